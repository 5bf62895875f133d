"""When an actor may take prompt groups: it serves a recorded version, near enough to the trainer's, and is not draining."""

from __future__ import annotations

import asyncio

from pipelinerl.types import PolicyVersion


class ServingGate:
    """Open while the served version is within `max_lag` of the trainer's last announced one.

    Before the first commit the actor serves weights that no trainer recorded: closed.
    `max_lag` None: any served version will do.
    """

    def __init__(self, max_lag: int | None) -> None:
        self._max_lag = max_lag
        self._opened = asyncio.Event()
        self.served: PolicyVersion | None = None
        self.announced: PolicyVersion | None = None
        self.draining = False

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    @property
    def reason(self) -> str:
        """Why it is closed, for /readyz and logs; empty when open."""
        if self.draining:
            return "draining"
        if self.served is None:
            return "no policy version served yet"
        if not self._near():
            return f"serves {self.served}, more than max_lag = {self._max_lag} behind {self.announced}"
        return ""

    def serve(self, version: PolicyVersion) -> None:
        self.served = version
        self._update()

    def announce(self, version: PolicyVersion) -> None:
        """An older one changes nothing: a joiner's side group is brought to a version that others have served for a while."""
        if self.announced is None or newer(version, self.announced):
            self.announced = version
        self._update()

    def drain(self) -> None:
        self.draining = True
        self._update()

    async def wait_open(self) -> None:
        await self._opened.wait()

    def _near(self) -> bool:
        if self.served is None or self.announced is None or self._max_lag is None:
            return self.served is not None
        same = self.served.incarnation == self.announced.incarnation
        return same and self.announced.number - self.served.number <= self._max_lag + 1

    def _update(self) -> None:
        if self.reason:
            self._opened.clear()
        else:
            self._opened.set()


def newer(one: PolicyVersion, other: PolicyVersion) -> bool:
    """Made by a later trainer, or by the same after more optimizer steps. Pure."""
    return (one.incarnation, one.number) > (other.incarnation, other.number)
