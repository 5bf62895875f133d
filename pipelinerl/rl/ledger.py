"""Where every issued sequence ended: `issued = trained + dropped_stale + dropped_filtered + failed + in_flight`.

Pure state stepped by two events, issue and close, each O(1). A broken equation is our own defect and stops the run.
Not here: metrics, files, streams; `to_state` is what a checkpoint stores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
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

    @property
    def discrepancy(self) -> int:
        """Issued less all others: 0, or a defect."""
        ended = self.trained + self.dropped_stale + self.dropped_filtered + self.failed
        return self.issued - ended - self.in_flight


class Ledger:
    """Outcomes of all sequences of one run. `counts` is replaced at each event: numbers of one moment, on any thread."""

    def __init__(self) -> None:
        self.counts = LedgerCounts()
        self._in_flight: dict[str, None] = {}  # in order of issue
        self._reasons = {outcome: Counter[str]() for outcome in Outcome}

    def issue(self, sequence_ids: Iterable[str]) -> None:
        """Counts sequences as issued and in flight. Raises `LedgerViolation` for one that is in flight already."""
        for sequence_id in sequence_ids:
            if sequence_id in self._in_flight:
                raise LedgerViolation(f"sequence {sequence_id} was issued twice")
            self._in_flight[sequence_id] = None
            self._count("issued")

    def close(self, sequence_id: str, outcome: Outcome, reason: str = "") -> None:
        """Ends one sequence. A failure needs a reason; reasons are counted, so keep them short and few.

        Raises `LedgerViolation` when the sequence is not in flight.
        """
        if sequence_id not in self._in_flight:
            raise LedgerViolation(f"sequence {sequence_id} ends as {outcome}, but it is not in flight")
        if outcome is Outcome.FAILED and not reason:
            raise LedgerViolation(f"sequence {sequence_id} failed without a reason")
        del self._in_flight[sequence_id]
        if reason:
            self._reasons[outcome][reason] += 1
        self._count(outcome.value)

    def is_open(self, sequence_id: str) -> bool:
        """Whether the sequence is in flight: only such a one may be trained."""
        return sequence_id in self._in_flight

    def in_flight(self) -> tuple[str, ...]:
        """Ids in order of issue."""
        return tuple(self._in_flight)

    def reasons(self, outcome: Outcome) -> dict[str, int]:
        """Sequences of that outcome by reason, where one was given."""
        return dict(self._reasons[outcome])

    def check(self) -> None:
        """Raises `LedgerViolation` with all the numbers when the equation does not hold."""
        if self.counts.discrepancy:
            numbers = ", ".join(f"{name} {count}" for name, count in self.counts.as_dict().items())
            raise LedgerViolation(f"issued != trained + dropped + failed + in_flight: {numbers}")

    def _count(self, name: str) -> None:
        """One more of `name`, and what is in flight now."""
        more: dict[str, int] = {name: getattr(self.counts, name) + 1}
        self.counts = replace(self.counts, in_flight=len(self._in_flight), **more)
        self.check()

    def to_state(self) -> dict[str, Any]:
        """JSON-able; `from_state` makes an equal ledger of it."""
        return {
            "issued": self.counts.issued,
            "closed": {outcome.value: getattr(self.counts, outcome.value) for outcome in Outcome},
            "reasons": {outcome.value: dict(counts) for outcome, counts in self._reasons.items()},
            "in_flight": list(self._in_flight),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Ledger:
        """Raises `LedgerViolation` when the stored numbers do not add up."""
        ledger = cls()
        ledger._reasons = {outcome: Counter(state["reasons"][outcome.value]) for outcome in Outcome}
        ledger._in_flight = dict.fromkeys(state["in_flight"])
        ledger.counts = LedgerCounts(state["issued"], in_flight=len(ledger._in_flight), **state["closed"])
        ledger.check()
        return ledger
