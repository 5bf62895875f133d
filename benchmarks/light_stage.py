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
from typing import Any, TypeVar

import torch

from benchmarks.light_members import WITHIN_S, Break, LightMember, MemberSpec, light_member
from benchmarks.nats_server import NatsServer
from pipelinerl.bus.jetstream import Bus, connect
from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.chunks import describe
from pipelinerl.transfer.group import GroupStore
from pipelinerl.transfer.stores import open_store
from pipelinerl.transfer.weight_log import WeightLog
from services.trainer.weight_sync.membership import MemberChange, UpdateRecord
from services.trainer.weight_sync.sender import LogWriter, WeightSender
from services.trainer.weight_sync.updater import WeightUpdater

RUN = "light"
NUM_CHUNKS = 8
ANCHOR_EVERY = 4
_LOOK_S = 0.001

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """Times that decide how soon a failure is noticed. `stall_timeout_s`: the longest that one chunk may take. `log`: place of
    the weight log; empty: none."""

    member_ttl_s: float
    deadline_s: float
    stall_timeout_s: float
    log: str = ""

    @property
    def limits(self) -> StreamLimits:
        return StreamLimits(member_ttl_s=self.member_ttl_s)


@dataclass(frozen=True)
class Said:
    """A control message, as everybody heard it. Monotonic seconds."""

    kind: str
    payload: bytes
    at_s: float


@dataclass
class StageRecorder:
    """In place of the trainer's `Recorder`."""

    records: list[UpdateRecord] = field(default_factory=list)
    changes: list[MemberChange] = field(default_factory=list)
    joined_s: dict[str, float] = field(default_factory=dict)
    """When each actor's side group had brought it to the served version."""
    served_s: dict[int, float] = field(default_factory=dict)
    """When the trainer counted each version as served by everyone who was left."""

    def served(self, update: UpdateRecord) -> None:
        self.served_s[update.version] = time.monotonic()
        self.records.append(update)

    def joined(self, actor: str, update: UpdateRecord) -> None:
        self.joined_s[actor] = time.monotonic()

    def member_changed(self, change: MemberChange) -> None:
        self.changes.append(change)


@dataclass
class LightStage:
    """`weights_of`: a version's. `within_s`: the longest that anything may take."""

    server: NatsServer
    settings: Settings
    bus: Bus
    updater: WeightUpdater
    sender: WeightSender
    stack: AsyncExitStack
    running: asyncio.Task[None]
    weights_of: Callable[[int], Weights]
    within_s: float
    history: StageRecorder
    members: list[LightMember] = field(default_factory=list)
    """All that were ever started."""
    said: list[Said] = field(default_factory=list)

    async def start(self, name: str, breaks: Break | None = None, *, reads_log: bool = False, **spec: str) -> LightMember:
        """`spec`: further fields of a `MemberSpec`."""
        spec |= {"log": self.settings.log, "folder": str(self.server.folder)} if reads_log else {}
        stall_timeout_s = self.settings.stall_timeout_s
        whole = MemberSpec(self.server.url, RUN, name, self.bus.limits, breaks, stall_timeout_s=stall_timeout_s, **spec)
        member = await self.stack.enter_async_context(light_member(whole))
        self.members.append(member)
        return member

    async def start_all(self, *names: str, breaks: dict[str, Break] | None = None, pods: bool = False) -> list[LightMember]:
        """Returns when all have registered. `pods`: in pods of their names."""
        started = await asyncio.gather(
            *(self.start(name, (breaks or {}).get(name), pod_uid=f"uid-{name}" if pods else "") for name in names)
        )
        await self.until(lambda: self.updater.num_present >= len(names))
        return list(started)

    async def offer(self, version: int) -> None:
        async with asyncio.timeout(self.within_s):
            snapshot = self.sender.snapshot(PolicyVersion(1, version), self.weights_of(version))
            await self.updater.offer(version, snapshot)

    async def served(self) -> None:
        """Returns when everyone who is left serves what was offered."""
        async with asyncio.timeout(self.within_s):
            await self.updater.all_served()
        assert not self.running.done()

    async def update(self, version: int) -> UpdateRecord:
        await self.offer(version)
        await self.served()
        return self.history.records[-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(self.within_s):
            while not condition():  # noqa: ASYNC110 - conditions are of many kinds
                await asyncio.sleep(_LOOK_S)

    def forming_s(self) -> float:
        """Seconds from the trainer's last call to meet until it announced a version to the group."""
        begin = self.last_s("epoch")
        return min(said.at_s for said in self.said if said.kind == "announce" and said.at_s > begin) - begin

    def last_s(self, kind: str) -> float:
        """When the trainer last said `kind`."""
        return max(said.at_s for said in self.said if said.kind == kind)


Stage = TypeVar("Stage", bound=LightStage)


def same_weights(megabytes: float) -> Callable[[int], Weights]:
    """Of every version, in as many tensors as chunks."""
    elements = int(megabytes * 1e6 / 4 / NUM_CHUNKS) // 16 * 16
    weights = {f"w{index}": torch.randn(elements) for index in range(NUM_CHUNKS)}
    return lambda version: weights


@asynccontextmanager
async def light_stage(
    folder: Path,
    settings: Settings,
    weights_of: Callable[[int], Weights],
    kind: type[Stage],
    *,
    heard: tuple[str, ...] = ("epoch", "announce", "commit", "abort"),
    actor: str = "",
    host: str = "127.0.0.1",
    request_timeout_s: float = 10.0,
    within_s: float = WITHIN_S,
) -> AsyncIterator[Stage]:
    """`heard`: kinds of control messages that it keeps; orders to all, and to `actor`. `host`: of trainer and server."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(NatsServer(folder, extra={"host": host}))
        connecting = connect(server.url, RUN, limits=settings.limits, request_timeout_s=request_timeout_s)
        bus = await stack.enter_async_context(connecting)
        await bus.create_streams()
        weights = weights_of(0)
        size = sum(tensor.nbytes for tensor in weights.values())
        manifest = describe(weights.items(), chunk_bytes=size // NUM_CHUNKS)
        stall_timeout_s, history = settings.stall_timeout_s, StageRecorder()
        sender = WeightSender(manifest, stall_timeout_s=stall_timeout_s, store=GroupStore(host), host=host)
        log = None
        if settings.log:
            store = await stack.enter_async_context(open_store(settings.log, bus))
            log = LogWriter(WeightLog(store, manifest, RUN, anchor_every=ANCHOR_EVERY))
        times = {"deadline_s": settings.deadline_s, "join_timeout_s": 2 * within_s}
        updater = WeightUpdater(bus, sender, history, incarnation=1, log=log, **times)
        running = asyncio.create_task(updater.run())
        stage = kind(server, settings, bus, updater, sender, stack, running, weights_of, within_s, history)
        listening = asyncio.create_task(_listen(stage, heard, actor))
        try:
            yield stage
        finally:
            await end(running, listening)


async def _listen(stage: LightStage, heard: tuple[str, ...], actor: str) -> None:
    async with stage.bus.watch_control(heard, actor) as messages:
        async for message in messages:
            stage.said.append(Said(message.kind, message.payload, time.monotonic()))


async def end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError, ExceptionGroup):
            await task
