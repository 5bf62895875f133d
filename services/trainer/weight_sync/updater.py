"""Brings every version to every actor: the session of the epoch, side sessions of joiners, control messages in and out.

Consumes versions offered by the optimizer loop and the actors' answers; produces served versions. `offer` returns as soon
as sending has begun, so that the next batch is computed while bytes move; it waits only for the version before, so that
sending trails the optimizer by at most one version. Registered actors, their answers and deadlines unblock it. An outage of
NATS is waited for. Only the first version has a limit to its waiting: a run that no actor can serve ends with their reasons.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from pipelinerl.bus.protocol import Bus, Headers
from pipelinerl.errors import MessageError, ServiceError
from pipelinerl.kube.pods import PodEnd
from pipelinerl.messages.control import (
    Abort,
    EpochJoined,
    Registration,
    Serving,
    Staged,
    decode_control,
)
from pipelinerl.service.retry import retry_forever
from services.trainer.weight_sync import coordinator as c
from services.trainer.weight_sync.membership import (
    MEMBER_STATES,
    BeginSide,
    Departures,
    EndSide,
    Joining,
    MemberChange,
    MembershipLog,
    member_states,
)
from services.trainer.weight_sync.membership import Action as JoiningAction
from services.trainer.weight_sync.session import (
    Answer,
    Order,
    Outcome,
    TransferContext,
    TransferSession,
    UpdateRecord,
    trace_answer,
)

if TYPE_CHECKING:
    from services.trainer.weight_sync.sender import CollectivePort, Snapshot

log = logging.getLogger(__name__)

ANSWER_TYPES = {"joined": EpochJoined, "staged": Staged, "serving": Serving, "failed": Abort}
"""What actors say, by kind."""
MOST_REASONS = 16
"""Actors whose last reason is remembered: enough for a person, and bounded where names keep changing."""


class WeightUpdater:
    """`join_timeout_s`: from the offer of the first version until some version is served.

    Keeps the snapshot of the newest served version for joiners, beside that of the version under way. `on_aborted`: version,
    epoch, actor (empty: all of the epoch) and reason of an update that is begun again. `on_regroup`: the group of all members
    is formed again, as this epoch; `on_evicted`: one was put out of it.
    """

    def __init__(
        self,
        bus: Bus,
        port: CollectivePort,
        *,
        incarnation: int,
        deadline_s: float,
        join_timeout_s: float,
        on_served: Callable[[UpdateRecord], None],
        on_joined: Callable[[str, UpdateRecord], None] = lambda actor, record: None,
        on_member: Callable[[MemberChange], None] = lambda change: None,
        on_aborted: Callable[[int, int, str, str], None] = lambda version, epoch, actor, reason: None,
        on_regroup: Callable[[int], None] = lambda epoch: None,
        on_evicted: Callable[[c.EvictionCause], None] = lambda cause: None,
    ) -> None:
        self._bus, self._port = bus, port
        self._incarnation, self._join_timeout_s = incarnation, join_timeout_s
        self._on_served, self._on_joined = on_served, on_joined
        self._on_member, self._on_aborted = on_member, on_aborted
        self._on_regroup, self._on_evicted = on_regroup, on_evicted
        self._formed_before = False
        self._draining: set[str] = set()
        """Actors that were told to end and are still registered."""
        self._departures, self._membership_log = Departures(), MembershipLog()
        self._events: asyncio.Queue[tuple[TransferSession | None, c.Event]] = asyncio.Queue()
        self._epochs = count(1)
        self._context = TransferContext(port, self._say, self._post, self._spawn, incarnation, deadline_s)
        self._main = TransferSession(self._context, c.Coordinator(self._epochs))
        self._sides: dict[str, TransferSession] = {}
        self._joining = Joining()
        self._idle = asyncio.Event()
        self._idle.set()
        self._members_changed = asyncio.Condition()
        self._served_changed = asyncio.Condition()
        self._under_way: Snapshot | None = None
        self._served_snapshot: Snapshot | None = None
        self._serving: dict[str, c.Member] = {}
        self._tasks: asyncio.TaskGroup
        self._reasons: dict[str, str] = {}
        self._offered = asyncio.Event()
        self.served_version = -1
        self.evictions = 0
        self.bad_messages = 0
        """Answers and registrations that could not be read, since the start."""

    # --- what the rest of the trainer uses --------------------------------------------------------------------------

    @property
    def members(self) -> dict[str, c.Member]:
        """Members of the current epoch, by actor."""
        return self._main.coordinator.members

    @property
    def serving(self) -> dict[str, c.Member]:
        """Actors that are known to serve `served_version`: whom to ask while it is held."""
        return dict(self._serving)

    @property
    def joining(self) -> frozenset[str]:
        """Actors that are being brought to the served version on side groups."""
        return frozenset(self._sides)

    @property
    def states(self) -> dict[str, str]:
        """Of each registered actor, by name. May be read on any thread."""
        present, draining = set(self._main.coordinator.present), set(self._draining)
        return member_states(present, set(self._serving), set(self._sides), draining)

    @property
    def member_states(self) -> dict[str, int]:
        """Registered actors by state, each of `MEMBER_STATES`. May be read on any thread."""
        states = list(self.states.values())
        return {state: states.count(state) for state in MEMBER_STATES}

    @property
    def epoch(self) -> int:
        return self._main.coordinator.epoch

    @property
    def reasons(self) -> str:
        """Why actors did not serve, in their own words where they had any; empty when nothing was heard."""
        return "; ".join(f"{actor}: {reason}" for actor, reason in sorted(self._reasons.items()))

    async def wait_for_members(self, count: int) -> None:
        """Returns when `count` actors have registered."""
        async with self._members_changed:
            await self._members_changed.wait_for(lambda: self.num_present >= count)

    @property
    def num_present(self) -> int:
        return len(self._main.coordinator.present)

    async def offer(self, version: int, snapshot: Snapshot) -> None:
        """Begins sending `version`. Waits until the version before is served by everyone who is left."""
        await self._idle.wait()
        self._idle.clear()
        self._under_way = snapshot
        self._main.begin(version, snapshot)
        self._offered.set()
        self._post(self._main, c.VersionReady(version))

    def pod_ends(self, pod: PodEnd) -> None:
        """An actor's pod is being deleted, or has ended: its departure, whatever its heart does."""
        leaving = self._departures.leaving(pod, self._main.coordinator.present)
        if leaving is not None:
            self._post(None, leaving)

    async def all_served(self) -> None:
        """Returns when the epoch has nothing under way."""
        await self._idle.wait()

    @asynccontextmanager
    async def hold_when_served(self, version: int) -> AsyncIterator[None]:
        """Enters once `version`, offered before, is served; while inside, no later one is committed. Staging goes on."""
        self._post(self._main, c.HoldCommits(above=version))
        try:
            async with self._served_changed:
                await self._served_changed.wait_for(lambda: self.served_version >= version)
            yield
        finally:
            self._post(self._main, c.HoldCommits(above=None))

    async def run(self) -> None:
        """Runs until cancelled. Raises `ServiceError` when no actor comes to serve the first version."""
        manifest = self._port.manifest.to_bytes()
        await retry_forever(lambda: self._bus.publish_control("manifest", manifest), "say 'manifest'")
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._watch_members())
                self._tasks.create_task(self._watch_answers())
                self._tasks.create_task(self._step_events())
                self._tasks.create_task(self._first_served_in_time())
        finally:
            for session in (self._main, *self._sides.values()):
                await session.close()

    async def _first_served_in_time(self) -> None:
        await self._offered.wait()
        try:
            async with asyncio.timeout(self._join_timeout_s), self._served_changed:
                await self._served_changed.wait_for(lambda: self.served_version >= 0)
        except TimeoutError as error:
            raise ServiceError(
                f"version {self._main.record.version} was served by no actor within weights.join_timeout_s = "
                f"{self._join_timeout_s:g} s; {f'last heard: {self.reasons}' if self._reasons else 'no actor said why'}. "
                "Look at the actors' logs, or raise it"
            ) from error

    # --- events in ------------------------------------------------------------------------------------------------

    async def _watch_members(self) -> None:
        async with self._bus.watch_members() as events:
            async for event in events:
                if event.payload is None:
                    self._draining.discard(event.actor)
                    self._post(None, c.MembersDown((event.actor,)))
                    continue
                try:
                    said = decode_control(event.payload, Registration)
                except MessageError as error:
                    self.bad_messages += 1
                    log.error("registration of %s is set aside: %s", event.actor, error)
                    continue
                member = c.Member(said.actor, said.process, said.ranks, said.grpc_address, said.pod_uid)
                if said.phase == "draining":
                    self._draining.add(said.actor)
                    self._post(None, c.MembersLeaving((member,), "it was told to end"))
                else:
                    self._draining.discard(said.actor)
                    self._post(None, c.MemberUp(member))

    async def _watch_answers(self) -> None:
        async with self._bus.watch_control(tuple(ANSWER_TYPES)) as messages:
            async for message in messages:
                try:
                    answer: Answer = decode_control(message.payload, ANSWER_TYPES[message.kind])
                except MessageError as error:
                    self.bad_messages += 1
                    log.error("answer %s of %s is set aside: %s", message.kind, message.actor, error)
                    continue
                trace_answer(message)
                self._hear(answer)

    def _hear(self, answer: Answer) -> None:
        """Posts the event of an answer to this incarnation, to the session that it is about; nobody else's.

        That of an epoch that is over goes to the main session, which ignores it.
        """
        ours = answer.incarnation == self._incarnation
        if isinstance(answer, Abort) and (ours or not answer.incarnation):
            self._reasons.pop(answer.actor, None)
            self._note_reason(answer.actor, answer.reason)
        if not ours:
            return
        if isinstance(answer, EpochJoined):
            self._reasons.pop(answer.actor, None)
        sides = (session for session in self._sides.values() if session.coordinator.epoch == answer.epoch)
        session = next(sides, self._main)
        self._post(session, session.event_of(answer))

    def _note_reason(self, actor: str, reason: str) -> None:
        """What an actor said itself is not replaced by what was seen of it from here."""
        self._reasons.setdefault(actor, reason)
        while len(self._reasons) > MOST_REASONS:
            del self._reasons[next(iter(self._reasons))]

    # --- what follows from them -------------------------------------------------------------------------------------

    def _post(self, session: TransferSession | None, event: c.Event) -> None:
        """`session` None: of the membership, which concerns all sessions."""
        self._events.put_nowait((session, event))

    async def _step_events(self) -> None:
        while True:
            waiting = [await self._events.get()]
            while not self._events.empty():
                waiting.append(self._events.get_nowait())
            for session, event in coalesce_departures(waiting):
                if session is None:
                    await self._membership(event)
                elif session is self._main:
                    await self._step_main(event)
                elif session in self._sides.values():
                    await self._step_side(session, event)

    async def _membership(self, event: c.Event) -> None:
        if isinstance(event, c.MemberUp):
            if self._departures.has_left(event.member):
                return
            self._membership_log.registered(event.member)
        await self._step_main(event)
        match event:
            case c.MemberUp(member):
                self._forget(member.actor, but=member.process)
                await self._side(self._joining.up(member))
            case c.MembersDown(actors):
                for actor in actors:
                    await self._gone(actor, "left, or its heartbeat stopped", left=False)
            case c.MembersLeaving(members, reason):
                for member in members:
                    if member.actor not in self._main.coordinator.present:  # else another process of that name is there
                        await self._gone(member.actor, reason, left=True)
        async with self._members_changed:
            self._members_changed.notify_all()

    async def _gone(self, actor: str, reason: str, *, left: bool) -> None:
        self._forget(actor)
        self._tell(self._membership_log.gone(actor, self.epoch, self.served_version, reason, left=left))
        await self._side(self._joining.down(actor))

    def _tell(self, changes: list[MemberChange]) -> None:
        for change in changes:
            self._on_member(change)

    def _forget(self, actor: str, but: str = "") -> None:
        """Processes of this name, except `but`, no longer count as having met, or as serving."""
        for member in {*self._context.met, *self._serving.values()}:
            if member.actor == actor and member.process != but:
                self._context.met.discard(member)
                if self._serving.get(actor) == member:
                    del self._serving[actor]

    async def _step_main(self, event: c.Event) -> None:
        for outcome in await self._main.step(event):
            await self._side(self._main_outcome(outcome))
            if isinstance(outcome, c.VersionServed):
                await self._finish(outcome.version)

    def _main_outcome(self, outcome: Outcome) -> list[JoiningAction]:
        match outcome:
            case c.FormGroup(epoch, members):
                if self._formed_before:
                    self._on_regroup(epoch)
                self._formed_before = True
                return self._joining.formed(members)
            case c.Evicted(actor, epoch, reason, left, cause):
                if not left:
                    self.evictions += 1
                    self._on_evicted(cause)
                self._note_reason(actor, reason)
                self._tell(self._membership_log.put_out(actor, epoch, self.served_version, reason, left=left))
                return self._joining.left(actor)
            case c.SendAbort(epoch, version, reason):
                self._on_aborted(version, epoch, "", reason)
                return []
            case c.WaitingForMembers(version):
                log.warning("no actor is left: version %d waits for one to register", version)
                return self._joining.formed(())
            case c.VersionServed(version, _, members):
                self._served_snapshot, self._under_way = self._under_way, None
                self._serving = dict(self._main.coordinator.members)
                for member in self._serving.values():
                    self._tell(self._membership_log.served(member, self.epoch, version))
                return self._joining.served(version, members)

    async def _side(self, actions: list[JoiningAction]) -> None:
        for action in actions:
            match action:
                case BeginSide(member, version):
                    await self._begin_side(member, version)
                case EndSide(actor):
                    await self._sides.pop(actor).close()

    async def _begin_side(self, member: c.Member, version: int) -> None:
        log.info("actor %s is brought to version %d on a side group", member.actor, version)
        session = TransferSession(self._context, c.Coordinator(self._epochs), joiner=member.actor)
        assert self._served_snapshot is not None, "nobody is brought to a version before one is served"
        session.begin(version, self._served_snapshot)
        self._sides[member.actor] = session
        session.coordinator.step(c.MemberUp(member))
        await self._step_side(session, c.VersionReady(version))

    async def _step_side(self, session: TransferSession, event: c.Event) -> None:
        for outcome in await session.step(event):
            actor = next(actor for actor, other in self._sides.items() if other is session)
            if isinstance(outcome, c.VersionServed):
                member = session.coordinator.members[actor]
                if outcome.version == self.served_version:
                    self._serving[actor] = member
                self._tell(self._membership_log.served(member, outcome.epoch, outcome.version))
                self._post(self._main, c.MemberReady(actor, member.process))
                await self._sides.pop(actor).close()
                self._on_joined(actor, session.record)
                await self._side(self._joining.side_served(actor, outcome.version))
            elif isinstance(outcome, c.SendAbort):
                self._on_aborted(outcome.version, outcome.epoch, actor, outcome.reason)
            elif isinstance(outcome, c.WaitingForMembers):
                await self._sides.pop(actor).close()
                await self._side(self._joining.side_failed(actor))

    async def _finish(self, version: int) -> None:
        self.served_version = version
        self._on_served(self._main.record)
        self._idle.set()
        async with self._served_changed:
            self._served_changed.notify_all()

    async def _say(self, kind: str, order: Order, actor: str, headers: Headers) -> None:
        payload = order.SerializeToString()
        await retry_forever(lambda: self._bus.publish_control(kind, payload, actor, headers), f"say {kind!r}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)


def coalesce_departures(
    events: list[tuple[TransferSession | None, c.Event]],
) -> list[tuple[TransferSession | None, c.Event]]:
    """The same events in the same order, departures that follow one another as one. Pure."""
    merged: list[tuple[TransferSession | None, c.Event]] = []
    for session, event in events:
        before = merged[-1][1] if merged else None
        if isinstance(event, c.MembersDown) and isinstance(before, c.MembersDown):
            merged[-1] = (None, c.MembersDown(before.actors + event.actors))
        elif (
            isinstance(event, c.MembersLeaving)
            and isinstance(before, c.MembersLeaving)
            and event == replace(before, members=event.members)
        ):
            merged[-1] = (None, replace(before, members=before.members + event.members))
        else:
            merged.append((session, event))
    return merged
