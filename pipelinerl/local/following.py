"""Keep a `RunState` up to date: ask a run's services over gRPC for step metrics, phases and actor states.

A service that does not answer is not an error here, because the runner handles dead services. Loops run until cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc
import grpc.aio

from pipelinerl.errors import ServiceError
from pipelinerl.local.processes import Service, ServiceDied, ServiceProcess
from pipelinerl.local.progress import RunState
from pipelinerl.service.grpc import open_channel
from pipelinerl.service.logs import printable
from pipelinerl.service.settings import ServiceAddress, read_address
from pipelinerl.service.tls import Certificates
from pipelinerl.v1 import actor_pb2, actor_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from pipelinerl.v1.actor_pb2 import ActorState

_CALL_TIMEOUT_S = 2.0
_RETRY_S = 0.5
_ASK_S = 1.0


async def follow_trainer(
    service: Service,
    certificates: Certificates,
    state: RunState,
    elapsed_s: Callable[[], float],
    on_up: Callable[[ServiceAddress], None],
) -> None:
    """Follow the steps and the status of the trainer, and of each process that replaces it after a restart. When a process has
    written its address, call `on_up` with that address. A trainer that dies is not reported here."""
    followed: ServiceProcess | None = None
    while True:
        process = service.process
        if process is None or process is followed:
            await asyncio.sleep(_RETRY_S)
            continue
        followed = process
        with contextlib.suppress(ServiceDied):
            address = await process.address(timeout_s=math.inf)
            on_up(address)
            async with asyncio.TaskGroup() as group:  # An error in this group ends the run at once.
                following = group.create_task(follow_calls(open_channel(address.grpc, certificates), state, elapsed_s))
                await process.wait()
                following.cancel()


async def follow_calls(channel: grpc.aio.Channel, state: RunState, elapsed_s: Callable[[], float]) -> None:
    """Follow the steps and the status of a trainer across its restarts, and close the channel at the end."""
    async with channel, asyncio.TaskGroup() as group:
        trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        group.create_task(_follow_status(trainer, state))
        group.create_task(_follow_steps(trainer, state, elapsed_s))


async def _follow_status(trainer: trainer_pb2_grpc.TrainerServiceStub, state: RunState) -> None:
    while True:
        if (status := await _status(trainer)) is not None:
            phase = trainer_pb2.TrainerPhase.Name(status.phase).removeprefix("TRAINER_PHASE_").lower()
            state.phase = printable(status.message or phase.replace("_", " "))
            counts = status.sequences
            state.failures = dict(status.failures)
            state.sequences = {field.name: getattr(counts, field.name) for field in counts.DESCRIPTOR.fields}
        await asyncio.sleep(_ASK_S)


async def _status(trainer: trainer_pb2_grpc.TrainerServiceStub) -> trainer_pb2.TrainerStatus | None:
    try:
        return await trainer.GetStatus(trainer_pb2.GetStatusRequest(), timeout=_CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return None


async def _follow_steps(trainer: trainer_pb2_grpc.TrainerServiceStub, state: RunState, elapsed_s: Callable[[], float]) -> None:
    """Record every optimizer step once, in order, and remove the steps that a restart of the trainer undid."""
    incarnation, begun, heard = -1, 0, 0
    while True:
        if (status := await _status(trainer)) is not None:
            if status.incarnation != incarnation:
                incarnation, begun = status.incarnation, status.policy_version
                state.rewind(begun)
                heard = state.step
            with contextlib.suppress(grpc.aio.AioRpcError):  # The trainer is starting or ending.
                async for message in trainer.StreamMetrics(trainer_pb2.StreamMetricsRequest(from_step=heard + 1)):
                    if message.step > heard:
                        heard = message.step
                        # Steps that this trainer took before the runner reached it do not count for the pace.
                        state.on_step(json.loads(message.json), elapsed_s() if heard > begun else None)
        await asyncio.sleep(_RETRY_S)


async def watch_actors(actors: Mapping[int, Service], certificates: Certificates, state: RunState) -> None:
    """Ask all actors for their states every `_ASK_S` seconds. `actors`: the present actors by number."""

    async def asked(service: Service) -> tuple[str, ActorState | str]:
        if (process := service.process) is None or process.returncode is not None:
            return service.name, "down"
        return service.name, await ask_actor(process.launch.address_file, certificates)

    while True:
        state.actors = dict(await asyncio.gather(*(asked(actors[number]) for number in sorted(actors))))
        await asyncio.sleep(_ASK_S)


async def ask_actor(address_file: Path, certificates: Certificates) -> ActorState | str:
    """Return the state of the actor with this address file, or the reason why it is unknown."""
    try:
        address = read_address(address_file).grpc
    except ServiceError:
        return "starting"
    async with open_channel(address, certificates) as channel:
        actor = actor_pb2_grpc.ActorServiceStub(channel)
        try:
            return await actor.GetState(actor_pb2.GetStateRequest(), timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return "not answering"
