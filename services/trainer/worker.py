"""What ranks other than 0 do: carry out rank 0's orders until the last one.

Consumes orders; produces its share of gradients, weights, results and checkpoints. Rank 0 unblocks it; when rank 0 is gone,
waiting ends with an error, and torchrun ends the other ranks.

A rank of the trainer other than rank 0, as a process: its model, then orders until the last one.

The first rank of a further node answers /healthz, /readyz and /metrics for that node's pod. It talks to no stream. A signal to
end does not end it: rank 0 gets the same one, and needs the others for its last checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pipelinerl.errors import UserError
from pipelinerl.initial_model import model_source
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.service.http import health_app, serve_http
from pipelinerl.service.lifecycle import EXIT_USER_ERROR, Readiness, watch_loop
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import RankSettings, TrainerSettings
from pipelinerl.telemetry.metrics import RunRegistry
from services.trainer.checkpoint.state_files import FollowingSaver
from services.trainer.distributed.world import (
    ADAPTER,
    BEAT,
    END,
    SAVE,
    SCORE,
    VALUE_HEAD,
    WEIGHTS,
    Message,
    leave_ranks,
)
from services.trainer.learn.step import TRAIN, Learner, StepShare
from services.trainer.loading import load_learner
from services.trainer.reporting.metrics import RankMetrics

log = logging.getLogger(__name__)


def follow(
    learner: Learner,
    heard: Callable[[str], None] = lambda kind: None,
    trained: Callable[[int], None] = lambda version: None,
) -> None:
    """Returns after rank 0's last order; `heard` is told of each one's kind, `trained` of the version that a step made.

    Raises `ServiceError` when rank 0 is gone without it, and whatever an order raises.
    """
    links = learner.world.links
    assert links is not None, "a rank that is alone has nobody to follow"
    saver = FollowingSaver(learner)
    while (order := links.hear()).kind != END:
        heard(order.kind)
        if order.kind == SAVE:
            saver.save()
        else:
            carry_out(order, learner)
        if order.kind == TRAIN:
            trained(order.fields["version"] + 1)
    saver.end()


def carry_out(order: Message, learner: Learner) -> None:
    """One order, together with the other ranks."""
    if order.kind == TRAIN:
        result = learner.compute(StepShare.from_message(order))
        world = learner.world
        if world.layout.sequence_index == 0 and world.links is not None:
            fields = {"memory_peak_bytes": result.memory_peak_bytes}
            world.links.report(Message("result", fields, {"values": result.values}))
    elif order.kind == SCORE:
        learner.score(order.arrays["token_ids"])
    elif order.kind in (WEIGHTS, ADAPTER, VALUE_HEAD):
        gathered = {WEIGHTS: learner.weights, ADAPTER: learner.adapter, VALUE_HEAD: learner.value_head}
        for _ in gathered[order.kind]():
            pass
    else:
        assert order.kind == BEAT, f"rank 0 gave an order that this rank does not know: {order.kind}"


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
