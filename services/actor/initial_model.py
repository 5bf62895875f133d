"""`python -m services.actor.initial_model`: fetch the initial model from the trainer, which built or copied it.

The actor's pod runs this program before the actor. It fetches models of the sources `checkpoint` and `smollm2`, unless
PIPELINERL_MODEL_DIR is set or PIPELINERL_MODEL_CACHE has the model. It waits without limit for a trainer that is not up yet, or
that still serves another recipe's model.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import grpc

from pipelinerl.errors import FieldError, MessageError, ServiceError
from pipelinerl.initial_model import built_folder, filling, is_built, is_complete
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.service.grpc import explained, open_channel
from pipelinerl.service.lifecycle import StartStopped, run_service, unless_stopped
from pipelinerl.service.logs import LogContext
from pipelinerl.service.retry import Backoff, retry_forever
from pipelinerl.service.settings import ActorSettings
from pipelinerl.v1 import trainer_pb2, trainer_pb2_grpc

log = logging.getLogger("services.actor.initial_model")

SILENT_S = 60.0
"""Seconds without a chunk from the trainer after which the request is repeated."""


async def run(settings: ActorSettings, stop: asyncio.Event, context: LogContext) -> None:
    """Fetch the initial model from the trainer into the cache. Do nothing if the cache has it, `model_dir` is set, or the
    trainer does not serve it. Raises `FieldError` for a wrong setting, `ServiceError` if stopped, and the cache's `OSError`."""
    recipe = load_recipe(settings.recipe)
    if settings.model_dir or not is_built(recipe.model):
        log.info("the initial model is %s; nothing is fetched", settings.model_dir or recipe.model.name)
        return
    folder = built_folder(recipe, settings.run, settings.model_cache)
    if is_complete(folder):
        log.info("the initial model is in the cache: %s", folder)
        return
    if not settings.trainer:
        raise FieldError("PIPELINERL_TRAINER", "", f"set it to host:port of the trainer, to fetch the model {folder.name}")

    async def attempt() -> int:
        with filling(folder) as beside:
            return await fetch(settings, folder.name, beside)

    fetching = retry_forever(
        attempt,
        f"fetch the initial model of trainer {settings.trainer}",
        retried=lambda error: isinstance(error, grpc.aio.AioRpcError | MessageError | TimeoutError),
        backoff=Backoff(first_s=0.5, most_s=5.0),
        explain=lambda error: explained(error, settings.tls_dir) or f"no data arrived for {SILENT_S:.0f} s",
        level=logging.INFO,  # the trainer may still be building the model
    )
    try:
        received = await unless_stopped(fetching, stop)
    except StartStopped as error:
        raise ServiceError("stopped before the initial model was fetched") from error
    log.info("initial model fetched: %s", folder, extra={"bytes": received})


async def fetch(settings: ActorSettings, name: str, folder: Path) -> int:
    """Write the model's files into the empty `folder` and return the number of bytes. Each call opens a new channel, which
    resolves the trainer's name again. Raises `AioRpcError`, `MessageError`, `TimeoutError` after `SILENT_S` without a chunk,
    and `FieldError` if `tls_dir` is wrong."""
    received = 0
    async with open_channel(settings.trainer, settings.tls_dir) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        chunks = stub.GetInitialModel(trainer_pb2.GetInitialModelRequest(name=name))
        while True:
            async with asyncio.timeout(SILENT_S):
                chunk = await chunks.read()
            if chunk is grpc.aio.EOF:
                return received
            if not chunk.file or chunk.file.startswith(".") or any(char in chunk.file for char in "/\\\0"):
                raise MessageError("InitialModelChunk", "file", f"{chunk.file!r} is not a valid file name")
            with (folder / chunk.file).open("ab") as out:
                received += out.write(chunk.data)


def main() -> int:
    return run_service(ActorSettings, "actor", run)


if __name__ == "__main__":
    sys.exit(main())
