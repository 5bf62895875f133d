"""A trainer's updater with light members as processes, and the times of all that is said between them.

Real NATS, control channel and Gloo groups on one machine; no optimizer and no engine. It measures nothing itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.light_members import Break, LightMember, MemberSpec, light_member
from pipelinerl.bus.jetstream import Bus, connect
from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.local.nats import NatsServer
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.chunks import describe
from pipelinerl.transfer.group import GroupStore
from services.trainer.weight_sync.sender import CollectivePort, WeightSender
from services.trainer.weight_sync.updater import UpdateRecord, WeightUpdater

RUN = "light"
WITHIN_S = 300.0
"""Far above what anything here takes: reached only by something that waits for ever."""
_LOOK_S = 0.001


@dataclass(frozen=True)
class Settings:
    """Times that decide how soon a failure is noticed. `stall_timeout_s`: the longest that one chunk may take."""

    member_ttl_s: float
    deadline_s: float
    stall_timeout_s: float

    @property
    def limits(self) -> StreamLimits:
        return StreamLimits(member_ttl_s=self.member_ttl_s, in_memory=True)


@dataclass(frozen=True)
class Said:
    """An order of the trainer, as everybody heard it. Monotonic seconds."""

    kind: str
    at_s: float


@dataclass
class LightStage:
    url: str
    settings: Settings
    bus: Bus
    updater: WeightUpdater
    sender: WeightSender
    stack: AsyncExitStack
    weights: dict[str, torch.Tensor]
    said: list[Said] = field(default_factory=list)
    registered_s: dict[str, float] = field(default_factory=dict)
    """When each actor was last seen to register for the first time."""
    joined_s: dict[str, float] = field(default_factory=dict)
    """When each actor's side group had brought it to the served version."""
    served_s: dict[int, float] = field(default_factory=dict)
    """When the trainer counted each version as served by everyone who was left."""
    records: list[UpdateRecord] = field(default_factory=list)

    async def start(self, name: str, breaks: Break | None = None) -> LightMember:
        spec = MemberSpec(
            self.url, RUN, name, self.settings.limits, breaks, stall_timeout_s=self.settings.stall_timeout_s
        )
        return await self.stack.enter_async_context(light_member(spec))

    async def start_all(self, *names: str, breaks: dict[str, Break] | None = None) -> list[LightMember]:
        """Returns when all have registered."""
        started = await asyncio.gather(*(self.start(name, (breaks or {}).get(name)) for name in names))
        await self.until(lambda: self.updater.num_present >= len(names))
        return list(started)

    async def update(self, version: int) -> UpdateRecord:
        """Returns when everyone who is left serves it."""
        snapshot = self.sender.snapshot(PolicyVersion(1, version), self.weights)
        async with asyncio.timeout(WITHIN_S):
            await self.updater.offer(version, snapshot)
            await self.updater.all_served()
        return self.records[-1]

    def served(self, record: UpdateRecord) -> None:
        """The updater calls it."""
        self.served_s[record.version] = time.monotonic()
        self.records.append(record)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not condition():  # noqa: ASYNC110 - conditions are of many kinds
                await asyncio.sleep(_LOOK_S)

    def forming_s(self) -> float:
        """Seconds from the trainer's last call to meet until it announced a version to the group."""
        begin = max(said.at_s for said in self.said if said.kind == "epoch")
        return min(said.at_s for said in self.said if said.kind == "announce" and said.at_s > begin) - begin

    def last_s(self, kind: str) -> float:
        """When the trainer last said `kind`."""
        return max(said.at_s for said in self.said if said.kind == kind)


@asynccontextmanager
async def light_stage(folder: Path, settings: Settings, megabytes: float = 1.0) -> AsyncIterator[LightStage]:
    """`megabytes` of weights in 8 tensors and 8 chunks."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(NatsServer(folder))
        bus = await stack.enter_async_context(connect(server.url, RUN, limits=settings.limits))
        await bus.create_streams()
        elements = int(megabytes * 1e6 / 4 / 8) // 16 * 16
        weights = {f"w{index}": torch.randn(elements) for index in range(8)}
        sender = WeightSender(
            describe(weights.items(), chunk_bytes=4 * elements), stall_timeout_s=settings.stall_timeout_s
        )
        port = CollectivePort(sender, GroupStore(), host="127.0.0.1")
        updater = WeightUpdater(
            bus,
            port,
            incarnation=1,
            deadline_s=settings.deadline_s,
            join_timeout_s=WITHIN_S,
            on_served=lambda record: stage.served(record),
            on_joined=lambda actor, record: stage.joined_s.update({actor: time.monotonic()}),
        )
        stage = LightStage(server.url, settings, bus, updater, sender, stack, weights)
        tasks = [asyncio.create_task(part) for part in (updater.run(), _orders(stage), _registrations(stage))]
        try:
            yield stage
        finally:
            await _end(tasks)


async def _orders(stage: LightStage) -> None:
    async with stage.bus.watch_control(("epoch", "announce", "commit", "abort")) as messages:
        async for message in messages:
            stage.said.append(Said(message.kind, time.monotonic()))


async def _registrations(stage: LightStage) -> None:
    async with stage.bus.watch_members() as events:
        async for event in events:
            if event.payload is None:
                stage.registered_s.pop(event.actor, None)
            else:
                stage.registered_s.setdefault(event.actor, time.monotonic())


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError, ExceptionGroup):
            await task
