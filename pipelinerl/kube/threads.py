"""Runs a blocking call on a thread of its own that nobody has to wait for.

The event loop's own executor is joined when the loop ends, and any executor's threads when the interpreter does: a request
to an API server that does not answer would hold up the end of a service. These threads are daemons.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def in_thread(call: Callable[[], _Result]) -> _Result:
    """What `call` returns or raises. Cancelled, it leaves the call to end by itself, and its result unused."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - the end of a thread: the caller gets it
            args: tuple[Callable[[Any], None], Any] = (future.set_exception, error)
        else:
            args = (future.set_result, result)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, *args)

    threading.Thread(target=run, name="kubernetes", daemon=True).start()
    return await future
