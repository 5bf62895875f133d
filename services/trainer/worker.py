"""The process of a rank other than rank 0: load the model, then execute rank 0's orders until the order to end.

On every node except rank 0's, the first rank answers /healthz, /readyz and /metrics for the pod. A termination signal does not
end this process, because rank 0 gets the same signal and needs all ranks for its last checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress

from pipelinerl.errors import EXIT_USER_ERROR, ServiceError, UserError
from pipelinerl.initial_model import model_source
from pipelinerl.recipe.fields import TrainerConfig
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.service.http import health_app, serve_http
from pipelinerl.service.lifecycle import Readiness, on_thread, watch_loop
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import RankSettings, TrainerSettings
from pipelinerl.telemetry.metrics import RunRegistry
from services.trainer.checkpoint.state_files import StateSaver
from services.trainer.learn.step import Learner, share_of
from services.trainer.loading import load_learner
from services.trainer.reporting.metrics import rank_orders
from services.trainer.world import (
    ADAPTER,
    END,
    HEARTBEAT,
    ORDER_TIMEOUT,
    SAVE,
    SCORE,
    TRAIN,
    USE,
    VALUE_HEAD,
    WEIGHTS,
    Links,
    Message,
    leave_ranks,
)

log = logging.getLogger(__name__)


def receive_batches(links: Links | None) -> Iterator[Message]:
    """Yield a message with the batches of each step, until rank 0 orders the end. A thread receives one message ahead.

    Request a step's message only after rank 0 has ordered the step. Raises `ServiceError` if rank 0 is gone, or if the message
    does not arrive within `ORDER_TIMEOUT` after the request."""
    assert links is not None, "a rank that is alone gets no batches"
    following = on_thread("batches", links.receive_order)
    try:
        while (message := following.result(ORDER_TIMEOUT.total_seconds())).kind != END:
            following = on_thread("batches", links.receive_order)
            yield message
    except TimeoutError:
        raise ServiceError("rank 0 has ordered a step but has not sent its batches; rank 0's log says why") from None


def worker_loop(learner: Learner, on_order: Callable[[Message], None] = lambda order: None) -> None:
    """Execute the orders of rank 0 up to `END`, and call `on_order` after each. Raises `ServiceError` if rank 0 is gone."""
    links, received = learner.world.links, receive_batches(learner.world.batches)
    assert links is not None, "a rank that is alone gets no orders"
    saver, saving = StateSaver(learner), ThreadPoolExecutor(max_workers=1, thread_name_prefix="saving")
    writing: Future[None] | None = None
    while (order := links.receive_order()).kind != END:
        if order.kind == SAVE:
            if writing is not None:
                writing.result()  # returns soon: rank 0 has finished the previous checkpoint
            saver.stage()
            writing = saving.submit(saver.follow)
        else:
            carry_out(order, learner, received)
        on_order(order)
    with suppress(ServiceError):  # also receive the batches of a step that is not taken; rank 0 may be gone already
        list(received)
    saving.shutdown()


def carry_out(order: Message, learner: Learner, received: Iterator[Message]) -> None:
    """Execute one order together with the other ranks. Raises `ServiceError` if the next batches are for another step."""
    if order.kind == TRAIN:
        batches, version = next(received), order.fields["version"]
        if (found := batches.fields["version"]) != version:
            raise ServiceError(f"rank 0 orders the step at version {version}, but has sent the batches of version {found}")
        statistics, _, figures = learner.compute(share_of(batches))
        world = learner.world
        if world.layout.sequence_index == 0 and world.links is not None:
            fields = {"memory_peak_gib": figures["memory_peak_gib"]}
            world.links.send(Message("result", fields, vars(statistics)), 0)
    elif order.kind == SCORE:
        learner.score(order.arrays["token_ids"], adapters=order.fields["adapters"])
    elif order.kind == USE:
        learner.use(TrainerConfig.model_validate(order.fields["trainer"]))
    elif order.kind in (WEIGHTS, ADAPTER, VALUE_HEAD):
        for _ in learner.gather(order.kind, order.fields["dtype"]):
            pass
    else:
        assert order.kind == HEARTBEAT, f"rank 0 gave an order that this rank does not know: {order.kind}"


async def serve_rank(settings: TrainerSettings, ranks: RankSettings, context: LogContext) -> None:
    """Run until rank 0 orders the end. Raises `ServiceError` if rank 0 is gone without that order."""
    context.instance = f"{settings.instance}-rank{ranks.rank}"
    registry, readiness = RunRegistry(context.run), Readiness("the model is loading")
    orders = rank_orders(registry)

    def count(order: Message) -> None:
        orders.labels(order.kind).inc()
        if order.kind == TRAIN:
            context.policy_version = order.fields["version"] + 1  # for the following log lines

    def work() -> None:
        recipe = load_recipe(settings.recipe)
        try:
            learner = load_learner(recipe, model_source(recipe, settings), ranks, revision=settings.revision)
        except UserError as error:
            # Rank 0 usually prints the same error. This one is logged, because it may concern a folder of this node.
            log.error("rank %d cannot load the model: %s", ranks.rank, error)
            sys.exit(EXIT_USER_ERROR)
        readiness.reason = ""
        worker_loop(learner, count)
        leave_ranks()

    async with AsyncExitStack() as stack:
        if ranks.local_rank == 0:  # this rank answers probes and scrapes of its pod
            watch = await stack.enter_async_context(watch_loop())
            app = health_app(readiness, registry, loop_watch=watch)
            serving = serve_http(app, settings.http_host, settings.http_port)
            log.info("node %d answers probes and scrapes on port %d", settings.node, await stack.enter_async_context(serving))
        await asyncio.to_thread(work)
