"""How many actors would keep the trainer busy within the lag bound: what an autoscaler of the actors is to follow.

Stepped by what the trainer measures anyway: its steps, and the counters that actors answer with. Pure state: no clock, no
metric, no Kubernetes. It scales nothing.

**Consumption.** A step uses up n sequences (trained, dropped or failed: each has to be generated) in s seconds in which the
trainer does not wait for sequences. Without any waiting it consumes `C = n / s` a second: the median over the last steps.

**Production.** An actor finishes `p` sequences per second in which it has any in progress, H of them at most. How fast it is
with all H is measured when its slots are nearly full. Actors that have less to do, because the bound allows no more, finish
fewer: with a share `o` of the slots in use, p is too low by a factor of 1 (saturated already) to 1 / o (batching costs
nothing). As long as they have never been full, `p / sqrt(o)`, the middle of that, is believed: fewer actors are wanted, their
slots fill up, and the next measurement is better. Once they have been full, that measurement stays until they are full again.

**Replicas.** `C / P` of them keep up, P the rate of a full actor. More than `ceil(M / H)` would share the M sequences that the
lag bound lets be in flight, and leave slots empty: M = (1 + max_lag) * B, or G * B in conventional mode. At least one is
wanted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

import numpy as np
from numpy.typing import NDArray

from pipelinerl.v1.actor_pb2 import ActorState

STEPS = 20
"""Last steps that the consumption is the median of."""
FEWEST_STEPS = 3
FEWEST_BUSY_S = 60.0
"""What the measured production must rest on, summed over actors, besides one step's sequences."""
FULL = 0.85
"""Share of an actor's slots from which on it counts as full: those between two sequences are empty."""
_UP, _DOWN = 0.1, 0.1
"""Hysteresis: actors that may be lacking, and share of the actors that may be too many, before the number changes."""


Production = NDArray[np.float64]
"""[3], of one actor between two looks: sequences finished, seconds in which it was busy, seconds of slots in use."""


class _Window:
    """The newest of what actors did: at least `fewest` sequences and a minute, and not much more."""

    def __init__(self, fewest: int) -> None:
        self._fewest = np.array((fewest, FEWEST_BUSY_S, -math.inf))
        self._produced: deque[Production] = deque()
        self._sum = np.zeros(3)

    def add(self, produced: Production) -> None:
        self._produced.append(produced)
        self._sum = self._sum + produced
        while (self._sum - self._produced[0] >= self._fewest).all():
            self._sum = self._sum - self._produced.popleft()

    @property
    def enough(self) -> bool:
        return bool((self._sum >= self._fewest).all())

    @property
    def rate(self) -> float:
        """Sequences per second of a busy actor."""
        return float(self._sum[0] / self._sum[1])

    @property
    def in_progress(self) -> float:
        """Of a busy actor, on average."""
        return float(self._sum[2] / self._sum[1])


def full_rate(rate: float, occupancy: float, known: float | None) -> float:
    """Sequences per second of an actor with all slots in use, from its `rate` at `occupancy` (0, 1]; `known`: measured when
    it was full."""
    return max(rate, known) if known is not None else rate / math.sqrt(min(1.0, occupancy))


def most_useful(in_flight: int | None, slots: int) -> int | None:
    """ceil(M / H): actors that `in_flight` sequences occupy; None where nothing bounds them."""
    return None if in_flight is None else max(1, math.ceil(in_flight / slots))


def replicas_wanted(needed: float, most: int | None, current: int | None = None) -> int:
    """Whole actors for `needed` = C / P, of which `most` are of use. `current`: what was wanted so far; kept while it lacks
    no more than 0.1 actors, and has no more than one and a tenth of itself to spare."""
    enough = max(1, math.ceil(needed))
    if current is not None and (current - 1 - _DOWN * current) <= needed <= current + _UP:
        enough = current
    return enough if most is None else min(enough, most)


class ReplicasWanted:
    """`slots`: H. `batch_size`: B. `in_flight`: M, None = unbounded. `wanted` None: not known yet."""

    def __init__(self, *, slots: int, batch_size: int, in_flight: int | None) -> None:
        self._slots, self._most = slots, most_useful(in_flight, slots)
        self._consumption: deque[float] = deque(maxlen=STEPS)
        self._warm = False
        self._seen: dict[str, ActorState] = {}
        self._lately, self._when_full = _Window(batch_size), _Window(batch_size)
        self.wanted: int | None = None

    def step(self, consumed: int, seconds: float) -> None:
        """A step that used up `consumed` sequences in `seconds` without waiting for any. The first one only warms up."""
        if self._warm and consumed > 0 and seconds > 0:
            self._consumption.append(consumed / seconds)
            self._update()
        self._warm = True

    def actors(self, states: Mapping[str, ActorState], *, measuring: bool = False) -> None:
        """All actors of now. While they are `measuring` (an evaluation runs beside), their production tells nothing."""
        before, self._seen = self._seen, {} if measuring else dict(states)
        for name, now in self._seen.items():
            last = before.get(name, now)
            finished, busy_s = now.sequences_finished - last.sequences_finished, now.busy_s - last.busy_s
            in_progress = (last.sequences_in_progress + now.sequences_in_progress) / 2
            if finished >= 0 and busy_s > 0:  # else it has started anew in between, or had nothing to do
                produced: Production = np.array((finished, busy_s, busy_s * in_progress))
                self._lately.add(produced)
                if in_progress >= FULL * self._slots:
                    self._when_full.add(produced)
        self._update()

    def finish(self) -> None:
        self.wanted = 1

    def _update(self) -> None:
        full = self._full_actor()
        if full and len(self._consumption) >= FEWEST_STEPS:
            self.wanted = replicas_wanted(median(self._consumption) / full, self._most, self.wanted)

    def _full_actor(self) -> float | None:
        """Sequences per second of an actor with all slots in use, as far as that is known."""
        known = self._when_full.rate if self._when_full.enough else None
        lately = self._lately
        if not lately.enough:
            return known
        occupancy = max(lately.in_progress, 1.0) / self._slots
        return known if known is not None and occupancy >= FULL else full_rate(lately.rate, occupancy, known)
