"""`python -m services.actor.initial_model`: fetch the initial model that the run built from the trainer.

The actor's pod runs this first. It does nothing for a hub model or a folder, or if the model is already in
PIPELINERL_MODEL_CACHE. It waits without limit for a trainer that is not up yet, or still serves another recipe's model, because
a cluster starts both at once; a log line says what it waits for. It loads no model.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from pipelinerl.errors import FieldError, MessageError, ServiceError
from pipelinerl.initial_model import COMPLETE, MOST_BYTES, MOST_FILES, built_folder, filling, is_built, is_complete
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.service.grpc import explained, open_channel
from pipelinerl.service.lifecycle import StartStopped, run_service, unless_stopped
from pipelinerl.service.logs import LogContext
from pipelinerl.service.retry import Backoff, retry_forever
from pipelinerl.service.settings import ActorSettings
from pipelinerl.v1 import trainer_pb2, trainer_pb2_grpc

log = logging.getLogger("services.actor.initial_model")

SILENT_S = 60.0
"""Time without a chunk from the trainer, after which the request is repeated."""


@dataclass
class _File:
    """A file in transfer. `checked`: whether the last chunk had the checksum of all data."""

    size: int
    received: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    checked: bool = False

    @property
    def complete(self) -> bool:
        return self.checked and self.received == self.size


class Receiver:
    """Checks chunks and writes them into files of an empty folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _File] = {}
        self._expected = 0

    def take(self, chunk: trainer_pb2.InitialModelChunk) -> None:
        """Write a chunk. Raises `MessageError` for an invalid chunk."""
        if chunk.file not in self._files:
            self._begin(chunk)
        file = self._files[chunk.file]
        if chunk.size_bytes != file.size:
            raise _wrong("size_bytes", f"{chunk.file} changed while it was sent")
        file.received += len(chunk.data)
        if file.received > file.size:
            raise _wrong("data", f"{chunk.file} is longer than its {file.size} bytes")
        file.digest.update(chunk.data)
        if chunk.sha256 and chunk.sha256 != file.digest.digest():
            raise _wrong("sha256", f"{chunk.file} arrived damaged")
        file.checked = bool(chunk.sha256)
        with (self._folder / chunk.file).open("ab") as out:
            out.write(chunk.data)

    def finish(self) -> int:
        """Return the number of bytes. Raises `MessageError` unless every file is complete and its checksum matches."""
        complete = sum(file.complete for file in self._files.values())
        if complete < len(self._files) or complete != self._expected or COMPLETE not in self._files:
            raise _wrong("files", f"{complete} of {self._expected} files are complete")
        return sum(file.size for file in self._files.values())

    def _begin(self, chunk: trainer_pb2.InitialModelChunk) -> None:
        if not chunk.file or chunk.file.startswith(".") or any(char in chunk.file for char in "/\\\0"):
            raise _wrong("file", f"{chunk.file!r} is not a valid file name")
        announced = sum(file.size for file in self._files.values()) + chunk.size_bytes
        if announced > MOST_BYTES or chunk.files > MOST_FILES or len(self._files) >= chunk.files:
            raise _wrong("files", f"{chunk.files} files of at least {announced} bytes are not one model")
        self._expected = chunk.files
        self._files[chunk.file] = _File(chunk.size_bytes)


def _wrong(field_name: str, problem: str) -> MessageError:
    return MessageError("InitialModelChunk", field_name, problem)


async def run(settings: ActorSettings, stop: asyncio.Event, context: LogContext) -> None:
    """Fetch the model that the run builds into the cache, unless it is there.

    Raises `FieldError`, and `ServiceError` if `stop` is set first.
    """
    recipe = load_recipe(settings.recipe)
    if settings.model_dir or not is_built(recipe.model):
        log.info("the initial model is %s; nothing is fetched", settings.model_dir or recipe.model.name)
        return
    folder = built_folder(recipe, settings.run, settings.model_cache)
    if is_complete(folder):
        log.info("initial model from the cache: %s", folder)
        return
    if not settings.trainer:
        raise FieldError("PIPELINERL_TRAINER", "", f"host:port of the trainer, which has {folder.name}")

    async def attempt() -> int:
        with filling(folder) as beside:
            return await fetch(settings, folder.name, beside)

    fetching = retry_forever(
        attempt,
        f"fetch the initial model of trainer {settings.trainer}",
        retried=lambda error: isinstance(error, grpc.aio.AioRpcError | MessageError | TimeoutError),
        backoff=Backoff(first_s=0.5, most_s=5.0),
        explain=lambda error: _reason(error, settings.tls_dir),
        level=logging.INFO,  # the trainer may still be building it
    )
    try:
        received = await unless_stopped(fetching, stop)
    except StartStopped as error:
        raise ServiceError("stopped before the initial model was there") from error
    log.info("initial model fetched: %s", folder, extra={"bytes": received})


async def fetch(settings: ActorSettings, name: str, folder: Path) -> int:
    """Fill the empty `folder` and return the number of bytes. A new channel looks up the trainer's name again.

    Raises `FieldError` on `tls_dir`, `AioRpcError`, `MessageError`, and `TimeoutError` after `SILENT_S` without a chunk.
    """
    receiver = Receiver(folder)
    async with open_channel(settings.trainer, settings.tls_dir) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        chunks = stub.GetInitialModel(trainer_pb2.GetInitialModelRequest(name=name))
        while True:
            async with asyncio.timeout(SILENT_S):
                chunk = await chunks.read()
            if chunk is grpc.aio.EOF:
                break
            receiver.take(chunk)
    return receiver.finish()


def _reason(error: Exception, tls_dir: Path | None) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return explained(error, tls_dir)
    return str(error) or f"nothing came for {SILENT_S:.0f} s"


def main() -> int:
    return run_service(ActorSettings, "actor", run)


if __name__ == "__main__":
    sys.exit(main())
