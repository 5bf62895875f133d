"""Kubernetes Events about pods: made as data, bounded, sent in the background, never waited for.

`EventRateLimiter` decides which are worth sending, so that something that flaps cannot flood the API; it is pure.
`EventRecorder` consumes `emit` calls and produces core v1 Events. It waits for the API server; while that is away a bounded
queue holds them and the rest is dropped: Events are for people, the logs have everything.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

from pipelinerl.kube.client import BACKOFF, KubeClient, KubeError, Pod

log = logging.getLogger(__name__)

MOST_KEYS = 1024
"""Kinds and objects that the limiter remembers."""


class EventRateLimiter:
    """At most one Event of a kind about an object every `every_s`, and of all kinds `burst`, refilled one by one every
    `refill_s`. The next one that passes says how many were left out."""

    def __init__(self, *, every_s: float = 60.0, burst: int = 100, refill_s: float = 1.0) -> None:
        self._every_s, self._burst, self._refill_s = every_s, burst, refill_s
        self._tokens, self._filled_at_s = float(burst), 0.0
        self._last: dict[tuple[str, str], tuple[float, int]] = {}
        """When the last one passed, and how many have been left out since; the one asked about longest ago comes first."""

    def passes(self, reason: str, about: str, now_s: float) -> int | None:
        """Number of Events of this kind about this object that were left out since the last one; None: this one is too.
        `now_s`: of a clock that never goes back."""
        self._tokens = min(self._burst, self._tokens + (now_s - self._filled_at_s) / self._refill_s)
        self._filled_at_s = now_s
        passed_at_s, left_out = self._last.pop((reason, about), (-math.inf, 0))
        passes = now_s - passed_at_s >= self._every_s and self._tokens >= 1
        self._tokens -= passes
        self._last[reason, about] = (now_s, 0) if passes else (passed_at_s, left_out + 1)
        if len(self._last) > MOST_KEYS:
            del self._last[next(iter(self._last))]
        return left_out if passes else None


QUEUE_SIZE = 200
TRIES = 5
"""Of one Event where the server does not answer."""
MESSAGE_CHARACTERS, NAME_CHARACTERS, INSTANCE_CHARACTERS = 1024, 253, 128
"""What the API server takes."""

EventType = Literal["Normal", "Warning"]


class EventRecorder:
    """Sends Events of one component, from the pod `instance`; used on one event loop."""

    def __init__(
        self,
        client: KubeClient,
        *,
        component: str,
        instance: str,
        limiter: EventRateLimiter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._component, self._instance = client, component, instance
        self._limiter, self._clock = limiter or EventRateLimiter(), clock
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(QUEUE_SIZE)
        self._denied_until_s = 0.0
        self._logged: tuple[object, ...] = ()
        self.num_dropped = 0
        """Not sent: no room, no permission, or no answer."""

    def emit(self, about: Pod, reason: str, message: str, type_: EventType = "Normal", *, always: bool = False) -> None:
        """Takes it and returns. One that `EventRateLimiter` leaves out is counted in the next message of its kind; one that
        happens but once is to be sent `always`."""
        left_out = 0 if always else self._limiter.passes(reason, about.name, self._clock())
        if left_out is None:
            return
        text = f"{message} ({left_out} more like this since the last one)" if left_out else message
        try:
            self._queue.put_nowait(self._body(about, reason, text, type_))
        except asyncio.QueueFull:
            self.num_dropped += 1

    def _body(self, about: Pod, reason: str, message: str, type_: EventType) -> dict[str, Any]:
        """A core v1 Event, as JSON. Without the uid of `about` `kubectl describe pod` does not show it, `kubectl get events`
        does."""
        suffix, at = f".{uuid.uuid4().hex[:16]}", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        where = {"name": about.name, "namespace": self._client.namespace}
        return {
            "metadata": {**where, "name": about.name[: NAME_CHARACTERS - len(suffix)] + suffix},
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", **where} | ({"uid": about.uid} if about.uid else {}),
            "reason": reason,
            "message": message if len(message) <= MESSAGE_CHARACTERS else message[: MESSAGE_CHARACTERS - 1] + "…",
            "type": type_,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": self._instance[:INSTANCE_CHARACTERS],
        }

    async def run(self) -> None:
        while True:
            await self._send(await self._queue.get())
            self._queue.task_done()

    async def drained(self) -> None:
        """Returns when all that was taken is sent, or given up."""
        await self._queue.join()

    async def _send(self, event: dict[str, Any]) -> None:
        if self._clock() < self._denied_until_s:
            self.num_dropped += 1
            return
        for tries in range(1, TRIES + 1):
            try:
                await self._client.create_event(event)
            except KubeError as error:
                why = (error.denied, error.status)  # a warning for each new reason, until an Event goes through
                log.log(logging.DEBUG if why == self._logged else logging.WARNING, "no Kubernetes Events: %s", error)
                self._logged = why
                if error.denied:
                    self._denied_until_s = self._clock() + BACKOFF.denied_s
                if 400 <= error.status < 500 and error.status != 429:
                    break
                if tries < TRIES:
                    await asyncio.sleep(BACKOFF.after(error, tries))
            else:
                self._logged = ()
                return
        self.num_dropped += 1
