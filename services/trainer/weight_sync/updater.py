"""Send policy versions to the actors: one transfer session sends to the members of the epoch, and one to each side group.

`offer` waits only until the previous version is served, because an epoch transfers one version at a time. In pipeline
mode, the trainer computes the next batch during a transfer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate, count
from statistics import median
from typing import TYPE_CHECKING

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode

from pipelinerl.bus.jetstream import Bus
from pipelinerl.errors import MessageError, ServiceError, TransferError
from pipelinerl.kube.client import PodEnd
from pipelinerl.messages.control import Control, decode_control
from pipelinerl.service.logs import AGGREGATED
from pipelinerl.service.retry import retry_forever
from pipelinerl.telemetry import attributes as a
from pipelinerl.telemetry.tracing import child, headers_of, root, trace_in, trace_of
from pipelinerl.transfer.manifest import DeadlineExceeded
from pipelinerl.v1 import control_pb2 as pb
from services.trainer.weight_sync import coordinator as c
from services.trainer.weight_sync.membership import LogReaders, MemberChange, Roster, UpdateObserver, UpdateRecord

if TYPE_CHECKING:
    from services.trainer.weight_sync.sender import CollectiveGroup, LogWriter, Snapshot, WeightSender

log = logging.getLogger(__name__)

_OTHER_BACKEND = "it restarted with another weights.backend"

ANSWER_TYPES = {"joined": pb.EpochJoined, "staged": pb.Staged, "serving": pb.Serving, "failed": pb.Abort}
MEETING_SHARE = 0.8
"""Share of the deadline within which all members of a group must connect. If some do not, the error names them, and only they
are evicted. If the full deadline passed instead, all members would be evicted."""
PATIENCE_S = 3.0
"""Maximum seconds to wait for a group's next member to connect. It applies only if each member has served a version. A dead
member is thus noticed long before its registration expires. A slow one is excluded, too, and returns through a side group."""
GATHER_S = 5.0
"""Maximum seconds to wait for further joining actors before a side group is opened; less if the last transfer took less."""
ASSUMED_BYTES_PER_S = 40e6
"""Assumed rate of the first transfer. `limit_s` allows for networks that are up to `coordinator.SLOW` times slower."""
MOST_REASONS = 16
"""Maximum number of actors whose reason for not serving is kept."""


class TransferSession:
    """One transfer group with its state machine: the epoch's group, or a side group for `joiners`. The session performs the
    coordinator's actions and records the update's figures. Its trace span lasts until the update is served or given up."""

    def __init__(self, updater: WeightUpdater, coordinator: c.Coordinator, joiners: Iterable[c.Member] = ()) -> None:
        self._updater, self.coordinator = updater, coordinator
        self.joiners = {member.actor: member for member in joiners}
        self._phase_at_s, self._answers_s = 0.0, list[float]()
        self.record = UpdateRecord(-1)
        self._span: Span = INVALID_SPAN
        self._commit_span: Span = INVALID_SPAN
        self.snapshot: Snapshot | None = None
        """Weights of the version in transfer; None if no version is in transfer."""
        self._begun_at = 0.0
        self._group: CollectiveGroup | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, version: int, snapshot: Snapshot) -> None:
        """Set the version that is sent after the next `VersionReady`."""
        self.snapshot, self.record, self._begun_at = snapshot, UpdateRecord(version), time.monotonic()
        about: a.Attributes = {a.VERSION: version, **({a.ACTOR: ", ".join(self.joiners)} if self.joiners else {})}
        self._span = root("weight_update", attributes=about)

    async def step(self, event: c.Event) -> list[c.Action]:
        if isinstance(event, c.DeadlinePassed) and self._timer and self._timer.when() > asyncio.get_running_loop().time():
            return []  # a new phase or an answer moved the deadline while this event was queued
        self._note(event)
        answered = len(self.coordinator.answered)
        actions = self.coordinator.step(event)
        if len(self.coordinator.answered) > answered:
            self._answers_s.append(time.monotonic() - self._phase_at_s)
            self._set_timer()
        for action in actions:
            await self._perform(action)
        return actions

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        updater, at_s = self._updater, self._phase_at_s - time.monotonic()
        due_s = self.coordinator.due_s(updater.deadline_s, updater.limit_s, self._answers_s)
        self._timer = asyncio.get_running_loop().call_later(at_s + due_s, updater.post, self, c.DeadlinePassed())

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._stop_transfer()
        self._end_spans("given up")

    def _note(self, event: c.Event) -> None:
        if not isinstance(event, pb.Staged | pb.Serving) or event.actor == c.TRAINER:
            return
        if (event.epoch, event.version) != (self.coordinator.epoch, self.record.version):
            return
        if isinstance(event, pb.Staged):
            self.record.receive_s[event.actor], self.record.prepare_s[event.actor] = event.receive_s, event.prepare_s
            self._span.add_event("staged", {a.ACTOR: event.actor, a.BYTES: event.bytes})
        else:
            self.record.stall_s[event.actor] = event.stall_s
            self._span.add_event("serving", {a.ACTOR: event.actor, a.STALL_S: event.stall_s})

    async def _perform(self, action: c.Action) -> None:
        updater = self._updater
        match action:
            case c.FormGroup(epoch, members):
                await self._form_group(epoch, members)
            case pb.Announce():
                action.manifest_id, action.deadline_s = updater.sender.manifest.manifest_id, 2 * updater.limit_s
                with self._order_span("announce", action.epoch) as span:
                    await self._say("announce", action, span)
                assert self._group is not None
                assert self.snapshot is not None
                sending = self._broadcast(self._group, self.snapshot, action.epoch, action.version)
                self._task = updater.tasks.create_task(sending)
            case pb.Commit():
                self._commit_span = self._order_span("commit", action.epoch)
                await self._say("commit", action, self._commit_span)
            case pb.Abort():
                updater.updates["aborted"] += 1
                log.warning("the update to version %d is aborted in epoch %d: %s", action.version, action.epoch, action.reason)
                self._span.add_event("aborted", {a.REASON: action.reason})
                self._end_spans(action.reason, of_commit_only=True)
                await self._say("abort", action)
                await self._stop_transfer()
            case c.VersionServed():
                self.record.round_trip_s = time.monotonic() - self._begun_at
                self._end_spans()
            case c.Evicted(actor, epoch, reason):
                if self.joiners:  # the recorder logs evictions from the epoch
                    log.warning("actor %s leaves side group %d: %s", actor, epoch, reason)
                self._span.add_event("evicted", {a.ACTOR: actor, a.REASON: reason})
        if isinstance(action, c.FormGroup | pb.Announce | pb.Commit):  # a phase begins
            self._phase_at_s, self._answers_s = time.monotonic(), []
            self._set_timer()

    async def _form_group(self, epoch: int, members: tuple[c.Member, ...]) -> None:
        await self._stop_transfer()
        if not members:
            return
        updater = self._updater
        world_size = 1 + sum(member.ranks for member in members)
        patience_s = PATIENCE_S if updater.roster.have_served(members) else None
        group = updater.sender.open_group(epoch, world_size, MEETING_SHARE * updater.deadline_s, patience_s)
        self._group = group
        start = pb.EpochStart(
            epoch=epoch,
            store_address=group.store_address,
            backend=updater.sender.backend,
            world_size=world_size,
            members=epoch_members(members),
            manifest_id=updater.sender.manifest.manifest_id,
            deadline_s=updater.deadline_s,
        )
        await self._say("epoch", start)
        self._task = updater.tasks.create_task(self._await_group(group, epoch, members))

    async def _await_group(self, group: CollectiveGroup, epoch: int, members: tuple[c.Member, ...]) -> None:
        try:
            await group.built()
        except TransferError as error:
            missing = actors_of(error.missing, members) if isinstance(error, DeadlineExceeded) else ()
            self._updater.post(self, c.TransferFailed(epoch, str(error), missing))
        else:
            self._updater.post(self, pb.EpochJoined(actor=c.TRAINER, epoch=epoch))

    async def _broadcast(self, group: CollectiveGroup, snapshot: Snapshot, epoch: int, version: int) -> None:
        try:
            with child(trace_of(self._span), "weight_update.transfer", attributes={a.EPOCH: epoch}):
                sent = await group.broadcast(snapshot, 2 * self._updater.limit_s)  # twice: `DeadlinePassed` comes first
        except TransferError as error:
            self._updater.post(self, c.TransferFailed(epoch, str(error)))
            return
        self.record.num_bytes, self.record.transfer_s = sent.num_bytes, sent.seconds
        if not self.joiners and 2 * sent.num_bytes > self._updater.sender.manifest.total_bytes:
            self._updater.transfers_s.append(sent.seconds * self._updater.sender.manifest.total_bytes / sent.num_bytes)
        self._updater.post(self, pb.Staged(actor=c.TRAINER, epoch=epoch, version=version, checksum=sent.checksum))

    async def _stop_transfer(self) -> None:
        task, group = self._task, self._group
        self._task = self._group = None
        if task is not None:
            task.cancel()  # before `abandon`, so that a task that has not begun never begins
        if group is not None:
            await group.abandon()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)

    async def _say(self, kind: str, order: Control, span: Span = INVALID_SPAN) -> None:
        order.incarnation = self._updater.incarnation
        payload, members = order.SerializeToString(), self.coordinator.members
        actors = [name for name in self.joiners if kind == "abort" or name in members] if self.joiners else [""]
        headers, bus = headers_of(trace_of(span)), self._updater.bus
        calls = [partial(bus.publish_control, kind, payload, actor, headers) for actor in actors]
        await asyncio.gather(*(retry_forever(call, f"publish {kind!r}") for call in calls))

    def _order_span(self, kind: str, epoch: int) -> Span:
        attributes = {a.EPOCH: epoch, **a.messaging("send", f"control.{kind}")}
        return child(trace_of(self._span), f"weight_update.{kind}", kind=SpanKind.PRODUCER, attributes=attributes)

    def _end_spans(self, failure: str = "", *, of_commit_only: bool = False) -> None:
        for span in (self._commit_span,) if of_commit_only else (self._commit_span, self._span):
            if failure:
                span.set_status(Status(StatusCode.ERROR, failure))
            span.end()
        self._commit_span = INVALID_SPAN
        self._span = self._span if of_commit_only else INVALID_SPAN


class WeightUpdater:
    """Sends versions to all actors, and keeps the newest served snapshot for joining actors.

    `join_timeout_s`: maximum time from the offer of the first version until an actor serves it, without the time for sending.
    `log`: writer of the weight log, if any. If all actors read this log, a version is served once one of them serves it."""

    def __init__(
        self,
        bus: Bus,
        sender: WeightSender,
        observer: UpdateObserver,
        *,
        incarnation: int,
        deadline_s: float,
        join_timeout_s: float,
        log: LogWriter | None = None,
    ) -> None:
        self.log, self.readers = log, LogReaders()
        self.bus, self.sender, self.incarnation, self.deadline_s = bus, sender, incarnation, deadline_s
        self._observer, self._join_timeout_s = observer, join_timeout_s
        self.on_change: Callable[[], None] = lambda: None
        """Called when a version is served or actors are gone."""
        self.tasks: asyncio.TaskGroup
        self.roster = Roster()
        self._draining: set[str] = set()
        self._events: asyncio.Queue[tuple[TransferSession | None, c.Event | None]] = asyncio.Queue()
        self._epochs = count(1)
        self._main = TransferSession(self, c.Coordinator(self._epochs))
        self._sides: list[TransferSession] = []
        self._gathering = False
        self.starting: set[str] = set()
        """Actors whose registrations say that they are loading, compiling or preparing to receive weights."""
        self.transfers_s = deque([sender.manifest.total_bytes / ASSUMED_BYTES_PER_S], maxlen=5)
        """Durations of the latest transfers to the epoch's members, each extrapolated to all bytes if it sent fewer. The
        first value is an assumption."""
        self._formed_before = False
        self._changed = asyncio.Condition()
        self._served_snapshot: Snapshot | None = None
        self._reasons: dict[str, str] = {}
        self.served_version = -1
        self.evictions = self.regroups = self.bad_messages = 0
        self.updates = {"served": 0, "aborted": 0}

    @property
    def members(self) -> dict[str, c.Member]:
        """Return the epoch's members, and the readers of the weight log that have a gRPC address."""
        readers = {actor: member for actor, member in self.readers.members.items() if member.grpc_address}
        return self._main.coordinator.members | readers

    @property
    def serving(self) -> dict[str, c.Member]:
        """Return the actors known to serve `served_version`, without readers of the weight log that gRPC calls do not reach."""
        return self.roster.serving(self.served_version) | self.readers.serving(self.served_version)

    @property
    def states(self) -> dict[str, str]:
        """Return each registered actor's state, one of `MEMBER_STATES`. Any thread may call this."""
        serving, joining = set(self.serving), {name for side in list(self._sides) for name in list(side.joiners)}
        states = {
            name: "joining" if name in joining else "serving" if name in serving else "waiting"
            for name in list(self._main.coordinator.present)
        }
        states |= {name: "joining" if version < 0 else "serving" for name, version in self.readers.versions.items()}
        return states | dict.fromkeys(set(self._draining) - states.keys(), "leaving")

    @property
    def versions(self) -> dict[str, int]:
        """Return the version of each actor with the state "serving". Any thread may call this."""
        members = dict.fromkeys(self.roster.serving(self.served_version), self.served_version)
        return members | {name: version for name, version in self.readers.versions.items() if version >= 0}

    @property
    def limit_s(self) -> float:
        """Return the maximum seconds for sending a version: `deadline_s` plus `SLOW` times the median of recent transfers."""
        return self.deadline_s + c.SLOW * median(self.transfers_s)

    @property
    def epoch(self) -> int:
        return self._main.coordinator.epoch

    @property
    def reasons(self) -> str:
        return "; ".join(f"{actor}: {reason}" for actor, reason in sorted(self._reasons.items()))

    async def wait_for_members(self, count: int) -> None:
        await self._until(lambda: self.num_present >= count)

    @property
    def num_present(self) -> int:
        return len(self._main.coordinator.present) + len(self.readers.members)

    async def offer(self, version: int, snapshot: Snapshot) -> None:
        """Wait until no version is in transfer to the epoch, then begin to send `version`."""
        await self.all_served()
        self._main.begin(version, snapshot)
        self.post(self._main, c.VersionReady(version))
        if self.log is not None:
            self.log.offer(snapshot)

    def pod_ends(self, pod: PodEnd) -> None:
        """Remove the actor of a pod that ends, even if the actor still sends heartbeats."""
        leaving = self.roster.leaving(pod, self._main.coordinator.present | self.readers.members)
        if leaving is not None:
            self._leave(leaving)

    @property
    def commit_held(self) -> bool:
        """Return whether `hold_when_served` delays the commit of the version in transfer."""
        return self._main.coordinator.held

    async def all_served(self) -> None:
        """Wait until no version is in transfer to the epoch."""
        await self._until(lambda: self._main.snapshot is None)

    async def order_sleep(self) -> None:
        """Order the actors that serve `served_version` to sleep until the next version. No version may be in transfer."""
        order = pb.Sleep(incarnation=self.incarnation, version=self.served_version).SerializeToString()
        await retry_forever(lambda: self.bus.publish_control("sleep", order), "publish 'sleep'")

    @asynccontextmanager
    async def hold_when_served(self, version: int) -> AsyncIterator[None]:
        """Wait until the offered `version` is served. Later versions are staged but not committed inside the block."""
        self._hold_commits(above=version)
        try:
            await self._until(lambda: self.served_version >= version)
            yield
        finally:
            self._hold_commits(above=None)

    def _hold_commits(self, above: int | None) -> None:
        self.post(self._main, c.HoldCommits(above))
        if self.log is not None:
            self.log.hold(above)

    async def run(self) -> None:
        """Run until cancelled. Raises `ServiceError` if no actor serves the first version in time."""
        manifest = self.sender.manifest.to_bytes()
        await retry_forever(lambda: self.bus.publish_control("manifest", manifest), "publish 'manifest'")
        try:
            async with asyncio.TaskGroup() as self.tasks:
                self.tasks.create_task(self._watch_members())
                self.tasks.create_task(self._watch_answers())
                self.tasks.create_task(self._step_events())
                self.tasks.create_task(self._first_served_in_time())
                if self.log is not None:
                    self.tasks.create_task(self.log.run(self.bus))
        finally:
            for session in (self._main, *self._sides):
                await session.close()

    async def _first_served_in_time(self) -> None:
        await self._until(lambda: self._main.snapshot is not None)
        try:
            async with asyncio.timeout(self._join_timeout_s + self.limit_s - self.deadline_s):
                await self._until(lambda: self.served_version >= 0)
        except TimeoutError as error:
            unwritten = f"weights.log cannot be written: {self.log.problem}. " if self.log and self.log.problem else ""
            raise ServiceError(
                f"no actor served version {self._main.record.version} within {self._join_timeout_s:g} s "
                f"(weights.join_timeout_s) plus the time for sending. {unwritten}Actors that cannot join: "
                f"{self.reasons or 'none'}. Look at the actors' logs, or raise weights.join_timeout_s"
            ) from error

    async def _watch_members(self) -> None:
        async with self.bus.watch_members() as events:
            async for event in events:
                for actors in (self._draining, self.starting):
                    actors.discard(event.actor)
                if event.payload is None:
                    self._leave(c.MembersLeaving.unregistered(event.actor))
                    continue
                try:
                    said = decode_control(event.payload, pb.Registration)
                except MessageError as error:
                    self.bad_messages += 1
                    log.error("registration of %s is ignored: %s", event.actor, error, extra=AGGREGATED)
                    continue
                member = c.Member(said.actor, said.process, said.ranks, said.grpc_address, said.pod_uid)
                if said.phase == "starting":  # an older process of that actor is gone
                    self.starting.add(said.actor)
                    self._leave(c.MembersLeaving.unregistered(said.actor, reason="it restarted"))
                elif said.phase == "draining":
                    self._draining.add(said.actor)
                    self._leave(c.MembersLeaving((member,), "it is shutting down"))
                elif said.reads_log:
                    if said.actor in self._main.coordinator.present:
                        self.post(None, c.MembersLeaving.unregistered(said.actor, reason=_OTHER_BACKEND))
                    version = said.policy_version if said.incarnation == self.incarnation else -1
                    if not self.roster.has_left(member):
                        self.readers.up(member)
                        self._reader_serves(self.readers.serves(said.actor, version))
                else:
                    self._tell(self.readers.leaves(said.actor, _OTHER_BACKEND, left=False))
                    self.post(None, c.MemberUp(member))

    def _reader_serves(self, changes: list[MemberChange]) -> None:
        self._tell(changes)
        self.post(self._main, c.ServedFromLog(self.readers.newest))

    def _leave(self, event: c.MembersLeaving) -> None:
        """Remove readers of the weight log at once; the departure of epoch members waits behind earlier events."""
        for member in event.members:
            self._tell(self.readers.leaves(member.actor, event.reason, left=event.cause is None, process=member.process))
        self.post(None, event)

    async def _watch_answers(self) -> None:
        async with self.bus.watch_control(tuple(ANSWER_TYPES)) as messages:
            async for message in messages:
                try:
                    answer: c.Answer = decode_control(message.payload, ANSWER_TYPES[message.kind])
                except MessageError as error:
                    self.bad_messages += 1
                    log.error("answer %s of %s is ignored: %s", message.kind, message.actor, error, extra=AGGREGATED)
                    continue
                about = {a.ACTOR: message.actor, **a.messaging("process", f"control.{message.kind}")}
                trace = trace_in(message.headers)  # the actor's trace continues in the trainer
                child(trace, "weight_update.answer", kind=SpanKind.CONSUMER, attributes=about).end()
                self._hear(answer)

    def _hear(self, answer: c.Answer) -> None:
        """Post an answer to the session of its epoch, unless it is for another incarnation."""
        ours = answer.incarnation == self.incarnation
        if isinstance(answer, pb.Abort) and (ours or not answer.incarnation):
            self._reasons.pop(answer.actor, None)
            self._note_reason(answer.actor, answer.reason)
        if not ours:
            return
        if isinstance(answer, pb.EpochJoined | pb.Serving):
            self._reasons.pop(answer.actor, None)
        if isinstance(answer, pb.Serving) and not answer.epoch:
            if answer.version == self._main.record.version:
                self._main.record.stall_s[answer.actor] = answer.stall_s
            self._reader_serves(self.readers.serves(answer.actor, answer.version))
        sides = (session for session in self._sides if session.coordinator.epoch == answer.epoch)
        self.post(next(sides, self._main), answer)  # the main session ignores answers about ended epochs

    def _note_reason(self, actor: str, reason: str) -> None:
        """Keep the first reason why an actor does not serve, for the latest `MOST_REASONS` actors."""
        self._reasons.setdefault(actor, reason)
        while len(self._reasons) > MOST_REASONS:
            del self._reasons[next(iter(self._reasons))]

    def post(self, session: TransferSession | None, event: c.Event | None) -> None:
        """Queue an event. `session` None: the event is about membership. `event` None: the wait for joining actors is over."""
        self._events.put_nowait((session, event))

    async def _step_events(self) -> None:
        while True:
            waiting = [await self._events.get()]
            while not self._events.empty():
                waiting.append(self._events.get_nowait())
            for session, event in coalesce_departures(waiting):
                if event is None:
                    await self._tend_sides(gathered=True)
                elif session is None:
                    await self._membership(event)
                elif session is self._main:
                    await self._step_main(event)
                elif session in self._sides:
                    await self._step_side(session, event)
                await self._tend_sides()  # after all actions, which make an evicted actor wait for some heartbeats
                async with self._changed:
                    self._changed.notify_all()

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _membership(self, event: c.Event) -> None:
        if isinstance(event, c.MemberUp) and self.roster.has_left(event.member):
            return
        await self._step_main(event)
        match event:
            case c.MemberUp(member):
                self.roster.up(member)
            case c.MembersLeaving(members, reason, _, cause):
                for member in members:
                    if member.actor not in self._main.coordinator.present:  # otherwise a newer process of this actor is present
                        changes = self.roster.gone(member.actor, self.epoch, self.served_version, reason, left=cause is None)
                        self._tell(changes)
                        self.on_change()

    def _tell(self, changes: list[MemberChange]) -> None:
        for change in changes:
            self._observer.member_changed(change)

    async def _step_main(self, event: c.Event) -> None:
        for action in await self._main.step(event):
            match action:
                case c.FormGroup(_, members) if members:
                    self.regroups += self._formed_before
                    self._formed_before = True
                case c.Evicted(actor, _, reason, cause):
                    self.evictions += cause is not None
                    self._note_reason(actor, reason)
                    self._tell(self.roster.put_out(action, self.served_version))
                case c.FormGroup() if self.readers.members:
                    self.post(self._main, c.ServedFromLog(self.readers.newest))
                case c.FormGroup():
                    log.warning("no actor is left: version %d waits for one to register", self._main.record.version)
                case c.VersionServed(version, epoch):
                    self._served_snapshot, self._main.snapshot = self._main.snapshot, None
                    self.served_version = version
                    self._tell(self.roster.served(self._main.coordinator.members.values(), epoch, version))
                    self.updates["served"] += 1
                    self._observer.served(self._main.record)
                    self.on_change()

    async def _tend_sides(self, *, gathered: bool = False) -> None:
        """Take actors that are gone or in the main epoch out of side groups, and open groups for others that need one.
        `gathered`: the wait for further actors is over."""
        for session in list(self._sides):
            if outdated := self.roster.outdated(session.joiners, self._main.coordinator.members):
                await self._step_side(session, c.MembersLeaving(outdated, "it is gone, or in the epoch", still_running=False))
        in_epoch = self._main.coordinator.members
        due = self.roster.side_groups(self.served_version, in_epoch, [session.joiners for session in self._sides])
        if due and not gathered and not self._gathering:
            asyncio.get_running_loop().call_later(min(GATHER_S, self.transfers_s[-1]), self.post, None, None)
        self._gathering = not gathered and (self._gathering or bool(due))
        for members in due if gathered else ():
            session = TransferSession(self, c.Coordinator(self._epochs), members)
            self._sides.append(session)
            log.info("a side group brings version %d to %s", self.served_version, ", ".join(session.joiners))
            assert self._served_snapshot is not None, "side groups begin after a version is served"
            session.begin(self.served_version, self._served_snapshot)
            for member in members:
                session.coordinator.step(c.MemberUp(member))
            await self._step_side(session, c.VersionReady(self.served_version))

    async def _step_side(self, session: TransferSession, event: c.Event) -> None:
        joiners = session.joiners
        for action in await session.step(event):
            match action:
                case c.VersionServed(version, epoch, actors):
                    members = [joiners.pop(actor) for actor in actors]
                    self._tell(self.roster.served(members, epoch, version))
                    for member in members:
                        self.post(self._main, c.MemberReady(member.actor, member.process))
                        self._observer.joined(member.actor, session.record)
                    self.on_change()
                case c.Evicted(actor, _, _, cause):
                    member = joiners.pop(actor)
                    if cause is not None:
                        self.roster.side_failed(member)
        if not joiners:
            self._sides.remove(session)
            await session.close()


Queued = tuple[TransferSession | None, c.Event | None]


def coalesce_departures(events: list[Queued]) -> list[Queued]:
    """Merge consecutive departures with the same reason into one event, and keep the order. Pure."""
    merged: list[Queued] = []
    for session, event in events:
        before = merged[-1][1] if merged else None
        match before, event:
            case c.MembersLeaving(earlier), c.MembersLeaving(members) if replace(before, members=members) == event:
                merged[-1] = (None, replace(before, members=earlier + members))
            case _:
                merged.append((session, event))
    return merged


def epoch_members(members: tuple[c.Member, ...]) -> tuple[pb.EpochMember, ...]:
    """Return the rank layout: the trainer has rank 0, and the actors' ranks follow in the order of `members`. Pure."""
    first_ranks = accumulate((member.ranks for member in members), initial=1)
    return tuple(
        pb.EpochMember(actor=member.actor, process=member.process, first_rank=first_rank, ranks=member.ranks)
        for member, first_rank in zip(members, first_ranks, strict=False)  # the last number is not used
    )


def actors_of(ranks: Iterable[int], members: tuple[c.Member, ...]) -> tuple[str, ...]:
    """Return the actors that own `ranks`, each once. Pure."""
    owners = [member.actor for member in members for _ in range(member.ranks)]
    return tuple(dict.fromkeys(owners[rank - 1] for rank in sorted(ranks)))
