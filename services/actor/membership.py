"""Tells the trainer that this actor is there: a registration that expires unless it is refreshed.

Consumes nothing, produces one entry of the membership bucket, refreshed three times per TTL with the current version and
phase. A process that dies or freezes stops refreshing, and the trainer sees it go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pipelinerl.bus.protocol import Bus
from pipelinerl.control import Phase, Registration
from pipelinerl.control_codec import encode_control
from pipelinerl.errors import BusError
from services.actor.gate import ServingGate

log = logging.getLogger(__name__)


LEAVE_WITHIN_S = 2.0


class Heartbeat:
    """`process` changes at every start, so that a restarted actor is a new member. `manifest_id()` is read at each beat."""

    def __init__(
        self,
        bus: Bus,
        gate: ServingGate,
        manifest_id: Callable[[], str],
        *,
        actor: str,
        process: str,
        grpc_address: str,
        ranks: int,
        pod_uid: str = "",
    ) -> None:
        self._bus, self._gate, self._manifest_id = bus, gate, manifest_id
        self._actor, self._process, self._grpc_address, self._ranks = actor, process, grpc_address, ranks
        self._pod_uid = pod_uid
        self._away = self._left = False

    async def run(self) -> None:
        """Runs until cancelled, or until `leave`. A bus that does not take a beat gets the next one; one line says so."""
        while not self._left:
            try:
                await self._bus.put_member(self._actor, encode_control(self.registration()))
            except BusError as error:
                log.log(logging.DEBUG if self._away else logging.WARNING, "cannot register, will try again: %s", error)
                self._away = True
            else:
                self._away = False
            await asyncio.sleep(self._bus.limits.member_ttl_s / 3)

    async def leave(self) -> None:
        """Removes the registration, once, within `LEAVE_WITHIN_S`; where that fails it expires. No beat follows.

        One that drains says so first: the trainer then knows that it was told to end and takes part for a while yet.
        """
        if self._left:
            return
        self._left = True
        try:
            async with asyncio.timeout(LEAVE_WITHIN_S):
                if self._gate.draining:
                    await self._bus.put_member(self._actor, encode_control(self.registration()))
                await self._bus.remove_member(self._actor)
        except (BusError, TimeoutError) as error:
            log.warning("cannot remove the registration, it will expire: %s", error or "no answer in time")

    def registration(self) -> Registration:
        served = self._gate.served
        phase: Phase = "draining" if self._gate.draining else "joining" if served is None else "serving"
        return Registration(
            actor=self._actor,
            process=self._process,
            grpc_address=self._grpc_address,
            ranks=self._ranks,
            manifest_id=self._manifest_id(),
            policy_version=served.number if served else 0,
            incarnation=served.incarnation if served else 0,
            phase=phase,
            pod_uid=self._pod_uid,
        )
