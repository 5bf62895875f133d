"""`--set a.b=c` on top of a recipe's data. Pure: plain data in, plain data out; validation comes after."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from pipelinerl.config.fields import field_at, unknown_field
from pipelinerl.config.yaml_text import YamlError, parse_yaml
from pipelinerl.errors import FieldError


@dataclass(frozen=True)
class Override:
    """One `--set`: the field's path and its YAML-typed value (`null` is None)."""

    path: tuple[str, ...]
    value: Any

    @property
    def dotted(self) -> str:
        return ".".join(self.path)


def parse_override(text: str) -> Override:
    """Reads `a.b=value`. Raises `FieldError` when it has no `=`, an empty name, or a value that is not YAML."""
    path, equals, value = text.partition("=")
    names = tuple(name.strip() for name in path.split("."))
    if not equals or not all(names):
        raise FieldError("--set", text, "write it as section.field=value, for example trainer.steps=50")
    try:
        return Override(names, parse_yaml(value, f"--set {path}"))
    except YamlError as error:
        raise FieldError("--set", text, f"the value is not YAML ({error.problem}); quote it") from error


def check_override(override: Override, model: type[BaseModel]) -> FieldError | None:
    """The error of a path that the model does not have, with near matches; None when it is known."""
    if field_at(model, override.path) is not None:
        return None
    return FieldError(f"--set {override.dotted}", override.value, unknown_field(override.path, model))


def apply_overrides(data: dict[str, Any], overrides: Iterable[Override]) -> dict[str, Any]:
    """A copy of `data` with every override in place, later ones winning. Missing or null sections are made."""
    changed = copy.deepcopy(data)
    for override in overrides:
        section = changed
        for name in override.path[:-1]:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section[override.path[-1]] = copy.deepcopy(override.value)
    return changed
