"""When an engine's decode steps ended, and what follows from that: throughput of a window, the gap that a swap left.

The times are those that vLLM's engine process stamps on the outputs of each step (`time.monotonic`, one clock for all
processes of a machine), so that neither the way to this process nor this process's own load is in them. A measure of the
stall that is independent of the weight-update client's own. Not here: what the steps compute.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

Window = tuple[float, float]
"""Begin and end, seconds of the monotonic clock."""


@dataclass(frozen=True)
class Step:
    """The end of a decode step that gave `tokens` tokens, sampled by weights of label `version`."""

    ended_s: float
    tokens: int
    version: str


@dataclass
class DecodeTrace:
    """Steps in the order in which they ended; `watch` fills it."""

    steps: list[Step] = field(default_factory=list)
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    def watch(self, engine_core: Any) -> None:
        """Notes every step whose outputs reach this process through vLLM's client `engine_core`."""
        take = engine_core.get_output_async

        async def noted() -> Any:
            outputs = await take()
            if outputs.outputs:
                tokens = sum(len(output.new_token_ids) for output in outputs.outputs)
                self.steps.append(Step(outputs.timestamp, tokens, outputs.weight_version or ""))
                self._more.set()
            return outputs

        engine_core.get_output_async = noted

    async def until_version(self, version: str, steps: int, timeout_s: float) -> None:
        """Returns when `steps` steps of `version` have ended. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while sum(step.version == version for step in self.steps[-4 * steps :]) < steps:
                self._more.clear()
                await self._more.wait()


def tokens_in(steps: Sequence[Step], windows: Sequence[Window]) -> float:
    """Tokens given within `windows`; those of a step that a window cuts count by the part of its time that lies within."""
    ended = np.array([step.ended_s for step in steps])
    total = np.cumsum([step.tokens for step in steps])
    return float(sum(np.subtract(*np.interp((end, begin), ended, total)) for begin, end in windows))


def rate_in(steps: Sequence[Step], windows: Sequence[Window]) -> float:
    """Tokens per second over all of `windows`."""
    return tokens_in(steps, windows) / sum(end - begin for begin, end in windows)


def step_times(steps: Sequence[Step], windows: Sequence[Window]) -> list[float]:
    """Seconds between the ends of neighbouring steps that both lie within one of `windows`."""
    return [
        later.ended_s - earlier.ended_s
        for earlier, later in pairwise(steps)
        if any(begin <= earlier.ended_s and later.ended_s <= end for begin, end in windows)
    ]


def stall_before(steps: Sequence[Step], version: str, step_s: float) -> float:
    """Seconds from the last step before `version` to the start of its first one, which is taken to last `step_s`.

    Raises ValueError when no step of `version` follows another.
    """
    for earlier, later in pairwise(steps):
        if later.version == version and earlier.version != version:
            return later.ended_s - earlier.ended_s - step_s
    raise ValueError(f"no step of version {version} follows one of another")


def median_step(steps: Sequence[Step], windows: Sequence[Window]) -> float:
    """Seconds of a decode step. Raises StatisticsError when none lies within `windows`."""
    return statistics.median(step_times(steps, windows))
