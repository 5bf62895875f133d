"""The recipe's part of the chart's values.schema.json, generated from the models so that helm refuses a misspelt field.

    python -m deploy.tools.recipe_schema            # is it up to date? Exit code 1 if not
    python -m deploy.tools.recipe_schema --write    # bring it up to date

Every field is optional there: recipe.set holds some of them. What a whole recipe must hold, and rules between fields, the
services check.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pipelinerl.recipe.fields import Recipe

SCHEMA = Path(__file__).resolve().parents[1] / "helm" / "values.schema.json"
_LEFT_OUT = ("required", "title")
_REFERENCES = "#/$defs/"


def recipe_definitions() -> dict[str, Any]:
    """Definition by name: `Recipe` and each of its sections, as JSON schema draft 7."""
    schema = Recipe.model_json_schema()
    sections = schema.pop("$defs")
    return {name: _optional(section) for name, section in {"Recipe": schema, **dict(sorted(sections.items()))}.items()}


def with_recipe(schema: dict[str, Any]) -> dict[str, Any]:
    """The chart's schema with the recipe's definitions as they are now, after its own."""
    names = recipe_definitions()
    own = {name: part for name, part in schema["definitions"].items() if name not in names and name[:1].islower()}
    return schema | {"definitions": own | names}


def text(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _optional(section: Any) -> Any:
    """Without what a part of a recipe need not hold, and with references as draft 7 writes them."""
    if isinstance(section, list):
        return [_optional(part) for part in section]
    if not isinstance(section, dict):
        return section
    kept = {key: value for key, value in section.items() if key not in _LEFT_OUT or isinstance(value, dict)}
    if str(kept.get("$ref", "")).startswith(_REFERENCES):
        kept["$ref"] = "#/definitions/" + kept["$ref"].removeprefix(_REFERENCES)
    return {key: value if key == "default" else _optional(value) for key, value in kept.items()}


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
