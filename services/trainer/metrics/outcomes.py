"""What became of what was issued: the ledger, its reasons, and the tokens that went each way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields

from pipelinerl.algorithms.ledger import LedgerCounts, Outcome
from pipelinerl.algorithms.staleness import StaleReason
from pipelinerl.reasons import MOST_REASONS, OTHER
from pipelinerl.service.metric_set import MetricSet
from services.trainer.sequences.books import Books

STATES = tuple(field.name for field in fields(LedgerCounts))
OUTCOMES = tuple(outcome.value for outcome in Outcome)
STALE_REASONS = tuple(reason.value for reason in StaleReason)
_NONE_STALE = dict.fromkeys(STALE_REASONS, 0)


class OutcomeMetrics:
    """Read from the books at each scrape."""

    def __init__(self, metrics: MetricSet) -> None:
        self._sequences = metrics.reading(
            "ledger_sequences", "The ledger: issued, and what became of them; over all of the run.", {"state": STATES}
        )
        self._discrepancy = metrics.reading(
            "ledger_discrepancy_sequences", "Issued sequences less those of all other states: 0, or a defect."
        )
        reasons = "see docs/errors.md; (other) for what is not among the most frequent"
        self._failed = metrics.reading("failed_sequences", "Failed sequences by reason.", {"reason": reasons})
        self._stale = metrics.reading(
            "dropped_stale_sequences", "Sequences too old when their turn came, by reason.", {"reason": STALE_REASONS}
        )
        self._tokens = metrics.count(
            "tokens_total",
            "Completion tokens by what became of their sequence, since this start.",
            {"outcome": OUTCOMES},
        )
        self._arrived = metrics.count(
            "tokens_arrived_total", "Completion tokens that reached the trainer, since this start.", unit="tokens"
        )
        self._bad = metrics.reading(
            "bad_messages",
            "Messages set aside: sequences since the run began, others since this start.",
            unit="messages",
        )

    def watch(self, books: Books, tokens_arrived: Callable[[], int], bad_messages: Callable[[], int]) -> None:
        """Where to read."""
        self._sequences.read_each(lambda: books.counts.as_dict())
        self._discrepancy.read(lambda: discrepancy(books.counts))
        self._failed.read_each(lambda: bounded(books.ledger.reasons(Outcome.FAILED)))
        self._stale.read_each(lambda: {**_NONE_STALE, **books.ledger.reasons(Outcome.DROPPED_STALE)})
        self._tokens.read_each(lambda: dict(books.tokens))
        self._arrived.read(tokens_arrived)
        self._bad.read(bad_messages)


def discrepancy(counts: LedgerCounts) -> int:
    """Issued less all others. Pure."""
    numbers = counts.as_dict()
    return numbers.pop("issued") - sum(numbers.values())


def bounded(counts: Mapping[str, int], most: int = MOST_REASONS) -> dict[str, float]:
    """The `most` frequent ones, and the sum of the others as `OTHER`. Pure."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(count for _, count in ordered[most:])
    return {**{reason: float(count) for reason, count in ordered[:most]}, **({OTHER: float(rest)} if rest else {})}
