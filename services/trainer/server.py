"""TrainerService over gRPC: status, the stream of step records, a checkpoint on demand, the initial model.

It reads the run's state through `status` and changes nothing but through `request_checkpoint`. The initial policy that a run
built is sent in chunks, for actors that share no disk with the trainer: one folder under one name, and nothing that a caller
could point elsewhere. Where the policy is a hub model or a folder of the user's, actors have that themselves, and are told so.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

import grpc

from pipelinerl.errors import ServiceError
from pipelinerl.initial_model import CHUNK_BYTES, COMPLETE, MOST_FILES, built_name, is_built
from pipelinerl.recipe.fields import Recipe
from pipelinerl.run_summary import StepRecord, to_json
from pipelinerl.v1 import trainer_pb2, trainer_pb2_grpc
from services.trainer.checkpoint.checkpointer import WrittenCheckpoint


async def initial_files(recipe: Recipe, run: str, source: str, asked: str) -> AsyncIterator[trainer_pb2.InitialModelChunk]:
    """All files of the initial policy, which was loaded from `source`; `config.json` last, a chunk in memory at a time.

    Raises `ServiceError` for another model than `asked`, and where the run built none.
    """
    if not is_built(recipe.model):
        kind = {"hub": "a hub model", "path": "a folder"}[recipe.model.source]
        raise ServiceError(f"the initial model of this run is {kind}, {recipe.model.name}: it is not sent to actors")
    if asked != (name := built_name(recipe, run)):
        raise ServiceError(f"this trainer's initial model is {name}, not {asked!r}: its recipe is another one")
    files = model_files(Path(source))
    for path in files:
        async for chunk in _file_chunks(path, len(files)):
            yield chunk


def model_files(folder: Path) -> list[Path]:
    """Those to send. Raises `ServiceError` where there are more than a model has."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
    if len(files) > MOST_FILES:
        raise ServiceError(f"{folder} holds {len(files)} files, more than the {MOST_FILES} of a model")
    return sorted(files, key=lambda path: path.name == COMPLETE)


async def _file_chunks(path: Path, num_files: int) -> AsyncIterator[trainer_pb2.InitialModelChunk]:
    """At least one, also of an empty file. The last has the checksum, so that none waits until the file was read."""
    digest = hashlib.sha256()

    def read() -> bytes:
        data = file.read(CHUNK_BYTES)
        digest.update(data)
        return data

    with path.open("rb") as file:
        size, last = os.fstat(file.fileno()).st_size, False
        while not last:
            data = await asyncio.to_thread(read)
            last = not data or file.tell() >= size
            checksum = digest.digest() if last else b""
            yield trainer_pb2.InitialModelChunk(file=path.name, size_bytes=size, sha256=checksum, data=data, files=num_files)


class StepFeed:
    """The run's step records, for any number of readers at their own pace. Ends with the run.

    Keeps one record (a few kilobytes) for each step of the run, so that a late reader has them all. Used on one event loop.
    """

    def __init__(self, records: Iterable[StepRecord] = ()) -> None:
        """`records`: of the run's steps so far."""
        self._records = list(records)
        self._changed = asyncio.Event()
        self._ended = False

    def add(self, record: StepRecord) -> None:
        self._records.append(record)
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        """Readers wait for the event that was there when they looked; the next change has one of its own."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def read(self, from_step: int) -> AsyncIterator[StepRecord]:
        """Records of steps >= `from_step`, those already taken first."""
        position = 0
        while position < len(self._records) or not self._ended:
            if position == len(self._records):
                await self._changed.wait()
                continue
            record = self._records[position]
            position += 1
            if record["step"] >= from_step:
                yield record


class TrainerService(trainer_pb2_grpc.TrainerServiceServicer):
    """`status()` describes the run now; `request_checkpoint()` returns a checkpoint once written. `source`: where this trainer
    loaded the initial policy from.

    A run that has ended, or ends before a checkpoint is begun, answers CheckpointNow with FAILED_PRECONDITION; an initial model
    that it does not have is refused in the same way.
    """

    def __init__(
        self,
        feed: StepFeed,
        status: Callable[[], trainer_pb2.TrainerStatus],
        request_checkpoint: Callable[[], Awaitable[WrittenCheckpoint]],
        recipe: Recipe,
        source: str,
    ) -> None:
        self._feed, self._status, self._request_checkpoint = feed, status, request_checkpoint
        self._recipe, self._source = recipe, source

    async def GetStatus(
        self, request: trainer_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.TrainerStatus:
        return self._status()

    async def StreamMetrics(
        self, request: trainer_pb2.StreamMetricsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[trainer_pb2.StepMetrics]:
        async for record in self._feed.read(request.from_step):
            yield trainer_pb2.StepMetrics(step=record["step"], json=to_json(record))

    async def CheckpointNow(
        self, request: trainer_pb2.CheckpointNowRequest, context: grpc.aio.ServicerContext
    ) -> trainer_pb2.CheckpointNowResponse:
        try:
            written = await self._request_checkpoint()
        except ServiceError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return trainer_pb2.CheckpointNowResponse(path=str(written.folder), policy_version=written.version)

    async def GetInitialModel(
        self, request: trainer_pb2.GetInitialModelRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[trainer_pb2.InitialModelChunk]:
        try:
            async for chunk in initial_files(self._recipe, self._status().run, self._source, request.name):
                yield chunk
        except ServiceError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
