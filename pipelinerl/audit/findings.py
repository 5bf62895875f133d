"""What an audit checks, and what it found wrong. Pure. A finding names the check and the thing; the first few are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

_EXAMPLES = 5


class Check(StrEnum):
    """What must hold, in the words of the audit's report."""

    JOURNAL = "the journal can be read"
    RESTARTS = "every start goes on from what it says it does"
    ISSUED_ONCE = "no sequence is issued twice"
    ISSUED_FIRST = "no sequence ends that was not issued"
    ENDED_ONCE = "no sequence ends twice"
    TRAINED_ONCE = "no sequence is trained twice into the same weights"
    EQUATION = "the equation holds at every step, with the trainer's own counts"
    VERSIONS = "every version was made once, in order"
    GROUPS = "group numbers have no gap, and each was reserved first"
    POSITIONS = "positions in the log do not go back"
    CHECKPOINTS = "every checkpoint holds the ledger of its moment"
    SUMMARY = "summary.json says the same"
    STRANGERS = "the log holds no sequence that was never issued"
    LOST = "every sequence in flight is somewhere"


@dataclass(frozen=True)
class CheckResult:
    """`count` problems, of which `examples` are the first; `skipped`: why it was not looked at."""

    check: Check
    count: int
    examples: tuple[str, ...]
    skipped: str = ""

    @property
    def ok(self) -> bool:
        return self.count == 0


@dataclass
class Findings:
    """Collects problems by check."""

    counts: dict[Check, int] = field(default_factory=dict)
    examples: dict[Check, list[str]] = field(default_factory=dict)
    skipped: dict[Check, str] = field(default_factory=dict)

    def add(self, check: Check, problem: str, times: int = 1) -> None:
        self.counts[check] = self.counts.get(check, 0) + times
        shown = self.examples.setdefault(check, [])
        if len(shown) < _EXAMPLES:
            shown.append(problem)

    def skip(self, reason: str, *checks: Check) -> None:
        """These were not looked at."""
        self.skipped |= dict.fromkeys(checks, reason)

    def results(self) -> list[CheckResult]:
        """One for each check, in their order."""
        return [
            CheckResult(
                check, self.counts.get(check, 0), tuple(self.examples.get(check, ())), self.skipped.get(check, "")
            )
            for check in Check
        ]
