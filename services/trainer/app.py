"""The process of rank 0: load the model, open the streams and reporting outputs, start the gRPC server, and execute the run.
The HTTP server starts first, so that it answers probes while the model loads."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from pipelinerl.audit.journal import JOURNAL, Journal
from pipelinerl.bus.jetstream import Bus, service_bus
from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import NATS, Recipe
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.run_summary import RunFiles
from pipelinerl.service.grpc import serve_calls
from pipelinerl.service.http import health_app, serve_http
from pipelinerl.service.lifecycle import Readiness, StartStopped, unless_stopped, watch_loop
from pipelinerl.service.logs import LogContext
from pipelinerl.service.retry import retry_forever
from pipelinerl.service.settings import RankSettings, TrainerSettings
from pipelinerl.telemetry.metrics import RunRegistry
from pipelinerl.transfer.stores import open_store
from pipelinerl.transfer.weight_log import CHAINS_KEPT, WeightLog
from services.trainer.checkpoint.run_state import Start, find_start, write_lineage
from services.trainer.loop import PolicyTrainer, load_policy_trainer
from services.trainer.reporting.metrics import TrainerMetrics
from services.trainer.reporting.page import ASKED_WITHIN_S, PageBoard, add_page, behind_key, page_hosts
from services.trainer.reporting.recorder import Recorder
from services.trainer.reporting.trackers import run_trackers
from services.trainer.run import TrainingRun
from services.trainer.weight_sync.sender import LogWriter, WeightSender

SERVICE = "pipelinerl.v1.TrainerService"
LoadPolicy = Callable[[Recipe, TrainerSettings, RankSettings, Start], PolicyTrainer]


async def serve(
    settings: TrainerSettings,
    ranks: RankSettings,
    stop: asyncio.Event,
    context: LogContext,
    load: LoadPolicy = load_policy_trainer,
) -> None:
    """On rank 0, execute the training run until it ends or `stop` is set. Raises the error that ends the run, if any."""
    recipe = load_recipe(settings.recipe)
    registry, readiness = RunRegistry(settings.run), Readiness("the model is loading")
    metrics = TrainerMetrics(registry)
    async with AsyncExitStack() as stack:
        stack.enter_context(suppress(StartStopped))
        loop_watch = await stack.enter_async_context(watch_loop())
        app = health_app(readiness, registry, loop_watch=loop_watch)
        board = PageBoard() if settings.page else None
        if board is not None:  # before the server starts, because an open page sends requests at once
            add_page(app, board)
        keyed, names = behind_key(app, settings.page_key), page_hosts(settings)
        http_port = await stack.enter_async_context(serve_http(keyed, settings.http_host, settings.http_port, names=names))
        start = await asyncio.to_thread(find_start, settings.run_dir, settings.run, recipe)
        policy = await asyncio.to_thread(load, recipe, settings, ranks, start)
        readiness.reason = "waiting for NATS"
        bus = await stack.enter_async_context(service_bus(settings, stop, stream_limits(settings)))
        made = retry_forever(lambda: bus.create_streams(fresh=not start.again), "make the run's streams")
        await unless_stopped(made, stop)
        write_lineage(settings.run_dir, settings.run, start.lineage, recipe, start.changes)
        files = stack.enter_context(RunFiles(settings.run_dir, start.version if start.again else None))
        journal = stack.enter_context(Journal(settings.run_dir / JOURNAL))
        trackers = await stack.enter_async_context(run_trackers(recipe, settings, start, http_port))
        recorder = Recorder(
            recipe, files, metrics, board=board, trackers=trackers, context=context, start=start, tokenizer=policy.tokenizer
        )
        writer = await stack.enter_async_context(log_writer(settings, recipe, policy.sender, bus))
        run = TrainingRun(settings, recipe, policy, bus, journal, start, recorder, writer)
        await stack.enter_async_context(serve_calls(settings, run.add_to_server, SERVICE, http_port))
        readiness.reason = ""
        await run.run(stop)
        if board is not None and board.is_read and not stop.is_set():
            await asyncio.sleep(ASKED_WITHIN_S)  # gives open pages time to fetch the end of the run


@asynccontextmanager
async def log_writer(
    settings: TrainerSettings, recipe: Recipe, sender: WeightSender, bus: Bus
) -> AsyncIterator[LogWriter | None]:
    """Yield a writer of the weight log; None if the recipe has no log. Raises `FieldError` for an invalid limit or location."""
    weights = recipe.weights
    if not weights.log_place:
        yield None
        return
    if weights.log_place == NATS:
        check_log_size(settings.weights_max_gib, sender.manifest.total_bytes)
    async with open_store(weights.log_place, bus) as store:
        every, keep_all = weights.anchor_every, weights.keep_versions
        log = WeightLog(store, sender.manifest, bus.run, anchor_every=every, keep_all=keep_all, placement=sender.placement)
        yield LogWriter(log)


def check_log_size(max_gib: float, weights_bytes: int) -> None:
    """Raise `FieldError` if `max_gib` cannot hold the anchors that a weight log keeps, `weights_bytes` each. Pure."""
    if max_gib * 1024**3 < (least := (CHAINS_KEPT + 1) * weights_bytes):
        why = f"is too small for the {CHAINS_KEPT + 1} anchors (whole versions) that the weight log keeps"
        enough = math.ceil(1000 * least / 1024**3) / 1000
        fix = f"raise it to at least {enough} (in the chart: nats.weightsMaxGib), or set another weights.log"
        raise FieldError("PIPELINERL_WEIGHTS_MAX_GIB", max_gib, f"{why}; {fix}")


def stream_limits(settings: TrainerSettings) -> StreamLimits:
    sequences, weights = (round(gib * 1024**3) for gib in (settings.sequences_max_gib, settings.weights_max_gib))
    return StreamLimits(sequences_max_bytes=sequences, weights_max_bytes=weights, replicas=settings.stream_replicas)
