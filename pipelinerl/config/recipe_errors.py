"""Everything that is wrong with one recipe, field by field, in words. Translates pydantic's errors; validates nothing."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipelinerl.config.fields import allowed, field_at, unknown_field
from pipelinerl.config.rules import BrokenRules
from pipelinerl.errors import FieldError, UserError

_ABSENT = "(missing)"


class MissingField(FieldError):
    """A field without a default was not given."""

    def __init__(self, field: str, fix: str) -> None:
        super().__init__(field, _ABSENT, fix)
        self.args = (f"{field} is missing: {fix}",)


class RecipeError(UserError):
    """A recipe cannot be used. Attributes: `source` (file or name), `problems` (one `FieldError` for each wrong field)."""

    def __init__(self, source: str, problems: Iterable[FieldError]) -> None:
        self.source, self.problems = source, tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  - {problem}" for problem in self.problems)]))


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[FieldError]:
    """One `FieldError` for each of pydantic's and for each broken rule, in the order of the fields."""
    return [problem for details in error.errors(include_url=False) for problem in _problems(details, model)]


def _problems(details: ErrorDetails, model: type[BaseModel]) -> Iterable[FieldError]:
    raised = details.get("ctx", {}).get("error")
    return raised.problems if isinstance(raised, BrokenRules) else (_problem(details, model),)


def _problem(details: ErrorDetails, model: type[BaseModel]) -> FieldError:
    path = tuple(str(part) for part in details["loc"])
    dotted, value, kind = ".".join(path), details["input"], details["type"]
    if kind == "extra_forbidden":
        return FieldError(dotted, value, unknown_field(path, model))
    field = field_at(model, path)
    if kind == "missing":
        return MissingField(dotted, f"give {allowed(field)}" if field else details["msg"])
    if kind == "value_error":
        return FieldError(dotted, value, str(details["ctx"]["error"]))
    return FieldError(dotted, value, f"use {allowed(field)}" if field else details["msg"])
