"""What differs between the recipe that a run was started with and the one it is resumed with, and whether that is allowed.

Each field says so itself: `fields.Changeable`. Pure. Reads no files, and does not validate the new recipe.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from pipelinerl.errors import UserError
from pipelinerl.recipe.fields import PUBLISHED, Recipe, may_change, section_of

UNKNOWN = "(no such field in this version)"


@dataclass(frozen=True)
class Change:
    """One field that differs. `field` is dotted; `old` and `new` are JSON values, `new` also `UNKNOWN`."""

    field: str
    old: Any
    new: Any
    allowed: bool

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.old)} → {_shown(self.new)}"


class ChangedRecipe(UserError):
    """A run cannot go on with this recipe. Attribute: `refused`, the changes that forbid it."""

    def __init__(self, refused: Sequence[Change]) -> None:
        self.refused = tuple(refused)
        lines = ["a run that is resumed keeps its recipe; put these back, or start a new run:"]
        lines += [f"  - {change}" for change in refused]
        if any(change.new is UNKNOWN for change in refused):
            lines.append(
                "what this version does not know cannot be put back: resume with the version that began the run"
            )
        super().__init__("\n".join(lines))


def check_resumable(old: Mapping[str, Any], new: Recipe) -> list[Change]:
    """The changes from `old` (a resolved recipe as plain data) to `new`, all of them allowed.

    Raises `ChangedRecipe` with every one that is not.
    """
    changes = recipe_changes(old, new)
    if refused := [change for change in changes if not change.allowed]:
        raise ChangedRecipe(refused)
    return changes


def recipe_changes(old: Mapping[str, Any], new: Recipe) -> list[Change]:
    """Every field that differs, in the recipe's order.

    `old` may be of another version of the program: a field that it lacks had today's default, one that today's recipe
    lacks is reported as such. A section that one of the two has and the other has not (`null`) is one change.
    """
    algorithm = old.get("algorithm")
    if isinstance(algorithm, Mapping):  # a loss brings along what its authors published
        old = {**old, "algorithm": {**PUBLISHED.get(str(algorithm.get("loss")), {}), **algorithm}}
    return list(_differences(old, new.model_dump(mode="json"), Recipe))


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any], model: type[BaseModel], prefix: str = ""
) -> Iterator[Change]:
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        was = old[name] if field.is_required() else old.get(name, to_jsonable_python(default))
        section, now = section_of(field.annotation), new[name]
        if section is not None and isinstance(was, Mapping) and isinstance(now, Mapping):
            yield from _differences(was, now, section, f"{prefix}{name}.")
        elif was != now:
            yield Change(prefix + name, was, now, may_change(field))
    unknown = [name for name in old if name not in model.model_fields]
    yield from (Change(prefix + name, old[name], UNKNOWN, allowed=False) for name in unknown)


def recipe_hash(recipe: Recipe) -> str:
    """SHA-256, hex, of the resolved recipe as JSON without spaces, keys sorted."""
    text = json.dumps(recipe.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _shown(value: Any) -> str:
    text = UNKNOWN if value is UNKNOWN else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."
