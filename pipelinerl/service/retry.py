"""Repeat an operation that fails because of something outside the process, such as an outage or a full stream, until it
succeeds. Cancel the task to stop the retries."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from pipelinerl.errors import BusError, PayloadTooLarge, TransferError

log = logging.getLogger(__name__)

LOG_EVERY_S = 60.0
"""Seconds between two log lines with the same reason for waiting."""
MOST_REASONS = 8
"""Maximum number of different reasons logged per `LOG_EVERY_S`, since a reason with a port or a duration differs each time."""

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Backoff:
    """Delays between tries, which double from `first_s` to `most_s`. Each is shortened by a random share up to `jitter`."""

    first_s: float = 0.1
    most_s: float = 5.0
    jitter: float = 0.0

    def delay_s(self, failures: int) -> float:
        """Return the seconds to wait after `failures` (at least 1) tries in a row have failed."""
        delay_s = min(self.most_s, self.first_s * 2 ** min(failures - 1, 30))
        return delay_s * random.uniform(1 - self.jitter, 1)


def is_bus_outage(error: Exception) -> bool:
    """Return whether waiting may help: NATS is unreachable, or a stream is full."""
    return isinstance(error, BusError) and not isinstance(error, PayloadTooLarge)


def is_transfer_error(error: Exception) -> bool:
    """Return whether another attempt may succeed: the weight log's store may be up again, or a newer version may work."""
    return isinstance(error, TransferError)


async def retry_forever(
    attempt: Callable[[], Awaitable[_Result]],
    action: str,
    *,
    retried: Callable[[Exception], bool] = is_bus_outage,
    backoff: Backoff = Backoff(),
    explain: Callable[[Exception], str] = str,
    level: int = logging.WARNING,
) -> _Result:
    """Return the result of the first `attempt()` that succeeds. Raise the first error for which `retried` is false.

    The log names the `action`, such as "publish g1.0", and the reason, which `explain` makes from the error. The same reason is
    logged at most once a minute.
    """
    failures, waiting_since_s = 0, time.monotonic()
    logged_at_s: dict[str, float] = {}
    while True:
        try:
            result = await attempt()
        except Exception as error:
            if not retried(error):
                raise
            failures += 1
            now_s, reason = time.monotonic(), explain(error)
            logged_at_s = {text: at_s for text, at_s in logged_at_s.items() if now_s - at_s < LOG_EVERY_S}
            if reason not in logged_at_s and len(logged_at_s) < MOST_REASONS:
                logged_at_s[reason] = now_s
                log.log(level, "cannot %s, trying again: %s", action, reason)
            await asyncio.sleep(backoff.delay_s(failures))
        else:
            if failures:
                log.info("managed to %s after %.1f s", action, time.monotonic() - waiting_since_s)
            return result
