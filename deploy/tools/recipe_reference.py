"""The reference of recipe fields in docs/recipe-fields.md, generated from the models so that it cannot drift from them.

    python -m deploy.tools.recipe_reference                    # print it
    python -m deploy.tools.recipe_reference docs/recipe-fields.md    # replace what stands between the file's two marks

Reads models and one file; knows no recipe's values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deploy.tools.generated import GeneratedPart, row
from pipelinerl.recipe.fields import Recipe, listed_section, section_of, takes

_HEAD = "| field | takes | default | meaning |\n|---|---|---|---|"


def reference() -> str:
    """Markdown: one table for the recipe itself and one for each of its sections, in the order of the models."""
    return "\n\n".join(_section(path, model) for path, model in sections(Recipe))


def sections(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(dotted path, model) of a model and all sections below it, each model once; the recipe's own path is empty."""
    seen = set[type[BaseModel]]()

    def walk(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
        if model in seen:
            return
        seen.add(model)
        yield path, model
        for name, field in model.model_fields.items():
            section = section_of(field.annotation) or listed_section(field.annotation)
            if section is not None:
                yield from walk(section, f"{path}.{name}" if path else name)

    return walk(model, path)


def _section(path: str, model: type[BaseModel]) -> str:
    title = f"## `{path}`" if path else "## The recipe itself"
    note = " ".join((vars(model).get("__doc__") or "").split()) if path else ""
    rows = [_row(f"{path}.{name}" if path else name, field) for name, field in model.model_fields.items()]
    return "\n\n".join(part for part in (title, note, "\n".join([_HEAD, *rows])) if part)


def _row(path: str, field: FieldInfo) -> str:
    taken, meaning = takes(field), " ".join((field.description or "").split())
    if section := section_of(field.annotation) or listed_section(field.annotation):
        taken = "a section" if section_of(field.annotation) else "a list of sections"
        where = next(path for path, model in sections(Recipe) if model is section)
        meaning = f"{meaning} See [`{where}`](#{where.replace('.', '')}).".strip()
    cells = (f"`{path.rpartition('.')[2]}`", taken, _default(field), meaning)
    return row(cells)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return "its defaults"
    if value is None and takes(field).endswith("or auto"):
        return "`auto`"
    if isinstance(value, float) and value and abs(value) < 1e-3:
        return f"`{value:g}`"
    return f"`{json.dumps(value, ensure_ascii=False)}`"


PART = GeneratedPart("fields", "python -m deploy.tools.recipe_reference docs/recipe-fields.md", reference)

if __name__ == "__main__":
    PART.main()
