"""The benchmark of ledger and audit measures what it says: a run in which every sequence is issued once and ends once."""

from __future__ import annotations

from benchmarks.audit import keep_ledger, measure
from pipelinerl.rl.ledger import LedgerCounts


def test_every_sequence_of_the_made_up_run_ends() -> None:
    # 2,000 in steps of 128: 15 whole ones with 2 failed (the 1st and the 65th), and one of 80 with 2.
    assert keep_ledger(2_000).counts == LedgerCounts(issued=2_000, trained=1_968, failed=32)


def test_a_row_has_every_figure() -> None:
    row = measure(2_000, rounds=1)
    assert row["sequences"] == 2_000
    assert all(row[name] > 0 for name in ("ledger_us", "books_us", "audit_us", "journal_bytes", "audit_bytes"))
