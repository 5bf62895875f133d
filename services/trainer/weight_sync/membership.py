"""Arrivals and departures of actors, the known state of each, and the choice of actors for side groups. Pure.

A new actor, or one evicted from an epoch, is brought to the newest served version at once, in a group of the trainer and this
actor alone, beside the others' epoch. Once it serves the version, it joins the next epoch like any other; until then it cannot
delay others. `coordinator.py` steps the transfer itself, and handles departures from an epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pipelinerl.kube.client import PodEnd
from services.trainer.weight_sync.coordinator import Evicted, EvictionCause, Member, MembersLeaving

MOST_REMEMBERED = 4096
"""Maximum number of remembered pods that have ended. Late heartbeats of their processes come within seconds."""


Kind = Literal["joined", "left", "evicted"]


@dataclass(frozen=True)
class MemberChange:
    """One line of the run's history. `joined`: the actor now serves `version`. `left`: it was told to leave. `evicted`: it was
    put out of `epoch` for a `cause`, or its heartbeats stopped."""

    kind: Kind
    member: Member
    epoch: int
    version: int
    reason: str = ""
    cause: EvictionCause | None = None


@dataclass
class UpdateRecord:
    """Figures of one version's update, in seconds and bytes."""

    version: int
    num_bytes: int = 0
    transfer_s: float = 0.0
    round_trip_s: float = 0.0
    receive_s: dict[str, float] = field(default_factory=dict)
    prepare_s: dict[str, float] = field(default_factory=dict)
    stall_s: dict[str, float] = field(default_factory=dict)


class UpdateObserver(Protocol):
    """Takes the events of weight updates; the run's recorder is one."""

    def served(self, update: UpdateRecord) -> None: ...

    def joined(self, actor: str, update: UpdateRecord) -> None: ...

    def update_aborted(self) -> None: ...

    def member_changed(self, change: MemberChange) -> None: ...

    def regrouped(self) -> None: ...


MEMBER_STATES = ("serving", "joining", "waiting", "leaving")
"""`waiting`: the actor serves no version, or an older one, and its turn is still to come. `leaving`: it was told to end, and is
still registered."""

MOST_AT_ONCE = 4
"""Maximum number of side groups at a time: each sends the whole version over the trainer's uplink."""

MOST_RESTED = 16
"""Maximum heartbeats between two attempts with an actor that fails repeatedly: each may cost the whole version's bytes."""


@dataclass
class _Registered:
    """Known state of one registered process."""

    member: Member
    version: int = -1
    """Newest version that it is known to serve; -1 = none."""
    joined: bool = False
    """Its arrival was reported, and no departure since."""
    met: bool = False
    """A group was built with it, so it is prepared and will join the next one quickly."""
    failures: int = 0
    """Failures in a row, in epochs or on side groups."""
    rest: int = 0
    """Heartbeats until the next attempt, after a failure."""


class Roster:
    """Registered actors in order of arrival, and pods that are known to end. It reports each arrival and each departure
    once."""

    def __init__(self) -> None:
        self._actors: dict[str, _Registered] = {}
        self._ended: dict[str, tuple[Member, ...]] = {}
        """Members by the uid of an ended pod, or by process if an actor does not know its pod: those that were told to end and
        may still run."""

    def up(self, member: Member) -> None:
        """Record a registration or heartbeat. A new process of a known actor serves nothing yet."""
        known = self._process(member)
        if known is None:
            self._actors[member.actor] = _Registered(member)
        else:
            known.member, known.rest = member, max(known.rest - 1, 0)

    def gone(self, actor: str, epoch: int, version: int, reason: str, *, left: bool) -> list[MemberChange]:
        """Remove an actor that is no longer registered. Its departure is not reported again if an epoch has put it out."""
        known = self._actors.pop(actor, None)
        if known is None or not known.joined:
            return []
        return [MemberChange("left" if left else "evicted", known.member, epoch, version, reason)]

    def put_out(self, evicted: Evicted, version: int) -> list[MemberChange]:
        """Record that an epoch put an actor out, whether or not it served anything."""
        known = self._actors.get(evicted.actor)
        if known is None:
            return []
        known.joined = False
        _rest(known)
        kind: Kind = "evicted" if evicted.cause else "left"
        return [MemberChange(kind, known.member, evicted.epoch, version, evicted.reason, evicted.cause)]

    def served(self, members: Iterable[Member], epoch: int, version: int) -> list[MemberChange]:
        """Record that these members received the version, in an epoch or on a side group."""
        changes = []
        for member in members:
            known = self._process(member)
            if known is not None:
                known.version, known.failures = version, 0
                if not known.joined:
                    changes.append(MemberChange("joined", member, epoch, version))
                known.joined = True
        return changes

    def serving(self, version: int) -> dict[str, Member]:
        """Return the actors that are known to serve `version`, none before the first. May be called on any thread."""
        actors = list(self._actors.values())
        return {known.member.actor: known.member for known in actors if known.version == version >= 0}

    def met(self, members: Iterable[Member]) -> None:
        """Record that a group was built with these members."""
        for known in map(self._process, members):
            if known is not None:
                known.met = True

    def have_met(self, members: Iterable[Member]) -> bool:
        return all(known is not None and known.met for known in map(self._process, members))

    def side_failed(self, member: Member) -> None:
        """Record that an actor's side group failed. It rests for 1, 2, 4, … `MOST_RESTED` heartbeats."""
        known = self._process(member)
        if known is not None:
            _rest(known)

    def side_groups(
        self, version: int, epoch: Collection[str], running: Mapping[str, Member]
    ) -> tuple[list[str], list[Member]]:
        """Return the `running` side groups to end, because their actor is gone, is a new process, or is in the `epoch` now; and
        the members to bring to `version` on new ones."""
        ended = [actor for actor, member in running.items() if actor in epoch or self._process(member) is None]
        busy = {*epoch, *running}.difference(set(ended) - set(epoch))
        due = [
            known.member
            for actor, known in self._actors.items()
            if known.version < version and not known.rest and actor not in busy
        ]
        return ended, due[: MOST_AT_ONCE - len(running) + len(ended)]

    def leaving(self, pod: PodEnd, present: Mapping[str, Member]) -> MembersLeaving | None:
        """Return the departure that follows from a pod's end; None if no actor of that pod is present (yet). After a departure
        because a pod was told to end, the end of its processes is a second one. An actor whose pod's end is uncertain returns
        with its next heartbeat."""
        of_pod = [member for member in present.values() if pod.uid and member.pod_uid == pod.uid]
        nameless = present.get(pod.name)
        if nameless is not None and not nameless.pod_uid:
            self._remember(nameless.process if pod.final else "")
            of_pod.append(nameless)
        told = () if pod.still_running else self._ended.get(pod.uid, ())
        if pod.final:
            self._remember(pod.uid, tuple(of_pod) if pod.still_running else ())
        of_pod.extend(told)
        return MembersLeaving(tuple(of_pod), pod.reason, pod.still_running) if of_pod else None

    def has_left(self, member: Member) -> bool:
        """Return whether the member's pod is known to end, so that a late heartbeat does not bring it back. A new pod of the
        same name, or a container that restarts in its pod, is another member."""
        return member.pod_uid in self._ended or member.process in self._ended

    def _remember(self, key: str, still_running: tuple[Member, ...] = ()) -> None:
        if key:
            self._ended[key] = still_running
        while len(self._ended) > MOST_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def _process(self, member: Member) -> _Registered | None:
        known = self._actors.get(member.actor)
        return known if known is not None and known.member.process == member.process else None


def _rest(known: _Registered) -> None:
    known.failures += 1
    known.rest = min(2 ** (known.failures - 1), MOST_RESTED)
