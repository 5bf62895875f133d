"""The initial policy of a run: where it is found, and under which name those that a run unpacks or copies are kept.

A folder of the cache counts as complete when it has `config.json`, and is put there whole by a rename: nobody sees half a
model. `services.trainer.initial_model` makes it, `services.actor.initial_model` fetches it from the trainer; nothing here needs
torch or the network.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import ModelConfig, Recipe
from pipelinerl.recipe.model_folder import model_folder
from pipelinerl.service.settings import PolicySettings

COMPLETE = "config.json"
CHUNK_BYTES = 1024**2
MOST_FILES, MOST_BYTES = 1024, 4 * 1024**4
"""Of a model that a trainer sends to an actor."""
_FORMAT = 2
"""Part of the key: raised when the same source would give other weights."""
_ABANDONED_S = 24 * 3600
"""A folder that somebody was filling and has not touched for so long belongs to a process that was killed."""


def is_built(model: ModelConfig) -> bool:
    """Whether the trainer puts this model into its cache before the run, and actors get it from there. Pure."""
    return model.source in ("checkpoint", "smollm2")


def built_name(recipe: Recipe, run: str) -> str:
    """Return the name of the model's folder in a cache. A checkpoint is copied once for each run, whatever its name stands for
    later; SmolLM2 is the same for all recipes. Pure."""
    if recipe.model.source == "smollm2":
        return f"smollm2-{_FORMAT}"
    text = json.dumps({"format": _FORMAT, "model": recipe.model.name, "run": run}, sort_keys=True)
    return f"{recipe.name}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


def built_folder(recipe: Recipe, run: str, cache: Path | None) -> Path:
    """Where the cache keeps what this run builds or copies, there or not. Raises `FieldError` when there is no cache."""
    if cache is None:
        what = f"model.source = {recipe.model.source!r} is built or copied by the run"
        raise FieldError("PIPELINERL_MODEL_CACHE", "", f"{what}: name a folder for it, or PIPELINERL_MODEL_DIR")
    return cache / built_name(recipe, run)


COMPILED = "inductor"
"""Folder of the cache for what torch compiles."""


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Of this machine: `PIPELINERL_CACHE`, else pipelinerl/ in the user's cache folder."""
    given = environment.get("PIPELINERL_CACHE")
    return Path(given) if given else Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipelinerl"


def why_unwritable(folder: Path) -> str:
    """Why no file can be made in the folder, which may have to be made itself; empty when one can. Changes nothing."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return f"{there} is not a folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to"


def is_complete(folder: Path) -> bool:
    return (folder / COMPLETE).is_file()


def model_source(recipe: Recipe, settings: PolicySettings) -> str:
    """What to load the initial policy from: a folder, or a hub id. Raises `FieldError` for a built model that is not there."""
    if settings.model_dir or not is_built(recipe.model):
        return settings.model_dir or str(model_folder(recipe.model) or recipe.model.name)
    folder = built_folder(recipe, settings.run, settings.model_cache)
    if not is_complete(folder):
        fix = (
            f"holds no complete {folder.name}; `python -m services.trainer.initial_model` makes it for the "
            "trainer, `python -m services.actor.initial_model` fetches it for an actor"
        )
        raise FieldError("PIPELINERL_MODEL_CACHE", str(settings.model_cache), fix)
    return str(folder)


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Yields an empty folder beside `folder`, which takes its place at the block's end.

    Where another process was faster, its folder stays. What an error leaves is removed, as is what killed ones left.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}."
    for left in folder.parent.glob(f"{prefix}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)
    beside = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        yield beside
        beside.chmod(0o755)  # services may run as another user than the builder
        try:
            beside.rename(folder)
        except OSError:
            if not is_complete(folder):
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
