"""The commands behind `pipelinerl <command>`, one module each. Importing them is light; executing one may not be.

This module defines a command, the arguments of commands that take a recipe, and their shell completion.
"""

from __future__ import annotations

import argparse
import glob
from collections.abc import Callable
from typing import Any, NamedTuple


class Command(NamedTuple):
    """`execute` returns the exit code, and raises `UserError` for a mistake in the arguments."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    execute: Callable[[argparse.Namespace], int]


def add_recipe_arguments(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """Add `recipe` and `overrides`."""
    recipe = parser.add_argument("recipe", metavar="RECIPE", nargs=nargs, help="recipe file, or the name of one under recipes/")
    override = parser.add_argument(
        "--set", dest="overrides", metavar="a.b=c", action="append", default=[],
        help="override one field of the recipe; the value is YAML (repeatable)",
    )  # fmt: skip
    recipe.completer, override.completer = _recipes, _fields  # type: ignore[attr-defined]


def _recipes(prefix: str, **_: Any) -> list[str]:
    from pipelinerl.recipe.loading import recipe_names

    return [*recipe_names(), *glob.glob(f"{prefix}*")]


def _fields(prefix: str, **_rest: Any) -> list[str]:
    from pipelinerl.recipe.fields import Recipe, choices, dotted_paths, field_at

    path, equals, _ = prefix.partition("=")
    if equals and (field := field_at(Recipe, tuple(path.split(".")))):
        return [f"{path}={choice}" for choice in choices(field.annotation)]
    return [f"{path}=" for path in dotted_paths(Recipe)]
