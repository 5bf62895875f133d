"""Which Events are worth sending, so that something that flaps cannot flood the API. Pure: no clock, no socket."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MOST_KEYS = 1024


@dataclass
class _Told:
    at_s: float
    left_out: int = 0


class EventBound:
    """At most one Event of a kind about an object every `every_s`, and of all kinds `burst`, refilled one by one every
    `refill_s`. The next one that passes says how many were left out."""

    def __init__(self, *, every_s: float = 60.0, burst: int = 100, refill_s: float = 1.0) -> None:
        self._every_s, self._burst, self._refill_s = every_s, burst, refill_s
        self._tokens, self._filled_at_s = float(burst), 0.0
        self._told: OrderedDict[tuple[str, str], _Told] = OrderedDict()

    def passes(self, reason: str, about: str, now_s: float) -> int | None:
        """Number of Events of this kind about this object that were left out since the last one; None: this one is too.
        `now_s`: of a clock that never goes back."""
        told = self._told.get((reason, about))
        if (told is not None and now_s - told.at_s < self._every_s) or not self._take(now_s):
            if told is None:
                told = self._remember(reason, about, now_s - self._every_s)
            told.left_out += 1
            return None
        left_out = told.left_out if told else 0
        self._remember(reason, about, now_s)
        return left_out

    def _remember(self, reason: str, about: str, at_s: float) -> _Told:
        told = self._told[reason, about] = _Told(at_s)
        self._told.move_to_end((reason, about))
        while len(self._told) > MOST_KEYS:
            self._told.popitem(last=False)
        return told

    def _take(self, now_s: float) -> bool:
        self._tokens = min(self._burst, self._tokens + (now_s - self._filled_at_s) / self._refill_s)
        self._filled_at_s = now_s
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
