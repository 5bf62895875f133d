"""The table of the chart's values in docs/chart-values.md, generated so that it cannot drift from the chart.

    python -m deploy.tools.values_reference                       # print it
    python -m deploy.tools.values_reference docs/chart-values.md  # replace what stands between the file's two marks

Types come from values.schema.json. Defaults and meanings come from values.yaml, where a comment stands above its value or
behind it. A value without a comment has that of the actor's value of this name, or else that of its section. Recipe fields are
one row each here: docs/recipe-fields.md has their meaning.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from deploy.tools.generated import GeneratedPart, row
from deploy.tools.recipe_schema import SECTIONS

CHART = Path(__file__).resolve().parents[1] / "helm"
_HEAD = "| value | type | default | meaning |\n|---|---|---|---|"
_SEVERAL = "several"
_TITLES = {_SEVERAL: "Several services", "": "The others"}
"""Titles of the last two sections, which are not named after a value."""
_OF_KUBERNETES = {
    "name": "text",
    "size": "text",
    "key": "text",
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
    "containers": "list of containers",
    "resourceClaims": "list of claims",
    "numberOrShare": "integer or share",
    "cidrs": "list of CIDRs",
    "ports": "list of ports",
    "peers": "list of peers",
    "issuerRef": "mapping",
    "Recipe": "recipe",
}


def reference() -> str:
    """Markdown: one table for each top-level section, one for the values that are in none, and one for those that services
    share. Values with the same type, default and meaning have one row."""
    meanings = comments((CHART / "values.yaml").read_text(encoding="utf-8"))
    paths: dict[tuple[str, str, str], list[str]] = {}
    for path, schema in values(read_schema()).items():
        default = f"`{json.dumps(default_of(path), ensure_ascii=False)}`"
        paths.setdefault((_type(schema), default, meaning(path, meanings)), []).append(path)
    rows: dict[str, list[str]] = {}
    for facts, alike in paths.items():
        sections = {path.partition(".")[0] if "." in path else "" for path in alike}
        section = sections.pop() if len(sections) == 1 else _SEVERAL
        rows.setdefault(section, []).append(row((", ".join(f"`{path}`" for path in alike), *facts)))
    rows |= {section: rows.pop(section) for section in _TITLES}
    parts = [
        (f"## {_TITLES.get(section, f'`{section}`')}", meanings.get(section, ""), "\n".join([_HEAD, *table]))
        for section, table in rows.items()
    ]
    return "\n\n".join(paragraph for part in parts for paragraph in part if paragraph)


def read_schema() -> dict[str, Any]:
    return dict(json.loads((CHART / "values.schema.json").read_text(encoding="utf-8")))


@functools.cache
def _defaults() -> dict[str, Any]:
    return dict(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")))


def default_of(path: str) -> Any:
    """Raises `KeyError` if values.yaml lacks the value."""
    return functools.reduce(lambda found, name: found[name], path.split("."), _defaults())


def values(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Schemas by dotted path, of what is set as a whole."""

    def within(path: str, part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        named = part.get("$ref", "").rpartition("/")[2]
        section = schema["definitions"][named] if named in SECTIONS else part
        if section.get("type") != "object" or "properties" not in section:
            yield path, part
            return
        for name, inner in section["properties"].items():
            yield from within(f"{path}.{name}" if path else name, inner)

    return dict(within("", schema))


def meaning(path: str, meanings: dict[str, str]) -> str:
    """Raises `KeyError` if neither the value, nor that of the actor, nor a section above it has a comment."""
    sections = [path.rsplit(".", count)[0] for count in range(1, path.count("."))]
    places = [path, f"actor.{path.partition('.')[2]}", *sections]
    return next((meanings[place] for place in places if place in meanings), "") or meanings[path]


def comments(text: str) -> dict[str, str]:
    """Comments of a YAML text by dotted path: those directly above a key, or behind a value that ends in the key's line."""
    lines, found = text.splitlines(), dict[str, str]()

    def walk(node: yaml.MappingNode, path: str) -> None:
        for key, value in node.value:
            at = path if key.value == "<<" else f"{path}.{key.value}".lstrip(".")
            first = last = key.start_mark.line
            while first and lines[first - 1].lstrip().startswith("#"):
                first -= 1
            above = " ".join(line.strip().removeprefix("# ") for line in lines[first:last])
            behind = lines[last][value.end_mark.column :] if value.end_mark.line == last else ""
            comment = above or behind.strip().removeprefix("# ")
            if comment and key.value != "<<":
                found[at] = comment
            if isinstance(value, yaml.MappingNode) and not value.flow_style:
                walk(value, at)

    walk(yaml.compose(text), "")
    return found


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return _OF_KUBERNETES[schema["$ref"].rpartition("/")[2]]
    if "enum" in schema:
        return ", ".join(f"`{'null' if choice is None else choice}`" for choice in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"])
    kind = schema["type"] if isinstance(schema["type"], str) else schema["type"][0]
    return {"boolean": "true / false", "string": "text", "object": "mapping", "array": "list"}.get(kind, kind)


PART = GeneratedPart("values", "python -m deploy.tools.values_reference docs/chart-values.md", reference)

if __name__ == "__main__":
    PART.main()
