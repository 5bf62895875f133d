"""TrainerService over real gRPC: readers of the step feed, checkpoints on demand and their refusal."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from pipelinerl.errors import ServiceError
from pipelinerl.service.grpc import serve_grpc
from pipelinerl.v1 import trainer_pb2, trainer_pb2_grpc
from services.trainer.checkpoint.checkpointer import WrittenCheckpoint
from services.trainer.server import StepFeed, TrainerService
from tests.unit.builders import make_recipe


async def written() -> WrittenCheckpoint:
    return WrittenCheckpoint(Path("checkpoints/step-7"), 7, 0, 0.1)


@asynccontextmanager
async def service(
    feed: StepFeed, request_checkpoint: Callable[[], Awaitable[WrittenCheckpoint]] = written
) -> AsyncIterator[trainer_pb2_grpc.TrainerServiceStub]:
    status = trainer_pb2.TrainerStatus(run="unit", policy_version=7)
    servicer = TrainerService(feed, lambda: status, request_checkpoint, make_recipe(), "nowhere")

    def register(server: grpc.aio.Server) -> None:
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server)

    async with (
        serve_grpc(register, ["pipelinerl.v1.TrainerService"], "127.0.0.1", 0, stop_grace_s=0.1) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield trainer_pb2_grpc.TrainerServiceStub(channel)


async def test_readers_get_past_and_coming_steps_until_the_end() -> None:
    feed = StepFeed()
    feed.add({"step": 1, "loss": 0.5})
    feed.add({"step": 2, "loss": float("nan")})
    async with service(feed) as stub, asyncio.timeout(60):
        first = stub.StreamMetrics(trainer_pb2.StreamMetricsRequest(from_step=1))
        late = stub.StreamMetrics(trainer_pb2.StreamMetricsRequest(from_step=3))
        told = [json.loads((await first.read()).json) for _ in range(2)]
        assert told == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}]
        feed.add({"step": 3})
        assert ((await first.read()).step, (await late.read()).step) == (3, 3)
        feed.add(None)
        assert await first.read() is grpc.aio.EOF
        assert await late.read() is grpc.aio.EOF
        again = stub.StreamMetrics(trainer_pb2.StreamMetricsRequest())
        assert [message.step async for message in again] == [1, 2, 3]


async def test_status_and_checkpoint() -> None:
    async with service(StepFeed()) as stub:
        assert (await stub.GetStatus(trainer_pb2.GetStatusRequest())).policy_version == 7
        answer = await stub.CheckpointNow(trainer_pb2.CheckpointNowRequest())
        assert (answer.path, answer.policy_version) == ("checkpoints/step-7", 7)


async def test_a_refused_checkpoint_says_why() -> None:
    async def refused() -> WrittenCheckpoint:
        raise ServiceError("the run has ended: no more checkpoints are written")

    async with service(StepFeed(), refused) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.CheckpointNow(trainer_pb2.CheckpointNowRequest())
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert raised.value.details() == "the run has ended: no more checkpoints are written"
