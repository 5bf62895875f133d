"""Sequences into micro-batches of a fixed token budget.

Best-fit decreasing decides how few bins are needed; the same number of bins is then filled evenly, because equal
micro-batches need the least memory and waste nothing when padded to one shape. Deterministic: equal inputs give equal
bins. Not here: the tensors (services/trainer), several ranks and the cost of attention (`step_plan`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

from pipelinerl.errors import FieldError

Bins = list[list[int]]
"""Indexes into the lengths that were packed; each index in exactly one bin."""


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def pack(lengths: Sequence[int], budget: int) -> Bins:
    """Bins of at most `budget` tokens, best-fit decreasing: the longest sequence first, into the fullest bin it fits.

    O(n log n). Raises `FieldError` when one sequence alone exceeds the budget.
    """
    bins: Bins = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for index in _longest_first(lengths):
        length = int(lengths[index])
        if length > budget:
            raise FieldError("trainer.tokens_per_microbatch", budget, f"a sequence of {length} tokens must fit in it")
        slot = bisect_left(room, (length, -1))
        if slot == len(room):
            bins.append([])
            left, target = budget, len(bins) - 1
        else:
            left, target = room.pop(slot)
        bins[target].append(index)
        insort(room, (left - length, target))
    return bins


def balance(lengths: Sequence[int], num_bins: int) -> Bins:
    """`num_bins` bins of nearly equal tokens: longest first, into the emptiest bin (LPT, within 4/3 of the optimum)."""
    bins: Bins = [[] for _ in range(num_bins)]
    load = [(0, target) for target in range(num_bins)]
    for index in _longest_first(lengths):
        tokens, target = load[0]
        bins[target].append(index)
        heapq.heapreplace(load, (tokens + int(lengths[index]), target))
    return [members for members in bins if members]


def plan_microbatches(lengths: Sequence[int], budget: int) -> Bins:
    """As few micro-batches as `pack` needs, with tokens spread evenly over them where that still fits the budget."""
    packed = pack(lengths, budget)
    even = balance(lengths, len(packed))
    fits = all(sum(int(lengths[index]) for index in members) <= budget for members in even)
    return even if fits else packed


def fill(lengths: Sequence[int], bins: Bins, capacity: int | None = None) -> float:
    """Share of real tokens in bins of `capacity` tokens; None = the fullest bin's, the one shape all of them fit."""
    loads = [sum(int(lengths[index]) for index in members) for members in bins]
    return sum(loads) / (len(loads) * (max(loads) if capacity is None else capacity))
