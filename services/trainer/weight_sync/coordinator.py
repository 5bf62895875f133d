"""State machine for the members of a transfer group and the progress of one version (docs/weight-updates.md). Pure.

`step(event)` returns the actions to perform, in order. `updater.py` performs them. Results of actions, answers of members and
passed deadlines are the next events. The trainer answers like a member, with `TRAINER` as its name.

The machine keeps these invariants:

- A version is committed only after all remaining members have staged it in this epoch, with the sender's checksum.
- No actor joins a running epoch. If a member is lost, the current or the next version is sent in an epoch with a higher number.
- One version is in transfer at a time, until all remaining members serve it.
- An actor that registered late or failed joins other members only after it has received and served a version through a side
  group (`MemberReady`), unless no other actor is left.

A run has one coordinator for the epoch and one for each side group. `membership.py` chooses the members of side groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from statistics import median

from pipelinerl.v1.control_pb2 import Abort, Announce, Commit, EpochJoined, Serving, Staged

MOST_RESTARTS = 3
"""Maximum number of retries of a version with the same members. If all fail, a member rejoins after a transfer to it alone."""
SLOW = 4.0
"""A member's answer may take this multiple of all members' median time. `WeightUpdater.limit_s` uses it for transfers, too."""
TRAINER = ""
"""Value of `actor` in the trainer's answers: `EpochJoined` when it is in the group, `Staged` when it has sent the version."""


@dataclass(frozen=True)
class Member:
    """One actor process. `ranks`: its tensor-parallel size. `pod_uid`: uid of its Kubernetes pod; "" = none."""

    actor: str
    process: str
    ranks: int = 1
    grpc_address: str = ""
    pod_uid: str = ""


class EvictionCause(StrEnum):
    HEARTBEAT = "heartbeat"
    RESTARTED = "restarted"
    MISSING = "missing"
    FAILED = "failed"
    DEADLINE = "deadline"
    CHECKSUM = "checksum"
    GROUP_BROKE = "group_broke"


@dataclass(frozen=True)
class MemberUp:
    """An actor registered, or sent a heartbeat."""

    member: Member


@dataclass(frozen=True)
class MembersLeaving:
    """These processes are shutting down or have ended. The process "" means any process of the actor."""

    members: tuple[Member, ...]
    reason: str
    still_running: bool = True
    """They can finish a running transfer, but their answers are no longer awaited. A second event, with False, reports their
    end. After it, a transfer that needs their ranks cannot finish."""
    cause: EvictionCause | None = None
    """None for an orderly departure."""

    @classmethod
    def unregistered(cls, *actors: str, reason: str = "left, or its heartbeat stopped") -> MembersLeaving:
        """Return the event that removes all processes of actors whose registrations were removed, expired or replaced."""
        members = tuple(Member(actor, process="") for actor in actors)
        return cls(members, reason, False, EvictionCause.HEARTBEAT)


@dataclass(frozen=True)
class MemberReady:
    """An actor's process serves a version that it received through a side group. It may join the next epoch."""

    actor: str
    process: str


@dataclass(frozen=True)
class VersionReady:
    """The trainer has a version to send. Only valid in the phase IDLE."""

    version: int


@dataclass(frozen=True)
class ServedFromLog:
    """`version` is the newest version that any reader of the weight log serves. If the epoch has no members, this event ends
    the update to this or an older version."""

    version: int


@dataclass(frozen=True)
class TransferFailed:
    """The trainer could not form the group or finish the broadcast. `missing`: actors that did not join the group."""

    epoch: int
    reason: str
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeadlinePassed:
    """The deadline of the current phase has passed. The caller ignores the deadlines of earlier phases."""


@dataclass(frozen=True)
class HoldCommits:
    """Stage versions after `above`, but do not commit them, because an evaluation or probe runs. `above` None: commit again."""

    above: int | None


Answer = EpochJoined | Staged | Serving | Abort
MembershipEvent = MemberUp | MembersLeaving | MemberReady
Event = MembershipEvent | VersionReady | ServedFromLog | HoldCommits | TransferFailed | DeadlinePassed | Answer


@dataclass(frozen=True)
class FormGroup:
    """An epoch begins. Without members, its version waits until an actor registers or a reader of the weight log serves it."""

    epoch: int
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Evicted:
    """An actor was removed from an epoch. `cause`: None for an orderly shutdown of its process."""

    actor: str
    epoch: int
    reason: str
    cause: EvictionCause | None = EvictionCause.FAILED


@dataclass(frozen=True)
class VersionServed:
    """All remaining members serve the version or, if no member remains, an actor that reads the weight log serves it."""

    version: int
    epoch: int
    members: tuple[str, ...]


Action = FormGroup | Announce | Commit | Abort | Evicted | VersionServed
"""`Announce`, `Commit` and `Abort` are messages to the members; the caller fills in their other fields. The caller broadcasts
the version after `Announce`, and closes the group after `Abort`, because the group may be stuck in a collective. `FormGroup`,
`Announce` and `Commit` begin a phase. If this phase lasts longer than `due_s`, the caller posts `DeadlinePassed`."""


class Phase(Enum):
    IDLE = "idle"
    WAITING = "waiting for members"
    FORMING = "forming the group"
    SENDING = "sending"
    COMMITTING = "committing"


_WAITED_FOR: dict[Phase, type] = {Phase.FORMING: EpochJoined, Phase.SENDING: Staged, Phase.COMMITTING: Serving}


class Coordinator:
    """State machine of one transfer group. `epochs` yields the numbers of new epochs; all coordinators of a run share it."""

    def __init__(self, epochs: Iterator[int] | None = None) -> None:
        self._epochs = itertools.count(1) if epochs is None else epochs
        self.phase = Phase.IDLE
        self.epoch = 0
        self.version = -1
        self.members: dict[str, Member] = {}
        self.present: dict[str, Member] = {}
        """Actors that may be members. For the epoch: registered actors, except readers of the weight log and actors that
        are starting or shutting down. For a side group: its joiners."""
        self._newcomers: set[str] = set()
        """Actors registered after the first `VersionReady`. They join after `MemberReady`, or if no other actor is left."""
        self._benched: dict[str, None] = {}
        """Failed actors in order of their failures. They rejoin through side groups. If no other actor is left, the one that
        failed longest ago is tried alone at its next heartbeat."""
        self._group_stands = False
        self.answered: dict[str, int] = {}
        """Members (and `TRAINER`) that have answered in this phase. Values: the checksum in a `Staged`, 0 for other answers."""
        self._left: set[str] = set()
        """Processes that left while their ranks were in the group. If the group then fails, no remaining member is blamed."""
        self._restarts = 0
        """Number of failed attempts to send this version to the same members, if no member was to blame."""
        self._breaks = False
        """True after a group of several members was dissolved because it broke repeatedly. Broken groups then get no retry."""
        self._held_above: int | None = None

    @property
    def held(self) -> bool:
        """Return whether the version in transfer may be staged, but not committed yet."""
        return self.phase is not Phase.IDLE and self._held_above is not None and self.version > self._held_above

    def due_s(self, deadline_s: float, limit_s: float, answers_s: list[float]) -> float:
        """Return the phase's maximum duration in seconds. `answers_s`: seconds from its start to each answer so far.

        - while the trainer sends: limit_s
        - before the first answer: deadline_s
        - after it: min(latest answer + deadline_s, first answer + limit_s)
        - once more than half of all (members and trainer) have answered: also at most max(deadline_s, SLOW * median answer)
        """
        if self.phase is Phase.SENDING and TRAINER not in self.answered:
            return limit_s
        due_s = min(answers_s[-1] + deadline_s, answers_s[0] + limit_s) if answers_s else deadline_s
        all_but_slow = 2 * len(answers_s) > len(self.members) + 1
        return min(due_s, max(deadline_s, SLOW * median(answers_s))) if all_but_slow else due_s

    def step(self, event: Event) -> list[Action]:
        """Return the actions to perform, in order. Answers of non-members, or about old epochs or versions, are ignored."""
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
            case ServedFromLog(version):
                if self.phase is not Phase.WAITING or version < self.version:
                    return []
                self.phase = Phase.IDLE
                return [VersionServed(self.version, self.epoch, ())]
            case HoldCommits(above):
                self._held_above = above
                return self._advance()
            case DeadlinePassed():
                return self._deadline()
            case TransferFailed(epoch, reason, missing):
                if epoch != self.epoch or not self._under_way:
                    return []
                lost = set(missing)
                return self._lose(lost, reason, EvictionCause.MISSING) if lost else self._restart(reason)
        if event.epoch != self.epoch:
            return []
        if isinstance(event, Abort):
            if event.actor not in self.members:
                return []
            is_retried = event.group_broke and self.phase in (Phase.FORMING, Phase.SENDING)
            return self._restart(event.reason) if is_retried else self._lose({event.actor}, event.reason)
        known = event.actor in self.members or event.actor == TRAINER
        is_current = isinstance(event, EpochJoined) or event.version == self.version
        if known and is_current and isinstance(event, _WAITED_FOR.get(self.phase, ())):
            self.answered[event.actor] = event.checksum if isinstance(event, Staged) else 0
        return self._advance()

    def _member_up(self, member: Member) -> list[Action]:
        actor, before = member.actor, self.present.get(member.actor)
        self.present[actor] = member
        if before is None or before.process != member.process:
            self._benched.pop(actor, None)
            if self.version >= 0:
                self._newcomers.add(actor)
        if actor in self.members and self.members[actor].process != member.process:
            return self._lose({actor}, "restarted as a new process", EvictionCause.RESTARTED)
        if self.phase is Phase.WAITING and actor == next(iter(self._benched), actor):
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

    def _deadline(self) -> list[Action]:
        if not self._under_way:
            return []
        late = set(self.members) - self.answered.keys()
        if not late and TRAINER in self.answered:
            return []  # all have staged the version; only its commit is held
        if not late or self._left:
            return self._restart("deadline passed on the trainer's side")
        return self._lose(late, f"deadline passed while {self.phase.value}", EvictionCause.DEADLINE)

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
                return [Commit(epoch=self.epoch, version=self.version)]
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
        self.phase = Phase.FORMING if members else Phase.WAITING
        return [FormGroup(self.epoch, tuple(members.values()))]

    def _eligible(self) -> dict[str, Member]:
        """Return the members of an epoch that begins now, in order of their ranks."""
        able = {actor: member for actor, member in sorted(self.present.items()) if actor not in self._benched}
        return {actor: member for actor, member in able.items() if actor not in self._newcomers} or able

    def _send(self) -> list[Action]:
        self.phase, self.answered, self._left = Phase.SENDING, {}, set()
        return [Announce(epoch=self.epoch, version=self.version)]

    def _lose(self, actors: set[str], reason: str, cause: EvictionCause | None = EvictionCause.FAILED) -> list[Action]:
        """Remove members. Before the commit, or if a commit loses its last member, abort and form a new group."""
        evicted: list[Action] = [Evicted(actor, self.epoch, reason, cause) for actor in sorted(actors)]
        failed = (actor for actor in sorted(actors) if self.present.get(actor) == self.members.get(actor))
        self._benched |= dict.fromkeys(failed)
        self._group_stands = False
        if self.phase in (Phase.FORMING, Phase.SENDING):
            return evicted + self._again(reason)
        for actor in actors:
            self.members.pop(actor, None)
        if self.phase is Phase.COMMITTING:
            return evicted + (self._advance() if self.members else self._again(reason))
        return evicted

    def _restart(self, reason: str) -> list[Action]:
        """Form the group again, or dissolve it if it broke too often."""
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


def _of(processes: Mapping[str, str], members: Mapping[str, Member]) -> set[str]:
    return {actor for actor, process in processes.items() if actor in members and process in ("", members[actor].process)}
