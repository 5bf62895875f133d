"""What virtual accelerators are: how long a decode step, an optimizer step and a weight transfer take at least, and a task.

Times are in flashes, the paper's unit: the time that one token takes on one accelerator at full utilisation. `flash_s` says how
long a flash lasts here, so that two cores can do the real work of all accelerators in the modelled time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipelinerl.rl.simulator import Timing
from pipelinerl.rl.throughput import DecodeCurve, Lengths
from pipelinerl.run_dir import write_json
from services.verifier.rewards.item import RewardInput

PAPER_CURVE = DecodeCurve(((1, 0.275 / 128), (128, 0.275), (192, 0.384), (256, 0.43)))
"""U(h) of the paper's worked case, in tokens per flash. The paper's own curve is a picture (near-linear to 128, saturating by
256); this one is derived from its figures: U(192) · 44 generators = 16.9, and U(128) from the 18.3 that conventional mode
generates with 133 sequences on each accelerator and lengths uniform on 1..L. U(256) is in no figure; H = 192 is best as long as
it is below 16.9 / 33 = 0.51, and 0.43 continues the bend."""
PAPER_TRAINING_TIME = 4.92
"""τ of the same case, in flashes per token."""

DIGITS, EVEN = "0123456789", "02468"


def score(item: RewardInput) -> float:
    """The task's reward: the share of the completion's characters that are even digits. Prompts mean nothing."""
    return sum(character in EVEN for character in item.completion) / max(1, len(item.completion))


@dataclass(frozen=True)
class Profile:
    """Accelerators of one process, and what they take. `lengths`: (tokens, weight)."""

    decode: tuple[tuple[float, float], ...]
    """U(h): points (sequences in progress, tokens per flash) of one accelerator."""
    training: float
    """τ: flashes of one accelerator for one trained completion token."""
    transfer: float
    """Flashes from the first byte of a version until it may be served."""
    lengths: tuple[tuple[int, float], ...]
    flash_s: float
    accelerators: int = 1

    @property
    def curve(self) -> DecodeCurve:
        return DecodeCurve(self.decode)

    @property
    def timing(self) -> Timing:
        """For the simulator: in flashes."""
        return Timing(self.curve, self.training, transfer=self.transfer)

    @property
    def completions(self) -> Lengths:
        return Lengths.of_bars((tokens, tokens, weight) for tokens, weight in self.lengths)

    def of(self, accelerators: int) -> Profile:
        return replace(self, accelerators=accelerators)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Profile:
        fields = json.loads(text)
        pairs: dict[str, Any] = {name: tuple(tuple(pair) for pair in fields[name]) for name in ("decode", "lengths")}
        return cls(**fields | pairs)


class Pace:
    """When steps are due that take at least their modelled time, and how many the machine was too slow for.

    A step begins when the one before it was due, also where its end was noticed a little later, and never before that.
    """

    def __init__(self) -> None:
        self.steps = self.overran = 0
        self.modelled_s = self.late_s = self.latest_s = 0.0

    def due_s(self, began_s: float, modelled_s: float) -> float:
        """The end, on the monotonic clock, of a step that began then and whose real work is done now."""
        due, now = began_s + modelled_s, time.monotonic()
        self.steps += 1
        self.modelled_s += modelled_s
        if now > due:
            self.overran += 1
            self.late_s += now - due
            self.latest_s = max(self.latest_s, now - due)
        return max(due, now)

    def write(self, path: Path) -> None:
        write_json(path, {**vars(self), "overran_share": self.overran / max(1, self.steps)})


def arguments(argv: Sequence[str]) -> tuple[Profile, Path]:
    """Of `virtual_actor` and `virtual_trainer`: a profile as JSON, and the file for their pace."""
    return Profile.from_json(argv[1]), Path(argv[2])
