"""An actor as a process, without a trainer: the service with vLLM, serving one version from the start.

Run as `python -m tests.support.lone_actor OPTIONS`, settings in the environment; OPTIONS is JSON, see `Options`.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from pipelinerl.bus.jetstream import service_bus
from pipelinerl.messages import verification
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.lifecycle import Readiness, background, leave, run_service
from pipelinerl.service.retry import Backoff
from pipelinerl.service.settings import ActorSettings
from services.actor import app
from services.actor.vllm_engine import start_engine


@dataclass(frozen=True)
class Options:
    version: int
    """Of incarnation 1."""
    stop_at_tokens: int = 0
    """Sends itself SIGTERM when a completion has so many tokens; 0: never."""
    serve_after: str = ""
    """A file: it takes no group before that is there."""


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
        async with start_engine(recipe, model, stop, **more) as engine:
            await engine.llm.update_weight_version(f"1:{options.version}")
            yield engine

    ServingActor.options = options
    app.Actor = ServingActor  # type: ignore[misc]
    app.service_bus = partial(service_bus, request_timeout_s=2.0)  # type: ignore[assignment]
    verification.BACKOFF = Backoff(0.02, 0.1)
    return run_service(ActorSettings, "actor", partial(app.serve, start=start))


if __name__ == "__main__":
    leave(main(Options(**json.loads(sys.argv[1]))))
