"""Many simulated actors in a few processes: the product's listener and heartbeat each, with weights that are never sent.

They answer each order as an actor would that takes no time for it. Their trainer's end is `NoBytesPort`. What is left is the
control channel: NATS, its messages, and the trainer's state machines.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

from prometheus_client import CollectorRegistry

from pipelinerl.bus.jetstream import connect
from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.control import Backend, RunEnd
from pipelinerl.types import PolicyVersion
from pipelinerl.weights.manifest import Manifest, build_manifest
from services.actor.gate import ServingGate
from services.actor.membership import Heartbeat
from services.actor.metrics import ActorMetrics
from services.actor.updates import UpdateListener
from services.actor.weights.staged import StagedWeights
from services.trainer.lane import SentBytes

RUN = "simulated"
MANIFEST: Manifest = build_manifest([("w", (4,), "float32")])
CHECKSUM = 1
REQUEST_TIMEOUT_S = 60.0


class NoBytesPort:
    """Implements `lane.TransferPort`: every group stands at once and every broadcast is over at once."""

    manifest: Manifest = MANIFEST
    backend: Backend = "gloo"

    async def open_group(self, epoch: int, world_size: int, deadline_s: float) -> NoBytesGroup:
        return NoBytesGroup()


class NoBytesGroup:
    store_address = "127.0.0.1:1"

    async def built(self) -> None:
        return

    async def broadcast(self, snapshot: object, deadline_s: float) -> SentBytes:
        return SentBytes(CHECKSUM, MANIFEST.total_bytes, 0.0)

    async def abandon(self) -> None:
        return


class NoBytesReceiver:
    """Implements `services.actor.updates.WeightReceiver`."""

    async def prepare(self, manifest: Manifest) -> None:
        return

    async def join_group(self, **where: object) -> None:
        return

    async def receive(self, version: PolicyVersion, deadline_s: float) -> StagedWeights:
        return StagedWeights(CHECKSUM, MANIFEST.total_bytes, 0.0, 0.0)

    async def commit(self, version: PolicyVersion) -> float:
        return 0.0

    async def discard(self) -> None:
        return


async def _never(_: RunEnd) -> None:
    raise AssertionError("nobody ends this run")


async def _live(url: str, names: Sequence[str], limits: StreamLimits, orders: Connection) -> None:
    """Listens for all, says so, and starts the hearts when told to."""
    metrics = ActorMetrics(CollectorRegistry())
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(
            connect(url, RUN, limits=limits, name=names[0], request_timeout_s=REQUEST_TIMEOUT_S)
        )
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        hearts = []
        for name in names:
            gate = ServingGate(max_lag=None)
            listener = UpdateListener(
                bus, NoBytesReceiver(), gate, metrics, instance=name, process=f"p-{name}", on_end=_never
            )
            tasks.create_task(listener.run())
            hearts.append(
                Heartbeat(bus, gate, _id_of(listener), actor=name, process=f"p-{name}", grpc_address="-:1", ranks=1)
            )
            while not listener.manifest_id:
                await asyncio.sleep(0.001)
        orders.send("listening")
        await asyncio.to_thread(orders.recv)
        for heart in hearts:
            tasks.create_task(heart.run())


def _id_of(listener: UpdateListener) -> Any:
    return lambda: listener.manifest_id


def _main(url: str, names: Sequence[str], limits: StreamLimits, orders: Connection) -> None:
    asyncio.run(_live(url, names, limits, orders))


class Crowd:
    """The watcher's end of the processes."""

    def __init__(self, processes: Sequence[Any], orders: Sequence[Connection]) -> None:
        self._processes, self._orders = processes, orders

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    async def listening(self) -> None:
        """Returns when all members follow the control channel. Raises EOFError when a process died."""
        for orders in self._orders:
            await asyncio.to_thread(orders.recv)

    def register(self) -> None:
        """Hearts begin to beat."""
        for orders in self._orders:
            orders.send("register")


@contextmanager
def crowd(url: str, members: int, processes: int, limits: StreamLimits) -> Iterator[Crowd]:
    """Starts `members` members in `processes` processes, one connection each; kills them at the block's end."""
    names = [f"m{number:05d}" for number in range(members)]
    context, started, orders = multiprocessing.get_context("spawn"), [], []
    for index in range(processes):
        here, there = multiprocessing.Pipe()
        process = context.Process(target=_main, args=(url, names[index::processes], limits, there), daemon=True)
        process.start()
        there.close()
        started.append(process)
        orders.append(here)
    try:
        yield Crowd(started, orders)
    finally:
        for process in started:
            process.kill()
            process.join()


def cpu_seconds(pid: int) -> float:
    """User and system time that process `pid` has taken (Linux)."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
