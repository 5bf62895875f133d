"""Something slow is built on a thread while the event loop goes on: probes answer, and a stop is heard at once.

A stop during the building ends the processes that it has started, which makes it fail, and waits for the thread: nothing is
left that nobody owns. It knows nothing of what is built.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import TypeVar

from pipelinerl.service.until_stopped import StartStopped

log = logging.getLogger(__name__)

_LOOK_S = 0.1

_Built = TypeVar("_Built")


async def build_off_loop(
    build: Callable[[], _Built],
    stop: asyncio.Event,
    children: Callable[[], Sequence[BaseProcess]] = multiprocessing.active_children,
) -> _Built:
    """`build()`, called on a thread. `children()`: the processes that a stop may end.

    Raises what `build` raises, or, where `stop` is set, `StartStopped`. What was built nevertheless is returned: it is the
    caller's to end.
    """
    building = asyncio.ensure_future(asyncio.to_thread(build))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((building, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not building.done():
            log.info("stopped before the engine was up")
            await _end_building(building, children)
        if stop.is_set() and building.exception() is not None:
            raise StartStopped("stopped before the engine was up") from building.exception()
        return building.result()
    except asyncio.CancelledError:
        for child in children():
            child.terminate()
        raise
    finally:
        stopping.cancel()


async def _end_building(building: asyncio.Future[_Built], children: Callable[[], Sequence[BaseProcess]]) -> None:
    """Returns when the thread has ended. It may start a process after one was ended: hence again and again."""
    while not building.done():
        for child in children():
            child.terminate()
        await asyncio.wait((building,), timeout=_LOOK_S)
