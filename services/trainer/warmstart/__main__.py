"""`python -m services.trainer.warmstart`: makes a run's initial model.

With `--config FILE.json --out DIR` that of a file which holds a recipe's `model` and `task` sections, as the local runner
writes it. With `--recipe-model` that of the trainer's recipe, in its PIPELINERL_MODEL_CACHE: what the trainer's pod runs
before the trainer. A hub model or a folder needs no making, and nothing is done.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from pipelinerl.initial_model import THREADS, built_folder, filling, is_built, is_complete
from pipelinerl.local.services import PROGRESS, available_cores
from pipelinerl.recipe.fields import ModelConfig, TaskConfig
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.service.lifecycle import EXIT_FAILURE, exit_code
from pipelinerl.service.logs import LogContext, configure_logging
from pipelinerl.service.settings import TrainerSettings, read_settings

log = logging.getLogger("services.trainer.warmstart")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.trainer.warmstart", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", type=Path, metavar="FILE", help="JSON with model and task; needs --out")
    what.add_argument(
        "--recipe-model", action="store_true", help="build the model of the trainer's recipe into its cache"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the model")
    arguments = parser.parse_args()
    if (arguments.out is None) != arguments.recipe_model:
        parser.error("--out goes with --config, and with nothing else")
    if arguments.recipe_model:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_FAILURE))  # what is half made is removed
        return exit_code(recipe_model)
    return exit_code(lambda: file_model(arguments.config, arguments.out))


def file_model(config: Path, out: Path) -> None:
    sections = json.loads(config.read_text(encoding="utf-8"))
    model, task = ModelConfig(**sections["model"]), TaskConfig(**sections["task"])
    _build(model, task, out, lambda line: print(f"{PROGRESS}{line}", flush=True))


def recipe_model() -> None:
    """Raises `UserError` for an environment or a recipe that cannot be used."""
    settings = read_settings(TrainerSettings)
    context = LogContext(settings.run, "trainer", settings.instance)
    configure_logging(context, log_format=settings.log_format, level=settings.log_level)
    recipe = load_recipe(settings.recipe)
    if settings.model_dir or not is_built(recipe.model):
        log.info("the initial model is %s; nothing is built", settings.model_dir or recipe.model.name)
        return
    folder = built_folder(recipe, settings.model_cache)
    if is_complete(folder):
        log.info("initial model from the cache: %s", folder)
        return
    import torch

    torch.set_num_threads(min(THREADS, available_cores()))
    with filling(folder) as beside:
        _build(recipe.model, recipe.task, beside, lambda line: log.info("%s%s", PROGRESS, line))
    log.info("initial model built: %s", folder)


def _build(model: ModelConfig, task: TaskConfig, out: Path, say: Callable[[str], None]) -> None:
    from transformers.utils import logging as transformers_logging

    from services.trainer.warmstart.build import build

    transformers_logging.disable_progress_bar()
    build(model, task, out, say)


if __name__ == "__main__":
    sys.exit(main())
