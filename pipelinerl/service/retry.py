"""Tries again what the bus did not take, until it does: the one way in which a publisher outlives an outage of NATS.

Waits 0.1 s, doubling to 5 s, without end; cancelling the task ends it. Says so when the waiting begins, when it is for another
reason, and when it is over. It keeps nothing: what is to be published stays in the caller's hands. A message that is too large
for the server is no outage and is raised at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pipelinerl.errors import BusError, PayloadTooLarge

log = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_MOST_S = 0.1, 5.0

_Result = TypeVar("_Result")


async def retry_forever(
    attempt: Callable[[], Awaitable[_Result]], action: str, *, first_s: float = RETRY_FIRST_S
) -> _Result:
    """The result of the first `attempt()` that raises no `BusError`. `action` is for the log: "publish g1.0".

    `first_s`: seconds before the second attempt. Raises `PayloadTooLarge`, and whatever else an attempt raises.
    """
    delay_s, waiting_since_s, told = first_s, 0.0, ""
    while True:
        try:
            result = await attempt()
        except PayloadTooLarge:
            raise
        except BusError as error:
            waiting_since_s = waiting_since_s or time.monotonic()
            if str(error) != told:
                told = str(error)
                log.warning("cannot %s, trying again until it works: %s", action, told)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, RETRY_MOST_S)
            continue
        if waiting_since_s:
            log.info("could %s after %.1f s", action, time.monotonic() - waiting_since_s)
        return result
