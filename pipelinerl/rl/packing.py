"""Pack sequences into micro-batches of a fixed token budget, and assign the micro-batches of one optimizer step to ranks.

Best-fit decreasing finds the number of bins (micro-batches). The same number of bins is then filled evenly, because equal
micro-batches need the least memory and padding.

Ranks that share a model (FSDP) begin each micro-batch together. A slot is one micro-batch on each rank and lasts as long as its
costliest one, so a step lasts Σ over slots of the maximum over ranks. The plan has as few slots as best-fit decreasing allows,
and nearly equal costs within each slot. Costs are FLOPs of a forward pass if the model is known, else tokens.

Sequences of one prompt that share a micro-batch can also share the prompt's tokens, so that each further sequence costs only
its completion. Such sequences are planned as pieces, each of which stays in one micro-batch. Equal inputs give equal plans.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pipelinerl.errors import FieldError

Bins = list[list[int]]
"""For each bin, the indexes of its sequences in a list of lengths. No index is in two bins."""


def _falling(values: Sequence[float], indexes: Iterable[int]) -> list[int]:
    return sorted(indexes, key=lambda index: (-values[index], index))


def pack(lengths: Sequence[int], budget: int) -> Bins:
    """Return bins of at most `budget` tokens by best-fit decreasing: longest sequence first, into the fullest bin it fits.
    Raises `FieldError` when one sequence alone exceeds the budget."""
    bins: Bins = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for index in _falling(lengths, range(len(lengths))):
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


def plan_microbatches(lengths: Sequence[int], budget: int) -> Bins:
    """Return as many micro-batches as `pack`. If possible, spread the tokens evenly. Raises `FieldError` like `pack`."""
    packed, tokens = pack(lengths, budget), [int(length) for length in lengths]
    even, left = _Planner(tokens, tokens, budget, len(packed)).spread(_falling(tokens, range(len(tokens))))
    return packed if left else even


@dataclass(frozen=True)
class CostModel:
    """FLOPs of one forward pass. A pair is a query with one of the keys that it attends to, which include its own."""

    per_token: float
    """FLOPs per token of the layers' products with weight matrices."""
    per_output_token: float = 0.0
    """FLOPs per predicted token of the output head, which is not computed for other tokens."""
    per_pair: float = 0.0
    """FLOPs per pair of the score and its product with the value vector, summed over the layers with full attention."""
    per_windowed_pair: float = 0.0
    """FLOPs as in `per_pair`, summed over the layers with windowed attention."""
    window: int = 0
    """Tokens that a query of a windowed layer attends to, including its own."""

    def of(self, lengths: ArrayLike, outputs: ArrayLike | None = None) -> NDArray[np.float64]:
        """Return each sequence's cost. `lengths`: tokens of each; `outputs`: predicted tokens of each, None = all tokens."""
        tokens = np.asarray(lengths, dtype=np.float64)
        predicted = tokens if outputs is None else np.asarray(outputs, dtype=np.float64)
        linear = self.per_token * tokens + self.per_output_token * predicted
        beyond = np.maximum(tokens - self.window, 0)  # queries whose window leaves keys out
        pairs, left_out = tokens * (tokens + 1) / 2, beyond * (beyond + 1) / 2
        return linear + self.per_pair * pairs + self.per_windowed_pair * (pairs - left_out)


UNIT_COST = CostModel(per_token=1.0)
"""Cost model for an unknown model: a sequence costs its number of tokens."""


Slots = list[Bins]
"""[slot][rank] → indexes of the sequences in the rank's micro-batch; empty if the rank has none in this slot."""

MOST_LEVELLED_SLOTS = 16
"""Maximum number of slots for which `levelled` is tried. With more slots, it takes long and makes a step at most 1% faster."""
BINS_TRIED = 8
"""Number of cheapest bins that are tried before a sequence counts as not fitting."""


@dataclass(frozen=True)
class StepPlan:
    """A step's micro-batches: every sequence is in exactly one, and all ranks have the same number of them."""

    slots: Slots
    costs: list[list[float]]
    """[slot][rank] → cost of the micro-batch, in units of the cost model."""

    def of_rank(self, rank: int) -> Bins:
        """Return the micro-batches of one rank, in order; some may be empty."""
        return [bins[rank] for bins in self.slots]

    @property
    def cost(self) -> float:
        """Cost of the whole step: Σ over slots of the costliest micro-batch."""
        return sum(max(costs) for costs in self.costs)

    @property
    def imbalance(self) -> float:
        """Share of the ranks' time in which they wait for the costliest micro-batch of their slot, in [0, 1)."""
        if not self.cost:
            return 0.0
        return max(0.0, 1 - sum(map(sum, self.costs)) / (len(self.slots[0]) * self.cost))


Prompt = tuple[Hashable, int]
"""A prompt's key and number of tokens. Sequences with equal keys have the same prompt."""
PIECES = (1, 4, 16, 0)
"""Divisors of the token budget that `plan_step` tries. Sequences of one prompt form pieces of at most budget / divisor tokens;
0 = one piece per sequence. Small pieces can be spread evenly over ranks; with large pieces, a prompt is computed less often."""
COPIES_OF_A_TOKEN = 5
"""Number of copied tokens that take as much memory as one computed token. If sequences share a prompt, its tokens are computed
once, but attention needs a copy of their queries, keys and values for each further sequence."""


def plan_step(
    lengths: Sequence[int],
    budget: int,
    num_ranks: int,
    cost_model: CostModel = UNIT_COST,
    outputs: ArrayLike | None = None,
    prompts: Sequence[Prompt] | None = None,
) -> StepPlan:
    """Plan micro-batches of at most `budget` tokens for sequences of `lengths` tokens. `outputs`: as in `CostModel.of`.

    `prompts`: each sequence's prompt, whose tokens `lengths` include; None = sequences share no computation. With prompts and
    several ranks, make a plan for each of `PIECES` and return the cheapest. No slot is empty on all ranks. Raises `FieldError`
    if a sequence exceeds the budget."""
    tokens = [int(length) for length in lengths]
    costs = cost_model.of(lengths, outputs)
    if prompts is None:
        return _planned(tokens, costs.tolist(), budget, num_ranks)
    plans = []
    for share in PIECES if num_ranks > 1 else PIECES[:1]:
        pieces = _pieces(tokens, prompts, budget // share if share else 0)
        members = [piece.members for piece in pieces]
        of_pieces = [float(costs[piece.members].sum()) - cost_model.per_token * piece.copied_tokens for piece in pieces]
        plan = _planned([piece.room for piece in pieces], of_pieces, budget, num_ranks)
        slots = [[[index for piece in bin_ for index in members[piece]] for bin_ in bins] for bins in plan.slots]
        plans.append(StepPlan(slots, plan.costs))
    return min(plans, key=lambda plan: plan.cost)


@dataclass
class _Piece:
    """Sequences of one prompt that are planned for the same micro-batch."""

    members: list[int]
    tokens: int
    copied_tokens: int = 0
    """Prompt tokens of all members but the first. Attention copies the first member's queries, keys and values for them."""

    @property
    def room(self) -> int:
        """Number of tokens of the budget that this piece takes."""
        return self.tokens + math.ceil(self.copied_tokens / COPIES_OF_A_TOKEN)


def _pieces(lengths: list[int], prompts: Sequence[Prompt], most: int) -> list[_Piece]:
    """Return the sequences in pieces, longest first. A piece of several sequences takes at most `most` tokens."""
    pieces: list[_Piece] = []
    newest: dict[Hashable, int] = {}
    for index in _falling(lengths, range(len(lengths))):
        key, shared = prompts[index]
        if key in newest:
            one = pieces[newest[key]]
            larger = _Piece([*one.members, index], one.tokens + lengths[index] - shared, one.copied_tokens + shared)
            if larger.room <= most:
                pieces[newest[key]] = larger
                continue
        newest[key] = len(pieces)
        pieces.append(_Piece([index], lengths[index]))
    return pieces


def _planned(lengths: list[int], cost: list[float], budget: int, num_ranks: int) -> StepPlan:
    if num_ranks == 1:
        return _plan([[members] for members in plan_microbatches(lengths, budget)], cost)
    packed = pack(lengths, budget)
    num_slots = math.ceil(len(packed) / num_ranks)
    planner = _Planner(lengths, cost, budget, num_ranks)
    plans = [_plan(planner.evened(packed, num_slots), cost)]
    if num_slots <= MOST_LEVELLED_SLOTS and (levelled := planner.levelled(num_slots)) is not None:
        plans.append(_plan(levelled, cost))
    return min(plans, key=lambda plan: plan.cost)


def _plan(slots: Slots, cost: list[float]) -> StepPlan:
    """Assign each slot's bins to ranks in falling order of cost, but in every second slot in rising order, to even the sums."""
    seated: Slots = []
    for number, bins in enumerate(slots):
        falling = sorted(bins, key=lambda members: -_total(members, cost))
        seated.append(falling if number % 2 == 0 else falling[::-1])
    costs = [[_total(members, cost) for members in bins] for bins in seated]
    return StepPlan(seated, costs)


def _total(members: Sequence[int], cost: Sequence[float]) -> float:
    return sum(cost[index] for index in members)


@dataclass(frozen=True)
class _Planner:
    """Distributes the sequences of one step over micro-batches."""

    lengths: list[int]
    cost: Sequence[float]
    budget: int
    num_ranks: int

    def evened(self, packed: Bins, num_slots: int) -> Slots:
        """Divide the bins among slots of bins with similar costs, and even out the costs within each slot if possible."""
        padded = packed + [[] for _ in range(num_slots * self.num_ranks - len(packed))]
        falling = sorted(padded, key=lambda members: -_total(members, self.cost))
        return [self._evened_slot(falling[first : first + self.num_ranks]) for first in range(0, len(falling), self.num_ranks)]

    def _evened_slot(self, bins: Bins) -> Bins:
        spread, left = self.spread(_falling(self.cost, (index for members in bins for index in members)))
        costliest = [max(_total(members, self.cost) for members in each) for each in (bins, spread)]
        return bins if left or costliest[1] >= costliest[0] else spread

    def levelled(self, num_slots: int) -> Slots | None:
        """Fill one slot after the other with the costliest remaining sequences, so that the bins of a slot cost about the same.
        Return None if a slot would be empty or the last slot cannot take all remaining sequences."""
        left = _falling(self.cost, range(len(self.lengths)))
        slots: Slots = []
        for slots_left in range(num_slots, 0, -1):
            if not left:
                return None
            # Except in the last slot, no bin costs more than this mean, or than the costliest sequence if that is higher.
            mean = _total(left, self.cost) / (slots_left * self.num_ranks)
            level = max(self.cost[left[0]], mean) if slots_left > 1 else math.inf
            bins, left = self.spread(left, level)
            slots.append(bins)
        return None if left else slots

    def spread(self, order: list[int], level: float = math.inf) -> tuple[Bins, list[int]]:
        """Fill a slot's bins, one per rank: put each sequence of `order` into the first bin with room of the `BINS_TRIED`
        cheapest. `level`: maximum cost of a bin. Return the bins and the sequences left over."""
        bins: Bins = [[] for _ in range(self.num_ranks)]
        room = [self.budget] * self.num_ranks
        cheapest = [(0.0, rank) for rank in range(self.num_ranks)]
        left: list[int] = []
        for index in order:
            if cheapest[0][0] + self.cost[index] > level:
                left.append(index)
                continue
            full: list[tuple[float, int]] = []
            while cheapest and len(full) < BINS_TRIED and room[cheapest[0][1]] < self.lengths[index]:
                full.append(heapq.heappop(cheapest))
            if cheapest and len(full) < BINS_TRIED and cheapest[0][0] + self.cost[index] <= level:
                load, rank = cheapest[0]
                bins[rank].append(index)
                room[rank] -= self.lengths[index]
                heapq.heapreplace(cheapest, (load + self.cost[index], rank))
            else:
                left.append(index)
            for entry in full:
                heapq.heappush(cheapest, entry)
        return bins, left
