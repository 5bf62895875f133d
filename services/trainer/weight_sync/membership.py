"""Who has come and gone, which actors get a side group of their own, and what each registered actor is doing. Pure.

An actor that comes, or that was left out of an epoch, is brought to the newest served version at once on a group of the
trainer and itself, beside the epoch of the others (`Joining`). Once it serves that, it is a member of the next epoch like any
other; until then it cannot hold anybody up. `updater.py` performs the actions, one session for each. Not here: what happens
within a transfer, and what a departure means for an epoch (`coordinator.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from pipelinerl.kube.pods import PodEnd
from services.trainer.weight_sync.coordinator import Member, MembersLeaving

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


class MembershipLog:
    """Tells each arrival and each departure once."""

    def __init__(self) -> None:
        self._registered: dict[str, Member] = {}
        self._serving: dict[str, Member] = {}

    def registered(self, member: Member) -> None:
        self._registered[member.actor] = member

    def served(self, member: Member, epoch: int, version: int) -> list[MemberChange]:
        """Its version was brought to it, by an epoch or on a side group."""
        if self._serving.get(member.actor) == member:
            return []
        self._serving[member.actor] = member
        return [MemberChange("joined", member, epoch, version)]

    def put_out(self, actor: str, epoch: int, version: int, reason: str, *, left: bool) -> list[MemberChange]:
        """Of an epoch, whether it served anything or not."""
        member = self._serving.pop(actor, None) or self._registered.get(actor)
        return [MemberChange("left" if left else "evicted", member, epoch, version, reason)] if member else []

    def gone(self, actor: str, epoch: int, version: int, reason: str, *, left: bool) -> list[MemberChange]:
        """It is no longer registered. Nothing new when an epoch has put it out before."""
        changes = self.put_out(actor, epoch, version, reason, left=left) if actor in self._serving else []
        self._registered.pop(actor, None)
        return changes


MOST_AT_ONCE = 4
"""Side transfers at a time: each has the whole version to send, and their sum is the trainer's uplink."""

MOST_RESTED = 16
"""Heartbeats between two tries of an actor that fails again and again: each may cost the whole version's bytes."""


@dataclass(frozen=True)
class BeginSide:
    member: Member
    version: int


@dataclass(frozen=True)
class EndSide:
    """Give it up: the actor is gone, or the epoch takes over."""

    actor: str


Action = BeginSide | EndSide


class Joining:
    """Each method takes one event and returns the actions to perform, in order."""

    def __init__(self, most_at_once: int = MOST_AT_ONCE) -> None:
        self._most_at_once = most_at_once
        self._served = -1
        self._present: dict[str, Member] = {}
        self._version: dict[str, int] = {}
        """Newest version that each present process is known to serve."""
        self._in_epoch: dict[str, Member] = {}
        self._on_side: dict[str, BeginSide] = {}
        self._failures: dict[str, int] = {}
        """Failures in a row, in an epoch or on a side group."""
        self._resting: dict[str, int] = {}
        """Failed lately: heartbeats until the next try, 1, 2, 4, … `MOST_RESTED` of them."""

    @property
    def on_side(self) -> frozenset[str]:
        """Actors whose side transfer is under way."""
        return frozenset(self._on_side)

    def up(self, member: Member) -> list[Action]:
        """Registered, or sent a heartbeat. A new process of a known actor serves nothing yet."""
        ended: list[Action] = []
        if self._present.get(member.actor, member).process != member.process:
            in_epoch = self._in_epoch.get(member.actor)
            ended = self.down(member.actor)
            if in_epoch == member:  # the epoch has been formed with the new process already
                self._in_epoch[member.actor] = member
        self._present[member.actor] = member
        if self._resting.get(member.actor, 0) > 1:
            self._resting[member.actor] -= 1
        else:
            self._resting.pop(member.actor, None)
        return ended + self._due()

    def down(self, actor: str) -> list[Action]:
        """Left, or its heartbeat stopped."""
        self._present.pop(actor, None)
        self._version.pop(actor, None)
        self._in_epoch.pop(actor, None)
        self._resting.pop(actor, None)
        self._failures.pop(actor, None)
        return self._end(actor) + self._due()

    def formed(self, members: Iterable[Member]) -> list[Action]:
        """The epoch of the others has been formed with these: they need nothing beside it."""
        self._in_epoch = {member.actor: member for member in members}
        return [action for actor in self._in_epoch for action in self._end(actor)]

    def left(self, actor: str) -> list[Action]:
        """Put out of the epoch."""
        self._in_epoch.pop(actor, None)
        self._rest(actor)
        return []

    def served(self, version: int, members: Iterable[str]) -> list[Action]:
        """The epoch serves `version`."""
        self._served = version
        self._version.update({actor: version for actor in members if actor in self._present})
        return self._due()

    def side_served(self, actor: str, version: int) -> list[Action]:
        """Its side transfer is complete."""
        if self._on_side.pop(actor, None) is not None:
            self._version[actor] = version
            self._failures.pop(actor, None)
        return self._due()

    def side_failed(self, actor: str) -> list[Action]:
        """It did not come to its end."""
        self._on_side.pop(actor, None)
        self._rest(actor)
        return self._due()

    def _rest(self, actor: str) -> None:
        failures = self._failures[actor] = self._failures.get(actor, 0) + 1
        self._resting[actor] = min(2 ** (failures - 1), MOST_RESTED)

    def _end(self, actor: str) -> list[Action]:
        return [EndSide(actor)] if self._on_side.pop(actor, None) is not None else []

    def _due(self) -> list[Action]:
        """Begins as many side transfers as may begin, in the order in which the actors came."""
        begun: list[Action] = []
        for actor, member in self._present.items():
            if len(self._on_side) >= self._most_at_once:
                break
            if self._needs(actor):
                self._on_side[actor] = BeginSide(member, self._served)
                begun.append(self._on_side[actor])
        return begun

    def _needs(self, actor: str) -> bool:
        behind = self._version.get(actor, -1) < self._served
        return behind and not any(actor in others for others in (self._in_epoch, self._on_side, self._resting))


MEMBER_STATES = ("serving", "joining", "waiting", "leaving")
"""`waiting`: it serves no version, or an older one, and its turn is still to come. `leaving`: it was told to end, and is still
registered."""


def member_states(
    present: AbstractSet[str], serving: AbstractSet[str], joining: AbstractSet[str], draining: AbstractSet[str]
) -> dict[str, str]:
    """State by name. `present`: members of the group and who waits to be one; `joining`: on side groups; `draining`: told to
    end. An actor on a side group is joining, though it may still serve the version before."""
    states = {name: "joining" if name in joining else "serving" if name in serving else "waiting" for name in present}
    return {**states, **dict.fromkeys(draining - present, "leaving")}
