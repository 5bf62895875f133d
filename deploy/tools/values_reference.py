"""The table of the chart's values in docs/chart-values.md, generated from values.schema.json so that it cannot drift from it.

    python -m deploy.tools.values_reference                       # print it
    python -m deploy.tools.values_reference docs/chart-values.md  # replace what stands between the file's two marks

Recipe fields are one row each here: docs/recipe-fields.md has their meaning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.tools.generated import GeneratedPart, row

SCHEMA = Path(__file__).resolve().parents[1] / "helm" / "values.schema.json"
_HEAD = "| value | type | default | meaning |\n|---|---|---|---|"
_OF_KUBERNETES = {
    "labels": "labels",
    "annotations": "annotations",
    "quantities": "quantities by name",
    "resources": "resources",
    "tolerations": "list of tolerations",
    "affinity": "affinity",
    "topologySpreadConstraints": "list of constraints",
    "env": "list of variables",
    "volumes": "list of volumes",
    "volumeMounts": "list of mounts",
    "numberOrShare": "integer or share",
    "cidrs": "list of CIDRs",
    "ports": "list of ports",
    "peers": "list of peers",
    "Recipe": "recipe",
}


def reference(schema: dict[str, Any]) -> str:
    """Markdown: one table for each top-level section, and one for the values that are in none."""
    parts: list[str] = []
    alone: list[str] = []
    for name, part in schema["properties"].items():
        rows = [_row(path, value) for path, value in _values(name, part)]
        if "properties" in part:
            parts.append("\n\n".join((f"## `{name}`", part["description"], "\n".join([_HEAD, *rows]))))
        else:
            alone += rows
    return "\n\n".join([*parts, "\n\n".join(("## The others", "\n".join([_HEAD, *alone])))])


def read_schema() -> dict[str, Any]:
    return dict(json.loads(SCHEMA.read_text(encoding="utf-8")))


def _values(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(dotted path, schema) of what is set as a whole."""
    if "properties" not in schema or "default" in schema:
        yield path, schema
        return
    for name, part in schema["properties"].items():
        yield from _values(f"{path}.{name}", part)


def _row(path: str, schema: dict[str, Any]) -> str:
    default = f"`{json.dumps(schema['default'], ensure_ascii=False)}`"
    cells = (f"`{path}`", _type(schema), default, schema["description"])
    return row(cells)


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return _OF_KUBERNETES[schema["$ref"].rpartition("/")[2]]
    if "enum" in schema:
        return ", ".join(f"`{'null' if choice is None else choice}`" for choice in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"])
    kind = schema["type"] if isinstance(schema["type"], str) else schema["type"][0]
    return {"boolean": "true / false", "string": "text", "object": "mapping", "array": "list"}.get(kind, kind)


PART = GeneratedPart("values", "python -m deploy.tools.values_reference docs/chart-values.md", lambda: reference(read_schema()))

if __name__ == "__main__":
    PART.main()
