"""Repeat an operation that fails for a while because of something outside the process, until it succeeds.

Errors that can pass (an outage, a full stream) are retried. Others (a message that is too large, a missing permission, our own
mistakes) are raised at once. Nothing is stored: the caller keeps its message. Cancel the task to stop the retries.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from pipelinerl.errors import BusError, PayloadTooLarge

log = logging.getLogger(__name__)

LOG_EVERY_S = 60.0
"""Seconds between two log lines with the same reason for waiting."""
MOST_REASONS = 8
"""Maximum number of different reasons logged in that time. Texts that contain a port or a duration all differ."""

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Backoff:
    """Delays between tries. They double from `first_s` to `most_s`; each is shortened at random by up to the share `jitter`."""

    first_s: float = 0.1
    most_s: float = 5.0
    jitter: float = 0.0

    def delay_s(self, failures: int) -> float:
        """Return the seconds to wait after `failures` (at least 1) tries in a row have failed."""
        delay_s = min(self.most_s, self.first_s * 2 ** min(failures - 1, 30))
        return delay_s * random.uniform(1 - self.jitter, 1)


def is_bus_outage(error: Exception) -> bool:
    """Return whether waiting may help: NATS is away, or a stream is full."""
    return isinstance(error, BusError) and not isinstance(error, PayloadTooLarge)


async def retry_forever(
    attempt: Callable[[], Awaitable[_Result]],
    action: str,
    *,
    retried: Callable[[Exception], bool] = is_bus_outage,
    backoff: Backoff = Backoff(),
    explain: Callable[[Exception], str] = str,
    level: int = logging.WARNING,
) -> _Result:
    """Return the result of the first `attempt()` that succeeds; raise the first error for which `retried` is false.

    `action` is for the log ("publish g1.0"). The reason of a failure, in the words of `explain`, is logged with `level`, the
    same reason at most once a minute. The success after a failure is logged, too.
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
