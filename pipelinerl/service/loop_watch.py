"""Makes a blocked event loop visible from outside it: the loop beats, another thread reads how long ago.

It reports; it neither interrupts what blocks nor restarts anything. The cluster's liveness probe does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

BEAT_S = 0.25


class LoopWatch:
    """The age of the last beat of one event loop, seconds. Read from any thread."""

    def __init__(self) -> None:
        self._last_beat = time.monotonic()

    def beat(self) -> None:
        self._last_beat = time.monotonic()

    def silent_s(self) -> float:
        """Seconds since the loop last ran; up to `BEAT_S` in a healthy one."""
        return time.monotonic() - self._last_beat


@asynccontextmanager
async def watch_loop() -> AsyncIterator[LoopWatch]:
    """A watch on the running loop, for as long as the block lasts."""
    watch, loop = LoopWatch(), asyncio.get_running_loop()
    handle: asyncio.TimerHandle

    def beat() -> None:
        nonlocal handle
        watch.beat()
        handle = loop.call_later(BEAT_S, beat)

    beat()
    try:
        yield watch
    finally:
        handle.cancel()
