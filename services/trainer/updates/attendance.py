"""Who has come and gone, as the run tells it: which pods end, which processes are therefore not to come back, and what is new.

Pure: it keeps names, takes events and returns what follows. What a departure means for an epoch is the coordinator's business.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipelinerl.kube.pods import PodEnd
from services.trainer.updates.coordinator import Member, MembersLeaving

MOST_REMEMBERED = 4096
"""Pods that have ended: their processes' last heartbeats come within seconds."""


@dataclass(frozen=True)
class MemberChange:
    """One line of the run's history. `joined`: it serves `version` from now on. `left`: on somebody's wish. `evicted`: it was
    put out of epoch `epoch`, or is no longer heard of."""

    kind: Literal["joined", "left", "evicted"]
    member: Member
    epoch: int
    version: int
    reason: str = ""


class Departures:
    """Which pods are known to end, so that a late heartbeat brings nobody back; a new pod of the same name, or a container
    that starts again in its pod, is somebody else. One whose end is not certain comes back with its next heartbeat."""

    def __init__(self) -> None:
        self._ended: OrderedDict[str, tuple[Member, ...]] = OrderedDict()
        """Pods by uid; of actors that do not know theirs, processes. With who was told to end and may still run."""

    def leaving(self, pod: PodEnd, present: Mapping[str, Member]) -> MembersLeaving | None:
        """The departure that follows from a pod's end; None where no actor of that pod is present (yet). Where one was told to
        end before, the end of its processes is a departure once more."""
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
        return member.pod_uid in self._ended or member.process in self._ended

    def _remember(self, key: str, still_running: tuple[Member, ...] = ()) -> None:
        if key:
            self._ended[key] = still_running
            self._ended.move_to_end(key)
        while len(self._ended) > MOST_REMEMBERED:
            self._ended.popitem(last=False)


class Attendance:
    """Tells each arrival and each departure once."""

    def __init__(self) -> None:
        self._registered: dict[str, Member] = {}
        self._serving: dict[str, Member] = {}

    def registers(self, member: Member) -> None:
        self._registered[member.actor] = member

    def serves(self, member: Member, epoch: int, version: int) -> list[MemberChange]:
        """Its version was brought to it, by an epoch or on a side group."""
        if self._serving.get(member.actor) == member:
            return []
        self._serving[member.actor] = member
        return [MemberChange("joined", member, epoch, version)]

    def put_out(self, actor: str, epoch: int, version: int, reason: str, *, left: bool) -> list[MemberChange]:
        """Of an epoch, whether it served anything or not."""
        member = self._serving.pop(actor, None) or self._registered.get(actor)
        return [MemberChange("left" if left else "evicted", member, epoch, version, reason)] if member else []

    def goes(self, actor: str, epoch: int, version: int, reason: str, *, left: bool) -> list[MemberChange]:
        """It is no longer registered. Nothing new when an epoch has put it out before."""
        serves = actor in self._serving
        changes = self.put_out(actor, epoch, version, reason, left=left) if serves else []
        self._registered.pop(actor, None)
        return changes
