"""The light actor, of which the one called `LIAR` says that its tokens were half a nat less likely than they were."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from benchmarks.light_actor import LightEngine, start_light_engine
from pipelinerl.messages.sequences import Completion
from pipelinerl.service.lifecycle import run_service
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import ActorSettings
from services.actor.app import serve
from services.actor.engine import GenerationRequest

LIAR = "actor-1"


@asynccontextmanager
async def start_lying_engine(*arguments: Any, **options: Any) -> AsyncIterator[LightEngine]:
    async with start_light_engine(*arguments, **options) as engine:
        honest = engine.generate

        async def generate(request: GenerationRequest) -> Completion:
            made = await honest(request)
            return replace(made, behaviour_logprobs=made.behaviour_logprobs - 0.5)

        engine.generate = generate  # type: ignore[method-assign]
        yield engine


async def run(settings: ActorSettings, stop: asyncio.Event, context: LogContext) -> None:
    await serve(settings, stop, context, start_lying_engine if settings.instance == LIAR else start_light_engine)


if __name__ == "__main__":
    sys.exit(run_service(ActorSettings, "actor", run))
