"""A rank of the trainer other than rank 0, as a process: its model, then orders until the last one.

The first rank of a further node answers /healthz, /readyz and /metrics for that node's pod. It talks to no stream. A signal to
end does not end it: rank 0 gets the same one, and needs the others for its last checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pipelinerl.config.load import load_recipe
from pipelinerl.config.settings import RankSettings, TrainerSettings
from pipelinerl.errors import UserError
from pipelinerl.initial_model import model_source
from pipelinerl.service.health_app import health_app
from pipelinerl.service.http import serve_http
from pipelinerl.service.lifecycle import EXIT_USER_ERROR
from pipelinerl.service.logs import LogContext
from pipelinerl.service.loop_watch import watch_loop
from pipelinerl.service.readiness import Readiness
from pipelinerl.service.run_registry import RunRegistry
from services.trainer.loading import load_learner
from services.trainer.metrics.rank import RankMetrics
from services.trainer.ranks.follower import follow
from services.trainer.ranks.world import leave_ranks

log = logging.getLogger(__name__)


class RankHealth:
    """What a rank shows of itself; set and counted on the thread that works."""

    def __init__(self, context: LogContext) -> None:
        self.registry, self.readiness = RunRegistry(context.run), Readiness("the model is loading")
        self._context = context
        self._orders = RankMetrics(self.registry).orders

    def heard(self, order: str) -> None:
        self._orders.labels(order).inc()

    def trained(self, version: int) -> None:
        """A step made `version`: log lines carry it from now on."""
        self._context.policy_version = version


async def serve_rank(settings: TrainerSettings, ranks: RankSettings, context: LogContext) -> None:
    """Runs until rank 0 has given its last order. Raises `ServiceError` when rank 0 is gone without it."""
    context.instance = f"{settings.instance}-rank{ranks.rank}"
    health = RankHealth(context)
    async with _answering(settings, health, speaks=ranks.local_rank == 0):
        await asyncio.to_thread(_work, settings, ranks, health)


@asynccontextmanager
async def _answering(settings: TrainerSettings, health: RankHealth, *, speaks: bool) -> AsyncIterator[None]:
    """Nothing, unless this rank speaks for its node."""
    if not speaks:
        yield
        return
    async with watch_loop() as watch:
        app = health_app(health.readiness, health.registry, loop_watch=watch)
        async with serve_http(app, settings.http_host, settings.http_port, own_thread=True) as port:
            log.info("node %d answers on port %d", settings.node, port)
            yield


def _work(settings: TrainerSettings, ranks: RankSettings, health: RankHealth) -> None:
    recipe = load_recipe(settings.recipe)
    try:
        learner = load_learner(recipe, model_source(recipe, settings), ranks)
    except (
        UserError
    ) as error:  # not printed as rank 0 prints its own: as a rule it is the same, but not for a node's own folder
        log.error("rank %d cannot load the model: %s", ranks.rank, error)
        sys.exit(EXIT_USER_ERROR)
    health.readiness.set_ready()
    follow(learner, health.heard, health.trained)
    leave_ranks()
