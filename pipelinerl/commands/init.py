"""`pipelinerl recipes` and `init`: list the recipes that come with pipelinerl, with the memory and the time that each
needs, and write the folder of a new task from a template.

Nothing is downloaded: the size of a hub model is estimated from its name. The templates are folders of this package.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import textwrap
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

import pipelinerl
from pipelinerl.commands.validate import model_of
from pipelinerl.errors import FieldError, UserError, one_of
from pipelinerl.recipe.fields import Recipe, TaskConfig
from pipelinerl.recipe.loading import known_recipes, load_recipe
from pipelinerl.rl.memory import GIB, engine_bytes, state_bytes
from pipelinerl.tasks.rows import ABSENT, BadRow, Values, known_format, rows_of, value_in
from pipelinerl.tasks.source import FileSource, field_names

_MINUTES = {"arithmetic": 2, "repeated-addition": 1, "calculator": 5, "guess": 7, "code": 5, "smollm2": 15}
"""Minutes that a whole run takes on two CPU cores, by recipe. The other recipes have not been run to their end."""
_PROCESSES_GIB = 3.0
"""Memory of the processes of a run on CPUs, in addition to the training state, the engine's weights and its KV cache."""
_EPISODE_GIB = 0.011
"""Memory of the two processes that run an episode."""


def recipes(args: argparse.Namespace) -> int:
    """Print the shipped recipes as text or, with `--json`, as one JSON array."""
    rows = [needs(load_recipe(path)) for path in known_recipes(shipped=True).values()]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in sorted(rows, key=lambda row: (row["device"] != "cpu", row["minutes"] or 0)):
        lasts = f"about {row['minutes']} min" if row["minutes"] else "duration not measured"
        memory = f"{row['memory_gib']:.0f} GiB of memory, 2 cores" if row["device"] == "cpu" else (
            f"{row['trainer_gib']:.0f} GiB for weights, gradients and optimizer, {row['actor_gib']:.0f} for an actor's weights"
        )  # fmt: skip
        print(f"{row['name']}\n{textwrap.indent(textwrap.fill(row['description'], 110), '    ')}")
        size = f"{row['parameters'] / 1e9:.1f}B" if row["parameters"] >= 1e9 else f"{row['parameters'] / 1e6:.1f}M"
        print(f"    {row['device'].upper()}: {memory}; {lasts}; model {row['model']} ({size}, {row['dtype']})")
    print("\npipelinerl run NAME starts one; pipelinerl validate NAME shows its settings")
    return 0


def needs(recipe: Recipe) -> dict[str, Any]:
    """Return what a recipe needs: `device` (cpu or gpu), model, `parameters`, `dtype`, memory in GiB, and minutes on two CPU
    cores (None = not measured). For a GPU, the memory excludes activations and the KV cache. Only local files are read."""
    model = model_of(recipe, None)
    on_cpu = recipe.model.dtype == "float32"
    trainer, actor = state_bytes(recipe, model) / GIB, engine_bytes(recipe, model) / GIB
    memory = trainer + (actor + recipe.actor.engine.kv_cache_gib) * recipe.actor.number + _PROCESSES_GIB
    memory += _EPISODE_GIB * recipe.actor.number * (recipe.samples_in_progress if recipe.episodic_tasks else 0)
    return {
        "name": recipe.name,
        "description": recipe.description,
        "device": "cpu" if on_cpu else "gpu",
        "model": recipe.model.name or recipe.model.source,
        "parameters": int(model.parameters),
        "dtype": recipe.model.dtype,
        "trainer_gib": round(trainer, 1),
        "actor_gib": round(actor, 1),
        "memory_gib": round(memory, 1) if on_cpu else None,
        "minutes": _MINUTES.get(recipe.name) if on_cpu else None,
    }


TEMPLATES = Path(pipelinerl.__file__).parent / "templates"
_NAME = "my-task"
"""Placeholder in templates for the names of recipe and folder. If the folder's name is unusable, the recipe keeps this name."""
_QUESTIONS = ("question", "prompt", "problem", "query", "instruction", "input", "messages")
_ANSWERS = (
    "answer", "final_answer", "expected_answer", "ground_truth", "reward_model.ground_truth", "reference", "solution", "output",
    "response", "target", "label",
)  # fmt: skip
_MOST_HELDOUT = 64
_FINAL = (r"####\s*(.+)", r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
"""Patterns of the final answer in a worked solution, as in GSM8K and in MATH. In a box, braces may be nested twice."""


def init(args: argparse.Namespace) -> int:
    """Write the folder of a new task, and print how to go on. If the folder is not empty or the data cannot be used, raise
    `UserError` before anything is written."""
    folder: Path = args.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FieldError("DIR", str(folder), "is not an empty folder; name a new one")
    if os.pathsep in (path := str(folder.resolve())):
        raise FieldError("DIR", path, f"Python cannot import a reward from a path with {os.pathsep!r}; choose one without it")
    for option, value in (("--question", args.question), ("--answer", args.answer)):
        if value and args.data is None:
            raise FieldError(option, value, "applies only to --data FILE; give that, too, or leave this out")
    words = data_words(args.data, args.question, args.answer) if args.data is not None else {}
    template = TEMPLATES / ("data" if words else args.template or "sums")
    name = re.sub("[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")[:40].strip("-") or _NAME
    changes = {"README.md": {_NAME: shlex.quote(str(folder))}, "recipe.yaml": {f"name: {_NAME}": f"name: {name}", **words}}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(path for path in template.iterdir() if path.is_file()):
            text, changed = file.read_text(encoding="utf-8"), changes.get(file.name, {})
            parts = re.split(f"({'|'.join(changed)})", text)  # in one pass, because a column may be called ANSWER
            (folder / file.name).write_text("".join(changed.get(part, part) for part in parts), encoding="utf-8")
        if words:
            shutil.copy(args.data, folder)
    except OSError as error:
        raise FieldError("DIR", str(folder), f"cannot be written: {error.strerror}; name another folder") from error
    names = ", ".join(sorted(path.name for path in folder.iterdir()))
    print(f"{folder}: {names}\n\n{(folder / 'README.md').read_text()}", end="")
    return 0


def data_words(data: Path, question: str | None, answer: str | None) -> dict[str, str]:
    """Return the texts that replace placeholders in the template folder "data", for the user's file `data`. Columns that are
    not given are recognised by common names. Raises `FieldError`, or `UserError` for a file that a run could not use."""
    if not data.is_file():
        raise FieldError("--data", str(data), f"there is no file at {data.absolute()}; name an existing one")
    if not known_format(data):
        raise FieldError("--data", str(data), "give a file of questions and answers: CSV, TSV, JSONL, JSON or Parquet")
    template, task = "", TaskConfig(source="jsonl", path=str(data), prompt_style="chat", heldout_problems=1)
    for first in islice(rows_of(task), 1):
        if isinstance(first.values, BadRow):
            raise UserError(f"{first.file}, {first.place}: {first.values}")
        asked = _column("--question", question, first.values, _QUESTIONS)
        wanted = _column("--answer", answer, first.values, _ANSWERS)
        if asked == wanted:
            raise FieldError("--answer", wanted, "is the column of the questions; name another one")
        inputs = [name for name in field_names(first.values) if name.lower() == "input" and name != wanted]
        template = f"{{{asked}}}\n{{{inputs[0]}}}" if inputs and asked.lower() == "instruction" and not question else ""
        task = task.model_copy(update={"prompt_field": asked, "answer_field": wanted, "prompt_template": template})
    try:
        problems = FileSource(task, seed=0).problems  # from the rows that a run can use
    except FieldError as error:
        raise FieldError("--data", str(data), f"{error.fix} (at least 2 problems are needed: 1 is held out)") from error
    answers = [str(one.reference.get("answer", "")) for one in problems]
    # If all answers are worked solutions, the recipe extracts final answers.
    pattern = next((one for one in _FINAL if all(re.search(one, text) for text in answers)), "")
    words = {"DATA": data.name, "QUESTION": task.prompt_field, "ANSWER": task.answer_field}
    as_yaml = {word: yaml.safe_dump(text, default_style='"', width=math.inf).strip() for word, text in words.items()}
    as_yaml["QUESTION"] += f"\n  prompt_template: {json.dumps(template)}" * bool(template)
    as_yaml["ANSWER"] += f"\n  answer_pattern: '{pattern}'" * bool(pattern)
    as_yaml["heldout_problems: 1 "] = f"heldout_problems: {max(1, min(_MOST_HELDOUT, len(problems) // 5))} "
    return as_yaml


def _column(option: str, given: str | None, row: Values, usual: tuple[str, ...]) -> str:
    columns = list(field_names(row))
    known = {column.strip().lower(): column for column in columns}
    if given is not None and value_in(row, given) is ABSENT:
        raise FieldError(option, given, f"is no column of the file; use {one_of(columns)}")
    if found := given or next((known[name] for name in usual if name in known), None):
        return found
    where = "; the first line of a CSV file names the columns"
    raise UserError(f"{option} is missing: no column is called {one_of(usual)}; give {one_of(columns)}{where}")
