"""Decide when an actor may take prompts, and which requests may share cached keys and values across weight swaps.
`UpdateListener` opens and closes the gate; the generation loop waits for it."""

from __future__ import annotations

import asyncio
import uuid

from pipelinerl.messages.control import Phase
from pipelinerl.messages.sequences import PolicyVersion


class ServingGate:
    """Groups may be taken only while this gate is open; groups that were taken earlier continue. It is closed before the first
    commit, because the actor then serves weights that no trainer recorded. Later, it closes while the actor drains or sleeps.
    With a `max_lag`, it also closes if the served version is from another incarnation than the last announced one, or more than
    `max_lag` + 1 behind it. The 1 is added because the trainer announces a version before actors serve it."""

    def __init__(self, max_lag: int | None) -> None:
        self._max_lag = max_lag
        self.opened = asyncio.Event()
        self.served: PolicyVersion | None = None
        self.announced: PolicyVersion | None = None
        self.draining = False
        self.swapping = False
        self.asleep = False

    @property
    def cache_salt(self) -> str:
        """Salt of a request that begins now. Requests with equal salts share cached keys and values, so the salt names the
        served version. During a swap, either version may serve the request, so its salt is unique."""
        return uuid.uuid4().hex if self.swapping else f"begun at {self.served}"

    @property
    def phase(self) -> Phase:
        if self.draining:
            return "draining"
        return "joining" if self.served is None else "serving"

    @property
    def reason(self) -> str:
        """Why the gate is closed, for /readyz and logs; empty if it is open."""
        if self.draining:
            return "draining"
        if self.served is None:
            return "no policy version served yet"
        if self.asleep:
            return "the engine sleeps while the trainer uses its GPU"
        if self.announced is not None and self._max_lag is not None:
            if self.served.incarnation != self.announced.incarnation:
                return f"serves {self.served}, which is from another incarnation than {self.announced}"
            if self.announced.number - self.served.number > self._max_lag + 1:
                return f"serves {self.served}, more than max_lag + 1 ({self._max_lag + 1}) versions behind {self.announced}"
        return ""

    def serve(self, version: PolicyVersion) -> None:
        self.served, self.asleep = version, False
        self._update()

    def sleep(self) -> None:
        self.asleep = True
        self._update()

    def announce(self, version: PolicyVersion) -> None:
        """Remember the newest announced version. Older ones, which an actor may get when it joins, are ignored."""
        if self.announced is None or version > self.announced:
            self.announced = version
        self._update()

    def drain(self) -> None:
        self.draining = True
        self._update()

    def _update(self) -> None:
        if self.reason:
            self.opened.clear()
        else:
            self.opened.set()
