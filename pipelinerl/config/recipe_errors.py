"""Everything that is wrong with one recipe, field by field, in words. Translates pydantic's errors; validates nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pipelinerl.config.fields import allowed, field_at, section_of, unknown_field
from pipelinerl.errors import FieldError, UserError

_ABSENT = "(missing)"


class RuleError(FieldError):
    """Fields of one section contradict each other; the rule's text names them. `value` is the section as given."""

    def __init__(self, section: str, value: object, rule: str) -> None:
        super().__init__(section, value, rule)
        self.args = (f"{section}: {rule}" if section else rule,)


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
    """One `FieldError` for each of pydantic's, in the order of the fields."""
    return [_problem(details, model) for details in error.errors(include_url=False)]


def _problem(details: ErrorDetails, model: type[BaseModel]) -> FieldError:
    path = tuple(str(part) for part in details["loc"])
    dotted, value, kind = ".".join(path), details["input"], details["type"]
    if kind == "extra_forbidden":
        return FieldError(dotted, value, unknown_field(path, model))
    field = field_at(model, path)
    if kind == "missing":
        return MissingField(dotted, f"give {allowed(field)}" if field else details["msg"])
    if kind == "value_error" and _is_section(path, value, model):
        return RuleError(dotted, value, _rule_text(details))
    if kind == "value_error" or field is None:
        return FieldError(dotted, value, _rule_text(details))
    return FieldError(dotted, value, f"use {allowed(field)}")


def _is_section(path: tuple[str, ...], value: Any, model: type[BaseModel]) -> bool:
    field = field_at(model, path)
    return not path or isinstance(value, Mapping) or bool(field and section_of(field.annotation))


def _rule_text(details: ErrorDetails) -> str:
    raised = details.get("ctx", {}).get("error")
    return str(raised) if raised is not None else details["msg"]
