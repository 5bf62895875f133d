"""The light actor, of which the one called `ODD` differs. Run as `python -m tests.support.odd_actor WHAT`.

`lies`: it says that its tokens were half a nat less likely than they were. `reads`: it gets its weights from the weight log, as
one in another cluster does.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from benchmarks.light_actor import start_light_engine
from pipelinerl.messages.sequences import Completion
from pipelinerl.recipe.loading import load_recipe, recipe_yaml
from pipelinerl.service.lifecycle import run_service
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import ActorSettings
from services.actor.app import serve
from services.actor.engine import GenerationRequest

ODD = "actor-1"


@asynccontextmanager
async def start_lying_engine(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
    async with start_light_engine(*arguments, **options) as engine:
        honest = engine.generate

        async def generate(request: GenerationRequest) -> Completion:
            made = await honest(request)
            return replace(made, behaviour_logprobs=made.behaviour_logprobs - 0.5)

        engine.generate = generate  # type: ignore[method-assign]
        yield engine


async def run(settings: ActorSettings, stop: asyncio.Event, context: LogContext) -> None:
    what, start = sys.argv[1] if settings.instance == ODD else "", start_light_engine
    if what == "lies":
        start = start_lying_engine
    elif what == "reads":
        own = settings.recipe.with_name(f"recipe-{ODD}.yaml")
        own.write_text(recipe_yaml(load_recipe(settings.recipe, ["weights.backend=log"])), encoding="utf-8")
        settings = settings.model_copy(update={"recipe": own})
    await serve(settings, stop, context, start)


if __name__ == "__main__":
    sys.exit(run_service(ActorSettings, "actor", run))
