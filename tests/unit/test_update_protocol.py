"""Both sides of the weight-update protocol over an in-memory bus: real messages, no collective and no vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from pipelinerl.bus.memory import MemoryBus, MemoryServer
from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.control import Backend, Registration, RunEnd
from pipelinerl.control_codec import encode_control
from pipelinerl.errors import TransferError
from pipelinerl.types import PolicyVersion
from pipelinerl.weights.manifest import Manifest, build_manifest
from services.actor.gate import ServingGate
from services.actor.metrics import ActorMetrics
from services.actor.updates import UpdateListener
from services.actor.weights.staged import StagedWeights
from services.trainer.updater import SentBytes, UpdateRecord, WeightUpdater
from tests.unit.builders import RUN

MANIFEST = build_manifest([("w", (4,), "float32")])
CHECKSUM = 42


@dataclass
class ScriptedPort:
    """The trainer's end: every broadcast succeeds."""

    manifest: Manifest = MANIFEST
    backend: Backend = "gloo"
    opened: list[tuple[int, int]] = field(default_factory=list)
    sent: list[object] = field(default_factory=list)

    async def open_group(self, epoch: int, world_size: int, deadline_s: float) -> str:
        self.opened.append((epoch, world_size))
        return "127.0.0.1:1"

    async def group_built(self) -> None:
        return

    async def broadcast(self, snapshot: object, deadline_s: float) -> SentBytes:
        self.sent.append(snapshot)
        return SentBytes(CHECKSUM, 16, 0.001)

    async def abandon_group(self) -> None:
        return


@dataclass
class ScriptedReceiver:
    """An actor's inference side. `on_receive` may wait, fail or report another checksum."""

    on_receive: Callable[[PolicyVersion], int] = lambda version: CHECKSUM
    may_receive: asyncio.Event = field(default_factory=asyncio.Event)
    served: list[PolicyVersion] = field(default_factory=list)
    joined: list[tuple[int, int, int]] = field(default_factory=list)
    discards: int = 0

    async def prepare(self, manifest: Manifest) -> None:
        assert manifest.manifest_id == MANIFEST.manifest_id

    async def join_group(
        self, *, store_address: str, epoch: int, first_rank: int, world_size: int, backend: str, deadline_s: float
    ) -> None:
        self.joined.append((epoch, first_rank, world_size))

    async def receive(self, version: PolicyVersion, deadline_s: float) -> StagedWeights:
        await self.may_receive.wait()
        return StagedWeights(self.on_receive(version), 16, 0.001, 0.001)

    async def commit(self, version: PolicyVersion) -> float:
        self.served.append(version)
        return 0.002

    async def discard(self) -> None:
        self.discards += 1


@dataclass
class RunningActor:
    name: str
    bus: MemoryBus
    receiver: ScriptedReceiver
    gate: ServingGate
    listener: UpdateListener
    task: asyncio.Task[None]

    async def register(self, process: str = "p1", ranks: int = 1) -> None:
        registration = Registration(self.name, process, f"{self.name}:1", ranks)
        await self.bus.put_member(self.name, encode_control(registration))


@dataclass
class Stage:
    updater: WeightUpdater
    port: ScriptedPort
    records: list[UpdateRecord]
    actors: dict[str, RunningActor]

    async def send(self, version: int) -> None:
        async with asyncio.timeout(10):
            await self.updater.offer(version, f"snapshot-{version}")
            await self.updater.all_served()


@asynccontextmanager
async def stage(*names: str, deadline_s: float = 5.0) -> AsyncIterator[Stage]:
    server = MemoryServer()
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(MemoryBus(RUN, server=server, limits=StreamLimits(member_ttl_s=600)))
        await bus.create_streams()
        port, records = ScriptedPort(), list[UpdateRecord]()
        updater = WeightUpdater(bus, port, incarnation=1, deadline_s=deadline_s, on_served=records.append)
        tasks = [asyncio.create_task(updater.run())]
        actors = {}
        for name in names:
            actors[name] = await start_actor(name, server, stack)
            tasks.append(actors[name].task)
            await actors[name].register()
        try:
            async with asyncio.timeout(10):
                await updater.wait_for_members(len(names))
            yield Stage(updater, port, records, actors)
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError, ExceptionGroup):
                    await task


async def start_actor(name: str, server: MemoryServer, stack: AsyncExitStack) -> RunningActor:
    bus = await stack.enter_async_context(MemoryBus(RUN, server=server, limits=StreamLimits(member_ttl_s=600)))
    receiver, gate = ScriptedReceiver(), ServingGate(max_lag=None)
    receiver.may_receive.set()

    async def on_end(end: RunEnd) -> None:
        raise AssertionError("nobody ends this run")

    listener = UpdateListener(
        bus, receiver, gate, ActorMetrics(CollectorRegistry()), instance=name, process="p1", on_end=on_end
    )
    return RunningActor(name, bus, receiver, gate, listener, asyncio.create_task(listener.run()))


async def test_every_actor_serves_what_was_sent() -> None:
    async with stage("a", "b") as one:
        await one.send(0)
        await one.send(1)
        for actor in one.actors.values():
            assert actor.receiver.served == [PolicyVersion(1, 0), PolicyVersion(1, 1)]
            assert actor.gate.served == PolicyVersion(1, 1)
        assert one.port.opened == [(1, 3)]
        assert [a.receiver.joined for a in one.actors.values()] == [[(1, 1, 3)], [(1, 2, 3)]]
        assert one.records[1].stall_s == {"a": 0.002, "b": 0.002}
        assert one.port.sent == ["snapshot-0", "snapshot-1"]


async def test_nobody_commits_before_everybody_staged() -> None:
    async with stage("a", "b") as one:
        one.actors["b"].receiver.may_receive.clear()
        sending = asyncio.create_task(one.send(0))
        async with asyncio.timeout(10):
            while not one.port.sent:
                await asyncio.sleep(0)
        assert one.actors["a"].receiver.served == []
        one.actors["b"].receiver.may_receive.set()
        await sending
        assert [len(actor.receiver.served) for actor in one.actors.values()] == [1, 1]


async def test_an_actor_that_misses_the_deadline_does_not_stop_the_others() -> None:
    async with stage("a", "b", deadline_s=0.2) as one:
        one.actors["b"].receiver.may_receive.clear()
        await one.send(0)
        assert one.actors["a"].receiver.served == [PolicyVersion(1, 0)]
        assert one.actors["b"].receiver.served == []
        assert one.actors["b"].receiver.discards == 1
        assert one.updater.evictions == 1
        assert one.port.opened == [(1, 3), (2, 2)]
        one.actors["b"].receiver.may_receive.set()
        await one.send(1)
        assert one.actors["b"].receiver.served == [PolicyVersion(1, 1)]


async def test_other_bytes_than_were_sent_are_never_served() -> None:
    async with stage("a", "b") as one:
        one.actors["b"].receiver.on_receive = lambda version: CHECKSUM + 1
        await one.send(0)
        assert one.actors["a"].receiver.served == [PolicyVersion(1, 0)]
        assert one.actors["b"].receiver.served == []


async def test_a_failed_receive_is_said_and_the_rest_go_on() -> None:
    async with stage("a", "b") as one:

        def fail(version: PolicyVersion) -> int:
            raise TransferError("disk full")

        one.actors["b"].receiver.on_receive = fail
        await one.send(0)
        assert one.actors["a"].receiver.served == [PolicyVersion(1, 0)]
        one.actors["b"].receiver.on_receive = lambda version: CHECKSUM
        await one.send(1)
        assert one.actors["b"].receiver.served == [PolicyVersion(1, 1)]


async def test_with_no_actor_left_a_version_waits_for_the_next_one() -> None:
    async with stage("a") as one:
        await one.send(0)
        await one.actors["a"].bus.remove_member("a")
        await one.updater.offer(1, "snapshot-1")
        async with asyncio.timeout(10):
            while one.updater.phase != "waiting for members":
                await asyncio.sleep(0)
            await one.actors["a"].register()
            await one.updater.all_served()
        assert one.actors["a"].receiver.served == [PolicyVersion(1, 0), PolicyVersion(1, 1)]


async def test_a_measured_version_is_kept_until_it_is_released() -> None:
    async with stage("a") as one:
        actor = one.actors["a"]
        await one.updater.offer(0, "snapshot-0")
        async with asyncio.timeout(10):
            async with one.updater.hold_when_served(0):
                await one.updater.offer(1, "snapshot-1")
                while len(one.port.sent) < 2:
                    await asyncio.sleep(0)
                assert actor.receiver.served == [PolicyVersion(1, 0)]
            await one.updater.all_served()
        assert actor.receiver.served == [PolicyVersion(1, 0), PolicyVersion(1, 1)]


async def test_a_tensor_parallel_actor_takes_consecutive_ranks() -> None:
    async with stage("a", "b") as one:
        await one.actors["a"].register(ranks=4)
        async with asyncio.timeout(10):
            while one.updater._coordinator.present["a"].ranks != 4:
                await asyncio.sleep(0)
        await one.send(0)
        assert one.port.opened == [(1, 6)]
        assert one.actors["b"].receiver.joined == [(1, 5, 6)]
