"""The known state of each actor, and the choice of actors for side groups. Pure.

A side group sends the newest served version to joining actors, while the other actors' epoch goes on. Newcomers share one side
group, so the trainer sends the version to them once. An actor that failed gets a separate side group. An actor joins the next
epoch only after it serves the version. Until then it cannot delay the epoch's members.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pipelinerl.kube.client import PodEnd
from services.trainer.weight_sync.coordinator import Evicted, EvictionCause, Member, MembersLeaving

MOST_REMEMBERED = 4096
"""Maximum number of ended pods to remember. Late heartbeats of their processes arrive within seconds."""


@dataclass(frozen=True)
class MemberChange:
    """An arrival or departure. `evicted`: the actor was removed from `epoch`, or its heartbeats stopped."""

    kind: Literal["joined", "left", "evicted"]
    member: Member
    epoch: int
    version: int
    reason: str = ""
    cause: EvictionCause | None = None


@dataclass
class UpdateRecord:
    """Figures of the update to one version. The dictionaries have one entry per actor."""

    version: int
    num_bytes: int = 0
    transfer_s: float = 0.0
    round_trip_s: float = 0.0
    receive_s: dict[str, float] = field(default_factory=dict)
    prepare_s: dict[str, float] = field(default_factory=dict)
    stall_s: dict[str, float] = field(default_factory=dict)


class UpdateObserver(Protocol):
    """Receives the events of weight updates. The run's recorder implements it."""

    def served(self, update: UpdateRecord) -> None: ...

    def joined(self, actor: str, update: UpdateRecord) -> None: ...

    def member_changed(self, change: MemberChange) -> None: ...


MEMBER_STATES = ("serving", "joining", "waiting", "leaving")
"""`joining`: in a side group, or reading its first version from the weight log. `waiting`: the actor serves no version or an
old one. `leaving`: it is shutting down."""
MOST_SIDE_GROUPS = 4
"""Maximum number of side groups at the same time. One of them is reserved for newcomers."""
MOST_IN_SIDE_GROUP = 64
"""Maximum number of newcomers in one side group."""
MOST_WAIT_HEARTBEATS = 16
"""Maximum number of heartbeats to wait before a failing actor may join a group again."""


@dataclass
class _Registered:
    member: Member
    version: int = -1
    """Newest version that the actor is known to serve; -1 = none."""
    joined: bool = False
    """True after the actor's arrival was reported, until its departure is reported."""
    failures: int = 0
    """Consecutive failures, in epochs or on side groups."""
    wait_heartbeats: int = 0
    """Number of heartbeats until a failed actor may join a group again; 0 = at once."""


class Roster:
    """Registered actors in order of arrival, and pods that are ending. Each arrival and departure is reported once."""

    def __init__(self) -> None:
        self._actors: dict[str, _Registered] = {}
        self._newest = -1
        self._behind: dict[str, _Registered] = {}
        """Actors that do not serve the newest version, in order of arrival. Only these can need a side group."""
        self._ended: dict[str, tuple[Member, ...]] = {}
        """Pods that are ending or have ended, by uid, each with its actor processes that may still be running."""

    def up(self, member: Member) -> None:
        """Record a registration or heartbeat. A new process of a known actor starts without a version."""
        known = self._process(member)
        if known is None:
            self._actors[member.actor] = self._behind[member.actor] = _Registered(member)
        else:
            known.member, known.wait_heartbeats = member, max(known.wait_heartbeats - 1, 0)

    def gone(self, actor: str, epoch: int, version: int, reason: str, *, left: bool) -> list[MemberChange]:
        """Remove an actor that is no longer registered. Return its departure if it had `joined`."""
        known = self._actors.pop(actor, None)
        self._behind.pop(actor, None)
        if known is None or not known.joined:
            return []
        return [MemberChange("left" if left else "evicted", known.member, epoch, version, reason)]

    def put_out(self, evicted: Evicted, version: int) -> list[MemberChange]:
        """Record that an actor was removed from an epoch, and return its departure."""
        known = self._actors.get(evicted.actor)
        if known is None:
            return []
        known.joined = False
        _count_failure(known)
        epoch, reason, cause = evicted.epoch, evicted.reason, evicted.cause
        return [MemberChange("evicted" if cause else "left", known.member, epoch, version, reason, cause)]

    def served(self, members: Iterable[Member], epoch: int, version: int) -> list[MemberChange]:
        """Record that these members received `version` in `epoch`, perhaps a side group's. Return the arrivals among them."""
        changes = []
        self._expect(version)
        for member in members:
            if known := self._process(member):
                known.version, known.failures = version, 0
                if version == self._newest:
                    self._behind.pop(member.actor, None)
                if not known.joined:
                    changes.append(MemberChange("joined", member, epoch, version))
                known.joined = True
        return changes

    def serving(self, version: int) -> dict[str, Member]:
        """Return the actors that are known to serve `version`; empty for a negative version. Any thread may call this."""
        actors = list(self._actors.values())
        return {known.member.actor: known.member for known in actors if known.version == version >= 0}

    def have_served(self, members: Iterable[Member]) -> bool:
        """Return whether each member has served a version since its process registered."""
        return all(known is not None and known.version >= 0 for known in map(self._process, members))

    def side_failed(self, member: Member) -> None:
        """Record a failed side group. Each failure in a row doubles the actor's wait, up to `MOST_WAIT_HEARTBEATS`."""
        if known := self._process(member):
            _count_failure(known)

    def outdated(self, joiners: Mapping[str, Member], epoch: Collection[str]) -> tuple[Member, ...]:
        """Return the members of a side group that are gone, have restarted, or are now in the `epoch`."""
        return tuple(member for actor, member in joiners.items() if actor in epoch or self._process(member) is None)

    def side_groups(
        self, version: int, epoch: Collection[str], running: Collection[Collection[str]]
    ) -> list[tuple[Member, ...]]:
        """Return the members of each side group to open for `version`. `running`: the actors of each existing side group."""
        self._expect(version)
        busy, free = set[str]().union(*running), MOST_SIDE_GROUPS - len(running)
        due = [
            known
            for actor, known in (self._behind.items() if free else ())
            if known.version < version and not known.wait_heartbeats and actor not in epoch and actor not in busy
        ]
        newcomers = tuple(known.member for known in due if not known.failures)[:MOST_IN_SIDE_GROUP]
        failed = [(known.member,) for known in due if known.failures][: max(0, free - 1)]
        return ([newcomers] if newcomers else []) + failed

    def _expect(self, version: int) -> None:
        if version > self._newest:
            self._newest = version
            self._behind = {actor: known for actor, known in self._actors.items() if known.version < version}

    def leaving(self, pod: PodEnd, present: Mapping[str, Member]) -> MembersLeaving | None:
        """Return the departure that a pod's end causes; None if the pod has no actor. The actor of a deleted pod departs twice:
        at the deletion, and when its processes have ended."""
        of_pod = [member for member in present.values() if member.pod_uid == pod.uid]
        deleted = () if pod.still_running else self._ended.get(pod.uid, ())
        if pod.final:
            self._ended[pod.uid] = tuple(of_pod) if pod.still_running else ()
            while len(self._ended) > MOST_REMEMBERED:
                del self._ended[next(iter(self._ended))]
        of_pod.extend(deleted)
        return MembersLeaving(tuple(of_pod), pod.reason, pod.still_running) if of_pod else None

    def has_left(self, member: Member) -> bool:
        """Return whether the member's pod is ending or has ended, so that a late heartbeat does not bring the member back."""
        return member.pod_uid in self._ended

    def _process(self, member: Member) -> _Registered | None:
        known = self._actors.get(member.actor)
        return known if known is not None and known.member.process == member.process else None


class LogReaders(Roster):
    """Actors that read the weight log, and are in no epoch. Messages that name their versions may arrive out of order. Pure."""

    def __init__(self) -> None:
        super().__init__()
        self.unreachable: set[str] = set()
        """Actors that did not answer the last time that they were asked for their load."""

    @property
    def members(self) -> dict[str, Member]:
        return {actor: known.member for actor, known in list(self._actors.items())}

    @property
    def newest(self) -> int:
        return max(self.versions.values(), default=-1)

    @property
    def versions(self) -> dict[str, int]:
        """Return the version that each actor serves; -1 = none. Any thread may call this."""
        return {actor: known.version for actor, known in list(self._actors.items())}

    def serving(self, version: int) -> dict[str, Member]:
        """Return the reachable actors that serve `version`; empty for a negative version. Any thread may call this."""
        found = super().serving(version)
        return {actor: one for actor, one in found.items() if one.grpc_address and actor not in self.unreachable}

    def serves(self, actor: str, version: int) -> list[MemberChange]:
        """Record that a registered actor serves `version`, unless it serves a newer one."""
        known = self._actors.get(actor)
        return self.served([known.member], 0, version) if known is not None and version > known.version else []

    def leaves(self, actor: str, reason: str, *, left: bool, process: str = "") -> list[MemberChange]:
        """Remove an actor that is shutting down or no longer registered; return its departure. `process`: "" = any process."""
        known = self._actors.get(actor)
        if known is None or process not in ("", known.member.process):
            return []
        self.unreachable.discard(actor)
        return self.gone(actor, 0, known.version, reason, left=left)


def _count_failure(known: _Registered) -> None:
    known.failures += 1
    known.wait_heartbeats = min(2 ** (known.failures - 1), MOST_WAIT_HEARTBEATS)
