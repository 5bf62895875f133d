"""The generated parts of the chart's values.schema.json: the recipe's fields, and the names of values that must not be null.

    python -m deploy.tools.recipe_schema            # is it up to date? Exit code 1 if not
    python -m deploy.tools.recipe_schema --write    # bring it up to date

Helm stores the schema in the Secret of each release, so it has only what Helm checks, and each definition once. Defaults and
meanings of values stand in values.yaml. Every recipe field is optional, because recipe.set holds some of them. The services
check what a whole recipe must hold, and rules between fields.

A null in the user's values removes the default before Helm checks the schema. So the definition `notNull` requires each value
for which neither null nor an empty value is meant. Helm then refuses the null by name, and templates take any other null as
empty.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import jsonschema

from pipelinerl.recipe.fields import Recipe

SCHEMA = Path(__file__).resolve().parents[1] / "helm" / "values.schema.json"
_WIDTH = 128
SECTIONS = {"image", "serviceAccount", "podDisruptionBudget"}
"""Definitions whose parts are values. A value of another definition is set as a whole."""
_LEFT_OUT = ("description", "default")
_REFERENCES = "#/$defs/"


def recipe_definitions() -> dict[str, Any]:
    """Definition by name: `Recipe` and each of its sections, as JSON schema draft 7."""
    schema = Recipe.model_json_schema()
    sections = schema.pop("$defs")
    named = {"Recipe": schema, **dict(sorted(sections.items()))}
    return {name: _without(section, (*_LEFT_OUT, "required", "title")) for name, section in named.items()}


def with_recipe(schema: dict[str, Any]) -> dict[str, Any]:
    """The chart's schema with the recipe's definitions as they are now, after its own."""
    names = recipe_definitions()
    own = {name: part for name, part in schema["definitions"].items() if name not in names and name[:1].islower()}
    own.pop("notNull", None)
    kept: dict[str, Any] = _without(schema | {"definitions": own}, _LEFT_OUT)
    kept["definitions"] |= names
    for name in SECTIONS:
        kept["definitions"][name] |= _not_null(kept["definitions"][name], kept["definitions"])
    kept["definitions"]["notNull"] = _not_null(kept, kept["definitions"])
    return kept | {"allOf": [{"$ref": "#/definitions/notNull"}]}


def _not_null(section: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that requires the values that must not be null in a section, and in the sections within."""
    required, within = [], {}
    for name, part in section["properties"].items():
        validator = jsonschema.Draft7Validator(part | {"definitions": definitions})
        if "properties" in part and (inner := _not_null(part, definitions)):
            within[name] = inner
        is_section = "properties" in part or part.get("$ref", "").rpartition("/")[2] in SECTIONS
        if not any(map(validator.is_valid, (None,) if is_section else (None, "", [], {}))):
            required.append(name)
    return ({"required": required} if required else {}) | ({"properties": within} if within else {})


def text(value: Any, indent: int = 0, used: int = 0) -> str:
    """JSON in which a part that fits takes one line, and names fill lines. `used`: width of what precedes it in its line."""
    line = json.dumps(value, ensure_ascii=False)
    if (indent and used + len(line) < _WIDTH) or not isinstance(value, dict | list) or not value:
        return line
    if value.keys() <= {"required", "properties"} if isinstance(value, dict) else all(isinstance(part, str) for part in value):
        return textwrap.fill(line, _WIDTH, initial_indent=" " * used, subsequent_indent=" " * (indent + 1))[used:]
    names = [f"{json.dumps(name)}: " if isinstance(value, dict) else "" for name in value]
    parts = value.values() if isinstance(value, dict) else value
    lines = [
        f"{' ' * (indent + 1)}{name}{text(part, indent + 1, indent + 1 + len(name))}"
        for name, part in zip(names, parts, strict=True)
    ]
    inner = ",\n".join(lines)
    return f"{line[0]}\n{inner}\n{' ' * indent}{line[-1]}" + ("" if indent else "\n")


def _without(section: Any, keywords: tuple[str, ...], *, of_names: bool = False) -> Any:
    """Without these keywords, and with references as draft 7 writes them. `of_names`: its keys are names, not keywords."""
    if isinstance(section, list):
        return [_without(part, keywords) for part in section]
    if not isinstance(section, dict):
        return section.replace(_REFERENCES, "#/definitions/") if isinstance(section, str) else section
    return {
        key: _without(value, keywords, of_names=not of_names and key in ("properties", "definitions"))
        for key, value in section.items()
        if of_names or key not in keywords
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="The recipe's part of the chart's values.schema.json.")
    parser.add_argument("--write", action="store_true", help="bring the file up to date")
    write = parser.parse_args().write
    now = SCHEMA.read_text(encoding="utf-8")
    wanted = text(with_recipe(json.loads(now)))
    if write:
        SCHEMA.write_text(wanted, encoding="utf-8")
    elif now != wanted:
        print(f"{SCHEMA} is not what the recipe's models say: python -m deploy.tools.recipe_schema --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
