"""Findings of the doctor, and rules that make them. Pure.

A family of rules is a generator function. It examines a view, that is, a problem set of a recipe or the records of a run, and
yields rows. A row has a rule's id, a gravity (`note`, or true for grave, or false for a warning), evidence, field and fix, and
perhaps sample and meaning. The evidence is false or empty if the rule finds nothing. The family's docstring lists its rules,
causes before effects, with page, meaning and threshold. A new rule needs an entry there.
A wrong finding is worse than a missing one, so thresholds have a margin, and rules wait for enough steps.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from pipelinerl.recipe.rules import value_at

log = logging.getLogger(__name__)
Gravity = Literal["grave", "warning", "note"]
GRAVITIES: tuple[Gravity, ...] = ("grave", "warning", "note")
"""Grave: nothing can be learned. Warning: much of the learning is lost. Note: time is lost, or something is unusual."""


@dataclass(frozen=True)
class Finding:
    """A result of a rule."""

    id: str
    gravity: Gravity
    evidence: str
    """Figures that show the problem."""
    field: str
    """Setting to change."""
    fix: str
    """Advice on what to do. If the field is numeric, the advice begins with its present value."""
    sample: Mapping[str, Any] | None = None
    """Line of samples.jsonl that shows the problem."""
    meaning: str = ""
    docs: str = ""
    """Page that explains the rule."""

    @property
    def brief(self) -> str:
        return f"{self.meaning} ({self.evidence}); {self.field}: {self.fix}"

    def to_json(self) -> dict[str, Any]:
        """Return the finding without its sample."""
        return {name: value for name, value in vars(self).items() if name != "sample"}


Rows = Iterator[tuple[Any, ...]]
Family = Callable[[Any], Rows]


def rules_of(*families: Family) -> dict[str, tuple[str, ...]]:
    """Return page, meaning and threshold of the rules in the docstrings of families, by id. A docstring lists a rule as
    `some-id (page.md#part): meaning: threshold`."""
    text = "\n\n".join(inspect.getdoc(one) or "" for one in families)
    found = re.findall(r"(?ms)^([\w-]+) \((\S+)\): (.+?):\s(.+?)(?=\n+\S|\Z)", text)
    return {id_: tuple(" ".join(part.split()) for part in told) for id_, *told in found}


def apply(families: Iterable[Family], *views: Any) -> list[Finding]:
    """Apply the rules to the views, and return the first finding of each rule, ranked. A view has an attribute `recipe`. If a
    family fails on a view, for example on damaged records, the findings that it has yielded are kept."""
    findings = list[Finding]()
    for family in families:
        rows, rules = list[tuple[Any, ...]](), rules_of(family)
        for view in views:
            try:
                rows.extend(row for row in family(view) if row[2])  # keeps the rows before an error
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                log.warning("the rules of %s cannot examine this recipe or run: %r", family.__name__, error)
        first = {row[0]: row for row in reversed(rows)}
        assert first.keys() <= rules.keys(), f"{family.__name__} does not list {[*first]}"
        for id_ in filter(first.__contains__, rules):
            row: tuple[Any, ...] = (*first[id_], None, "")
            (_, grave, evidence, field, fix, sample, meaning, *_), (page, usual, _) = row, rules[id_]
            gravity: Gravity = "note" if grave == "note" else "grave" if grave else "warning"
            with suppress(AttributeError, LookupError):  # some rules name `logs`, which is no field
                if isinstance(value := value_at(views[0].recipe, field), int | float):
                    fix = f"is {value:,}; {fix}" if isinstance(value, int) else f"is {value:g}; {fix}"
            findings.append(Finding(id_, gravity, evidence, field, fix, sample, meaning or usual, f"docs/{page}"))
    return ranked(findings)


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings by gravity; those of equal gravity keep their order. The first one may explain the others, because
    rules list causes first (for a run: lost data, lengths, answers, rewards, numerics, the policy, speed)."""
    return sorted(findings, key=lambda one: GRAVITIES.index(one.gravity))


def percent(share: float) -> str:
    if math.isnan(share):
        return "unknown"
    return f"{share:.0%}" if share in (0, 1) or 0.01 <= share <= 0.99 else f"{share:.2%}"
