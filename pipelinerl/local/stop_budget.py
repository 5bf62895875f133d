"""How long each service may take to stop, so that all of them together stop in time. Pure but for the clock it is given."""

from __future__ import annotations

from collections.abc import Callable

STOP_WITHIN_S = 12.0
"""Of the 15 s a user waits at most after Ctrl-C; the rest is for summary and report."""

_RESERVED_S = {"warmstart": 8.0, "trainer": 5.0, "actor": 2.5, "verifier": 1.0, "nats": 0.0}
"""What must be left for those that stop later."""


class StopBudget:
    """Shares `within_s` seconds, from the first call of `start` on, among services that stop one after the other."""

    def __init__(self, clock_s: Callable[[], float], within_s: float = STOP_WITHIN_S) -> None:
        self._clock_s, self._within_s = clock_s, within_s
        self._deadline_s: float | None = None

    @property
    def started(self) -> bool:
        return self._deadline_s is not None

    def start(self) -> None:
        """Starts the clock; later calls change nothing."""
        if self._deadline_s is None:
            self._deadline_s = self._clock_s() + self._within_s

    def grace_s(self, kind: str) -> float:
        """Seconds that `trainer`, `actor`, `verifier` or `nats` gets before it is killed. Starts the clock."""
        self.start()
        assert self._deadline_s is not None
        return max(0.2, self._deadline_s - self._clock_s() - _RESERVED_S[kind])
