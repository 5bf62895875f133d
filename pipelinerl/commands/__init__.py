"""What `pipelinerl <command>` does, one module for each command. Importing them is light; executing may not be.

Here: the arguments of commands that take a recipe, and what a shell completes them to.
"""

from __future__ import annotations

import argparse
import glob
from typing import Any


def add_recipe_arguments(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """`recipe` and `overrides`."""
    recipe = parser.add_argument("recipe", metavar="RECIPE", nargs=nargs, help="recipe file, or the name of one under recipes/")
    override = parser.add_argument(
        "--set", dest="overrides", metavar="a.b=c", action="append", default=[],
        help="override one field of the recipe; the value is YAML (repeatable)",
    )  # fmt: skip
    recipe.completer, override.completer = _recipes, _fields  # type: ignore[attr-defined]


def _recipes(prefix: str, **_: Any) -> list[str]:
    from pipelinerl.recipe.loading import recipe_names

    return [*recipe_names(), *glob.glob(f"{prefix}*")]


def _fields(prefix: str, **_: Any) -> list[str]:
    from pipelinerl.recipe.fields import Recipe, dotted_paths

    return [f"{path}=" for path in dotted_paths(Recipe)]
