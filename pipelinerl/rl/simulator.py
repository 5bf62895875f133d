"""Simulate a run, to find how groups, queues, waiting, weight updates and chance change the rates of `throughput.py`.

Actors, feeder, intake and trainer behave as the services do. They ask `groups.py` how much may be issued, which sequences are
stale and when a phase begins. While an actor decodes the same sequences, all its decode steps take the same time. So only the
decode steps at which a sequence begins or ends or the policy version changes are events.

The simulator assumes that all sequences succeed and that verifying and publishing take no time. There are no evaluations, and
actors neither join nor leave. Lengths are independent of each other and of learning.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, islice, repeat

import numpy as np

from pipelinerl.messages.sequences import VersionSpan
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.groups import (
    IssueBounds,
    IssuedGroups,
    groups_before_step,
    groups_per_step,
    length_bucket,
    stale_reason,
    starts_phase,
)
from pipelinerl.rl.throughput import DecodeCurve, Lengths


@dataclass(frozen=True)
class Timing:
    """Durations, all in one unit of time: seconds, or the paper's flashes."""

    decode: DecodeCurve
    training: float
    """τ: time to train on one completion token, on one rank."""
    step: float = 0.0
    """Fixed time of an optimizer step, in addition to the time for its tokens."""
    snapshot: float = 0.0
    """Time to copy new weights, during which the trainer computes nothing."""
    transfer: float = 0.0
    """Time to send new weights to the actors, while generation and training go on. The swap that follows takes no time."""


@dataclass
class Simulation:
    """Totals after the warm-up. Lags are in optimizer steps, times in the unit of `Timing`."""

    steps: int = 0
    duration: float = 0.0
    sequences: int = 0
    lag_histogram: Counter[int] = field(default_factory=Counter)
    """Trained completion tokens by lag."""
    actor_idle: float = 0.0
    """Share of the time in which an actor has nothing in progress."""
    empty_slots: float = 0.0
    """Share of the time in which a slot has no sequence."""
    trainer_idle: float = 0.0
    """Share of the time in which no optimizer step runs."""
    finished_by_length: Counter[int] = field(default_factory=Counter)
    stale_by_length: Counter[int] = field(default_factory=Counter)
    """By length bucket: sequences trained or dropped, and the stale ones among them."""

    @property
    def rate(self) -> float:
        """Completion tokens trained on, per unit of time."""
        return self.lag_histogram.total() / self.duration

    @property
    def stale_share(self) -> float:
        """Share of the finished sequences that were dropped as stale."""
        return self.stale_by_length.total() / self.finished_by_length.total()


def simulate(
    recipe: Recipe, timing: Timing, lengths: Lengths, *, num_actors: int, num_ranks: float, warmup_steps: int, steps: int
) -> Simulation:
    """Simulate `steps` optimizer steps of a run, after `warmup_steps` that are not counted.

    All slots begin at once, which biases about the first `largest_lag` steps. To simulate a part of a longer run, set
    `recipe.trainer.steps` above `warmup_steps + steps`, because slots run empty towards the end of a run. In conventional mode,
    accelerators that both generate and train count in `num_actors` and in `num_ranks`."""
    assert 0 <= warmup_steps < warmup_steps + steps <= recipe.trainer.steps
    return _Run(recipe, timing, lengths, num_actors, num_ranks).result(warmup_steps, warmup_steps + steps)


_Sample = tuple[VersionSpan, ...]
"""Spans of a finished sequence, which cover all its tokens."""


@dataclass(slots=True, eq=False)
class _Group:
    """Samples of one prompt. Groups are numbered in order of issue."""

    number: int
    lengths: list[int]
    done: list[_Sample] = field(default_factory=list)


_Wait = float | Callable[[], bool]
"""A wait of a simulated process: until a time, or until a condition holds, which is checked after each event."""
_Process = Iterator[_Wait]


@dataclass(slots=True, eq=False)
class _Actor:
    """A simulated actor with H slots. A sequence that begins at decode step c ends at step c + its length."""

    count: int = 0
    since: float = 0.0
    step: float = 0.0
    """`count`: decode steps that were complete at time `since`. `step`: duration of each decode step since then."""
    batch: list[tuple[int, int, int, _Group]] = field(default_factory=list)
    """Heap of sequences in progress: (last decode step, tie-breaker, first decode step, group)."""
    joining: list[tuple[int, _Group]] = field(default_factory=list)
    """(length, group) of each sequence that begins with the next decode step."""
    samples: deque[tuple[int, _Group]] = field(default_factory=deque)
    """Samples of the most recently taken group that have no slot yet."""
    swaps: tuple[list[int], list[int]] = field(default_factory=lambda: ([0], [0]))
    """Two lists: the decode steps at which versions were swapped in, and these versions."""
    to_swap: int | None = None
    wake: int = 0
    """Number of the actor's newest scheduled event. Its earlier events are ignored."""

    @property
    def slots_in_use(self) -> int:
        return len(self.batch) + len(self.joining)


class _Run:
    def __init__(self, recipe: Recipe, timing: Timing, lengths: Lengths, num_actors: int, num_ranks: float) -> None:
        self.recipe, self.timing, self.num_ranks = recipe, timing, num_ranks
        self.per_step, self.group_size = groups_per_step(recipe), recipe.sampling.group_size
        self.slots = recipe.actor.sequences_in_progress
        in_progress = np.arange(1, self.slots + 1, dtype=np.float64)
        self.step_times = [0.0, *timing.decode.step_time(in_progress).tolist()]
        self.random = np.random.default_rng(0)
        draws = (lengths.sample(self.random, 10_000 + self.group_size).tolist() for _ in repeat(None))
        self.drawn = chain.from_iterable(draws)

        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = count()
        """Serial numbers for events and sequences. In heaps, they break ties in the order of creation."""
        self.waiting: list[tuple[Callable[[], bool], _Process]] = []

        self.actors = [_Actor() for _ in range(num_actors)]
        self.hungry = OrderedDict.fromkeys(self.actors)
        """Actors with an empty slot, in the order in which they take the next groups."""
        self.prompts: deque[_Group] = deque()
        self.bounds = IssueBounds(recipe)
        self.issued = self.lost = 0
        """Numbers of groups issued, and of groups lost because none of their samples was trained on."""
        self.open: dict[int, None] = {}
        """Incomplete groups by their number, in order of issue."""
        self.num_waiting = 0
        """Number of samples that have arrived and wait for others of their group."""
        self.ready: deque[_Group] = deque()
        self.version = self.taking_for = 0
        """The trainer's version, and the version for which the next batch is taken."""
        self.batch: list[list[_Sample]] = []
        """Samples of each group of the next step or phase, without stale ones."""
        self.offered = self.served = -1
        self.counted = Simulation()
        self.counted_from = self.computing = self.busy = self.slot_time = 0.0
        """End of the warm-up, and sums since then: time of optimizer steps, busy time of actors, time of used slots."""

    def result(self, first: int, last: int) -> Simulation:
        """Run until version `last` and return the totals since version `first`."""
        self._resume(self._optimizer_loop())
        while self.version < first:
            self._next_event()
        self.counted, self.counted_from = Simulation(), self.now
        self.computing = self.busy = self.slot_time = 0.0
        while self.version < last:
            self._next_event()
        for actor in self.actors:
            self._add_up(actor)
        counted, duration = self.counted, self.now - self.counted_from
        everybody = duration * len(self.actors)
        counted.duration = duration
        counted.actor_idle = max(0.0, 1 - self.busy / everybody)
        counted.empty_slots = max(0.0, 1 - self.slot_time / (everybody * self.slots))
        counted.trainer_idle = max(0.0, 1 - self.computing / duration)
        return counted

    def _add_up(self, actor: _Actor) -> None:
        passed = self.now - max(actor.since, self.counted_from)
        self.busy += passed if actor.batch else 0.0
        self.slot_time += passed * len(actor.batch)

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

    def _next_boundary(self, actor: _Actor) -> float:
        if not actor.batch:
            return self.now
        return actor.since + math.ceil((self.now - actor.since) / actor.step - 1e-9) * actor.step

    def _wake(self, actor: _Actor) -> None:
        """Schedule the actor's next event: the end of the current decode step if a new sequence or version waits for it, else
        the end of the sequence that finishes first."""
        actor.wake += 1
        if actor.joining or actor.to_swap is not None:
            when = self._next_boundary(actor)
        elif actor.batch:
            when = actor.since + (actor.batch[0][0] - actor.count) * actor.step
        else:
            return
        self._at(when, partial(self._decode, actor, actor.wake))

    def _decode(self, actor: _Actor, wake: int) -> None:
        """End the actor's current decode step: remove finished sequences, swap the version and admit new sequences."""
        if wake != actor.wake:  # `_wake` has replaced this event.
            return
        if actor.batch:
            actor.count += round((self.now - actor.since) / actor.step)
        self._add_up(actor)
        actor.since = self.now
        batch, finished = actor.batch, []
        while batch and batch[0][0] <= actor.count:
            finished.append(heapq.heappop(batch))
        if actor.to_swap is not None:
            counts, versions = actor.swaps
            if counts[-1] == actor.count:  # The previous version sampled nothing.
                versions[-1] = actor.to_swap
            else:
                counts.append(actor.count)
                versions.append(actor.to_swap)
            actor.to_swap = None
        for end, _, begin, group in finished:
            self._arrive(group, self._spans(actor, begin, end))
        self._fill(actor)
        for length, group in actor.joining:
            heapq.heappush(batch, (actor.count + length, next(self.numbers), actor.count, group))
        actor.joining.clear()
        actor.step = self.step_times[len(batch)]
        self._wake(actor)

    def _fill(self, actor: _Actor) -> None:
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

    def _issue(self) -> None:
        room = self.bounds.room(max(0, self.served), len(self.actors), self.issued - self.lost, self.num_waiting)
        for _ in range(room.allowance):
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
        """Move complete groups into the next batch, without the sequences that are stale for it."""
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

    def _optimizer_loop(self) -> _Process:
        """Mirror `services.trainer.loop`: take a batch, compute the step, and send the new version to the actors."""
        steps = self.recipe.trainer.steps
        yield from self._offer()
        yield lambda: self.served == 0
        batch_at = self.now
        for version in range(steps):
            for_max_lag = self.bounds.room(self.served, len(self.actors), self.issued - self.lost, 0).held_by_max_lag
            asked_at = self.now
            yield self._has_batch
            waited = self.now - asked_at
            wait_share = waited / (self.now - batch_at) if waited else 0.0
            batch_at = self.now
            if self.recipe.mode == "conventional" and starts_phase(self.recipe, version):
                self.random.shuffle(self.batch)
            batch, self.batch = self.batch[: self.per_step], self.batch[self.per_step :]
            oldest = next(iter(self.open), self.issued)
            groups = IssuedGroups(self.issued - self.lost, len(self.open), self.issued, oldest)
            self.bounds.begin_step(len(self.actors), groups, wait_share, for_max_lag=for_max_lag)
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
                yield from self._offer()

    def _count(self, batch: list[list[_Sample]], version: int) -> None:
        self.counted.steps += 1
        self.counted.sequences += sum(map(len, batch))
        for span in chain.from_iterable(chain.from_iterable(batch)):
            self.counted.lag_histogram[version - span.version] += span.end - span.start

    def _offer(self) -> _Process:
        """Start to send the new version once actors serve the one before. In conventional mode, wait until they serve it."""
        yield self.now + self.timing.snapshot
        yield lambda: self.served == self.offered
        self.offered = self.version
        self._resume(self._send(self.version))
        if self.recipe.mode == "conventional":
            yield lambda: self.served == self.offered

    def _send(self, version: int) -> _Process:
        yield self.now + self.timing.transfer
        boundaries = [self._next_boundary(actor) for actor in self.actors]
        for actor in self.actors:
            actor.to_swap = version
            self._wake(actor)
        yield max(boundaries)
        self.served = version
        self._issue()
