"""A rank of the trainer other than rank 0, as a process: its model, then orders until the last one.

It serves nothing and talks to no stream. A signal to end does not end it: rank 0 gets the same one, and needs the others for
its last checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from pipelinerl.config.load import load_recipe
from pipelinerl.config.settings import RankSettings, TrainerSettings
from pipelinerl.errors import UserError
from pipelinerl.initial_model import model_source
from pipelinerl.service.lifecycle import EXIT_USER_ERROR
from pipelinerl.service.logs import LogContext
from services.trainer.loading import load_learner
from services.trainer.ranks.follower import follow
from services.trainer.ranks.world import leave_ranks

log = logging.getLogger(__name__)


async def serve_rank(settings: TrainerSettings, ranks: RankSettings, context: LogContext) -> None:
    """Runs until rank 0 has given its last order. Raises `ServiceError` when rank 0 is gone without it."""
    context.instance = f"{settings.instance}-rank{ranks.rank}"
    await asyncio.to_thread(_work, settings, ranks)


def _work(settings: TrainerSettings, ranks: RankSettings) -> None:
    recipe = load_recipe(settings.recipe)
    try:
        learner = load_learner(recipe, model_source(recipe, settings), ranks)
    except (
        UserError
    ) as error:  # not printed as rank 0 prints its own: as a rule it is the same, but not for a node's own folder
        log.error("rank %d cannot load the model: %s", ranks.rank, error)
        sys.exit(EXIT_USER_ERROR)
    follow(learner)
    leave_ranks()
