"""The light actor, of which the one called `READER` gets its weights from the weight log, as one in another cluster does."""

import asyncio
import sys

from benchmarks.light_actor import start_light_engine
from pipelinerl.recipe.loading import load_recipe, recipe_yaml
from pipelinerl.service.lifecycle import run_service
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import ActorSettings
from services.actor.app import serve

READER = "actor-1"


async def run(settings: ActorSettings, stop: asyncio.Event, context: LogContext) -> None:
    if settings.instance == READER:
        own = settings.recipe.with_name(f"recipe-{READER}.yaml")
        own.write_text(recipe_yaml(load_recipe(settings.recipe, ["weights.backend=log"])), encoding="utf-8")
        settings = settings.model_copy(update={"recipe": own})
    await serve(settings, stop, context, start_light_engine)


if __name__ == "__main__":
    sys.exit(run_service(ActorSettings, "actor", run))
