"""Trainer and actors of the weight-update protocol together, while actors come and go and messages arrive late: nothing that
somebody says or does has to be ended by a deadline. Real messages and state machines, no bytes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

import pytest

from pipelinerl.errors import TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.manifest import GroupFailed, GroupSpec, TransferResult
from services.actor.weight_sync.client import StagedWeights
from tests.support.memory_bus import MemoryServer
from tests.unit.test_update_protocol import ScriptedGroup, ScriptedReceiver, ScriptedSender, Stage, ended, stage, start_actor


class Wire:
    """A transfer group without bytes: it stands when all ranks are there, and a version has arrived when all take it. Who
    leaves breaks it for everybody."""

    def __init__(self, world: int) -> None:
        self.world, self.here, self.broken, self.sent = world, {0}, False, -1
        self.taken: defaultdict[int, set[int]] = defaultdict(set)

    def stands(self) -> bool:
        return len(self.here) == self.world

    def arrived(self, version: int) -> bool:
        return self.sent == version and len(self.taken[version]) == self.world - 1

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self.broken:
                raise GroupFailed("", "somebody left")
            await asyncio.sleep(0)


@dataclass
class WiredSender(ScriptedSender):
    wires: dict[str, Wire] = field(default_factory=dict)

    def open_group(self, epoch: int, world_size: int, deadline_s: float, patience_s: float | None) -> WiredGroup:
        wire = self.wires[f"epoch-{epoch}"] = Wire(world_size)
        return WiredGroup(self.sent, wire=wire)


@dataclass
class WiredGroup(ScriptedGroup):
    wire: Wire = field(default_factory=lambda: Wire(1))

    async def built(self) -> None:
        await self.wire.until(self.wire.stands)

    async def broadcast(self, snapshot: object, deadline_s: float) -> TransferResult:
        version = self.wire.sent = int(str(snapshot).rpartition("-")[2])
        await self.wire.until(lambda: self.wire.arrived(version))
        return await super().broadcast(snapshot, deadline_s)

    async def abandon(self) -> None:
        self.wire.broken = True
        await super().abandon()


@dataclass
class WiredReceiver(ScriptedReceiver):
    wires: dict[str, Wire] = field(default_factory=dict)
    wire: Wire | None = None
    rank: int = 0
    fails: bool = False
    """The next receive."""

    def leave(self) -> None:
        if self.wire is not None:
            self.wire.broken = True
            self.wire = None

    async def join_group(self, group: GroupSpec, timeout_s: float) -> None:
        self.leave()
        self.wire = wire = self.wires[group.name]
        self.rank = group.rank
        wire.here.add(group.rank)
        await self._as_long_as_it_stands(wire, wire.stands)

    async def receive(self, version: PolicyVersion, deadline_s: float) -> StagedWeights:
        if (wire := self.wire) is None:
            raise TransferError("no transfer group is joined")
        if self.fails:
            self.fails = False
            self.leave()
            raise TransferError("disk full")
        wire.taken[version.number].add(self.rank)
        await self._as_long_as_it_stands(wire, lambda: wire.arrived(version.number))
        return await super().receive(version, deadline_s)

    async def commit(self, version: PolicyVersion) -> float:
        assert not self.served or version.number >= self.served[-1].number, "an actor never goes back"
        return await super().commit(version)

    async def _as_long_as_it_stands(self, wire: Wire, condition: Callable[[], bool]) -> None:
        try:
            await wire.until(condition)
        except BaseException:
            self.leave()
            raise


@dataclass
class Churn:
    """Actors that come, go, fail and lose their heartbeats while versions are sent, as a seed decides."""

    one: Stage
    sender: WiredSender
    random: Random
    births: Iterator[int] = field(default_factory=lambda: count(1))
    version: int = -1
    offering: asyncio.Future[None] | None = None

    async def something(self) -> None:
        choice, name = self.random.random(), self.random.choice("abcd")
        actor = self.one.actors.get(name)
        if actor is None:
            await self.start(name)
        elif choice < 0.1:
            await self.kill(name)
        elif choice < 0.15:  # its container starts again
            await self.kill(name, forgotten=False)
            await self.start(name)
        elif choice < 0.25:  # its heart stops for a while
            await actor.bus.remove_member(name)
        elif choice < 0.5:
            await actor.register()
        elif choice < 0.6:
            actor.receiver.fails = True
        elif choice < 0.8:
            self.offer()
        for _ in range(self.random.choice((0, 3, 30, 100))):
            await asyncio.sleep(0)

    async def start(self, name: str) -> None:
        receiver, process = WiredReceiver(wires=self.sender.wires), f"p{next(self.births)}"
        actor = await start_actor(name, self.one.server, self.one.stack, receiver, process)
        self.one.stack.push_async_callback(ended, actor.task)
        self.one.actors[name] = actor
        await actor.register()

    async def kill(self, name: str, *, forgotten: bool = True) -> None:
        actor = self.one.actors.pop(name)
        assert not actor.task.done(), actor.task
        await ended(actor.task)
        actor.receiver.leave()
        if forgotten:
            await actor.bus.remove_member(name)

    def offer(self) -> None:
        if self.offering is None or self.offering.done():
            self.version += 1
            offer = self.one.updater.offer(self.version, f"snapshot-{self.version}")
            self.offering = asyncio.ensure_future(offer)

    def is_settled(self) -> bool:
        updater, names = self.one.updater, sorted(self.one.actors)
        served = all(self.one.served(name)[-1:] == [self.version] for name in names)
        return served and updater.served_version == self.version and sorted(updater.serving) == names

    async def settle(self) -> None:
        """The faults end and hearts beat: every actor comes to serve the newest version, whatever was under way."""
        for actor in self.one.actors.values():
            actor.receiver.fails = False
        calm = 0
        for _ in range(1000):
            for actor in self.one.actors.values():
                await actor.register()
                assert not actor.task.done(), actor.task
            for _ in range(50):
                await asyncio.sleep(0)
            assert not self.one.running.done(), self.one.running
            calm = calm + 1 if self.is_settled() else 0
            if calm == 10:  # what is late has come by then
                return
        raise AssertionError(f"version {self.version}: { ({name: self.one.served(name) for name in self.one.actors}) }")


@pytest.mark.parametrize("seed", range(20))
async def test_whoever_comes_and_goes_everybody_is_brought_to_the_newest_version_without_a_deadline(seed: int) -> None:
    random, sender = Random(seed), WiredSender()
    server = MemoryServer(lateness=lambda: random.choice((0, 0, 1, 5, 40)))
    async with stage(deadline_s=600, join_timeout_s=600, server=server, sender=sender) as one:
        churn = Churn(one, sender, random)
        for _ in range(60):
            await churn.something()
        await churn.start("e")
        churn.offer()
        await churn.settle()
        evictions = one.updater.evictions
        churn.offer()
        await churn.settle()
        assert (set(one.updater.members), one.updater.evictions) == (set(one.actors), evictions)
