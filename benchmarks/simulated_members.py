"""Many simulated actors in a few processes: a consumer, the product's heartbeat and the answers of an actor each, no weights.

They answer each order as an actor would that takes no time for it. Their trainer's end is `NoBytesSender`. What is left is the
control channel: NATS, its messages, and the trainer's state machines.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from pipelinerl.bus.jetstream import Bus, connect
from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.messages.control import Backend, decode_control
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.manifest import Manifest, TransferResult, build_manifest
from pipelinerl.v1.control_pb2 import Announce, Commit, EpochJoined, EpochStart, Registration, Serving, Staged
from services.actor.app import Heartbeat
from services.actor.weight_sync.updates import ServingGate

RUN = "simulated"
MANIFEST: Manifest = build_manifest([("w", (4,), "float32")])
CHECKSUM = 1
ORDERS = {"epoch": EpochStart, "announce": Announce, "commit": Commit}
REQUEST_TIMEOUT_S = 60.0


class NoBytesSender:
    """Implements `sender.WeightSender`: every group stands at once, and every broadcast takes `transfer_s`. `bytes_sent`: what
    rank 0 would send, the version once for each broadcast, as over a chain or a ring."""

    manifest: Manifest = MANIFEST
    backend: Backend = "gloo"

    def __init__(self, transfer_s: float = 0.0) -> None:
        self.transfer_s, self.bytes_sent = transfer_s, 0

    def open_group(self, epoch: int, world_size: int, deadline_s: float, patience_s: float | None) -> NoBytesGroup:
        return NoBytesGroup(self)


class NoBytesGroup:
    store_address = "127.0.0.1:1"

    def __init__(self, sender: NoBytesSender) -> None:
        self._sender = sender

    async def built(self) -> None:
        return

    async def broadcast(self, snapshot: object, deadline_s: float) -> TransferResult:
        self._sender.bytes_sent += MANIFEST.total_bytes
        await asyncio.sleep(self._sender.transfer_s)
        return TransferResult(CHECKSUM, MANIFEST.total_bytes, self._sender.transfer_s)

    async def abandon(self) -> None:
        return


class SimulatedMember:
    """Follows the control channel by a consumer of its own, and answers at once what is for it.

    Orders are decoded once a process: a thousand decodings of the same thousand members, which a thousand machines would do
    at the same time, would otherwise be most of what is measured.
    """

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus, self._name = bus, name
        self._epoch = 0
        self.gate = ServingGate(max_lag=None)

    async def run(self, following: asyncio.Event) -> None:
        """Runs until cancelled."""
        async with self._bus.watch_control(tuple(ORDERS), self._name) as messages:
            following.set()
            async for message in messages:
                await self._answer(decoded(message.kind, message.payload))

    async def _answer(self, order: object) -> None:
        match order:
            case EpochStart() if any(member.actor == self._name for member in order.members):
                self._epoch = order.epoch
                await self._say("joined", EpochJoined(actor=self._name, incarnation=order.incarnation, epoch=order.epoch))
            case Announce() if order.epoch == self._epoch:
                staged = Staged(
                    actor=self._name,
                    incarnation=order.incarnation,
                    epoch=order.epoch,
                    version=order.version,
                    checksum=CHECKSUM,
                    bytes=MANIFEST.total_bytes,
                    receive_s=0.0,
                    prepare_s=0.0,
                )
                await self._say("staged", staged)
            case Commit() if order.epoch == self._epoch:
                self.gate.serve(PolicyVersion(order.incarnation, order.version))
                await self._say(
                    "serving",
                    Serving(
                        actor=self._name, incarnation=order.incarnation, epoch=order.epoch, version=order.version, stall_s=0.0
                    ),
                )

    async def _say(self, kind: str, answer: EpochJoined | Staged | Serving) -> None:
        await self._bus.publish_control(kind, answer.SerializeToString(), self._name)


@lru_cache(maxsize=16)
def decoded(kind: str, payload: bytes) -> object:
    return decode_control(payload, ORDERS[kind])


async def _live(url: str, names: Sequence[str], limits: StreamLimits, orders: Connection) -> None:
    """Listens for all, says so, and starts the hearts when told to."""
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(
            connect(url, RUN, limits=limits, name=names[0], request_timeout_s=REQUEST_TIMEOUT_S)
        )
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        members = {name: SimulatedMember(bus, name) for name in names}
        for member in members.values():
            following = asyncio.Event()
            tasks.create_task(member.run(following))
            await following.wait()
        orders.send("listening")
        await asyncio.to_thread(orders.recv)
        for name, member in members.items():
            me = Registration(actor=name, process=f"p-{name}", grpc_address="-:1", ranks=1)
            heart = Heartbeat(bus, member.gate, lambda: MANIFEST.manifest_id, me)
            tasks.create_task(heart.run())


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
def crowd(url: str, members: int, processes: int, limits: StreamLimits, prefix: str = "m") -> Iterator[Crowd]:
    """Starts `members` members in `processes` processes, one connection each; kills them at the block's end."""
    names = [f"{prefix}{number:05d}" for number in range(members)]
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
