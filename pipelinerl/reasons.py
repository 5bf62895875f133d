"""Reasons of failures as few words that can be counted. Details are in the logs. Pure."""

from __future__ import annotations

REASON_CHARACTERS = 60
MOST_REASONS = 24
"""Reasons are few as long as services agree on them; what comes beyond is summed up as `OTHER`."""
OTHER = "(other)"


def short_reason(failure: str) -> str:
    """The part before the colon."""
    return failure.partition(":")[0].strip()[:REASON_CHARACTERS] or "unknown"


class FirstReasons:
    """Short reasons for a counter, whose series stay for good: the first `most` different ones, and `OTHER` for all others."""

    def __init__(self, most: int = MOST_REASONS) -> None:
        self._most, self._seen = most, set[str]()

    def of(self, failure: str) -> str:
        reason = short_reason(failure)
        if len(self._seen) < self._most:
            self._seen.add(reason)
        return reason if reason in self._seen else OTHER
