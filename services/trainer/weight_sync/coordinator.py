"""The members of the weight-transfer group and the progress of one version, as a pure state machine driven by events.

This is the trainer's side of the protocol (docs/weight-updates.md), without clock, socket or thread. `step(event)` returns the
actions to perform, in order. `updater.py` performs them and reports the results, and passed deadlines, as events. Members'
answers are events, too, and the trainer's own end of the group answers like a member.

The tests check these invariants against every order of events:
  * `Commit` of v comes only after every remaining member of the epoch has staged v in that epoch with the sender's
    checksum;
  * an epoch's membership never changes; any change makes a new epoch with a higher number;
  * one version is in transfer at a time, and each transfer that begins ends in `VersionServed`, with the remaining members;
  * an actor that came late or failed is not in the epoch with others until `MemberReady` reports that it has served a version
    on a side group, so that no actor delays the members twice.

A run has one coordinator for the epoch of all actors, and one for each side group that brings joiners up to date.
`membership.py` decides which joiners share a side group. This module does not handle the bytes of a version.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from statistics import median

from pipelinerl.v1.control_pb2 import Abort, Announce, Commit, EpochJoined, Serving, Staged

MOST_RESTARTS = 3
"""Maximum number of retries of one version with the same members. Then each must succeed alone before it rejoins."""
SLOW = 4.0
"""A member or transfer is slow if it takes more than this multiple of the median time of members or of earlier transfers."""
TRAINER = ""
"""`actor` of the trainer's own answers: `EpochJoined` when its end of the group is built, `Staged` when all bytes are sent."""


@dataclass(frozen=True)
class Member:
    """One actor process. `ranks`: its number of ranks in the group, which is the tensor-parallel size."""

    actor: str
    process: str
    ranks: int = 1
    grpc_address: str = ""
    pod_uid: str = ""
    """Uid of the actor's Kubernetes pod; "" = none."""


class EvictionCause(StrEnum):
    HEARTBEAT = "heartbeat"
    RESTARTED = "restarted"
    MISSING = "missing"
    FAILED = "failed"
    DEADLINE = "deadline"
    CHECKSUM = "checksum"
    GROUP_BROKE = "group_broke"


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemberUp:
    """An actor registered, or registered again, as the same or as a new process."""

    member: Member


@dataclass(frozen=True)
class MembersLeaving:
    """These processes are shutting down or have ended. One event names several, so that one new epoch is enough. A member with
    the process "" stands for any process of its actor. `still_running`: they still take part in a running transfer, which
    continues without their answers. After their end, a second event ends a transfer that may still wait for their ranks.
    `cause`: None for an orderly departure."""

    members: tuple[Member, ...]
    reason: str
    still_running: bool = True
    cause: EvictionCause | None = None

    @classmethod
    def unregistered(cls, *actors: str) -> MembersLeaving:
        """Return the event for actors that removed their registrations or whose heartbeats expired."""
        members = tuple(Member(actor, process="") for actor in actors)
        return cls(members, "left, or its heartbeat stopped", False, EvictionCause.HEARTBEAT)


@dataclass(frozen=True)
class MemberReady:
    """An actor serves a version that it got on a side group, and may be in the next epoch. `process` distinguishes processes of
    the same actor."""

    actor: str
    process: str


@dataclass(frozen=True)
class VersionReady:
    """The trainer has a version to send. Only valid in the phase IDLE."""

    version: int


@dataclass(frozen=True)
class TransferFailed:
    """On the trainer's side, forming the group or a broadcast failed. `missing`: actors that did not join the group."""

    epoch: int
    reason: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeadlinePassed:
    """The deadline with this `SetDeadline` token has passed. Old tokens are ignored."""

    token: int


@dataclass(frozen=True)
class HoldCommits:
    """During a measurement (evaluation or probe), stage but do not commit versions after `above`. None ends the measurement."""

    above: int | None


Answer = EpochJoined | Staged | Serving | Abort
"""A member's report: it has joined, has staged, serves, or has failed. The trainer's own end sends only the first two."""
Event = MemberUp | MembersLeaving | MemberReady | VersionReady | HoldCommits | TransferFailed | DeadlinePassed | Answer


# --- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FormGroup:
    epoch: int
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Evicted:
    """An actor was removed from an epoch. `cause`: None for an orderly departure, because its process is shutting down."""

    actor: str
    epoch: int
    reason: str
    cause: EvictionCause | None = EvictionCause.FAILED


@dataclass(frozen=True)
class SetDeadline:
    """A phase begins. Post `DeadlinePassed(token)` when `due_s` says that the phase is stuck or too slow."""

    token: int


@dataclass(frozen=True)
class VersionServed:
    """Every remaining member serves the version."""

    version: int
    epoch: int
    members: tuple[str, ...]


@dataclass(frozen=True)
class WaitingForMembers:
    version: int


Action = FormGroup | Announce | Commit | Abort | Evicted | SetDeadline | VersionServed | WaitingForMembers
"""`Announce`, `Commit` and `Abort` are messages to the members; the caller fills in further fields. After `Announce`, broadcast
the version on the epoch's group. After `Abort`, close the group, which may be stuck in a collective."""


class Phase(Enum):
    IDLE = "idle"
    WAITING = "waiting for members"
    FORMING = "forming the group"
    SENDING = "sending"
    COMMITTING = "committing"


_WAITED_FOR: dict[Phase, type] = {Phase.FORMING: EpochJoined, Phase.SENDING: Staged, Phase.COMMITTING: Serving}


class Coordinator:
    """State machine of one group. `epochs`: numbers for further epochs, shared by all coordinators of a run."""

    def __init__(self, epochs: Iterator[int] | None = None) -> None:
        self._epochs = itertools.count(1) if epochs is None else epochs
        self.phase = Phase.IDLE
        self.epoch = 0
        self.version = -1
        self.members: dict[str, Member] = {}
        """Members of the current epoch."""
        self.present: dict[str, Member] = {}
        """All registered actors."""
        self._newcomers: set[str] = set()
        """Actors that came after the first offer. Until `MemberReady`, an epoch includes them only if nobody else is left."""
        self._benched: dict[str, int] = {}
        """Failed actors, each with the number of its last failure. A failed actor rejoins through a side group. If no other
        actor is left, the one that failed longest ago is tried again, alone, at its next heartbeat."""
        self._failures = itertools.count()
        self._group_stands = False
        self.answered: dict[str, int] = {}
        """Actors (and `TRAINER`) that have answered in this phase, each with the checksum of the bytes that it staged."""
        self._left: set[str] = set()
        """Processes that left while their ranks were in the group. If the group then breaks or hangs, no other is blamed."""
        self._restarts = 0
        """Failed attempts at the current version with the same members, none of whom could be blamed."""
        self._breaks = False
        """True if the last group of several members was dissolved for breaking repeatedly. The next group is not retried."""
        self._held_above: int | None = None
        self._deadline_token = 0

    @property
    def held(self) -> bool:
        """Return whether the version in transfer may be staged, but not committed yet."""
        return self._under_way and self._held_above is not None and self.version > self._held_above

    def due_s(self, deadline_s: float, limit_s: float, answers_s: list[float]) -> float:
        """Return after how many seconds this phase is stuck or too slow, unless another answer arrives before.

        Each answer gives the others `deadline_s` more, but at most `limit_s` after the first answer. Once more than half have
        answered, `SLOW` times the median is a further limit. While the trainer sends, only `limit_s` applies, since the
        transfer itself notices a stuck chunk. `answers_s`: times of this phase's answers since its begin, in order."""
        if self.phase is Phase.SENDING and TRAINER not in self.answered:
            return limit_s
        due_s = min(answers_s[-1] + deadline_s, answers_s[0] + limit_s) if answers_s else deadline_s
        all_but_slow = 2 * len(answers_s) > len(self.members) + 1
        return min(due_s, max(deadline_s, SLOW * median(answers_s))) if all_but_slow else due_s

    def step(self, event: Event) -> list[Action]:
        """Return the actions to perform, in order. Events from old epochs, old versions or non-members change nothing."""
        match event:
            case MemberUp(member):
                return self._member_up(member)
            case MembersLeaving():
                return self._members_leaving(event)
            case MemberReady(actor, process):
                if actor not in self.present or self.present[actor].process != process:
                    return []
                self._benched.pop(actor, None)
                self._newcomers.discard(actor)
                return self._form() if self.phase is Phase.WAITING else []
            case VersionReady(version):
                assert self.phase is Phase.IDLE, f"version {version} offered while {self.version} is {self.phase.value!r}"
                self.version, self._restarts = version, 0
                return self._send() if self._group_stands and self.members == self._eligible() else self._form()
            case HoldCommits(above):
                self._held_above = above
                return self._advance()
            case DeadlinePassed(token):
                return self._deadline(token)
            case TransferFailed(epoch, reason, missing):
                if epoch != self.epoch or not self._under_way:
                    return []
                lost = set(missing)
                return self._lose(lost, reason, EvictionCause.MISSING) if lost else self._restart(reason)
        if event.epoch != self.epoch:
            return []
        if isinstance(event, Abort):
            return self._member_failed(event)
        self._note(event)
        return self._advance()

    # --- events --------------------------------------------------------------------------------------------------

    def _member_up(self, member: Member) -> list[Action]:
        actor, before = member.actor, self.present.get(member.actor)
        self.present[actor] = member
        if before is None or before.process != member.process:
            self._benched.pop(actor, None)
            if self.version >= 0:
                self._newcomers.add(actor)
        if actor in self.members and self.members[actor].process != member.process:
            return self._lose({actor}, "restarted as a new process", EvictionCause.RESTARTED)
        if self.phase is Phase.WAITING and actor == min(self._benched, key=self._benched.__getitem__, default=actor):
            self._benched.pop(actor, None)
            return self._form()
        return []

    def _members_leaving(self, event: MembersLeaving) -> list[Action]:
        processes = {member.actor: member.process for member in event.members}
        for actor in _of(processes, self.present):
            self.present.pop(actor)
            self._benched.pop(actor, None)
            self._newcomers.discard(actor)
        leaving = _of(processes, self.members)
        if not leaving:
            hangs = self.phase is Phase.SENDING and TRAINER not in self.answered
            gone = not event.still_running and not self._left.isdisjoint(processes.values())
            return self._again(event.reason) if hangs and gone else []
        if not event.still_running or self.phase is not Phase.SENDING or len(leaving) == len(self.members):
            return self._lose(leaving, event.reason, event.cause)
        for actor in leaving:
            self._left.add(self.members.pop(actor).process)
            self.answered.pop(actor, None)
        self._group_stands = False
        return [Evicted(actor, self.epoch, event.reason, None) for actor in sorted(leaving)] + self._advance()

    def _deadline(self, token: int) -> list[Action]:
        if token != self._deadline_token or not self._under_way:
            return []
        late = set(self.members) - self.answered.keys()
        if not late and TRAINER in self.answered:
            return [self._new_deadline()]  # all have staged the version; only its commit is held
        if not late or self._left:
            return self._restart("deadline passed on the trainer's side")
        return self._lose(late, f"deadline passed while {self.phase.value}", EvictionCause.DEADLINE)

    def _member_failed(self, said: Abort) -> list[Action]:
        if said.actor not in self.members:
            return []
        if said.group_broke and self.phase in (Phase.FORMING, Phase.SENDING):
            return self._restart(said.reason)
        return self._lose({said.actor}, said.reason)

    def _note(self, answer: EpochJoined | Staged | Serving) -> None:
        if isinstance(answer, Staged | Serving) and answer.version != self.version:
            return
        known = answer.actor in self.members or answer.actor == TRAINER
        if known and isinstance(answer, _WAITED_FOR.get(self.phase, ())):
            self.answered[answer.actor] = answer.checksum if isinstance(answer, Staged) else 0

    # --- phases --------------------------------------------------------------------------------------------------

    @property
    def _under_way(self) -> bool:
        return self.phase in (Phase.FORMING, Phase.SENDING, Phase.COMMITTING)

    def _advance(self) -> list[Action]:
        answered = self.answered
        complete = answered.keys() >= self.members.keys()
        if self.phase is Phase.FORMING and TRAINER in answered and complete:
            self._group_stands = True
            return self._send()
        if self.phase is Phase.SENDING and TRAINER in answered:
            wrong = {actor for actor, checksum in answered.items() if checksum != answered[TRAINER]}
            if wrong:
                return self._lose(wrong, "staged bytes differ from those sent", EvictionCause.CHECKSUM)
            if complete and not self.held:
                self.phase, self.answered = Phase.COMMITTING, {}
                return [Commit(epoch=self.epoch, version=self.version), self._new_deadline()]
        if self.phase is Phase.COMMITTING and complete:
            self.phase = Phase.IDLE
            self._breaks = self._breaks and len(self.members) == 1
            return [VersionServed(self.version, self.epoch, tuple(self.members))]
        return []

    def _form(self) -> list[Action]:
        self.epoch = next(self._epochs)
        members = self._eligible()
        if members != self.members:
            self._restarts = 0
        self.members = members
        self._newcomers -= set(self.members)
        self.answered, self._left = {}, set()
        if not self.members:
            self.phase = Phase.WAITING
            return [WaitingForMembers(self.version)]
        self.phase = Phase.FORMING
        return [FormGroup(self.epoch, tuple(self.members.values())), self._new_deadline()]

    def _eligible(self) -> dict[str, Member]:
        """Return the members of an epoch that begins now, in order of their ranks. Newcomers are included only if nobody else
        is available."""
        able = {actor: member for actor, member in sorted(self.present.items()) if actor not in self._benched}
        return {actor: member for actor, member in able.items() if actor not in self._newcomers} or able

    def _send(self) -> list[Action]:
        self.phase, self.answered, self._left = Phase.SENDING, {}, set()
        return [Announce(epoch=self.epoch, version=self.version), self._new_deadline()]

    def _lose(self, actors: set[str], reason: str, cause: EvictionCause | None = EvictionCause.FAILED) -> list[Action]:
        """Remove members. If the others still lack bytes, or none is left to commit, abort and form a new group."""
        evicted: list[Action] = [Evicted(actor, self.epoch, reason, cause) for actor in sorted(actors)]
        for actor in sorted(actors):
            if self.present.get(actor) == self.members.get(actor):
                self._benched[actor] = next(self._failures)
        self._group_stands = False
        if self.phase in (Phase.FORMING, Phase.SENDING):
            return evicted + self._again(reason)
        for actor in actors:
            self.members.pop(actor, None)
        if self.phase is Phase.COMMITTING:
            return evicted + (self._advance() if self.members else self._again(reason))
        return evicted

    def _restart(self, reason: str) -> list[Action]:
        """Form the group again. Dissolve a group that breaks repeatedly."""
        if self._left:
            return self._again(reason)
        self._restarts += 1
        if self._restarts > (0 if self._breaks else MOST_RESTARTS):
            self._breaks = len(self.members) > 1
            broke = f"the group broke {self._restarts} times: {reason}"
            return self._lose(set(self.members), broke, EvictionCause.GROUP_BROKE)
        return self._again(reason)

    def _again(self, reason: str) -> list[Action]:
        abort = Abort(epoch=self.epoch, version=self.version, reason=reason)
        return [abort, *self._form()]

    def _new_deadline(self) -> SetDeadline:
        self._deadline_token += 1
        return SetDeadline(self._deadline_token)


def _of(processes: Mapping[str, str], members: Mapping[str, Member]) -> set[str]:
    return {actor for actor, process in processes.items() if actor in members and process in ("", members[actor].process)}
