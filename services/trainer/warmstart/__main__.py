"""`python -m services.trainer.warmstart`: builds the initial model of the trainer's recipe into its PIPELINERL_MODEL_CACHE, or
copies it there from a checkpoint.

What the local runner and the trainer's pod run before the trainer. A hub model or a folder needs no making: nothing is done.
"""

from __future__ import annotations

import logging
import signal
import sys

from pipelinerl.initial_model import built_folder, filling, is_built, is_complete
from pipelinerl.local.services import PROGRESS, available_cores
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.service.lifecycle import EXIT_FAILURE, exit_code
from pipelinerl.service.logs import LogContext, configure_logging
from pipelinerl.service.settings import TrainerSettings, read_settings
from services.trainer.checkpoint.store import fetch_initial

THREADS = 2
"""More do not help models this small, and with as many threads everywhere the weights are the same."""

log = logging.getLogger("services.trainer.warmstart")


def build_model() -> None:
    """Raises `UserError` for an environment or a recipe that cannot be used."""
    settings = read_settings(TrainerSettings)
    context = LogContext(settings.run, "trainer", settings.instance)
    configure_logging(context, log_format=settings.log_format, level=settings.log_level)
    recipe = load_recipe(settings.recipe)
    if settings.model_dir or not is_built(recipe.model):
        log.info("the initial model is %s; nothing is built", settings.model_dir or recipe.model.name)
        return
    folder = built_folder(recipe, settings.run, settings.model_cache)
    if is_complete(folder):
        log.info("initial model from the cache: %s", folder)
        return
    if recipe.model.source == "checkpoint":
        with filling(folder) as beside:
            found = fetch_initial(recipe.model.name, settings.run_dir, beside)
        log.info("initial model: %s, in %s", found, folder)
        return
    import torch
    from transformers.utils import logging as transformers_logging

    from services.trainer.warmstart.build import build

    torch.set_num_threads(min(THREADS, available_cores()))
    transformers_logging.disable_progress_bar()
    with filling(folder) as beside:
        build(recipe.model, list(recipe.mixture.values()), beside, lambda line: log.info("%s%s", PROGRESS, line))
    log.info("initial model built: %s", folder)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_FAILURE))  # what is half made is removed
    return exit_code(build_model)


if __name__ == "__main__":
    sys.exit(main())
