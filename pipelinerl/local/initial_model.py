"""The folder of the initial policy: the user's, or one built once and kept in a cache for the next run.

The building itself is `python -m services.trainer.warmstart`, a process of its own: it needs torch, this does not.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from pipelinerl.config.recipe import Recipe
from pipelinerl.local.process import Launch, ServiceProcess, log_tail
from pipelinerl.local.services import ServiceLaunches
from pipelinerl.local.threads import available_cores
from pipelinerl.local.watch import background

_FORMAT = 1
"""Part of the key: raised when the same configuration would build other weights."""
_THREADS = 2
"""Of the builder: more do not help models this small, and with as many threads everywhere the weights are the same."""
_POLL_S = 0.2
PROGRESS = "initial model: "
"""How the builder begins a line that a person should see as it goes. Its errors are told once, at its end."""

RunProcess = Callable[[str, Launch], AbstractAsyncContextManager[ServiceProcess]]
"""Starts a process of the given kind and stops it at the block's end."""


def cache_folder(environment: Mapping[str, str]) -> Path:
    """`PIPELINERL_CACHE`, else pipelinerl/ in the user's cache folder."""
    given = environment.get("PIPELINERL_CACHE")
    return Path(given) if given else Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipelinerl"


def build_config(recipe: Recipe) -> dict[str, Any]:
    """All that the built weights depend on, as the builder reads it. Pure."""
    return {"model": recipe.model.model_dump(mode="json"), "task": recipe.task.model_dump(mode="json")}


def cache_key(config: Mapping[str, Any]) -> str:
    """Names the folder of what `config` builds: equal configurations, equal keys. Pure."""
    text = json.dumps({"format": _FORMAT, **config}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


async def initial_model(
    recipe: Recipe, launches: ServiceLaunches, run_process: RunProcess, say: Callable[[str], None]
) -> str:
    """Folder of the initial policy; "" for a hub model, which the services fetch. Builds it where the recipe says so.

    `say` hears what is going on. Raises `ServiceDied` when the building fails.
    """
    if recipe.model.source == "hub":
        return ""
    if recipe.model.source == "path":
        return _absolute(recipe.model.name)
    config = build_config(recipe)
    folder = cache_folder(launches.environment) / "models" / f"{recipe.name}-{cache_key(config)}"
    if (folder / "config.json").is_file():
        say(f"initial model from the cache: {folder}")
    else:
        await _build(config, folder, launches, run_process, say)
    return str(folder)


def _absolute(path: str) -> str:
    return str(Path(path).resolve())


async def _build(
    config: Mapping[str, Any],
    folder: Path,
    launches: ServiceLaunches,
    run_process: RunProcess,
    say: Callable[[str], None],
) -> None:
    say("building the initial model (kept for the next run)")
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    beside.mkdir(parents=True)
    config_file = launches.run_dir.path.resolve() / "warmstart.json"
    config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    arguments = ("--config", str(config_file), "--out", str(beside))
    launch = launches.initial_model(arguments, min(_THREADS, available_cores()))
    try:
        async with run_process("warmstart", launch) as process, background(_repeat_log(launch.log, say)):
            code = await process.wait()
        if code != 0:
            raise process.died()
        _put_in_place(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _put_in_place(built: Path, folder: Path) -> None:
    """Renames, so that nobody ever sees half a model. A run beside this one may have been faster: then its folder stays."""
    try:
        built.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise


async def _repeat_log(log: Path, say: Callable[[str], None]) -> None:
    """Says the log's last line whenever there is a new one that tells of progress."""
    said = ""
    while True:
        await asyncio.sleep(_POLL_S)
        line = log_tail(log, lines=1).strip()
        if line.startswith(PROGRESS) and line != said:
            said = line
            say(line)
