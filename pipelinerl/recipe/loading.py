"""Load a recipe by name or file, apply `--set` overrides, and validate it. Other functions write a recipe as YAML, and compare
the stored recipe of a run with a new recipe that resumes the run."""

from __future__ import annotations

import contextlib
import copy
import glob
import json
import os
import re
import shlex
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, to_jsonable_python

import pipelinerl
from pipelinerl.errors import FieldError, UserError, counted
from pipelinerl.recipe.fields import MAY_CHANGE, PUBLISHED, Recipe, allowed, field_at, listed_section, section_of, unknown_field
from pipelinerl.recipe.rules import broken_rules
from pipelinerl.run_dir import check_folder


class RecipeError(UserError):
    """A recipe cannot be used. Attributes: `source` (file or name), `problems` (a `FieldError` for each problem)."""

    def __init__(self, source: str, problems: Iterable[FieldError]) -> None:
        self.source, self.problems = source, tuple(problems)
        title = f"{source}: {counted(len(self.problems), 'problem')}"
        super().__init__("\n".join([title, *(f"  - {problem}" for problem in self.problems)]))


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[FieldError]:
    """Return a `FieldError` for each failure of a validation of `model`."""
    return [_problem(details, model) for details in error.errors(include_url=False)]


def _problem(details: ErrorDetails, model: type[BaseModel]) -> FieldError:
    path = tuple(str(part) for part in details["loc"])
    dotted, value, kind = ".".join(path), details["input"], details["type"]
    field = field_at(model, path)
    if kind == "extra_forbidden":
        return FieldError(dotted, value, unknown_field(path, model))
    if kind == "missing":
        missing = FieldError(dotted, "(missing)", f"give {allowed(field)}" if field else details["msg"])
        missing.args = (f"{dotted} is missing: {missing.fix}",)
        return missing
    if kind == "value_error":
        return FieldError(dotted, value, str(details["ctx"]["error"]))
    return FieldError(dotted, value, f"use {allowed(field)}" if field else details["msg"])


class YamlError(UserError):
    """A text cannot be read as the YAML of a recipe. Attributes: `source`, `line` (counted from 1; 0 = unknown), `problem`."""

    def __init__(self, source: str, line: int, problem: str) -> None:
        self.source, self.line, self.problem = source, line, problem
        super().__init__(f"{source}:{line}: {problem}" if line else f"{source}: {problem}")


class _Loader(yaml.SafeLoader):
    """Safe loader that refuses a repeated key and, unlike PyYAML, reads `1e-6` as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        first_line: dict[str, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in first_line and key != "<<":
                problem = f"key {key!r} occurs twice (first on line {first_line[key]}): keep one of them"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            first_line[key] = line
        return super().construct_mapping(node, deep=deep)


_EXPONENTIAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENTIAL, list("-+0123456789."))


def parse_yaml(text: str, source: str) -> Any:
    """Parse one YAML document. Raises `YamlError` with `source`, the line and the problem."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "not YAML"
        raise YamlError(source, mark.line + 1 if mark else 0, problem) from error
    except yaml.reader.ReaderError as error:
        problem = f"contains a character that YAML does not allow: {error.reason} at position {error.position}"
        raise YamlError(source, 0, problem) from error
    except RecursionError as error:
        raise YamlError(source, 0, "is nested too deeply; use fewer levels of brackets or indentation") from error
    except ValueError as error:  # PyYAML makes a date of 2026-13-01, which fails.
        raise YamlError(source, 0, f"a value is invalid: {error}; put texts such as dates in quotes") from error


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Return the field's path and the value, read as YAML, of an override `a.b=value`. Fields of text and of lists of texts
    take an empty value, and an unquoted one with a YAML comment, literally. Raises `FieldError` if `=` or a name is missing, or
    for invalid YAML, which only a field of text takes literally."""
    path, equals, value = text.partition("=")
    names = tuple(name.strip() for name in path.split("."))
    if not equals or not all(names):
        raise FieldError("--set", text, "write it as section.field=value, for example trainer.steps=50")
    kind = field.annotation if (field := field_at(Recipe, names)) else None
    as_text = _as_taken(kind, value)
    as_yaml = ("'", '"', "[") if isinstance(as_text, list) else ("'", '"')
    # In a text, `#` is more likely a part of a pattern, such as #(\d+)$, than the start of a comment.
    if (not value.strip() or re.search(r"(^|\s)#", value)) and as_text is not None and not value.strip().startswith(as_yaml):
        return names, as_text
    try:
        parsed = parse_yaml(value, f"--set {path}")
    except YamlError as error:
        if isinstance(as_text, str):
            return names, value
        fix = "check its brackets, and put the whole argument into single quotes for the shell"
        raise FieldError("--set", text, f"the value is not valid YAML ({error.problem}); {fix}") from error
    if isinstance(parsed, str) and isinstance(as_text := _as_taken(kind, parsed), list):
        return names, as_text
    return names, parsed


def _as_taken(kind: Any, text: str) -> str | list[str] | None:
    """Return `text` if the type `kind` accepts it, else `[text]` ([] for an empty text); None if `kind` accepts neither."""
    for value in (text, [text] if text else []):
        with contextlib.suppress(ValidationError):
            TypeAdapter(kind).validate_python(value)
            return value
    return None


def understood(overrides: Sequence[str]) -> list[str]:
    """Return a line for each override, with the field and its value as JSON."""
    return [f"set: {'.'.join(path)} = {_shown(value)}" for path, value in map(parse_override, overrides)]


def find_recipe(name: str | Path) -> Path:
    """Return the recipe's file. `name` is its path, the path of a folder with a `recipe.yaml`, or the bare name of a recipe in
    `recipes/` of the current folder, of the source tree or of the installation. Raises `FieldError` if no file is found."""
    path, inside = Path(name), Path(name, "recipe.yaml")
    if found := next((file for file in (path, inside) if os.path.isfile(file)), known_recipes().get(str(name))):
        return found
    if os.path.isdir(path):
        raise FieldError("recipe", str(name), "is a folder without recipe.yaml; give a recipe file, or a recipe's name")
    known = ", ".join(sorted(known_recipes())) or "(none here)"
    raise FieldError("recipe", str(name), f"no such file; give a path or one of: {known}")


def known_recipes(*, shipped: bool = False) -> dict[str, Path]:
    """Return the files of recipes, keyed by the bare names that `find_recipe` takes. `shipped`: only recipes that come with
    this package, without `recipes/` of the current folder."""
    source_tree = Path(pipelinerl.__file__).resolve().parents[1]
    folders = (Path("recipes"), source_tree / "recipes", Path(sys.prefix, "share", "pipelinerl", "recipes"))
    return {found.stem: found for folder in reversed(folders[shipped:]) for found in sorted(folder.glob("*.yaml"))}


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe `name` (see `find_recipe`) with `overrides` of the form `a.b=value`. Raises `FieldError` if the file is
    missing or unreadable, `YamlError` if it is not YAML, and `RecipeError` for wrong fields."""
    path = find_recipe(name)
    return recipe_from_data(found_beside(read_recipe(path), path.parent), str(path), overrides)


def found_beside(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a recipe's data with its paths resolved; the recipe's file is in `folder`. Paths to problems, to a chat template
    and in an agent's command get `folder` as a prefix if they exist there, else they stay relative to the current folder."""

    def found(path: Any) -> Any:
        if not isinstance(path, str) or not path or is_template(path):
            return path
        beside = str(folder / path)
        return beside if os.path.exists(beside) or glob.glob(beside) else path

    def moved(section: Any) -> Any:
        if isinstance(section, list):
            return [moved(one) for one in section]
        if not isinstance(section, dict):
            return section
        changed = {key: moved(value) if key in _WITH_PATHS else value for key, value in section.items()}
        for key in ("path", "chat_template"):
            if key in section and not (key == "path" and section.get("source") == "hub"):
                changed[key] = found(section[key])
        if isinstance(command := section.get("command"), str):
            words = ((word, found(word)) for word in command.split(" "))
            changed["command"] = " ".join(word if path == word else shlex.quote(path) for word, path in words)
        return changed

    return moved(data)


_WITH_PATHS = ("task", "tasks", "evaluation", "sets", "model")
"""Sections of a recipe that hold paths, and sections that contain such a section."""


def modules_beside(recipe: Recipe, file: Path) -> Path | None:
    """Return the folder of a recipe's file if a module that the recipe names is there, such as reward.py for `reward:score`.
    Return None otherwise, and for the current folder, whose modules are found anyway. Raises `FieldError` if a module in the
    returned folder would hide a library."""
    beside = {path.stem: path for path in file.parent.glob("*.py")} | {
        path.parent.name: path.parent for path in file.parent.glob("*/__init__.py")
    }
    if file.parent.samefile(".") or beside.keys().isdisjoint(re.split("[.:]", path)[0] for path in recipe.user_code):
        return None
    libraries = [path for path in sys.path if path.endswith("-packages")]
    for name, path in sorted(beside.items()):
        if name in sys.stdlib_module_names or PathFinder.find_spec(name, libraries) is not None:
            raise FieldError("recipe", str(file), f"{path} would hide the library {name} from the verifier; rename or move it")
    return file.parent


def recipe_of_run(path: Path, option: str = "RUN") -> Recipe:
    """Return the recipe in the file `path`, which a run has written as recipe.yaml in its folder. Raises `FieldError` for
    `option` if the file is missing, and `UserError` if it is invalid, for example because another version wrote it."""
    check_folder(path.parent, option)
    if not path.is_file():
        raise FieldError(option, str(path.parent), f"has no {path.name}; give the folder of a run, such as runs/NAME")
    try:
        return recipe_from_data(read_recipe(path), str(path))
    except RecipeError as error:
        raise UserError(f"{error}\nif nobody has changed this file, use the version of pipelinerl that wrote it") from error


def read_recipe(path: Path) -> dict[str, Any]:
    """Return a recipe file's data, unvalidated. Raises `FieldError` if it is unreadable, `YamlError` if not a YAML mapping."""
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise YamlError(str(path), 0, f"not a UTF-8 text file (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise FieldError("recipe", str(path), f"cannot be read: {error.strerror}") from error
    if not isinstance(data, dict):
        raise YamlError(str(path), 1, "a recipe must be a mapping of sections (name:, model:, task:, ...)")
    return data


def recipe_from_data(data: dict[str, Any], source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Apply overrides to plain data and validate it. Raises `RecipeError` with all wrong overrides and fields. Rules between
    fields are checked only if every field is valid."""
    problems: list[FieldError] = []
    changed = copy.deepcopy(data)
    for text in overrides:
        try:
            path, value = parse_override(text)
            if field_at(Recipe, path) is None:
                raise FieldError(f"--set {'.'.join(path)}", value, unknown_field(path, Recipe))
            set_value(changed, path, value)
        except FieldError as error:
            problems.append(error)
    problems += _read_chat_template(changed)
    try:
        recipe = Recipe.model_validate(changed)
        problems += broken_rules(recipe)
    except ValidationError as error:
        problems += problems_of(error, Recipe)
    if problems:
        raise RecipeError(source, problems)
    return recipe


def _read_chat_template(data: dict[str, Any]) -> Iterator[FieldError]:
    """Replace a file's name in `model.chat_template` by the file's text, because other machines lack the file. Yield an error
    if it cannot be used."""
    model = data.get("model")
    path = model.get("chat_template") if isinstance(model, dict) else None
    try:
        if not isinstance(path, str) or is_template(path) or not Path(path).is_file():
            return
        text = Path(path).read_text(encoding="utf-8")
        data["model"] = {**data["model"], "chat_template": text}
        if not is_template(text):
            yield FieldError("model.chat_template", path, "contains no Jinja, such as {{ messages }}; give a chat template")
    except (OSError, ValueError) as error:
        yield FieldError("model.chat_template", path, f"cannot be read: {error}")


def is_template(text: str) -> bool:
    """Return whether a text is a chat template and not a file's name."""
    return "{{" in text or "{%" in text


def no_template_file(path: str) -> FieldError:
    fix = f"there is no such file{'' if Path(path).is_absolute() else f' in {Path.cwd()}'}; give a file with a chat template"
    return FieldError("model.chat_template", path, f"{fix}, or its text (helm --set-file recipe.set.model.chat_template=FILE)")


def set_value(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set a value in plain data, and create missing sections. Raises `FieldError` if a list has no such position."""
    section: Any = data
    for name, inner in zip(path, [*path[1:], None], strict=True):
        key: Any = name
        if isinstance(section, list):
            key = int(name) if name.isdecimal() else len(section)
            if key >= len(section):
                raise FieldError(f"--set {'.'.join(path)}", value, f"the list has {len(section)} items, counted from 0")
        elif inner is not None and not isinstance(section.get(name), dict | list):
            section[name] = {}
        if inner is None:
            section[key] = value
        else:
            section = section[key]


def recipe_yaml(recipe: Recipe) -> str:
    """Return the recipe as YAML, with the value of every field. Loading it gives an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


UNKNOWN = "(no such field in this version)"


@dataclass(frozen=True)
class Change:
    """A field that differs between two recipes. `field` is dotted; `old` and `new` are JSON values. `new` is `UNKNOWN` if
    this version of pipelinerl has no such field. `allowed`: whether the field may change when a run is resumed."""

    field: str
    old: Any
    new: Any
    allowed: bool

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.old)} → {_shown(self.new)}"


def check_resumable(old: Mapping[str, Any], new: Recipe) -> list[Change]:
    """Return the changes from `old`, a recipe as plain data, to `new`. Raises `UserError` if a change is not allowed."""
    changes = recipe_changes(old, new)
    if refused := [change for change in changes if not change.allowed]:
        lines = ["these fields cannot change when a run is resumed; put them back, or start a new run:"]
        lines += [f"  - {change}" for change in refused]
        if any(change.new is UNKNOWN for change in refused):
            lines.append("unknown fields cannot be put back: resume with the version that began the run")
        raise UserError("\n".join(lines))
    return changes


def recipe_changes(old: Mapping[str, Any], new: Recipe) -> list[Change]:
    """Return the fields that differ. `old` may be from another version of pipelinerl: a field that it lacks counts as this
    version's default, and a field that this version does not know has the new value `UNKNOWN`."""
    algorithm = old.get("algorithm")
    if isinstance(algorithm, Mapping):  # Some losses change the defaults of other fields.
        old = {**old, "algorithm": {**PUBLISHED.get(str(algorithm.get("loss")), {}), **algorithm}}
    return list(_differences(old, new.model_dump(mode="json"), Recipe))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], model: type[BaseModel], prefix: str = "") -> Iterator[Change]:
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        was = old.get(name, None if field.is_required() else to_jsonable_python(default))
        section, now = section_of(field.annotation), new[name]
        if section is not None and isinstance(was, Mapping) and isinstance(now, Mapping):
            yield from _differences(was, now, section, f"{prefix}{name}.")
        elif (item := listed_section(field.annotation)) and isinstance(was, list) and len(was) == len(now):
            for position, (one, other) in enumerate(zip(was, now, strict=True)):
                yield from _differences(one, other, item, f"{prefix}{name}.{position}.")
        elif was != now:
            yield Change(prefix + name, was, now, MAY_CHANGE in field.metadata)
    unknown = [name for name in old if name not in model.model_fields]
    yield from (Change(prefix + name, old[name], UNKNOWN, allowed=False) for name in unknown)


def _shown(value: Any) -> str:
    text = UNKNOWN if value is UNKNOWN else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."
