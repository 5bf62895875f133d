"""Who has come and gone, what is known of each registered actor, and which of them get a side group of their own. Pure.

An actor that comes, or that was left out of an epoch, is brought to the newest served version at once on a group of the
trainer and itself, beside the epoch of the others. Once it serves that, it is a member of the next epoch like any other; until
then it cannot hold anybody up. Not here: what happens within a transfer, and what a departure means for an epoch
(`coordinator.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from pipelinerl.kube.client import PodEnd
from services.trainer.weight_sync.coordinator import Evicted, EvictionCause, Member, MembersLeaving

MOST_REMEMBERED = 4096
"""Pods that have ended: their processes' last heartbeats come within seconds."""


Kind = Literal["joined", "left", "evicted"]


@dataclass(frozen=True)
class MemberChange:
    """One line of the run's history. `joined`: it serves `version` from now on. `left`: on somebody's wish. `evicted`: it was
    put out of epoch `epoch`, then with the `cause`, or is no longer heard of."""

    kind: Kind
    member: Member
    epoch: int
    version: int
    reason: str = ""
    cause: EvictionCause | None = None


MOST_AT_ONCE = 4
"""Side groups at a time: each has the whole version to send, and their sum is the trainer's uplink."""

MOST_RESTED = 16
"""Heartbeats between two tries of an actor that fails again and again: each may cost the whole version's bytes."""


@dataclass
class _Registered:
    """What is known of one registered process."""

    member: Member
    version: int = -1
    """Newest that it is known to serve."""
    joined: bool = False
    """Its arrival has been told, and no departure since."""
    met: bool = False
    """A group was built with it: prepared, and so quick to come to the next."""
    failures: int = 0
    """In a row, in an epoch or on a side group."""
    rest: int = 0
    """Failed lately: heartbeats until the next try."""


class Roster:
    """Registered actors, in the order in which they came, and pods that are known to end. Tells each arrival and each
    departure once."""

    def __init__(self) -> None:
        self._actors: dict[str, _Registered] = {}
        self._ended: dict[str, tuple[Member, ...]] = {}
        """Pods by uid; of actors that do not know theirs, processes. With who was told to end and may still run."""

    def up(self, member: Member) -> None:
        """Registered, or sent a heartbeat. A new process of a known actor serves nothing yet."""
        known = self._process(member)
        if known is None:
            self._actors[member.actor] = _Registered(member)
        else:
            known.member, known.rest = member, max(known.rest - 1, 0)

    def gone(self, actor: str, epoch: int, version: int, reason: str, *, left: bool) -> list[MemberChange]:
        """It is no longer registered. Nothing new when an epoch has put it out before."""
        known = self._actors.pop(actor, None)
        if known is None or not known.joined:
            return []
        return [MemberChange("left" if left else "evicted", known.member, epoch, version, reason)]

    def put_out(self, evicted: Evicted, version: int) -> list[MemberChange]:
        """Of an epoch, whether it served anything or not."""
        known = self._actors.get(evicted.actor)
        if known is None:
            return []
        known.joined = False
        _rest(known)
        kind: Kind = "evicted" if evicted.cause else "left"
        return [MemberChange(kind, known.member, evicted.epoch, version, evicted.reason, evicted.cause)]

    def served(self, members: Iterable[Member], epoch: int, version: int) -> list[MemberChange]:
        """The version was brought to them, by an epoch or on a side group."""
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
        """Actors that are known to serve `version`; nobody before a first one. May be called on any thread."""
        actors = list(self._actors.values())
        return {known.member.actor: known.member for known in actors if known.version == version >= 0}

    def met(self, members: Iterable[Member]) -> None:
        """A group was built with them."""
        for known in map(self._process, members):
            if known is not None:
                known.met = True

    def have_met(self, members: Iterable[Member]) -> bool:
        return all(known is not None and known.met for known in map(self._process, members))

    def side_failed(self, member: Member) -> None:
        """Its side group did not come to its end. It rests for 1, 2, 4, … `MOST_RESTED` heartbeats."""
        known = self._process(member)
        if known is not None:
            _rest(known)

    def side_groups(
        self, version: int, epoch: Collection[str], running: Mapping[str, Member]
    ) -> tuple[list[str], list[Member]]:
        """Which side groups of those `running` end, because their actor is gone, is a new process, or is in the `epoch` now;
        and who is to be brought to `version` on a new one."""
        ended = [actor for actor, member in running.items() if actor in epoch or self._process(member) is None]
        busy = {*epoch, *running}.difference(set(ended) - set(epoch))
        due = [
            known.member
            for actor, known in self._actors.items()
            if known.version < version and not known.rest and actor not in busy
        ]
        return ended, due[: MOST_AT_ONCE - len(running) + len(ended)]

    def leaving(self, pod: PodEnd, present: Mapping[str, Member]) -> MembersLeaving | None:
        """The departure that follows from a pod's end; None where no actor of that pod is present (yet). Where one was told to
        end before, the end of its processes is a departure once more. One whose end is not certain comes back with its next
        heartbeat."""
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
        """Its pod is known to end: a late heartbeat brings nobody back. A new pod of the same name, or a container that starts
        again in its pod, is somebody else."""
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
