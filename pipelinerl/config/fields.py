"""What fields a recipe has and what each one allows, read off the pydantic models: for errors, overrides and docs.

Pure. Validates nothing itself.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The model behind `Model` or `Model | None`; None when a field is not a section."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def field_at(model: type[BaseModel], path: tuple[str, ...]) -> FieldInfo | None:
    """The field of a dotted path, or None when there is none. Inside a free-form mapping every path is that mapping."""
    field = model.model_fields.get(path[0]) if path else None
    if field is None or len(path) == 1:
        return field
    section = section_of(field.annotation)
    if section is not None:
        return field_at(section, path[1:])
    return field if get_origin(field.annotation) is dict else None


def dotted_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every field of a model as a dotted path, sections included."""
    for name, field in model.model_fields.items():
        yield prefix + name
        section = section_of(field.annotation)
        if section is not None:
            yield from dotted_paths(section, f"{prefix}{name}.")


def near_matches(model: type[BaseModel], path: str, limit: int = 3) -> list[str]:
    """Existing paths that `path` may have meant: the same name elsewhere, then alike names in its section and beyond."""
    known = list(dotted_paths(model))
    section, _, name = path.rpartition(".")
    same_name = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    same_name.sort(key=lambda candidate: -difflib.SequenceMatcher(None, candidate, path).ratio())
    beside = {candidate.rpartition(".")[2]: candidate for candidate in known if candidate.rpartition(".")[0] == section}
    alike = [beside[found] for found in difflib.get_close_matches(name, beside, n=limit, cutoff=0.6)]
    return list(dict.fromkeys([*same_name, *alike, *difflib.get_close_matches(path, known, n=1, cutoff=0.85)]))[:limit]


def unknown_field(path: tuple[str, ...], model: type[BaseModel]) -> str:
    """What to say of a path that the model does not have: what was meant, or else what there is."""
    near = near_matches(model, ".".join(path))
    if near:
        return f"no such field; did you mean {' or '.join(near)}?"
    parent = field_at(model, path[:-1])
    section = section_of(parent.annotation) if parent else model
    if section is None:
        return f"no such field; {'.'.join(path[:-1])} holds one value"
    return f"no such field; allowed here: {', '.join(section.model_fields)}"


def allowed(field: FieldInfo) -> str:
    """What a field takes, for a person: `an integer from 1 to 1024 (n: samples per prompt)`."""
    text = f"{_allowed_type(field.annotation)}{_bounds(field)}"
    meaning = (field.description or "").rstrip(". ")
    return f"{text} ({meaning})" if meaning else text


def _allowed_type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_allowed_type(part) for part in get_args(annotation))
    if annotation is type(None):
        return "null"
    section = section_of(annotation)
    if section is not None:
        return "a section with " + ", ".join(section.model_fields)
    if get_origin(annotation) in (list, tuple):
        items = get_args(annotation)[:1]
        return "a list of " + ", ".join(get_args(items[0])) if items and get_origin(items[0]) is Literal else "a list"
    return _TYPE_NAMES.get(annotation, "a mapping" if get_origin(annotation) is dict else "a value")


def _bounds(field: FieldInfo) -> str:
    low = high = ""
    for constraint in field.metadata:
        match constraint:
            case annotated_types.Ge(ge=bound):
                low = f"at least {bound}"
            case annotated_types.Gt(gt=bound):
                low = f"above {bound}"
            case annotated_types.Le(le=bound):
                high = f"at most {bound}"
            case annotated_types.Lt(lt=bound):
                high = f"below {bound}"
    return (f", {low}" if low else "") + (f" and {high}" if low and high else f", {high}" if high else "")
