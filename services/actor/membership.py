"""The actor's registration with the trainer, and the heartbeat that renews it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pipelinerl.bus.jetstream import Bus
from pipelinerl.errors import BusError
from pipelinerl.messages.control import Registration
from pipelinerl.messages.sequences import PolicyVersion
from services.actor.generation import ServingGate

log = logging.getLogger(__name__)

LEAVE_WITHIN_S = 2.0


class Heartbeat:
    """One entry of the membership bucket, refreshed three times per TTL with the current version and phase.

    A process that dies or freezes stops refreshing, so that the trainer notices its loss. `me`: the fixed fields; `process`
    differs at every start, so that a restarted actor is a new member. `manifest_id()` is called at each refresh.
    """

    def __init__(self, bus: Bus, gate: ServingGate, manifest_id: Callable[[], str], me: Registration) -> None:
        self._bus, self._gate, self._manifest_id, self._me = bus, gate, manifest_id, me
        self._away = self._left = False

    async def run(self) -> None:
        """Refresh until cancelled, or until `leave`. A failed refresh is logged once and followed by the next one."""
        while not self._left:
            try:
                await self._bus.put_member(self._me.actor, self.registration().SerializeToString())
            except BusError as error:
                log.log(logging.DEBUG if self._away else logging.WARNING, "cannot register, will try again: %s", error)
                self._away = True
            else:
                self._away = False
            await asyncio.sleep(self._bus.limits.member_ttl_s / 3)

    async def leave(self) -> None:
        """End the heartbeat and remove the registration within `LEAVE_WITHIN_S`; if that fails, it expires.

        A draining actor first registers as draining, so that the trainer knows that it is stopping in good order.
        """
        if self._left:
            return
        self._left = True
        try:
            async with asyncio.timeout(LEAVE_WITHIN_S):
                if self._gate.draining:
                    await self._bus.put_member(self._me.actor, self.registration().SerializeToString())
                await self._bus.remove_member(self._me.actor)
        except (BusError, TimeoutError) as error:
            log.warning("cannot remove the registration, it will expire: %s", error or "no answer in time")

    def registration(self) -> Registration:
        served = self._gate.served or PolicyVersion(0, 0)
        now = Registration(policy_version=served.number, incarnation=served.incarnation)
        now.MergeFrom(self._me)
        now.manifest_id, now.phase = self._manifest_id(), self._gate.phase
        return now
