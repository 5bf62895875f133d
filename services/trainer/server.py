"""TrainerService over gRPC: status, the stream of step records, a checkpoint on demand, the initial model.

An initial model that the run unpacked or copied is sent in chunks to actors that share no disk with the trainer. A caller names
the model, not files, so it cannot request other files. Actors load other models themselves.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

from grpc import aio

from pipelinerl.errors import ServiceError
from pipelinerl.initial_model import CHUNK_BYTES, built_name, is_built
from pipelinerl.recipe.fields import Recipe
from pipelinerl.run_summary import StepRecord, to_json
from pipelinerl.v1 import trainer_pb2 as pb
from pipelinerl.v1 import trainer_pb2_grpc
from services.trainer.checkpoint.checkpointer import WrittenCheckpoint


async def initial_files(recipe: Recipe, run: str, source: str, asked: str) -> AsyncIterator[pb.InitialModelChunk]:
    """Yield the files of folder `source` in chunks. Raises `ServiceError` if `asked` is not a model that the trainer sends."""
    if not is_built(recipe.model):
        kind = {"hub": "a hub model", "path": "a folder", "package": "part of the package"}[recipe.model.source]
        raise ServiceError(f"this run's initial model is {kind}, {recipe.model.name}: the actor's recipe must name it, too")
    if asked != (name := built_name(recipe, run)):
        raise ServiceError(f"the trainer's initial model is {name}, not {asked!r}: give the actor the same recipe and run name")
    for path in sorted(Path(source).iterdir()):  # noqa: ASYNC240 - it has few files
        if path.is_file() and not path.name.startswith("."):
            with path.open("rb") as file:
                data = await asyncio.to_thread(file.read, CHUNK_BYTES)
                yield pb.InitialModelChunk(file=path.name, data=data)
                while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                    yield pb.InitialModelChunk(file=path.name, data=data)


class StepFeed:
    """The run's step records, for any number of readers on one event loop. All records are kept for late readers."""

    def __init__(self, records: Iterable[StepRecord] = ()) -> None:
        self._records: list[StepRecord | None] = list(records)
        self._changed = asyncio.Event()
        """Wakes waiting readers. `add` sets this event, and replaces it with a new one."""

    def add(self, record: StepRecord | None) -> None:
        """Add a step's record, or None at the end of the run."""
        self._records.append(record)
        self._changed.set()
        self._changed = asyncio.Event()

    async def read(self, from_step: int) -> AsyncIterator[StepRecord]:
        """Yield the records of steps >= `from_step`: first those of past steps, then each new one."""
        for position in itertools.count():
            while position == len(self._records):
                await self._changed.wait()
            record = self._records[position]
            if record is None:
                return
            if record["step"] >= from_step:
                yield record


class TrainerService(trainer_pb2_grpc.TrainerServiceServicer):
    """`status()` returns the run's current status. `request_checkpoint()` returns once a checkpoint is written. `source`:
    folder or hub id of the initial policy. A call that cannot be served fails with FAILED_PRECONDITION and the reason."""

    def __init__(
        self,
        feed: StepFeed,
        status: Callable[[], pb.TrainerStatus],
        request_checkpoint: Callable[[], Awaitable[WrittenCheckpoint]],
        recipe: Recipe,
        source: str,
    ) -> None:
        self._feed, self._status, self._request_checkpoint = feed, status, request_checkpoint
        self._recipe, self._source = recipe, source

    async def GetStatus(self, request: pb.GetStatusRequest, context: aio.ServicerContext) -> pb.TrainerStatus:
        return self._status()

    async def StreamMetrics(
        self, request: pb.StreamMetricsRequest, context: aio.ServicerContext
    ) -> AsyncIterator[pb.StepMetrics]:
        async for record in self._feed.read(request.from_step):
            yield pb.StepMetrics(step=record["step"], json=to_json(record))

    async def CheckpointNow(self, request: pb.CheckpointNowRequest, context: aio.ServicerContext) -> pb.CheckpointNowResponse:
        written = await self._request_checkpoint()
        return pb.CheckpointNowResponse(path=str(written.folder), policy_version=written.version)

    async def GetInitialModel(
        self, request: pb.GetInitialModelRequest, context: aio.ServicerContext
    ) -> AsyncIterator[pb.InitialModelChunk]:
        async for chunk in initial_files(self._recipe, self._status().run, self._source, request.name):
            yield chunk
