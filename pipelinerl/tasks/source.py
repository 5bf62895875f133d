"""What a source of problems is: a pure function of split and index.

The same (split, index) gives the same problem in every process of every run with the same settings, so that a feeder
resumes from a number. Held-out problems never occur in training. How a problem becomes tokens is the trainer's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class Split(StrEnum):
    TRAIN = "train"
    HELDOUT = "heldout"


@dataclass(frozen=True)
class Problem:
    """One problem. `reference` is JSON-able: `answer`, and for reasoning-gym `dataset` and `entry` (what its scorer needs)."""

    task: str
    question: str
    reference: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reference_json(self) -> str:
        return json.dumps(self.reference, separators=(",", ":"))


class TaskSource(Protocol):
    """Problems of one task."""

    @property
    def num_train(self) -> int | None:
        """Distinct training problems; None = no end. Beyond it indices wrap around (another epoch)."""
        ...

    def problem(self, split: Split, index: int) -> Problem:
        """Raises `FieldError` when the task has too few distinct problems for its held-out split."""
        ...
