"""What the services of a run say about themselves over gRPC: step metrics, the trainer's phase, the actors' states.

Only asks. A service that does not answer is a state to show, not an error: whether it lives is the supervisor's business.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from pipelinerl.local.progress_view import ActorView
from pipelinerl.v1 import actor_pb2, actor_pb2_grpc, trainer_pb2, trainer_pb2_grpc

_CALL_TIMEOUT_S = 2.0
_RETRY_S = 0.5
_LOOPBACK = (("grpc.enable_http_proxy", 0),)


@dataclass(frozen=True)
class TrainerView:
    """The trainer as it describes itself. `message`: what it waits for, for a person."""

    phase: str
    message: str
    policy_version: int
    members: int
    sequences: dict[str, int]

    @property
    def text(self) -> str:
        return self.message or self.phase.replace("_", " ")


class TrainerLink:
    """One channel to the trainer at `address` (host:port). Used as an async context manager."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_LOOPBACK)
        self._stub = trainer_pb2_grpc.TrainerServiceStub(self._channel)

    async def __aenter__(self) -> TrainerLink:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def status(self) -> TrainerView | None:
        """None when it does not answer."""
        try:
            status = await self._stub.GetStatus(trainer_pb2.GetStatusRequest(), timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
        phase = trainer_pb2.TrainerPhase.Name(status.phase).removeprefix("TRAINER_PHASE_").lower()
        counts = {field.name: getattr(status.sequences, field.name) for field in status.sequences.DESCRIPTOR.fields}
        return TrainerView(phase, status.message, status.policy_version, status.members, counts)

    async def first_status(self) -> TrainerView:
        """Waits for an answer: the caller cancels it when the trainer's process has ended."""
        while True:
            view = await self.status()
            if view is not None:
                return view
            await asyncio.sleep(_RETRY_S)

    async def steps(self, from_step: int = 0) -> AsyncIterator[dict[str, Any]]:
        """The object of metrics.jsonl of every optimizer step from that one on, each once, in order; goes on after a broken
        stream.

        Never ends by itself: the caller cancels it when the trainer's process has ended.
        """
        heard = from_step - 1
        while True:
            try:
                request = trainer_pb2.StreamMetricsRequest(from_step=heard + 1)
                async for message in self._stub.StreamMetrics(request):
                    if message.step > heard:
                        heard = message.step
                        yield json.loads(message.json)
            except grpc.aio.AioRpcError:
                pass  # it is starting, or ending
            await asyncio.sleep(_RETRY_S)


async def actor_view(name: str, address: str) -> ActorView:
    """The state of the actor at `address`; phase `not answering` when it does not."""
    async with grpc.aio.insecure_channel(address, options=_LOOPBACK) as channel:
        try:
            request = actor_pb2.GetStateRequest()
            state = await actor_pb2_grpc.ActorServiceStub(channel).GetState(request, timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return ActorView(name, "not answering")
    phase = actor_pb2.ActorPhase.Name(state.phase).removeprefix("ACTOR_PHASE_").lower()
    return ActorView(name, phase, state.policy_version, state.sequences_in_progress)
