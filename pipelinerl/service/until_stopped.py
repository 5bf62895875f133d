"""Something that may take long while a process starts, given up when the process is told to stop.

It does not try again: `pipelinerl.retry` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from pipelinerl.errors import PipelineRLError

_Result = TypeVar("_Result")


class StartStopped(PipelineRLError):
    """The process was told to stop before it was up."""


async def unless_stopped(work: Coroutine[Any, Any, _Result], stop: asyncio.Event) -> _Result:
    """The result of `work`, or what it raises. Raises `StartStopped`, with `work` cancelled, where `stop` is set before."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.wait((working, stopping))
    raise StartStopped("stopped before it was up")
