"""Compute, for an autoscaler, how many actors would keep the trainer busy within the lag bound.

**Consumption.** A step uses up x sequences (trained, dropped or failed) in s seconds, not counting its waits for sequences. C,
the number of sequences that the trainer could consume in a second, is the median of x / s over the last steps.

**Production.** A full actor finishes P sequences a second. P is measured while nearly all H slots are in use. While slots are
empty, P is the last measured value, or the actor's present rate if that is higher. A lower rate only means that the lag bound
gives the actor less work. Until actors have been full once, P is estimated from the rate p at a share `o` of used slots. P is
between p (already saturated) and p / o (batching costs nothing); the estimate is their geometric mean, `p / sqrt(o)`.

**Replicas.** `C / P` actors keep up with the trainer, and at least one is wanted. More than `ceil(M / H)` actors would leave
slots empty. M is the number of sequences that may be issued before the first step: (1 + max_lag) * B, or G * B in conventional
mode, but at most those of the whole run.
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
"""Number of latest steps over which the median of the consumption is taken."""
FEWEST_STEPS = 3
FEWEST_BUSY_S = 60.0
"""Minimum busy seconds, summed over actors, from which the rate of finished sequences is measured."""
FULL = 0.85
"""Share of used slots above which an actor counts as full. It is below 1, because a slot is empty between two sequences."""

Production = NDArray[np.float64]
"""Work of an actor between two observations: [sequences finished, seconds busy, seconds busy × sequences in progress]."""


def newest_rates(produced: deque[Production], fewest: int) -> tuple[float, float] | None:
    """Return the sequences per second of a busy actor, and its mean sequences in progress. Just enough of the newest entries of
    `produced` are used to reach `fewest` sequences and `FEWEST_BUSY_S` busy seconds; older entries are removed. Return None if
    all entries together fall short of either minimum."""
    total = np.zeros(3)
    for number, one in enumerate(reversed(produced), start=1):
        total += one
        finished, busy_s, slots_s = total.tolist()
        if finished >= fewest and busy_s >= FEWEST_BUSY_S:
            for _ in range(len(produced) - number):
                produced.popleft()
            return finished / busy_s, slots_s / busy_s
    return None


def replicas_wanted(needed: float, most: int, current: int | None = None) -> int:
    """Return `needed`, the number of actors that just keep up with the trainer, rounded up to a whole number from 1 to `most`.
    So that the result changes seldom, the previous number `current` is kept while it is at most 0.1 below `needed` and at most
    1 + `current` / 10 above it."""
    enough = max(1, math.ceil(needed))
    if current is not None and current - 1 - 0.1 * current <= needed <= current + 0.1:
        enough = current
    return min(enough, most)


class ReplicasWanted:
    """Computes `wanted`, the number of actors wanted; None until it is known. `slots`: sequences that an actor keeps in
    progress. `batch_size`: sequences of one step. `in_flight`: number of sequences that may be issued before the first step."""

    def __init__(self, *, slots: int, batch_size: int, in_flight: int) -> None:
        self._slots, self._batch_size, self._most = slots, batch_size, max(1, math.ceil(in_flight / slots))
        self._consumption: deque[float] = deque(maxlen=STEPS)
        self._warm = False
        self._seen: dict[str, ActorState] = {}
        self._lately, self._when_full = deque[Production](), deque[Production]()
        self.wanted: int | None = None

    def step(self, consumed: int, seconds: float) -> None:
        """Add a step that used up `consumed` sequences in `seconds` (without waits). The first step is ignored as warm-up."""
        if self._warm and consumed > 0 and seconds > 0:
            self._consumption.append(consumed / seconds)
            self._update()
        self._warm = True

    def actors(self, states: Mapping[str, ActorState], *, measuring: bool = False) -> None:
        """Add the current states of all actors. Sequences finished during an evaluation (`measuring`) do not count."""
        before, self._seen = self._seen, {} if measuring else dict(states)
        for name, now in self._seen.items():
            last = before.get(name, now)
            finished, busy_s = now.sequences_finished - last.sequences_finished, now.busy_s - last.busy_s
            in_progress = (last.sequences_in_progress + now.sequences_in_progress) / 2
            if finished >= 0 and busy_s > 0:  # Otherwise, the actor has restarted or was idle.
                produced: Production = np.array((finished, busy_s, busy_s * in_progress))
                self._lately.append(produced)
                if in_progress >= FULL * self._slots:
                    self._when_full.append(produced)
        self._update()

    def finish(self) -> None:
        self.wanted = 1

    def _update(self) -> None:
        full = self._full_actor()
        if full and len(self._consumption) >= FEWEST_STEPS:
            self.wanted = replicas_wanted(median(self._consumption) / full, self._most, self.wanted)

    def _full_actor(self) -> float | None:
        """Return the sequences that a full actor finishes in a second, P of the module's docstring; None if it is unknown."""
        full, lately = (newest_rates(one, self._batch_size) for one in (self._when_full, self._lately))
        known = full[0] if full else None
        if lately is None:
            return known
        rate, occupancy = lately[0], min(1.0, max(lately[1], 1.0) / self._slots)
        if known is None:
            return rate / math.sqrt(occupancy)
        return known if occupancy >= FULL else max(rate, known)
