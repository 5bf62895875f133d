"""Findings of the doctor, and rules that make them. Pure.

A rule looks at one thing and is silent unless its threshold is passed. The threshold is stated in the rule's docstring, which
docs/doctor.md shows. Wrong accusations are worse than silence, so thresholds leave room, and rules wait for enough steps.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

log = logging.getLogger(__name__)
Gravity = Literal["grave", "warning", "note"]
GRAVITIES: tuple[Gravity, ...] = ("grave", "warning", "note")
"""Grave: nothing can be learned. Warning: much of the learning is lost. Note: time is lost, or something is unusual."""


@dataclass(frozen=True)
class Found:
    """A rule's result if it found something. `evidence` holds the figures, `field` names the setting to change, and `fix` gives
    the new value and the reason. `sample` holds parts of a line of samples.jsonl that show the problem."""

    gravity: Gravity
    evidence: str
    field: str
    fix: str
    sample: Mapping[str, Any] | None = None
    meaning: str = ""
    """What is wrong; empty if the rule's docstring says it."""


@dataclass(frozen=True)
class Finding(Found):
    """A rule's `id`, with its page in `docs`, and what it found."""

    id: str = ""
    docs: str = ""

    @property
    def brief(self) -> str:
        return f"{self.meaning} ({self.evidence}); {self.field}: {self.fix}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Verdict = Found | Literal[False] | None
"""What a rule returns: what it found, or a false value."""
Check = Callable[[Any], Verdict]


@dataclass(frozen=True)
class Rule:
    """A rule over a view: settings, a problem set of a recipe, or the records of a run. `docs`: its page."""

    check: Check
    docs: str

    @property
    def id(self) -> str:
        return self.check.__name__.replace("_", "-")

    @property
    def told(self) -> tuple[str, str]:
        """Meaning and threshold, which the docstring of `check` holds, with a colon between them."""
        meaning, _, threshold = " ".join((inspect.getdoc(self.check) or "").split()).partition(": ")
        return meaning, threshold


def add_to(rules: list[Rule]) -> Callable[[str], Callable[[Check], Check]]:
    """Return a decorator that adds a rule to a list. It takes the rule's page in docs."""

    def rule(docs: str) -> Callable[[Check], Check]:
        def added(check: Check) -> Check:
            rules.append(Rule(check, f"docs/{docs}"))
            return check

        return added

    return rule


def apply(rules: Iterable[Rule], *views: Any) -> list[Finding]:
    """Return what each rule finds in the first view in which it finds something, ranked. A rule that fails, as on damaged
    records, is logged and finds nothing."""
    found = ((rule, next((one for view in views if (one := _checked(rule, view))), None)) for rule in rules)
    told = (({**vars(one), "meaning": one.meaning or rule.told[0]}, rule) for rule, one in found if one)
    return ranked(Finding(**one, id=rule.id, docs=rule.docs) for one, rule in told)


def _checked(rule: Rule, view: Any) -> Found | None:
    try:
        return rule.check(view) or None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        log.warning("rule %s cannot read these records: %r", rule.id, error)
        return None


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings by gravity, and else in the given order. Rules are listed in the order of causes, so that the first
    finding explains those after it: lost data, then lengths, answers, rewards, numerics, the policy, and last speed."""
    return sorted(findings, key=lambda one: GRAVITIES.index(one.gravity))


def worse(value: float, grave: float) -> Gravity:
    """Return `grave` if the value reaches that bound, else `warning`."""
    return "grave" if value >= grave else "warning"


def percent(share: float) -> str:
    return f"{share:.0%}" if share in (0, 1) or 0.01 <= share <= 0.99 else f"{share:.2%}"
