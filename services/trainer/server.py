"""TrainerService over gRPC: status, the stream of step records, a checkpoint on demand, the initial model.

Reads the run's state through `status`; changes nothing but through `request_checkpoint`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

import grpc

from pipelinerl.errors import ServiceError
from pipelinerl.v1 import trainer_pb2, trainer_pb2_grpc
from services.trainer.initial_files import InitialFiles
from services.trainer.report.records import StepRecord, to_json


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
        while True:
            fresh = await self._after(position)
            if not fresh:
                return
            position += len(fresh)
            for record in fresh:
                if record["step"] >= from_step:
                    yield record

    async def _after(self, position: int) -> list[StepRecord]:
        """Records from `position` on, waiting for one; empty at the run's end."""
        while position == len(self._records) and not self._ended:
            await self._changed.wait()
        return self._records[position:]


class TrainerService(trainer_pb2_grpc.TrainerServiceServicer):
    """`status()` describes the run now; `request_checkpoint()` returns (folder, version) once written.

    A run that has ended, or ends before a checkpoint is begun, answers CheckpointNow with FAILED_PRECONDITION;
    `initial` refuses a model that it does not have in the same way.
    """

    def __init__(
        self,
        feed: StepFeed,
        status: Callable[[], trainer_pb2.TrainerStatus],
        request_checkpoint: Callable[[], Awaitable[tuple[str, int]]],
        initial: InitialFiles,
    ) -> None:
        self._feed, self._status, self._request_checkpoint = feed, status, request_checkpoint
        self._initial = initial

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
            path, version = await self._request_checkpoint()
        except ServiceError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return trainer_pb2.CheckpointNowResponse(path=path, policy_version=version)

    async def GetInitialModel(
        self, request: trainer_pb2.GetInitialModelRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[trainer_pb2.InitialModelChunk]:
        try:
            async for chunk in self._initial.chunks(request.name):
                yield chunk
        except ServiceError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
