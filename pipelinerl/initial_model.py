"""Find the initial policy of a run. With `model.source` smollm2 or checkpoint, it is a folder of the cache.

`services.trainer.initial_model` makes this folder, and `services.actor.initial_model` fetches it from the trainer. The folder
is renamed into place as a whole, so that no process sees half a model.
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
_FORMAT = 2
"""Part of a cache folder's name. Increase this number if a change of the code changes the weights of any `model.source`."""
_ABANDONED_S = 24 * 3600
"""Seconds without a change after which a partial folder is removed, because its process was probably killed."""


def is_built(model: ModelConfig) -> bool:
    """Return whether the trainer puts this model into its cache before the run and serves it to the actors."""
    return model.source in ("checkpoint", "smollm2")


def built_name(recipe: Recipe, run: str) -> str:
    """Return the name of a model's folder in a cache. Runs share only the folder of smollm2."""
    if recipe.model.source == "smollm2":
        return f"smollm2-{_FORMAT}"
    text = json.dumps({"format": _FORMAT, "model": recipe.model.name, "run": run}, sort_keys=True)
    return f"{recipe.name}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


def built_folder(recipe: Recipe, run: str, cache: Path | None) -> Path:
    """Return the cache folder of the model that this run builds or copies. Raises `FieldError` if `cache` is None."""
    if cache is None:
        what = f"the run builds or copies the model of model.source = {recipe.model.source!r}"
        raise FieldError("PIPELINERL_MODEL_CACHE", "", f"{what}; name a cache folder, or set PIPELINERL_MODEL_DIR")
    return cache / built_name(recipe, run)


COMPILED = "inductor"
"""Folder in the cache for code that torch compiles."""


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return this machine's cache folder: `PIPELINERL_CACHE`, or pipelinerl/ in the user's cache folder."""
    given = environment.get("PIPELINERL_CACHE")
    return Path(given) if given else Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipelinerl"


def why_unwritable(folder: Path) -> str:
    """Return why no file can be created in the folder, which need not exist yet; empty if one can."""
    # Unlike their namesakes in pathlib, functions of os.path raise no error for folders that this user cannot search.
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    if not there.is_dir():
        return f"{there} is not a folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to"


def is_complete(folder: Path) -> bool:
    return os.path.isfile(folder / COMPLETE)


def model_source(recipe: Recipe, settings: PolicySettings) -> str:
    """Return the folder or hub id of the initial policy. Raises `FieldError` if the cache lacks a model that the run builds."""
    if settings.model_dir or not is_built(recipe.model):
        return settings.model_dir or str(model_folder(recipe.model) or recipe.model.name)
    folder = built_folder(recipe, settings.run, settings.model_cache)
    if not is_complete(folder):
        makes = "a run of this recipe, or `python -m services.trainer.initial_model`, makes it for the trainer"
        fix = f"holds no complete {folder.name}; {makes}; `python -m services.actor.initial_model` fetches it for an actor"
        raise FieldError("PIPELINERL_MODEL_CACHE", str(settings.model_cache), fix)
    return str(folder)


@contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder`, and rename it to `folder` at the end of the block. If another process finished
    first, its folder stays. After an error, remove the new folder. At the start, remove leftovers older than a day."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}."
    for left in folder.parent.glob(f"{prefix}*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)
    beside = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        yield beside
        beside.chmod(0o755)  # services may run as a user other than the builder
        try:
            beside.rename(folder)
        except OSError:
            if not is_complete(folder):
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
