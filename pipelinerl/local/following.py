"""What the services of a run say about themselves over gRPC: step metrics, the trainer's phase, the actors' states.

Only asks. A service that does not answer is a state to show, not an error: whether it lives is the supervisor's business.

Loops that keep a `RunState` fresh while a run goes on. Each ends only by being cancelled, and changes nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from pipelinerl.local.processes import ServiceDied, ServiceProcess
from pipelinerl.local.progress import ActorView, RunState
from pipelinerl.local.supervisor import SupervisedService
from pipelinerl.service.address import ServiceAddress, read_address
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


_ASK_S = 1.0


async def follow_trainer(
    service: SupervisedService,
    state: RunState,
    elapsed_s: Callable[[], float],
    on_up: Callable[[ServiceAddress], None] = lambda address: None,
) -> None:
    """Consumes step stream and status of the trainer, and after a restart those of the next one. Waits for its address
    file, which `on_up` is told of; that a trainer died is not news here."""
    process: ServiceProcess | None = None
    while True:
        process = await service.next_process(process)
        with contextlib.suppress(ServiceDied):
            address = await process.address(timeout_s=math.inf)
            on_up(address)
            async with TrainerLink(address.grpc) as link, background(_follow_status(link, state)):
                await _while_it_lives(process, _follow_steps(link, state, elapsed_s))


async def _follow_steps(link: TrainerLink, state: RunState, elapsed_s: Callable[[], float]) -> None:
    """From the version that the trainer began with; steps that it took before it was asked say nothing of the pace."""
    begun = (await link.first_status()).policy_version
    state.rewind(begun)
    async for metrics in link.steps(from_step=state.step + 1):
        state.on_step(metrics, elapsed_s() if (metrics.get("step") or 0) > begun else None)


async def _while_it_lives(process: ServiceProcess, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` until the process ends. Raises what `work` raises."""
    tasks = {asyncio.ensure_future(work), asyncio.ensure_future(process.wait())}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _follow_status(link: TrainerLink, state: RunState) -> None:
    while True:
        status = await link.status()
        if status is not None:
            state.on_phase(status.text)
            state.on_sequences(status.sequences)
        await asyncio.sleep(_ASK_S)


async def watch_actors(services: Callable[[], Sequence[SupervisedService]], state: RunState) -> None:
    """Asks every actor there is for its state, once a second."""
    while True:
        state.on_actors(await asyncio.gather(*(_actor(service) for service in services())))
        await asyncio.sleep(_ASK_S)


async def _actor(service: SupervisedService) -> ActorView:
    process = service.process
    if process is None or process.returncode is not None:
        return ActorView(service.name, "down")
    if not process.launch.address_file.is_file():
        return ActorView(service.name, "starting")
    return await actor_view(service.name, read_address(process.launch.address_file).grpc)


async def pid_ended(pid: int) -> None:
    """Returns when the process ends, child or not. Where the kernel has no pidfd (not Linux) it waits for ever."""
    ended = asyncio.Event()
    if sys.platform != "linux":
        await ended.wait()
        return
    descriptor = os.pidfd_open(pid)
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work` beside the block and cancels it at the block's end. Its error, if it failed, is raised there."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()
