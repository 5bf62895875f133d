"""An actor as a process, without a trainer: the service's own parts, serving one version from the start.

Run as `python -m tests.support.counting_actor OPTIONS`, settings in the environment; OPTIONS is JSON, see `Options`. Its
engine is vLLM, or a light one whose token at position p of prompt and completion is p, with log-probability -version.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from pipelinerl.bus.jetstream import connect
from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.messages.sequences import FinishReason, PolicyVersion, VersionSpan
from pipelinerl.messages.verification import VerifierClient
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.service.address import ServiceAddress, write_address
from pipelinerl.service.http import health_app, serve_http
from pipelinerl.service.lifecycle import Readiness, run_service, watch_loop
from pipelinerl.service.logs import LogContext
from pipelinerl.service.retry import Backoff
from pipelinerl.service.settings import ActorSettings
from services.actor.app import Actor
from services.actor.engine import Generation, GenerationRequest
from services.actor.metrics import ActorMetrics
from services.actor.vllm_engine import start_engine


@dataclass(frozen=True)
class Options:
    version: int
    """Of incarnation 1."""
    vllm: bool = False
    token_s: float = 0.001
    stop_at_tokens: int = 0
    """Sends itself SIGTERM when a completion has so many tokens; 0: never."""
    ack_wait_s: float = 30.0
    deletion_cost_every_s: float = 15.0
    serve_after: str = ""
    """A file: it takes no group before that is there."""


class LightEngine:
    """An `InferenceEngine`. Every completion is as long as it may be."""

    vocab_size = 100_000
    weights = None

    def __init__(self, options: Options) -> None:
        self._options = options
        self._aborted: dict[str, asyncio.Event] = {}
        self.lengths: dict[str, int] = {}

    async def generate(self, request: GenerationRequest) -> Generation:
        aborted = self._aborted[request.request_id] = asyncio.Event()
        start, length = len(request.prompt_token_ids), 0
        try:
            while length < request.sampling.max_tokens and not aborted.is_set():
                await _set_or_later(aborted, self._options.token_s)
                length += not aborted.is_set()
                self.lengths[request.request_id] = length
        finally:
            del self._aborted[request.request_id]
        version = self._options.version
        return Generation(
            np.arange(start, start + length, dtype=np.int32),
            np.full(length, -float(version), np.float32),
            (VersionSpan(version, 0, length),) if length else (),
            FinishReason.LENGTH if length == request.sampling.max_tokens else None,
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._aborted:
                self._aborted[request_id].set()

    def progress(self) -> dict[str, int]:
        return {request_id: self.lengths.get(request_id, 0) for request_id in self._aborted}

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    async def check_health(self) -> None:
        return


async def _set_or_later(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


@asynccontextmanager
async def started_engine(options: Options, settings: ActorSettings, stop: asyncio.Event) -> AsyncIterator[Any]:
    if not options.vllm:
        yield LightEngine(options)
        return
    async with start_engine(load_recipe(settings.recipe), settings.model_dir, stop) as engine:
        await engine.llm.update_weight_version(f"1:{options.version}")
        yield engine


def longest(engine: Any, actor: Actor) -> Callable[[], int]:
    """Tokens of the completion that is furthest, as the engine tells the actor."""
    under_way = actor._generation._generating
    return lambda: max((engine.progress().get(request_id, 0) for request_id in under_way), default=0)


async def terminate_at(tokens: int, length: Callable[[], int]) -> None:
    while length() < tokens:
        await asyncio.sleep(0.005)
    os.kill(os.getpid(), signal.SIGTERM)


async def serve_after(options: Options, actor: Actor) -> None:
    while options.serve_after and not os.path.exists(options.serve_after):
        await asyncio.sleep(0.02)
    actor._gate.serve(PolicyVersion(1, options.version))


async def run(settings: ActorSettings, stop: asyncio.Event, context: LogContext, options: Options) -> None:
    limits, registry, readiness = (
        StreamLimits(ack_wait_s=options.ack_wait_s),
        CollectorRegistry(),
        Readiness("starting"),
    )
    async with AsyncExitStack() as stack:
        watch = await stack.enter_async_context(watch_loop())
        app = health_app(readiness, registry, loop_watch=watch)
        http_port = await stack.enter_async_context(serve_http(app, "127.0.0.1", 0, own_thread=True))
        engine = await stack.enter_async_context(started_engine(options, settings, stop))
        bus = await stack.enter_async_context(
            connect(settings.nats_url, settings.run, limits=limits, request_timeout_s=2.0)
        )
        patient = VerifierClient(settings.verifier, backoff=Backoff(0.02, 0.1))
        verifier = await stack.enter_async_context(patient)
        actor = Actor(
            settings, load_recipe(settings.recipe), engine, bus, verifier, ActorMetrics(registry), context, stop
        )
        actor._deletion_cost._every_s = options.deletion_cost_every_s
        serving = asyncio.create_task(serve_after(options, actor))
        stack.callback(serving.cancel)
        assert settings.address_file is not None
        write_address(settings.address_file, ServiceAddress("127.0.0.1:1", f"127.0.0.1:{http_port}", os.getpid()))
        if options.stop_at_tokens:
            stopping = asyncio.create_task(terminate_at(options.stop_at_tokens, longest(engine, actor)))
            stack.callback(stopping.cancel)
        await actor.run("127.0.0.1:1", readiness)


if __name__ == "__main__":
    chosen = Options(**json.loads(sys.argv[1]))
    sys.exit(run_service(ActorSettings, "actor", lambda settings, stop, context: run(settings, stop, context, chosen)))
