"""A trainer's updater with members as processes: real NATS, control channel and Gloo groups; only the engines are absent.

The stage keeps what every test checks at its end: which bytes belong to which version, and all that was said on the
control channel, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.light_members import Break, LightMember, MemberSpec, light_member, weights_checksum
from pipelinerl.bus.jetstream import Bus, connect
from pipelinerl.bus.protocol import EVERY_ACTOR, StreamLimits
from pipelinerl.local.nats import NatsServer
from pipelinerl.messages.control import (
    Commit,
    EpochStart,
    Serving,
    Staged,
    decode_control,
)
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.chunks import describe
from pipelinerl.transfer.group import GroupStore
from services.trainer.weight_sync.membership import MemberChange
from services.trainer.weight_sync.sender import CollectivePort, WeightSender
from services.trainer.weight_sync.updater import UpdateRecord, WeightUpdater
from tests.faults.network import Place

RUN = "faults"
DEADLINE_S = 3.0
LIMITS = StreamLimits(member_ttl_s=1.5, in_memory=True)
UPDATE_WITHIN_S = 10 * DEADLINE_S
"""Far above what any one failure may cost: reached only by something that waits for ever."""
HEARD = {"epoch": EpochStart, "staged": Staged, "commit": Commit, "serving": Serving}


@dataclass
class FaultStage:
    server: NatsServer
    bus: Bus
    updater: WeightUpdater
    sender: WeightSender
    stack: AsyncExitStack
    running: asyncio.Task[None]
    members: list[LightMember] = field(default_factory=list)
    """All that were ever started."""
    checksums: dict[int, int] = field(default_factory=dict)
    said: list[object] = field(default_factory=list)
    records: list[UpdateRecord] = field(default_factory=list)
    joins: list[str] = field(default_factory=list)
    changes: list[MemberChange] = field(default_factory=list)

    async def start(
        self, name: str, breaks: Break | None = None, place: Place | None = None, *, pod_uid: str = ""
    ) -> LightMember:
        spec = MemberSpec(self.server.url, RUN, name, self.bus.limits, breaks, pod_uid=pod_uid)
        if place is not None:
            spec = replace(spec, address=place.address, namespace=place.namespace)
        member = await self.stack.enter_async_context(light_member(spec))
        self.members.append(member)
        return member

    async def start_all(
        self, *names: str, breaks: dict[str, Break] | None = None, pods: bool = False
    ) -> list[LightMember]:
        """Starts members and waits until all have registered. `pods`: in pods of their names."""
        started = await asyncio.gather(
            *(self.start(name, (breaks or {}).get(name), pod_uid=f"uid-{name}" if pods else "") for name in names)
        )
        async with asyncio.timeout(UPDATE_WITHIN_S):
            await self.updater.wait_for_members(len(names))
        return list(started)

    async def offer(self, version: int) -> None:
        weights = weights_of(version)
        self.checksums[version] = weights_checksum(weights)
        async with asyncio.timeout(UPDATE_WITHIN_S):
            await self.updater.offer(version, self.sender.snapshot(PolicyVersion(1, version), weights))

    async def update(self, version: int) -> None:
        """Returns when everyone who is left serves it."""
        await self.offer(version)
        await self.served()

    async def served(self) -> None:
        async with asyncio.timeout(UPDATE_WITHIN_S):
            await self.updater.all_served()
        assert not self.running.done()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(UPDATE_WITHIN_S):
            while not condition():
                await asyncio.sleep(0.01)

    async def all_on(self, version: int, members: list[LightMember]) -> None:
        """After any faults: each of these comes to serve exactly the bytes of `version`."""
        await asyncio.gather(*(member.until_serving(version, UPDATE_WITHIN_S) for member in members))
        for member in members:
            assert (member.version, member.served[-1].checksum) == (version, self.checksums[version])

    def check(self) -> None:
        """The invariants of docs/weight-updates.md over all that has happened."""
        for member in self.members:
            self._serves_only_recorded_versions_and_never_an_older_one(member)
        self._commits_come_after_all_have_staged()

    def _serves_only_recorded_versions_and_never_an_older_one(self, member: LightMember) -> None:
        versions = [report.number for report in member.served]
        assert versions == sorted(versions), f"{member.name} went back: {versions}"
        for report in member.served:
            assert report.checksum == self.checksums[report.number], f"{member.name} served other bytes"

    def _commits_come_after_all_have_staged(self) -> None:
        epochs: dict[int, set[str]] = {}
        left = {(change.member.actor, change.epoch) for change in self.changes if change.kind == "left"}
        assert self.said or not self.records, "nothing was heard of what was served"
        committed: set[tuple[int, int]] = set()
        staged: set[tuple[str, int, int]] = set()
        for message in self.said:
            match message:
                case EpochStart():
                    epochs[message.epoch] = {member.actor for member in message.members}
                case Staged():
                    staged.add((message.actor, message.epoch, message.version))
                case Commit():
                    committed.add((message.epoch, message.version))
                    members = {actor for actor in epochs[message.epoch] if (actor, message.epoch) not in left}
                    missing = {actor for actor in members if (actor, message.epoch, message.version) not in staged}
                    assert not missing, f"{message} before {missing} had staged it"
                case Serving():
                    assert (message.epoch, message.version) in committed


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """About 1 MB that no two versions share."""
    generator = torch.Generator().manual_seed(version)
    return {f"w{index}": torch.randn(200, 160, generator=generator) for index in range(8)}


@asynccontextmanager
async def fault_stage(
    folder: Path, *, host: str = "127.0.0.1", limits: StreamLimits = LIMITS
) -> AsyncIterator[FaultStage]:
    """Ends with a check of the invariants, where the test got so far. `host`: the trainer's and the server's address."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(NatsServer(folder, extra={"host": host}))
        bus = await stack.enter_async_context(connect(server.url, RUN, limits=limits, request_timeout_s=2.0))
        await bus.create_streams()
        sender = WeightSender(describe(weights_of(0).items(), chunk_bytes=1 << 17), stall_timeout_s=2.0)
        port = CollectivePort(sender, GroupStore(host), host=host)
        records: list[UpdateRecord] = []
        joins: list[str] = []
        changes: list[MemberChange] = []
        updater = WeightUpdater(
            bus,
            port,
            incarnation=1,
            deadline_s=DEADLINE_S,
            join_timeout_s=60,
            on_served=records.append,
            on_joined=lambda actor, record: joins.append(actor),
            on_member=changes.append,
        )
        running = asyncio.create_task(updater.run())
        stage = FaultStage(server, bus, updater, sender, stack, running, records=records, joins=joins, changes=changes)
        listening = asyncio.create_task(_listen(stage))
        try:
            yield stage
            stage.check()
        finally:
            for task in (running, listening):
                task.cancel()
                with suppress(asyncio.CancelledError, ExceptionGroup):
                    await task


async def _listen(stage: FaultStage) -> None:
    async with stage.bus.watch_control(tuple(HEARD), EVERY_ACTOR) as messages:
        async for message in messages:
            stage.said.append(decode_control(message.payload, HEARD[message.kind]))
