"""The folder of the initial policy: the user's, or one built once and kept in a cache for the next run.

The building itself is `python -m services.trainer.warmstart`, a process of its own: it needs torch, this does not.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from pipelinerl.config.recipe import Recipe
from pipelinerl.initial_model import THREADS, build_config, built_folder, filling, is_built, is_complete
from pipelinerl.local.process import Launch, ServiceProcess, log_tail
from pipelinerl.local.services import ServiceLaunches
from pipelinerl.local.threads import available_cores
from pipelinerl.local.watch import background

_POLL_S = 0.2
PROGRESS = "initial model: "
"""How the builder begins a line that a person should see as it goes. Its errors are told once, at its end."""

RunProcess = Callable[[str, Launch], AbstractAsyncContextManager[ServiceProcess]]
"""Starts a process of the given kind and stops it at the block's end."""


def cache_folder(environment: Mapping[str, str]) -> Path:
    """`PIPELINERL_CACHE`, else pipelinerl/ in the user's cache folder."""
    given = environment.get("PIPELINERL_CACHE")
    return Path(given) if given else Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipelinerl"


async def initial_model(
    recipe: Recipe, launches: ServiceLaunches, run_process: RunProcess, say: Callable[[str], None]
) -> str:
    """Folder of the initial policy; "" for a hub model, which the services fetch. Builds it where the recipe says so.

    `say` hears what is going on. Raises `ServiceDied` when the building fails.
    """
    if not is_built(recipe.model):
        return _absolute(recipe.model.name) if recipe.model.source == "path" else ""
    folder = built_folder(recipe, cache_folder(launches.environment) / "models")
    if is_complete(folder):
        say(f"initial model from the cache: {folder}")
    else:
        await _build(recipe, folder, launches, run_process, say)
    return str(folder)


def _absolute(path: str) -> str:
    return str(Path(path).resolve())


async def _build(
    recipe: Recipe,
    folder: Path,
    launches: ServiceLaunches,
    run_process: RunProcess,
    say: Callable[[str], None],
) -> None:
    say("building the initial model (kept for the next run)")
    config_file = launches.run_dir.path.resolve() / "warmstart.json"
    config_file.write_text(json.dumps(build_config(recipe), indent=2) + "\n", encoding="utf-8")
    with filling(folder) as beside:
        arguments = ("--config", str(config_file), "--out", str(beside))
        launch = launches.initial_model(arguments, min(THREADS, available_cores()))
        async with run_process("warmstart", launch) as process, background(_repeat_log(launch.log, say)):
            code = await process.wait()
        if code != 0:
            raise process.died()


async def _repeat_log(log: Path, say: Callable[[str], None]) -> None:
    """Says the log's last line whenever there is a new one that tells of progress."""
    said = ""
    while True:
        await asyncio.sleep(_POLL_S)
        line = log_tail(log, lines=1).strip()
        if line.startswith(PROGRESS) and line != said:
            said = line
            say(line)
