"""One transfer group and the state machine that directs it: the epoch of all actors, or a joiner's side group.

Performs its coordinator's actions that concern the group itself: opening, announcing, broadcasting, committing, aborting,
deadlines; and records what the update took, also as spans. What the actions mean for the run (a version is served, an actor
left) goes back to `updater.py`, which owns the sessions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode

from pipelinerl.bus.protocol import NO_HEADERS, ControlMessage, Headers
from pipelinerl.errors import TransferError
from pipelinerl.messages.control import (
    Abort,
    Announce,
    Commit,
    EpochJoined,
    EpochMember,
    EpochStart,
    Serving,
    Staged,
)
from pipelinerl.telemetry import attributes as a
from pipelinerl.telemetry.spans import (
    child,
    headers_of,
    root,
    trace_in,
    trace_of,
)
from pipelinerl.transfer.manifest import RanksMissing
from services.trainer.weight_sync import coordinator as c

if TYPE_CHECKING:
    from services.trainer.weight_sync.sender import CollectiveGroup, CollectivePort, Snapshot


log = logging.getLogger(__name__)


class UpdateTrace:
    """The trainer's spans of one update, from its offer until every member serves the version, or it is given up.

    Members' spans follow the announcement or the commit that they answer.
    """

    def __init__(self, span: Span = INVALID_SPAN) -> None:
        """Of no update, unless `span` is given: see `begin`."""
        self._span = span
        self._commit: Span = INVALID_SPAN

    @classmethod
    def begin(cls, version: int, joiner: str) -> UpdateTrace:
        """`joiner`: the one actor that is brought to the version; empty: all of them."""
        attributes: a.Attributes = {a.VERSION: version}
        if joiner:
            attributes[a.ACTOR] = joiner
        return cls(root("weight_update", attributes=attributes))

    def order(self, kind: str, epoch: int) -> Span:
        """Around saying `kind` to the members."""
        attributes = {a.EPOCH: epoch, **a.messaging("send", f"control.{kind}")}
        return child(trace_of(self._span), f"weight_update.{kind}", kind=SpanKind.PRODUCER, attributes=attributes)

    def transfer(self, epoch: int) -> Span:
        """Around the broadcast of the bytes."""
        return child(trace_of(self._span), "weight_update.transfer", attributes={a.EPOCH: epoch})

    def commit(self, epoch: int) -> Headers:
        """Of the order to serve what is staged; its span lasts until all do."""
        self._commit = self.order("commit", epoch)
        return headers_of(trace_of(self._commit))

    def measured(self, what: str, actor: str, attribute: str, value: float) -> None:
        """What a member measured when it had staged the version, or served it."""
        self._span.add_event(what, {a.ACTOR: actor, attribute: value})

    def aborted(self, reason: str) -> None:
        """It begins again with another group."""
        self._span.add_event("aborted", {a.REASON: reason})
        self._commit.set_status(Status(StatusCode.ERROR, reason))
        self._commit.end()
        self._commit = INVALID_SPAN

    def evicted(self, actor: str, reason: str) -> None:
        """The others go on."""
        self._span.add_event("evicted", {a.ACTOR: actor, a.REASON: reason})

    def end(self, failure: str = "") -> None:
        """Served by all, or given up for a reason. Only the first call counts."""
        for span in (self._commit, self._span):
            if failure:
                span.set_status(Status(StatusCode.ERROR, failure))
            span.end()
        self._commit = self._span = INVALID_SPAN


def trace_answer(message: ControlMessage) -> None:
    """Of a member's answer that arrived: the last span on its side follows into the trainer."""
    about = {a.ACTOR: message.actor, **a.messaging("process", f"control.{message.kind}")}
    child(trace_in(message.headers), "weight_update.answer", kind=SpanKind.CONSUMER, attributes=about).end()


MEETING_SHARE = 0.8
"""Of the deadline, for a group's members to meet: a meeting knows who did not come, and says so before the deadline of the
phase, which would blame all whom it kept waiting."""
PATIENCE_S = 3.0
"""For the next rank once one has come, in a meeting of members that have met before: who died a moment ago is found out by
this, long before its registration expires. Who is only slow is left out too, and comes back by a side group."""
Order = EpochStart | Announce | Commit | Abort
"""What the trainer says to actors about a transfer."""
Answer = EpochJoined | Staged | Serving | Abort
"""What actors say of one."""
Outcome = c.FormGroup | c.SendAbort | c.Evicted | c.VersionServed | c.WaitingForMembers
"""Actions that concern more than the session."""


@dataclass(frozen=True)
class TransferResult:
    """A version whose every byte has left. `checksum`: of the whole version, to compare with what receivers staged."""

    checksum: int
    num_bytes: int
    seconds: float


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


@dataclass(frozen=True)
class TransferContext:
    """What sessions share. `say` sends an order to all actors or to one, `post` an event to a session."""

    port: CollectivePort
    say: Callable[[str, Order, str, Headers], Awaitable[None]]
    post: Callable[[TransferSession, c.Event], None]
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    incarnation: int
    deadline_s: float
    met: set[c.Member] = field(default_factory=set)
    """Members that a group was built with: prepared, and so quick to come to the next."""


class TransferSession:
    """`joiner`: whose side group this is, and the only one spoken to; empty: the epoch of all."""

    def __init__(self, context: TransferContext, coordinator: c.Coordinator, *, joiner: str = "") -> None:
        self._context, self.coordinator, self.joiner = context, coordinator, joiner
        self.record, self.trace = UpdateRecord(-1), UpdateTrace()
        self._snapshot: Snapshot | None = None
        self._begun_at = 0.0
        self._group: CollectiveGroup | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, version: int, snapshot: Snapshot) -> None:
        """What the next `VersionReady` will send."""
        self._snapshot, self.record, self._begun_at = snapshot, UpdateRecord(version), time.monotonic()
        self.trace = UpdateTrace.begin(version, self.joiner)

    async def step(self, event: c.Event) -> list[Outcome]:
        """Takes an event of this session and performs what follows from it; returns what concerns the run."""
        outcomes: list[Outcome] = []
        for action in self.coordinator.step(event):
            await self._perform(action)
            if isinstance(action, Outcome):
                outcomes.append(action)
        return outcomes

    def event_of(self, answer: Answer) -> c.Event:
        """What an actor's answer is to the coordinator. Keeps the times that it says of the version under way."""
        epoch, actor = answer.epoch, answer.actor
        match answer:
            case EpochJoined():
                return c.MemberJoined(actor, epoch)
            case Abort():
                return c.MemberFailed(actor, epoch, answer.reason, answer.group_broke)
        current = (epoch, answer.version) == (self.coordinator.epoch, self.record.version)
        match answer:
            case Staged():
                if current:
                    self.record.receive_s[actor], self.record.prepare_s[actor] = answer.receive_s, answer.prepare_s
                    self.trace.measured("staged", actor, a.BYTES, answer.bytes)
                return c.MemberStaged(actor, epoch, answer.version, answer.checksum)
            case Serving():
                if current:
                    self.record.stall_s[actor] = answer.stall_s
                    self.trace.measured("serving", actor, a.STALL_S, answer.stall_s)
                return c.MemberServing(actor, epoch, answer.version)

    async def close(self) -> None:
        """Ends what is under way, in bounded time."""
        if self._timer is not None:
            self._timer.cancel()
        await self._stop_transfer()
        self.trace.end("given up")

    async def _say(self, kind: str, order: Order, headers: Headers = NO_HEADERS) -> None:
        await self._context.say(kind, order, self.joiner, headers)

    async def _perform(self, action: c.Action) -> None:
        context = self._context
        match action:
            case c.FormGroup(epoch, members):
                await self._form_group(epoch, members)
            case c.SendVersion(epoch, version):
                announce = Announce(
                    incarnation=context.incarnation,
                    epoch=epoch,
                    version=version,
                    manifest_id=context.port.manifest.manifest_id,
                    deadline_s=context.deadline_s,
                )
                with self.trace.order("announce", epoch) as span:
                    await self._say("announce", announce, headers_of(trace_of(span)))
                assert self._group is not None
                assert self._snapshot is not None
                self._task = context.spawn(self._broadcast(self._group, self._snapshot, epoch, version))
            case c.SendCommit(epoch, version):
                await self._say(
                    "commit",
                    Commit(incarnation=context.incarnation, epoch=epoch, version=version),
                    self.trace.commit(epoch),
                )
            case c.SendAbort(epoch, version, reason):
                log.warning("version %d is aborted in epoch %d: %s", version, epoch, reason)
                self.trace.aborted(reason)
                await self._say(
                    "abort",
                    Abort(incarnation=context.incarnation, epoch=epoch, version=version, reason=reason, actor=""),
                )
                await self._stop_transfer()
            case c.SetDeadline(token):
                self._set_deadline(token)
            case c.WaitingForMembers():
                await self._stop_transfer()
            case c.VersionServed():
                self.record.round_trip_s = time.monotonic() - self._begun_at
                self._snapshot = None
                self.trace.end()
            case c.Evicted(actor, epoch, reason):
                log.warning("actor %s leaves epoch %d: %s", actor, epoch, reason)
                self.trace.evicted(actor, reason)

    async def _form_group(self, epoch: int, members: tuple[c.Member, ...]) -> None:
        await self._stop_transfer()
        context = self._context
        world_size = 1 + sum(member.ranks for member in members)
        patience_s = PATIENCE_S if context.met.issuperset(members) else None
        try:
            group = await context.port.open_group(epoch, world_size, MEETING_SHARE * context.deadline_s, patience_s)
        except TransferError as error:
            context.post(self, c.TransferFailed(epoch, str(error)))
            return
        self._group = group
        await self._say(
            "epoch",
            EpochStart(
                incarnation=context.incarnation,
                epoch=epoch,
                store_address=group.store_address,
                backend=context.port.backend,
                world_size=world_size,
                members=epoch_members(members),
                manifest_id=context.port.manifest.manifest_id,
                deadline_s=context.deadline_s,
            ),
        )
        self._task = context.spawn(self._await_group(group, epoch, members))

    async def _await_group(self, group: CollectiveGroup, epoch: int, members: tuple[c.Member, ...]) -> None:
        try:
            await group.built()
        except RanksMissing as error:
            self._context.post(self, c.TransferFailed(epoch, str(error), actors_of(error.ranks, members)))
        except TransferError as error:
            self._context.post(self, c.TransferFailed(epoch, str(error)))
        else:
            self._context.met.update(members)
            self._context.post(self, c.GroupBuilt(epoch))

    async def _broadcast(self, group: CollectiveGroup, snapshot: Snapshot, epoch: int, version: int) -> None:
        try:
            with self.trace.transfer(epoch):
                sent = await group.broadcast(snapshot, self._context.deadline_s)
        except TransferError as error:
            self._context.post(self, c.TransferFailed(epoch, str(error)))
            return
        self.record.num_bytes, self.record.transfer_s = sent.num_bytes, sent.seconds
        self._context.post(self, c.BytesSent(epoch, version, sent.checksum))

    async def _stop_transfer(self) -> None:
        task, group = self._task, self._group
        self._task = self._group = None
        if task is not None:
            task.cancel()  # before anything is waited for: one that has not begun must not
        if group is not None:
            await group.abandon()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    def _set_deadline(self, token: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(
            self._context.deadline_s, lambda: self._context.post(self, c.DeadlinePassed(token))
        )


def epoch_members(members: tuple[c.Member, ...]) -> tuple[EpochMember, ...]:
    """Rank layout: rank 0 is the trainer, then each actor's ranks in the members' order. Pure."""
    laid_out, next_rank = [], 1
    for member in members:
        laid_out.append(
            EpochMember(actor=member.actor, process=member.process, first_rank=next_rank, ranks=member.ranks)
        )
        next_rank += member.ranks
    return tuple(laid_out)


def actors_of(ranks: Iterable[int], members: tuple[c.Member, ...]) -> tuple[str, ...]:
    """Whose ranks these are, each actor once. Pure."""
    wanted = set(ranks)
    return tuple(
        member.actor
        for member in epoch_members(members)
        if wanted & set(range(member.first_rank, member.first_rank + member.ranks))
    )
