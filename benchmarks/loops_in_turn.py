"""Steps of the learner and of a bare loop in turn, on one rank or on several, and the ratios that come of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Timing:
    """Of one step."""

    wall_s: float
    cpu_s: float
    """Of this process, all threads."""


@dataclass(frozen=True)
class Timings:
    """Of both loops, pair by pair."""

    ours: list[Timing] = field(default_factory=list)
    bare: list[Timing] = field(default_factory=list)


def timed(step: Callable[[], Any]) -> Timing:
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return Timing(time.perf_counter() - wall, time.process_time() - cpu)


def in_turn(ours: Callable[[], Any], bare: Callable[[], Any], pairs: int, meet: Callable[[], Any] = lambda: None) -> Timings:
    """`pairs` steps of each, the order swapped each time. `meet`: called before each step, and not timed."""
    timings = Timings()
    for pair in range(pairs):
        sides = [(ours, timings.ours), (bare, timings.bare)]
        for step, kept in sides if pair % 2 else sides[::-1]:
            meet()
            kept.append(timed(step))
    return timings


def of_all_ranks(timings: Sequence[Timings]) -> Timings:
    """A step lasts as long as that of the slowest rank, and takes the processor time of all."""

    def together(steps: Sequence[Timing]) -> Timing:
        return Timing(max(step.wall_s for step in steps), sum(step.cpu_s for step in steps))

    return Timings(
        [together(steps) for steps in zip(*(each.ours for each in timings), strict=True)],
        [together(steps) for steps in zip(*(each.bare for each in timings), strict=True)],
    )


def compared(timings: Timings, tokens: int) -> dict[str, float]:
    """Throughput of `tokens` per step, and ratios ours / bare: medians over pairs, and of the fastest steps."""
    pairs = list(zip(timings.ours, timings.bare, strict=True))
    return {
        "ratio": statistics.median(bare.wall_s / ours.wall_s for ours, bare in pairs),
        "ratio_best": min(step.wall_s for step in timings.bare) / min(step.wall_s for step in timings.ours),
        "ratio_cpu_time": statistics.median(bare.cpu_s / ours.cpu_s for ours, bare in pairs),
        "learner_tokens_per_s": tokens / statistics.median(step.wall_s for step in timings.ours),
        "bare_tokens_per_s": tokens / statistics.median(step.wall_s for step in timings.bare),
        "learner_cpu_s_per_step": statistics.median(step.cpu_s for step in timings.ours),
        "bare_cpu_s_per_step": statistics.median(step.cpu_s for step in timings.bare),
        "pairs": len(pairs),
    }
