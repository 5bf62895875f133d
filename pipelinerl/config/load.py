"""From a recipe's name or file, and `--set` overrides, to a validated `Recipe`; and back to YAML.

Reads files and nothing else: whether the model, the data or a package is there is `preflight.py`'s question.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

import pipelinerl
from pipelinerl.config.overrides import Override, apply_overrides, check_override, parse_override
from pipelinerl.config.recipe import Recipe
from pipelinerl.config.recipe_errors import RecipeError, problems_of
from pipelinerl.config.yaml_text import YamlError, parse_yaml
from pipelinerl.errors import FieldError

_SUFFIXES = (".yaml", ".yml")


def recipe_folders() -> tuple[Path, ...]:
    """Where a recipe's bare name is looked up: here, in the source tree, in an installation."""
    source_tree = Path(pipelinerl.__file__).resolve().parents[1]
    return Path("recipes"), source_tree / "recipes", Path(sys.prefix, "share", "pipelinerl", "recipes")


def find_recipe(name: str | Path, folders: Iterable[Path] | None = None) -> Path:
    """The file of `recipes/arithmetic.yaml` or of the bare name `arithmetic`.

    Raises `FieldError` naming what was asked for and the recipes there are.
    """
    path = Path(name)
    if path.is_file():
        return path
    searched = tuple(folders) if folders is not None else recipe_folders()
    if path.suffix not in _SUFFIXES and len(path.parts) == 1:
        for folder in searched:
            if (folder / f"{name}.yaml").is_file():
                return folder / f"{name}.yaml"
    if path.is_dir():
        raise FieldError("recipe", str(name), "is a folder; give a recipe file in it, or a recipe's name")
    known = sorted({found.stem for folder in searched for found in folder.glob("*.yaml")})
    raise FieldError("recipe", str(name), f"no such file; give a path or one of: {', '.join(known) or '(none here)'}")


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The validated recipe of a file or name with `a.b=value` overrides applied.

    Raises `FieldError` (no such recipe), `YamlError` (with the line) and `RecipeError` (every wrong field).
    """
    path = find_recipe(name)
    return recipe_from_data(read_recipe(path), str(path), overrides)


def read_recipe(path: Path) -> dict[str, Any]:
    """The file's data, not validated. Raises `YamlError`."""
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise YamlError(str(path), 0, f"not a UTF-8 text file (byte {error.start})") from error
    except OSError as error:
        raise FieldError("recipe", str(path), f"cannot be read: {error.strerror}") from error
    if not isinstance(data, dict):
        raise YamlError(str(path), 1, "a recipe is a mapping of sections (name:, model:, task:, ...)")
    return data


def recipe_from_data(data: dict[str, Any], source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Validates plain data.

    Raises `RecipeError` with one problem for each wrong override and each wrong field, or, where every field is right by
    itself, for each rule between fields that is broken.
    """
    parsed, problems = _parse_overrides(overrides)
    try:
        recipe = Recipe.model_validate(apply_overrides(data, parsed))
    except ValidationError as error:
        raise RecipeError(source, [*problems, *problems_of(error, Recipe)]) from error
    if problems:
        raise RecipeError(source, problems)
    return recipe


def _parse_overrides(texts: Sequence[str]) -> tuple[list[Override], list[FieldError]]:
    overrides: list[Override] = []
    problems: list[FieldError] = []
    for text in texts:
        try:
            override = parse_override(text)
        except FieldError as error:
            problems.append(error)
            continue
        problem = check_override(override, Recipe)
        problems.append(problem) if problem else overrides.append(override)
    return overrides, problems


def recipe_yaml(recipe: Recipe) -> str:
    """The resolved recipe, every field written out, in the models' order; reads back to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
