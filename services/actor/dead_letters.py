"""Keeps a message of PROMPTS that is given up where people find it (`pipelinerl dead-letters`). It gives nothing up itself."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from pipelinerl.bus.protocol import Bus, PromptDelivery
from pipelinerl.codec import encode_dead_letter
from pipelinerl.errors import BusError, PayloadTooLarge
from pipelinerl.types import DeadLetter
from services.actor.metrics import ActorMetrics

log = logging.getLogger(__name__)

REASON_CHARACTERS = 1000


class DeadLetters:
    """`actor`: name of the one that gives up."""

    def __init__(self, bus: Bus, metrics: ActorMetrics, *, actor: str) -> None:
        self._bus, self._metrics, self._actor = bus, metrics, actor

    async def keep(self, delivery: PromptDelivery, reason: str) -> bool:
        """False when the stream did not take it: then the message must not be given up yet. It is delivered again."""
        letter = DeadLetter(
            run=self._bus.run,
            msg_id=delivery.msg_id,
            prompt_group=delivery.payload,
            reason=reason[:REASON_CHARACTERS],
            deliveries=delivery.num_deliveries,
            actor=self._actor,
            at_s=time.time(),
        )
        try:
            await self._store(letter, f"position-{delivery.position}")
        except BusError as error:
            log.warning("a prompt group to be given up comes again, its dead letter is not stored: %s", error)
            return False
        self._metrics.dead_letters.inc()
        return True

    async def _store(self, letter: DeadLetter, msg_id: str) -> None:
        """One that is too large is stored without the message. Raises `BusError`."""
        try:
            await self._bus.publish_dead_letter(encode_dead_letter(letter), msg_id)
        except PayloadTooLarge:
            reason = f"{letter.reason} (its {len(letter.prompt_group)} bytes are too many to be kept)"
            bare = encode_dead_letter(replace(letter, prompt_group=b"", reason=reason))
            await self._bus.publish_dead_letter(bare, msg_id)
