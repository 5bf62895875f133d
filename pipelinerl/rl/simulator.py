"""A run in simulated time: what groups, queues, waiting, weight updates, evaluation and chance make of the closed form's rates.

Actors decode step by step. A sequence that finishes leaves its slot to the next sample of the actor's group, or of the oldest
group on the queue; new weights come between two decode steps. The trainer takes complete groups in the order of their
completion, one batch ahead, drops stale sequences, and sends each version while it computes the next. What may be issued, what
is stale and when a phase begins is asked of `groups.py`, as the services do, so that a rule that changes there changes here.

Between two changes of an actor's batch all its decode steps take the same time, so only those at which something changes are
events: a run costs time by its sequences and weight updates, not by its tokens.

All sequences finish well; verifying and publishing take no time; actors neither come nor go. Nothing is learned: lengths stay
what they are, independent of each other.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, islice

import numpy as np

from pipelinerl.messages.sequences import VersionSpan
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.groups import (
    EVALUATION_SLOTS,
    IssueBounds,
    groups_before_step,
    groups_per_step,
    length_bucket,
    stale_reason,
    starts_phase,
)
from pipelinerl.rl.throughput import DecodeCurve, Lengths


@dataclass(frozen=True)
class Timing:
    """What takes how long, in one unit of time: seconds, or the paper's flashes."""

    decode: DecodeCurve
    """Of one actor, which may be several accelerators."""
    training: float
    """τ: one completion token on one rank of the trainer."""
    step: float = 0.0
    """Of an optimizer step, whatever its tokens."""
    snapshot: float = 0.0
    """Of copying new weights, in which the trainer computes nothing."""
    transfer: float = 0.0
    """From then until actors may swap, beside generation and training. The swap itself takes no time."""


@dataclass
class Simulation:
    """What happened after the warm-up. Lags in optimizer steps, times in the unit of `Timing`."""

    steps: int = 0
    duration: float = 0.0
    sequences: int = 0
    """Trained on, as are `tokens`, of completions."""
    tokens: int = 0
    lag_histogram: Counter[int] = field(default_factory=Counter)
    """Trained tokens by lag."""
    actor_idle: float = 0.0
    """Share of the actors' time with nothing in progress."""
    empty_slots: float = 0.0
    """Share of the slots' time with no sequence."""
    trainer_idle: float = 0.0
    """Share of the time in which no optimizer step was computed."""
    finished_by_length: Counter[int] = field(default_factory=Counter)
    """Sequences that were trained on or dropped, by `length_bucket`."""
    stale_by_length: Counter[int] = field(default_factory=Counter)
    """Those of them that were dropped as stale."""

    @property
    def rate(self) -> float:
        """Completion tokens trained on, per unit of time."""
        return self.tokens / self.duration

    @property
    def stale_share(self) -> float:
        """Of the sequences."""
        return self.stale_by_length.total() / self.finished_by_length.total()


def simulate(
    recipe: Recipe,
    timing: Timing,
    lengths: Lengths,
    *,
    num_actors: int,
    num_ranks: float,
    warmup_steps: int,
    steps: int,
    seed: int = 0,
) -> Simulation:
    """`steps` optimizer steps of a run, after `warmup_steps` that are not counted: all slots begin at once, and about
    `largest_lag` steps pass until no trace of that is left. A run issues nothing that no step will use, so slots run empty at
    its end: for one that goes on, let `recipe.trainer.steps` be larger.

    In conventional mode, give as many actors and ranks as there are accelerators when all of them take part in each phase.
    """
    assert 0 <= warmup_steps < warmup_steps + steps <= recipe.trainer.steps
    return _Run(recipe, timing, lengths, num_actors, num_ranks, seed).result(warmup_steps, warmup_steps + steps)


_Sample = tuple[VersionSpan, ...]
"""A finished sequence: its tokens are those of its spans."""


@dataclass(slots=True, eq=False)
class _Group:
    """Samples of one prompt, `number` in order of issue."""

    number: int
    lengths: list[int]
    done: list[_Sample] = field(default_factory=list)


_Wait = float | Callable[[], bool]
"""What a process of the trainer waits for: a time, or a condition, which is looked at after each event."""
_Process = Iterator[_Wait]


@dataclass(slots=True, eq=False)
class _Actor:
    """H slots and the decode steps over them. Counts decode steps: a sequence that begins at count c ends at c + its length."""

    count: int = 0
    """Decode steps done."""
    since: float = 0.0
    step: float = 0.0
    """When the decode step under way began, and how long it takes."""
    batch: list[tuple[int, int, int, _Group | None]] = field(default_factory=list)
    """Heap of (count of the end, tie-breaker, count of the beginning, group): what is in progress; no group: held-out."""
    joining: list[tuple[int, _Group | None]] = field(default_factory=list)
    """(length, group) that begins with the next decode step."""
    samples: deque[tuple[int, _Group]] = field(default_factory=deque)
    """Of the group that was taken last, those without a slot yet."""
    heldout: deque[int] = field(default_factory=deque)
    evaluating: int = 0
    """Held-out sequences in `batch` or `joining`."""
    swaps: tuple[list[int], list[int]] = field(default_factory=lambda: ([0], [0]))
    """Counts at which a version came in, and these versions."""
    to_swap: int | None = None
    wake: int = 0
    """Number of the event that is up to date."""
    until: float = 0.0
    busy: float = 0.0
    slot_time: float = 0.0
    """Until when the two are added up: time with anything in progress, and time of slots in use."""

    @property
    def slots_in_use(self) -> int:
        return len(self.batch) + len(self.joining) - self.evaluating

    def add_up(self, now: float) -> None:
        passed, self.until = now - self.until, now
        self.busy += passed if self.batch else 0.0
        self.slot_time += passed * (len(self.batch) - min(self.evaluating, len(self.batch)))


class _Run:
    def __init__(self, recipe: Recipe, timing: Timing, lengths: Lengths, num_actors: int, num_ranks: float, seed: int) -> None:
        self.recipe, self.timing, self.lengths, self.num_ranks = recipe, timing, lengths, num_ranks
        self.per_step, self.group_size = groups_per_step(recipe), recipe.sampling.group_size
        self.slots = recipe.actor.sequences_in_progress
        in_progress = np.arange(1, self.slots + EVALUATION_SLOTS + 1, dtype=np.float64)
        self.step_times = [0.0, *timing.decode.step_time(in_progress).tolist()]
        self.random = np.random.default_rng(seed)
        self.drawn = self._draw()

        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = count()
        """Of events and sequences: of two at the same time, the earlier one comes first."""
        self.waiting: list[tuple[Callable[[], bool], _Process]] = []

        self.actors = [_Actor() for _ in range(num_actors)]
        self.hungry = OrderedDict.fromkeys(self.actors)
        """Those with an empty slot, in the order in which they take the next groups."""
        self.prompts: deque[_Group] = deque()
        self.bounds = IssueBounds(recipe)
        self.issued = self.lost = 0
        """Groups: issued, and of which nothing was trained."""
        self.open: dict[int, None] = {}
        """Numbers of groups that are not complete, in order of issue."""
        self.num_waiting = 0
        """Samples that arrived and wait for others of their group."""
        self.ready: deque[_Group] = deque()
        self.version = self.taking_for = 0
        """Of the trainer, and for which the next batch is taken."""
        self.batch: list[list[_Sample]] = []
        """Of the next step or phase: fresh samples of each group."""
        self.offered = self.served = -1
        self.held_above: int | None = None
        """Later versions are not committed while this one is evaluated."""
        self.heldout_left = 0
        self.counted = Simulation()
        self.computing = 0.0

    def result(self, first: int, last: int) -> Simulation:
        """From version `first` to version `last`."""
        self._resume(self._optimizer_loop())
        while self.version < first:
            self._next_event()
        began_at, self.counted, self.computing = self.now, Simulation(), 0.0
        for actor in self.actors:
            actor.until, actor.busy, actor.slot_time = self.now, 0.0, 0.0
        while self.version < last:
            self._next_event()
        for actor in self.actors:
            actor.add_up(self.now)
        counted, duration = self.counted, self.now - began_at
        everybody = duration * len(self.actors)
        counted.duration = duration
        counted.actor_idle = max(0.0, 1 - sum(actor.busy for actor in self.actors) / everybody)
        counted.empty_slots = max(0.0, 1 - sum(actor.slot_time for actor in self.actors) / (everybody * self.slots))
        counted.trainer_idle = max(0.0, 1 - self.computing / duration)
        return counted

    # --- events

    def _next_event(self) -> None:
        self.now, _, happen = heapq.heappop(self.events)
        happen()
        while ready := next((one for one in self.waiting if one[0]()), None):
            self.waiting.remove(ready)
            self._resume(ready[1])

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.numbers), happen))

    def _resume(self, process: _Process) -> None:
        wait = next(process, None)
        if callable(wait):
            self.waiting.append((wait, process))
        elif wait is not None:
            self._at(wait, partial(self._resume, process))

    # --- actors

    def _next_boundary(self, actor: _Actor) -> float:
        """When the decode step under way ends; now, where there is none."""
        if not actor.batch:
            return self.now
        return actor.since + math.ceil((self.now - actor.since) / actor.step - 1e-9) * actor.step

    def _wake(self, actor: _Actor) -> None:
        """Its next event: the end of a sequence, or of the decode step under way when something is to change with the next."""
        actor.wake += 1
        if actor.joining or actor.to_swap is not None:
            when = self._next_boundary(actor)
        elif actor.batch:
            when = actor.since + (actor.batch[0][0] - actor.count) * actor.step
        else:
            return
        self._at(when, partial(self._decode, actor, actor.wake))

    def _decode(self, actor: _Actor, wake: int) -> None:
        """Up to the decode step that ends now: what has ended leaves, what is to join joins."""
        if wake != actor.wake:
            return
        if actor.batch:
            actor.count += round((self.now - actor.since) / actor.step)
        actor.add_up(self.now)
        actor.since = self.now
        batch, finished = actor.batch, []
        while batch and batch[0][0] <= actor.count:
            finished.append(heapq.heappop(batch))
        if actor.to_swap is not None:
            counts, versions = actor.swaps
            if counts[-1] == actor.count:  # nothing was sampled by the version before
                versions[-1] = actor.to_swap
            else:
                counts.append(actor.count)
                versions.append(actor.to_swap)
            actor.to_swap = None
        heldout = sum(group is None for *_, group in finished)
        actor.evaluating -= heldout
        self.heldout_left -= heldout
        for end, _, begin, group in finished:
            if group is not None:
                self._arrive(group, self._spans(actor, begin, end))
        self._fill(actor)
        for length, group in actor.joining:
            heapq.heappush(batch, (actor.count + length, next(self.numbers), actor.count, group))
        actor.joining.clear()
        actor.step = self.step_times[len(batch)]
        self._wake(actor)

    def _fill(self, actor: _Actor) -> None:
        """Empty slots, from the group that the actor has, then from the queue."""
        while actor.heldout and actor.evaluating < EVALUATION_SLOTS:
            actor.joining.append((actor.heldout.popleft(), None))
            actor.evaluating += 1
        self._admit(actor)
        while actor.slots_in_use < self.slots and self.prompts:
            self._take_group(actor)
        if actor.slots_in_use < self.slots:
            self.hungry.setdefault(actor)

    def _take_group(self, actor: _Actor) -> None:
        group = self.prompts.popleft()
        actor.samples.extend((length, group) for length in group.lengths)
        self._admit(actor)

    def _admit(self, actor: _Actor) -> None:
        for _ in range(min(len(actor.samples), self.slots - actor.slots_in_use)):
            actor.joining.append(actor.samples.popleft())

    def _spans(self, actor: _Actor, begin: int, end: int) -> _Sample:
        counts, versions = actor.swaps
        first, last = bisect_right(counts, begin) - 1, bisect_right(counts, end - 1)
        edges = [begin, *counts[first + 1 : last], end]
        return tuple(
            VersionSpan(version, start - begin, stop - begin)
            for version, start, stop in zip(versions[first:last], edges[:-1], edges[1:], strict=True)
        )

    # --- feeder and intake

    def _draw(self) -> Iterator[int]:
        while True:
            yield from self.lengths.sample(self.random, 10_000 + self.group_size).tolist()

    def _issue(self) -> None:
        """What the feeder may."""
        version, unlost = max(0, self.served), self.issued - self.lost
        allowance = self.bounds.allowance(version, len(self.actors), unlost, self.num_waiting)
        for _ in range(allowance):
            self.prompts.append(_Group(self.issued, list(islice(self.drawn, self.group_size))))
            self.open[self.issued] = None
            self.issued += 1
        while self.prompts and self.hungry:
            actor, _ = self.hungry.popitem(last=False)
            self._take_group(actor)
            if actor.slots_in_use < self.slots:
                self.hungry[actor] = None
            self._wake(actor)

    def _arrive(self, group: _Group, sample: _Sample) -> None:
        group.done.append(sample)
        self.num_waiting += 1
        if len(group.done) == self.group_size:
            self.num_waiting -= self.group_size
            del self.open[group.number]
            self.ready.append(group)
            self._take()
        self._issue()

    def _has_batch(self) -> bool:
        return len(self.batch) >= groups_before_step(self.recipe, self.taking_for)

    def _take(self) -> None:
        """Complete groups into the next batch, without what is stale for it."""
        lost = 0
        while self.ready and not self._has_batch():
            kept = []
            for spans in self.ready.popleft().done:
                stale = stale_reason(spans, self.taking_for, self.recipe.algorithm) is not None
                bucket = length_bucket(spans[-1].end)
                self.counted.finished_by_length[bucket] += 1
                self.counted.stale_by_length[bucket] += stale
                if not stale:
                    kept.append(spans)
            if kept:
                self.batch.append(kept)
            else:
                lost += 1
        self.lost += lost
        if lost:
            self._issue()

    # --- trainer

    def _optimizer_loop(self) -> _Process:
        """As `services.trainer.loop`: takes a batch, computes, offers the version, evaluates it."""
        steps, every = self.recipe.trainer.steps, self.recipe.evaluation.every_steps
        yield from self._offer()
        yield lambda: self.served == 0
        self._resume(self._evaluate(0))
        batch_at, waited = self.now, 0.0
        for version in range(steps):
            for_max_lag = self.bounds.held_by_max_lag(self.served, self.issued - self.lost)
            asked_at = self.now
            yield self._has_batch
            waited += self.now - asked_at
            wait_share = waited / (self.now - batch_at) if waited else 0.0
            batch_at, waited = self.now, 0.0
            if self.recipe.mode == "conventional" and starts_phase(self.recipe, version):
                self.random.shuffle(self.batch)
            batch, self.batch = self.batch[: self.per_step], self.batch[self.per_step :]
            self.bounds.begin_step(
                len(self.actors),
                self.issued - self.lost,
                len(self.open),
                wait_share,
                for_max_lag=for_max_lag,
                issued=self.issued,
                oldest_open=next(iter(self.open), self.issued),
            )
            self.taking_for = min(version + 1, steps - 1)
            self._take()
            self._issue()
            tokens = sum(spans[-1].end for group in batch for spans in group)
            duration = self.timing.step + tokens * self.timing.training / self.num_ranks
            yield self.now + duration
            self.computing += duration
            self.version = version + 1
            self._count(batch, version)
            if self.version == steps:
                return
            if starts_phase(self.recipe, self.version):
                measure = every and self.version % every == 0
                if measure:
                    yield lambda: self.held_above is None
                elif self.held_above is not None and self.served != self.offered > self.held_above:  # passed over
                    asked_at = self.now
                    yield lambda: self.held_above is None or self._has_batch()
                    waited = self.now - asked_at
                    if self.held_above is not None:
                        continue
                yield from self._offer()
                if measure:
                    self._resume(self._evaluate(self.version))

    def _count(self, batch: list[list[_Sample]], version: int) -> None:
        self.counted.steps += 1
        for group in batch:
            self.counted.sequences += len(group)
            for span in chain.from_iterable(group):
                self.counted.tokens += span.end - span.start
                self.counted.lag_histogram[version - span.version] += span.end - span.start

    def _offer(self) -> _Process:
        """Sends the new version once the one before is served; in conventional mode waits until it is."""
        yield self.now + self.timing.snapshot
        yield lambda: self.served == self.offered
        self.offered = self.version
        self._resume(self._send(self.version))
        if self.recipe.mode == "conventional":
            yield lambda: self.served == self.offered

    def _send(self, version: int) -> _Process:
        yield self.now + self.timing.transfer
        yield lambda: self.held_above is None or version <= self.held_above
        boundaries = [self._next_boundary(actor) for actor in self.actors]
        for actor in self.actors:
            actor.to_swap = version
            self._wake(actor)
        yield max(boundaries)
        self.served = version
        self._issue()

    def _evaluate(self, version: int) -> _Process:
        self.held_above = version
        yield lambda: self.served >= version
        num_problems = sum(share.task.heldout_problems for share in self.recipe.problem_sets.values())
        problems = self.lengths.sample(self.random, num_problems * self.recipe.evaluation.samples).tolist()
        self.heldout_left = len(problems)
        for number, length in enumerate(problems):
            self.actors[number % len(self.actors)].heldout.append(length)
        for actor in self.actors:
            self._fill(actor)
            self._wake(actor)
        yield lambda: self.heldout_left == 0
        self.held_above = None
