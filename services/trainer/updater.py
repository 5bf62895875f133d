"""Performs what the coordinator decides: groups, broadcasts, control messages, deadlines.

Consumes versions offered by the optimizer loop and the actors' answers; produces served versions. `offer` returns as soon
as sending has begun, so that the next batch is computed while bytes move; it waits only for the version before, so that
sending trails the optimizer by at most one version. Registered actors, their answers and deadlines unblock it. An outage of
NATS is waited for. Only the first version has a limit to its waiting: a run that no actor can serve ends with their reasons.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from pipelinerl.bus.protocol import Bus
from pipelinerl.control import (
    Abort,
    Announce,
    Backend,
    Commit,
    EpochJoined,
    EpochMember,
    EpochStart,
    Registration,
    Serving,
    Staged,
)
from pipelinerl.control_codec import decode_control, encode_control
from pipelinerl.errors import MessageError, ServiceError, TransferError
from pipelinerl.retry import until_taken
from pipelinerl.weights.manifest import Manifest
from pipelinerl.weights.manifest_codec import manifest_to_bytes
from services.trainer import coordinator as c

log = logging.getLogger(__name__)

ANSWER_TYPES = {"joined": EpochJoined, "staged": Staged, "serving": Serving, "failed": Abort}
"""What actors say, by kind."""
MOST_REASONS = 16
"""Actors whose last reason is remembered: enough for a person, and bounded where names keep changing."""


@dataclass(frozen=True)
class SentBytes:
    checksum: int
    num_bytes: int
    seconds: float


class TransferPort(Protocol):
    """The trainer's end of the collective; `services.trainer.weights.port` implements it over torch."""

    manifest: Manifest
    backend: Backend

    async def open_group(self, epoch: int, world_size: int, deadline_s: float) -> str:
        """Opens the store of this epoch's group and starts building it; returns the store's host:port."""
        ...

    async def group_built(self) -> None:
        """Returns when every rank has connected. Raises `TransferError` at the deadline."""
        ...

    async def broadcast(self, snapshot: object, deadline_s: float) -> SentBytes:
        """Raises `TransferError`."""
        ...

    async def abandon_group(self) -> None:
        """Tears the group down in bounded time, whatever it is stuck in."""
        ...


@dataclass
class UpdateRecord:
    """What one version's update took. Seconds, bytes."""

    version: int
    num_bytes: int = 0
    transfer_s: float = 0.0
    round_trip_s: float = 0.0
    receive_s: dict[str, float] = field(default_factory=dict)
    prepare_s: dict[str, float] = field(default_factory=dict)
    stall_s: dict[str, float] = field(default_factory=dict)


class WeightUpdater:
    """See the module. `join_timeout_s`: from the offer of the first version until some version is served."""

    def __init__(
        self,
        bus: Bus,
        port: TransferPort,
        *,
        incarnation: int,
        deadline_s: float,
        join_timeout_s: float,
        on_served: Callable[[UpdateRecord], None],
    ) -> None:
        self._bus, self._port = bus, port
        self._incarnation, self._deadline_s, self._join_timeout_s = incarnation, deadline_s, join_timeout_s
        self._on_served = on_served
        self._coordinator = c.Coordinator()
        self._events: asyncio.Queue[c.Event] = asyncio.Queue(maxsize=10_000)
        self._idle = asyncio.Event()
        self._idle.set()
        self._members_changed = asyncio.Condition()
        self._served_changed = asyncio.Condition()
        self._snapshot: object = None
        self._record = UpdateRecord(-1)
        self._begun_at = 0.0
        self._tasks: asyncio.TaskGroup
        self._transfer: asyncio.Task[None] | None = None
        self._reasons: dict[str, str] = {}
        self._offered = asyncio.Event()
        self._timers: set[asyncio.TimerHandle] = set()
        self.served_version = -1
        self.evictions = 0

    # --- what the rest of the trainer uses --------------------------------------------------------------------------

    @property
    def members(self) -> dict[str, c.Member]:
        """Members of the current epoch, by actor."""
        return self._coordinator.members

    @property
    def epoch(self) -> int:
        return self._coordinator.epoch

    @property
    def reasons(self) -> str:
        """Why actors did not serve, in their own words where they had any; empty when nothing was heard."""
        return "; ".join(f"{actor}: {reason}" for actor, reason in sorted(self._reasons.items()))

    async def wait_for_members(self, count: int) -> None:
        """Returns when `count` actors have registered."""
        async with self._members_changed:
            await self._members_changed.wait_for(lambda: len(self._coordinator.present) >= count)

    @property
    def num_present(self) -> int:
        return len(self._coordinator.present)

    async def offer(self, version: int, snapshot: object) -> None:
        """Begins sending `version`. Waits until the version before is served by everyone who is left."""
        await self._idle.wait()
        self._idle.clear()
        self._snapshot = snapshot
        self._record, self._begun_at = UpdateRecord(version), time.monotonic()
        self._offered.set()
        await self._events.put(c.VersionReady(version))

    async def all_served(self) -> None:
        """Returns when nothing is being sent."""
        await self._idle.wait()

    @asynccontextmanager
    async def hold_when_served(self, version: int) -> AsyncIterator[None]:
        """Enters once `version`, offered before, is served; while inside, no later one is committed. Staging goes on."""
        await self._events.put(c.HoldCommits(above=version))
        try:
            async with self._served_changed:
                await self._served_changed.wait_for(lambda: self.served_version >= version)
            yield
        finally:
            await self._events.put(c.HoldCommits(above=None))

    async def run(self) -> None:
        """Runs until cancelled. Raises `ServiceError` when no actor comes to serve the first version."""
        manifest = manifest_to_bytes(self._port.manifest)
        await until_taken(lambda: self._bus.publish_control("manifest", manifest), "say 'manifest'")
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._watch_members())
                self._tasks.create_task(self._watch_answers())
                self._tasks.create_task(self._step_events())
                self._tasks.create_task(self._first_served_in_time())
        finally:
            for timer in self._timers:
                timer.cancel()
            await self._port.abandon_group()

    async def _first_served_in_time(self) -> None:
        await self._offered.wait()
        try:
            async with asyncio.timeout(self._join_timeout_s), self._served_changed:
                await self._served_changed.wait_for(lambda: self.served_version >= 0)
        except TimeoutError as error:
            raise ServiceError(
                f"version {self._record.version} was served by no actor within weights.join_timeout_s = "
                f"{self._join_timeout_s:g} s; {f'last heard: {self.reasons}' if self._reasons else 'no actor said why'}. "
                "Look at the actors' logs, or raise it"
            ) from error

    # --- events in ------------------------------------------------------------------------------------------------

    async def _watch_members(self) -> None:
        async with self._bus.watch_members() as events:
            async for event in events:
                if event.payload is None:
                    await self._events.put(c.MemberDown(event.actor))
                    continue
                try:
                    registration = decode_control(event.payload, Registration)
                except MessageError as error:
                    log.error("registration of %s is set aside: %s", event.actor, error)
                    continue
                await self._register(registration)

    async def _register(self, registration: Registration) -> None:
        if registration.phase == "draining":
            await self._events.put(c.MemberDown(registration.actor))
            return
        await self._events.put(
            c.MemberUp(
                c.Member(registration.actor, registration.process, registration.ranks, registration.grpc_address)
            )
        )

    async def _watch_answers(self) -> None:
        async with self._bus.watch_control(tuple(ANSWER_TYPES)) as messages:
            async for message in messages:
                try:
                    decoded: object = decode_control(message.payload, ANSWER_TYPES[message.kind])
                except MessageError as error:
                    log.error("answer %s of %s is set aside: %s", message.kind, message.actor, error)
                    continue
                event = self._answer_event(decoded)
                if event is not None:
                    await self._events.put(event)

    def _answer_event(self, answer: object) -> c.Event | None:
        """The coordinator's event for an answer to this incarnation; None for anybody else's."""
        if isinstance(answer, Abort) and answer.incarnation in (0, self._incarnation):
            self._reasons.pop(answer.actor, None)
            self._note_reason(answer.actor, answer.reason)
        if getattr(answer, "incarnation", None) != self._incarnation:
            return None
        match answer:
            case EpochJoined():
                self._reasons.pop(answer.actor, None)
                return c.MemberJoined(answer.actor, answer.epoch)
            case Staged():
                if answer.version == self._record.version:
                    self._record.receive_s[answer.actor] = answer.receive_s
                    self._record.prepare_s[answer.actor] = answer.prepare_s
                return c.MemberStaged(answer.actor, answer.epoch, answer.version, answer.checksum)
            case Serving():
                if answer.version == self._record.version:
                    self._record.stall_s[answer.actor] = answer.stall_s
                return c.MemberServing(answer.actor, answer.epoch, answer.version)
            case Abort():
                return c.MemberFailed(answer.actor, answer.epoch, answer.reason)
        return None

    def _note_reason(self, actor: str, reason: str) -> None:
        """What an actor said itself is not replaced by what was seen of it from here."""
        self._reasons.setdefault(actor, reason)
        while len(self._reasons) > MOST_REASONS:
            del self._reasons[next(iter(self._reasons))]

    # --- actions out ----------------------------------------------------------------------------------------------

    async def _step_events(self) -> None:
        while True:
            event = await self._events.get()
            for action in self._coordinator.step(event):
                await self._perform(action)
            if isinstance(event, c.MemberUp | c.MemberDown):
                async with self._members_changed:
                    self._members_changed.notify_all()

    async def _perform(self, action: c.Action) -> None:
        match action:
            case c.FormGroup(epoch, members):
                await self._form_group(epoch, members)
            case c.SendVersion(epoch, version):
                await self._send_version(epoch, version)
            case c.SendCommit(epoch, version):
                await self._control("commit", Commit(self._incarnation, epoch, version))
            case c.SendAbort(epoch, version, reason):
                log.warning("version %d is aborted in epoch %d: %s", version, epoch, reason)
                await self._control("abort", Abort(self._incarnation, epoch, version, reason, ""))
                await self._stop_transfer()
            case c.Evicted(actor, epoch, reason):
                self.evictions += 1
                self._note_reason(actor, reason)
                log.warning("actor %s leaves epoch %d: %s", actor, epoch, reason)
            case c.SetDeadline(token):
                self._set_deadline(token)
            case c.WaitingForMembers(version):
                log.warning("no actor is left: version %d waits for one to register", version)
                await self._stop_transfer()
            case c.VersionServed(version, _, _):
                await self._finish(version)

    async def _form_group(self, epoch: int, members: tuple[c.Member, ...]) -> None:
        await self._stop_transfer()
        world_size = 1 + sum(member.ranks for member in members)
        try:
            store_address = await self._port.open_group(epoch, world_size, self._deadline_s)
        except TransferError as error:
            await self._events.put(c.TransferFailed(epoch, str(error)))
            return
        await self._control(
            "epoch",
            EpochStart(
                incarnation=self._incarnation,
                epoch=epoch,
                store_address=store_address,
                backend=self._port.backend,
                world_size=world_size,
                members=epoch_members(members),
                manifest_id=self._port.manifest.manifest_id,
                deadline_s=self._deadline_s,
            ),
        )
        self._transfer = self._tasks.create_task(self._await_group(epoch))

    async def _await_group(self, epoch: int) -> None:
        try:
            await self._port.group_built()
        except TransferError as error:
            await self._events.put(c.TransferFailed(epoch, str(error)))
        else:
            await self._events.put(c.GroupBuilt(epoch))

    async def _send_version(self, epoch: int, version: int) -> None:
        announce = Announce(self._incarnation, epoch, version, self._port.manifest.manifest_id, self._deadline_s)
        await self._control("announce", announce)
        self._transfer = self._tasks.create_task(self._broadcast(epoch, version))

    async def _broadcast(self, epoch: int, version: int) -> None:
        try:
            sent = await self._port.broadcast(self._snapshot, self._deadline_s)
        except TransferError as error:
            await self._events.put(c.TransferFailed(epoch, str(error)))
            return
        self._record.num_bytes, self._record.transfer_s = sent.num_bytes, sent.seconds
        await self._events.put(c.BytesSent(epoch, version, sent.checksum))

    async def _stop_transfer(self) -> None:
        task, self._transfer = self._transfer, None
        await self._port.abandon_group()
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _set_deadline(self, token: int) -> None:
        for timer in self._timers:
            timer.cancel()
        timer = asyncio.get_running_loop().call_later(
            self._deadline_s, lambda: self._events.put_nowait(c.DeadlinePassed(token))
        )
        self._timers = {timer}

    async def _finish(self, version: int) -> None:
        self._record.round_trip_s = time.monotonic() - self._begun_at
        self.served_version = version
        self._snapshot = None
        self._on_served(self._record)
        self._idle.set()
        async with self._served_changed:
            self._served_changed.notify_all()

    async def _control(self, kind: str, message: EpochStart | Announce | Commit | Abort) -> None:
        payload = encode_control(message)
        await until_taken(lambda: self._bus.publish_control(kind, payload), f"say {kind!r}")


def epoch_members(members: tuple[c.Member, ...]) -> tuple[EpochMember, ...]:
    """Rank layout: rank 0 is the trainer, then each actor's ranks in the members' order. Pure."""
    laid_out, next_rank = [], 1
    for member in members:
        laid_out.append(EpochMember(member.actor, member.process, next_rank, member.ranks))
        next_rank += member.ranks
    return tuple(laid_out)
