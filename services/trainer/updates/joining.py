"""Which actors get a side group of their own, as a pure state machine: those registered that serve no current version.

An actor that comes, or that was left out of an epoch, is brought to the newest served version at once on a group of the
trainer and itself, beside the epoch of the others. Once it serves that, it is a member of the next epoch like any other;
until then it cannot hold anybody up.

`services.trainer.updates.updater` performs the actions, one lane for each. Not here: what happens within a transfer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.trainer.updates.coordinator import Member

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
    """See the module. Each method takes one event and returns the actions to perform, in order."""

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
        """Registered, or its heart beats. A new process of a known actor serves nothing yet."""
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
