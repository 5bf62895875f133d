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
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from pipelinerl.messages.sequences import VersionSpan
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.groups import (
    IssueBounds,
    groups_before_step,
    groups_per_step,
    length_bucket,
    stale_reason,
    starts_phase,
)
from pipelinerl.rl.throughput import DecodeCurve, Lengths

EVALUATION_SLOTS = 64
"""Held-out sequences that an actor decodes beside its H."""


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
    """From then until actors may swap, beside generation and training."""
    stall: float = 0.0
    """In which an actor generates nothing because of the swap."""


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


class _Group:
    """Samples of one prompt, `number` in order of issue. `done`: (length, spans) of those that have finished."""

    __slots__ = ("done", "lengths", "number")

    def __init__(self, number: int, lengths: list[int]) -> None:
        self.number, self.lengths = number, lengths
        self.done: list[tuple[int, tuple[VersionSpan, ...]]] = []


_Wait = float | Callable[[], bool]
"""What a process of the trainer waits for: a time, or a condition, which is looked at after each event."""
_Process = Iterator[_Wait]


class _Actor:
    """H slots and the decode steps over them. Counts decode steps: a sequence that begins at count c ends at c + its length."""

    __slots__ = (
        "batch", "busy", "count", "evaluating", "heldout", "hungry", "joining", "samples", "since", "slot_time", "step",
        "swaps", "to_swap", "until", "wake",
    )  # fmt: skip

    def __init__(self) -> None:
        self.count, self.since, self.step = 0, 0.0, 0.0
        """Decode steps done; when the one under way began, and how long it takes."""
        self.batch: list[tuple[int, int, int, _Group | None]] = []
        """Heap of (count of the end, tie-breaker, count of the beginning, group): what is in progress; no group: held-out."""
        self.joining: list[tuple[int, _Group | None]] = []
        """(length, group) that begins with the next decode step."""
        self.samples: deque[tuple[int, _Group]] = deque()
        """Of the group that was taken last, those without a slot yet."""
        self.heldout: deque[int] = deque()
        self.evaluating = 0
        """Held-out sequences in `batch` or `joining`."""
        self.swaps: tuple[list[int], list[int]] = ([0], [0])
        """Counts at which a version came in, and these versions."""
        self.to_swap: int | None = None
        self.hungry = True
        """Whether it has an empty slot, and waits for a group."""
        self.wake = 0
        """Number of the event that is up to date."""
        self.until = self.busy = self.slot_time = 0.0
        """Until when the two are added up: time with anything in progress, and time of slots in use."""

    @property
    def slots_in_use(self) -> int:
        return len(self.batch) + len(self.joining) - self.evaluating

    def add_up(self, now: float) -> None:
        passed, self.until = now - self.until, now
        self.busy += passed if self.batch else 0.0
        self.slot_time += passed * (len(self.batch) - min(self.evaluating, len(self.batch)))


class _Run:
    def __init__(
        self,
        recipe: Recipe,
        timing: Timing,
        lengths: Lengths,
        num_actors: int,
        num_ranks: float,
        seed: int,
    ) -> None:
        self.recipe, self.timing, self.lengths = recipe, timing, lengths
        self.num_ranks = num_ranks
        self.per_step, self.group_size = groups_per_step(recipe), recipe.sampling.group_size
        self.slots = recipe.actor.sequences_in_progress
        self.step_times = [
            0.0,
            *timing.decode.step_time(np.arange(1, self.slots + EVALUATION_SLOTS + 1).astype(np.float64)).tolist(),
        ]
        self.random = np.random.default_rng(seed)
        self.drawn: deque[int] = deque()

        self.now = 0.0
        self.events: list[tuple[float, int, _Actor | _Process, int]] = []
        self.num_events = 0
        self.waiting: list[tuple[Callable[[], bool], _Process]] = []

        self.actors = [_Actor() for _ in range(num_actors)]
        self.hungry = deque(self.actors)
        """In the order in which they take the next groups."""
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
        self.batch: list[list[tuple[int, tuple[VersionSpan, ...]]]] = []
        """Of the next step or phase: fresh samples of each group."""
        self.offered = self.served = -1
        self.held_above: int | None = None
        """Later versions are not committed while this one is evaluated."""
        self.heldout_left = 0
        self.counted: Simulation | None = None
        self.computing = 0.0

    def result(self, first: int, last: int) -> Simulation:
        """From version `first` to version `last`."""
        self._resume(self._optimizer_loop())
        while self.version < first:
            self._next_event()
        began_at, self.counted, self.computing = self.now, Simulation(), 0.0
        for actor in self.actors:
            actor.until, actor.busy, actor.slot_time = max(self.now, actor.since), 0.0, 0.0
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
        self.now, _, subject, wake = heapq.heappop(self.events)
        if isinstance(subject, _Actor):
            if wake == subject.wake:
                self._decode(subject)
        else:
            self._resume(subject)
        again = True
        while again:
            again = False
            for index, (condition, process) in enumerate(self.waiting):
                if condition():
                    del self.waiting[index]
                    self._resume(process)
                    again = True
                    break

    def _at(self, when: float, subject: _Actor | _Process, wake: int = 0) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (when, self.num_events, subject, wake))

    def _resume(self, process: _Process) -> None:
        wait = next(process, None)
        if callable(wait):
            self.waiting.append((wait, process))
        elif wait is not None:
            self._at(wait, process)

    # --- actors

    def _next_boundary(self, actor: _Actor) -> float:
        """When the decode step under way ends; now, where there is none."""
        if not actor.batch:
            return max(self.now, actor.since)
        steps = max(0, math.ceil((self.now - actor.since) / actor.step - 1e-9))
        return actor.since + steps * actor.step

    def _wake(self, actor: _Actor) -> None:
        """Its next event: the end of a sequence, or of the decode step under way when something is to change with the next."""
        actor.wake += 1
        if actor.joining or actor.to_swap is not None:
            self._at(self._next_boundary(actor), actor, actor.wake)
        elif actor.batch:
            self._at(actor.since + (actor.batch[0][0] - actor.count) * actor.step, actor, actor.wake)

    def _decode(self, actor: _Actor) -> None:
        """Up to the decode step that ends now: what has ended leaves, what is to join joins."""
        if actor.batch:
            actor.count += round((self.now - actor.since) / actor.step)
        actor.add_up(self.now)
        actor.since = self.now
        batch, finished = actor.batch, []
        while batch and batch[0][0] <= actor.count:
            finished.append(heapq.heappop(batch))
        if actor.to_swap is not None:
            if batch or finished:
                actor.since += self.timing.stall
            counts, versions = actor.swaps
            if counts[-1] == actor.count:  # nothing was sampled by the version before
                versions[-1] = actor.to_swap
            else:
                counts.append(actor.count)
                versions.append(actor.to_swap)
            actor.to_swap = None
        for end, _, begin, group in finished:
            if group is None:
                actor.evaluating -= 1
                self.heldout_left -= 1
            else:
                self._arrive(group, end - begin, self._spans(actor, begin, end))
        self._fill(actor)
        for length, group in actor.joining:
            self.num_events += 1
            heapq.heappush(batch, (actor.count + length, self.num_events, actor.count, group))
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
        if actor.slots_in_use < self.slots and not actor.hungry:
            actor.hungry = True
            self.hungry.append(actor)

    def _take_group(self, actor: _Actor) -> None:
        group = self.prompts.popleft()
        actor.samples.extend((length, group) for length in group.lengths)
        self._admit(actor)

    def _admit(self, actor: _Actor) -> None:
        for _ in range(min(len(actor.samples), self.slots - actor.slots_in_use)):
            actor.joining.append(actor.samples.popleft())

    def _spans(self, actor: _Actor, begin: int, end: int) -> tuple[VersionSpan, ...]:
        counts, versions = actor.swaps
        first, last = bisect_right(counts, begin) - 1, bisect_right(counts, end - 1)
        edges = [begin, *counts[first + 1 : last], end]
        return tuple(
            VersionSpan(version, start - begin, stop - begin)
            for version, start, stop in zip(versions[first:last], edges[:-1], edges[1:], strict=True)
        )

    # --- feeder and intake

    def _issue(self) -> None:
        """What the feeder may."""
        version, unlost = max(0, self.served), self.issued - self.lost
        allowance = self.bounds.allowance(version, len(self.actors), unlost, self.num_waiting)
        for _ in range(allowance):
            if len(self.drawn) < self.group_size:
                self.drawn.extend(self.lengths.sample(self.random, 10_000 + self.group_size).tolist())
            self.prompts.append(_Group(self.issued, [self.drawn.popleft() for _ in range(self.group_size)]))
            self.open[self.issued] = None
            self.issued += 1
        while self.prompts and self.hungry:
            actor = self.hungry.popleft()
            self._take_group(actor)
            actor.hungry = actor.slots_in_use < self.slots
            if actor.hungry:
                self.hungry.append(actor)
            self._wake(actor)

    def _arrive(self, group: _Group, length: int, spans: tuple[VersionSpan, ...]) -> None:
        group.done.append((length, spans))
        self.num_waiting += 1
        if len(group.done) == self.group_size:
            self.num_waiting -= self.group_size
            del self.open[group.number]
            self.ready.append(group)
            self._take()
        self._issue()

    def _take(self) -> None:
        """Complete groups into the next batch, without what is stale for it."""
        algorithm, lost = self.recipe.algorithm, 0
        while self.ready and len(self.batch) < groups_before_step(self.recipe, self.taking_for):
            kept = []
            for length, spans in self.ready.popleft().done:
                by_mean = algorithm.max_lag_of == "mean"
                stale = stale_reason(spans, self.taking_for, algorithm.max_lag, by_mean=by_mean) is not None
                if self.counted:
                    self.counted.finished_by_length[length_bucket(length)] += 1
                    self.counted.stale_by_length[length_bucket(length)] += stale
                if not stale:
                    kept.append((length, spans))
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
        batch_at = self.now
        for version in range(steps):
            needed, asked_at = groups_before_step(self.recipe, version), self.now
            yield lambda needed=needed: len(self.batch) >= needed  # type: ignore[misc]
            last_at, batch_at = batch_at, self.now
            wait_share = (batch_at - asked_at) / (batch_at - last_at) if batch_at > last_at else 0.0
            if self.recipe.mode == "conventional" and starts_phase(self.recipe, version):
                self.random.shuffle(self.batch)
            batch, self.batch = self.batch[: self.per_step], self.batch[self.per_step :]
            self.bounds.begin_step(
                len(self.actors),
                self.issued - self.lost,
                len(self.open),
                wait_share,
                issued=self.issued,
                oldest_open=next(iter(self.open), self.issued),
            )
            self.taking_for = min(version + 1, steps - 1)
            self._take()
            self._issue()
            tokens = sum(length for group in batch for length, _ in group)
            duration = self.timing.step + tokens * self.timing.training / self.num_ranks
            yield self.now + duration
            self.computing += duration
            self.version = version + 1
            if self.counted:
                self._count(batch, version)
            if self.version == steps:
                return
            if starts_phase(self.recipe, self.version):
                measure = every and self.version % every == 0
                if measure:
                    yield lambda: self.held_above is None
                elif self.held_above is not None and self.served != self.offered > self.held_above:  # passed over
                    yield lambda: self.held_above is None or len(self.batch) >= self.per_step
                    if self.held_above is not None:
                        continue
                yield from self._offer()
                if measure:
                    self._resume(self._evaluate(self.version))

    def _count(self, batch: list[list[tuple[int, tuple[VersionSpan, ...]]]], version: int) -> None:
        assert self.counted is not None
        self.counted.steps += 1
        for group in batch:
            for length, spans in group:
                self.counted.sequences += 1
                self.counted.tokens += length
                for span in spans:
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
        yield max(boundaries) + self.timing.stall
        self.served = version
        self._issue()

    def _evaluate(self, version: int) -> _Process:
        self.held_above = version
        yield lambda: self.served >= version
        problems = self.lengths.sample(self.random, self.recipe.task.heldout_problems).tolist()
        self.heldout_left = len(problems)
        for number, length in enumerate(problems):
            self.actors[number % len(self.actors)].heldout.append(length)
        for actor in self.actors:
            self._fill(actor)
            self._wake(actor)
        yield lambda: self.heldout_left == 0
        self.held_above = None
