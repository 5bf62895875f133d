"""An actor as a process, without a trainer: the service as it is, serving one version from the start.

Run as `python -m tests.support.counting_actor OPTIONS`, settings in the environment; OPTIONS is JSON, see `Options`. Its
engine is vLLM, or a light one whose token at position p of prompt and completion is p, with log-probability -version.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from pipelinerl.bus.jetstream import service_bus
from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.messages import verification
from pipelinerl.messages.sequences import Completion, FinishReason, PolicyVersion, VersionSpan
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.lifecycle import Readiness, background, leave, run_service
from pipelinerl.service.retry import Backoff
from pipelinerl.service.settings import ActorSettings
from services.actor import app
from services.actor.engine import GenerationRequest
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

    async def generate(self, request: GenerationRequest) -> Completion:
        aborted = self._aborted[request.request_id] = asyncio.Event()
        start, length = len(request.prompt_token_ids), 0
        try:
            while length < request.sampling.max_tokens and not aborted.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(aborted.wait(), self._options.token_s)
                length += not aborted.is_set()
                self.lengths[request.request_id] = length
        finally:
            del self._aborted[request.request_id]
        version = self._options.version
        return Completion(
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


class ServingActor(app.Actor):
    """Serves one version, since there is no trainer that sends any."""

    options: ClassVar[Options]

    async def run(self, grpc_address: str, readiness: Readiness) -> None:
        async with background(self._play()):
            await super().run(grpc_address, readiness)

    async def _play(self) -> None:
        while self.options.serve_after and not os.path.exists(self.options.serve_after):
            await asyncio.sleep(0.02)
        self.gate.serve(PolicyVersion(1, self.options.version))
        if self.options.stop_at_tokens:
            while self._longest() < self.options.stop_at_tokens:
                await asyncio.sleep(0.005)
            os.kill(os.getpid(), signal.SIGTERM)

    def _longest(self) -> int:
        """Tokens of the completion that is furthest, as the engine tells the actor."""
        progress = self.engine.progress()  # type: ignore[attr-defined]
        return max((progress.get(request_id, 0) for request_id in self.training.generating), default=0)


def main(options: Options) -> int:
    @asynccontextmanager
    async def start(recipe: Recipe, model: str, stop: asyncio.Event, **more: Any) -> AsyncIterator[Any]:
        if not options.vllm:
            yield LightEngine(options)
            return
        async with start_engine(recipe, model, stop, **more) as engine:
            await engine.llm.update_weight_version(f"1:{options.version}")
            yield engine

    ServingActor.options = options
    app.Actor = ServingActor  # type: ignore[misc]
    limits = StreamLimits(ack_wait_s=options.ack_wait_s)
    app.service_bus = partial(service_bus, limits=limits, request_timeout_s=2.0)  # type: ignore[assignment]
    verification.BACKOFF = Backoff(0.02, 0.1)
    return run_service(ActorSettings, "actor", partial(app.serve, start=start))


if __name__ == "__main__":
    leave(main(Options(**json.loads(sys.argv[1]))))
