"""Where every issued sequence ended: `issued = trained + dropped_stale + dropped_filtered + failed + in_flight`.

Pure state stepped by two events, issue and close, each O(1). A broken equation is our own defect and stops the run.
Not here: metrics, files, streams; `to_state` is what a checkpoint stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    TRAINED = "trained"
    DROPPED_STALE = "dropped_stale"
    DROPPED_FILTERED = "dropped_filtered"
    FAILED = "failed"


class LedgerViolation(AssertionError):
    """A sequence was issued or closed twice, closed without being issued, or the counts do not add up."""


@dataclass(frozen=True)
class LedgerCounts:
    """Sequences. The fields are those of `SequenceCounts` in trainer.proto."""

    issued: int = 0
    trained: int = 0
    dropped_stale: int = 0
    dropped_filtered: int = 0
    failed: int = 0
    in_flight: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class Ledger:
    """Outcomes of all sequences of one run."""

    def __init__(self) -> None:
        self._issued = 0
        self._closed = dict.fromkeys(Outcome, 0)
        self._in_flight: dict[str, None] = {}  # in order of issue
        self._reasons: dict[Outcome, dict[str, int]] = {outcome: {} for outcome in Outcome}

    def issue(self, sequence_ids: Iterable[str]) -> None:
        """Raises `LedgerViolation` when one of them is in flight already; those before it are issued."""
        for sequence_id in sequence_ids:
            if sequence_id in self._in_flight:
                raise LedgerViolation(f"sequence {sequence_id} was issued twice")
            self._in_flight[sequence_id] = None
            self._issued += 1
        self.check()

    def close(self, sequence_id: str, outcome: Outcome, reason: str = "") -> None:
        """Ends one sequence. A failure needs a reason; reasons are counted, so keep them short and few.

        Raises `LedgerViolation` when the sequence is not in flight.
        """
        if sequence_id not in self._in_flight:
            raise LedgerViolation(f"sequence {sequence_id} ends as {outcome}, but it is not in flight")
        if outcome is Outcome.FAILED and not reason:
            raise LedgerViolation(f"sequence {sequence_id} failed without a reason")
        del self._in_flight[sequence_id]
        self._closed[outcome] += 1
        if reason:
            self._reasons[outcome][reason] = self._reasons[outcome].get(reason, 0) + 1
        self.check()

    def is_open(self, sequence_id: str) -> bool:
        """Whether the sequence is in flight: only such a one may be trained."""
        return sequence_id in self._in_flight

    def in_flight(self) -> tuple[str, ...]:
        """Ids in order of issue."""
        return tuple(self._in_flight)

    @property
    def counts(self) -> LedgerCounts:
        by_outcome = {outcome.value: count for outcome, count in self._closed.items()}
        return LedgerCounts(issued=self._issued, in_flight=len(self._in_flight), **by_outcome)

    def reasons(self, outcome: Outcome) -> dict[str, int]:
        """Sequences of that outcome by reason, where one was given."""
        return dict(self._reasons[outcome])

    def check(self) -> None:
        """Raises `LedgerViolation` with all the numbers when the equation does not hold."""
        if self._issued != sum(self._closed.values()) + len(self._in_flight):
            numbers = ", ".join(f"{name} {count}" for name, count in self.counts.as_dict().items())
            raise LedgerViolation(f"issued != trained + dropped + failed + in_flight: {numbers}")

    def to_state(self) -> dict[str, Any]:
        """JSON-able; `from_state` makes an equal ledger of it."""
        return {
            "issued": self._issued,
            "closed": {outcome.value: count for outcome, count in self._closed.items()},
            "reasons": {outcome.value: dict(counts) for outcome, counts in self._reasons.items()},
            "in_flight": list(self._in_flight),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Ledger:
        """Raises `LedgerViolation` when the stored numbers do not add up."""
        ledger = cls()
        ledger._issued = state["issued"]
        ledger._closed = {outcome: state["closed"][outcome.value] for outcome in Outcome}
        ledger._reasons = {outcome: dict(state["reasons"][outcome.value]) for outcome in Outcome}
        ledger._in_flight = dict.fromkeys(state["in_flight"])
        ledger.check()
        return ledger
