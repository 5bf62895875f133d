"""The light actor, of which the one called `LIAR` says that its tokens were half a nat less likely than they were."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from benchmarks.light_actor import LightEngine, start_light_engine
from pipelinerl.service.lifecycle import run_service
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import ActorSettings
from services.actor.app import serve
from services.actor.engine import Generation, GenerationRequest

LIAR = "actor-1"


class LyingEngine:
    def __init__(self, honest: LightEngine) -> None:
        self._honest = honest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)

    async def generate(self, request: GenerationRequest) -> Generation:
        made = await self._honest.generate(request)
        return replace(made, behaviour_logprobs=made.behaviour_logprobs - 0.5)


@asynccontextmanager
async def start_lying_engine(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
    async with start_light_engine(*arguments, **options) as engine:
        yield LyingEngine(engine)


async def run(settings: ActorSettings, stop: asyncio.Event, context: LogContext) -> None:
    await serve(settings, stop, context, start_lying_engine if settings.instance == LIAR else start_light_engine)


if __name__ == "__main__":
    sys.exit(run_service(ActorSettings, "actor", run))
