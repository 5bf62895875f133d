"""Loops that keep a `RunState` fresh while a run goes on. Each ends only by being cancelled, and changes nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from pipelinerl.local.follow import TrainerLink, actor_view
from pipelinerl.local.process import ServiceDied, ServiceProcess
from pipelinerl.local.progress_view import ActorView, RunState
from pipelinerl.local.supervisor import SupervisedService
from pipelinerl.service.address import ServiceAddress, read_address

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
