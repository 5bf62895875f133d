"""What a leaving actor has begun goes back to PROMPTS, with what it has generated of it; another actor goes on there.

Consumes the groups in hand, produces new messages on PROMPTS and acknowledges the old ones, in this order: a group is never
acknowledged before the messages that take its place are stored. It waits for the stream, up to a deadline. What cannot be
stored in time is given back as it came, or redelivered by itself; the log says what is generated anew then.
It generates nothing and stops nothing: whoever calls it has done so.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from pipelinerl.bus.protocol import Bus, Headers
from pipelinerl.codec import encode_group
from pipelinerl.errors import BusError, MessageError
from pipelinerl.message_checks import check_group
from pipelinerl.retry import until_taken
from pipelinerl.tracing.spans import headers_of, trace_in
from pipelinerl.types import PartialSequence, PromptGroup
from services.actor.completions import state_of
from services.actor.held_groups import HeldGroups, Remainder
from services.actor.metrics import ActorMetrics

log = logging.getLogger(__name__)

HEADER_ROOM_BYTES = 1024
"""For a message's headers, its id above all."""
AT_ONCE = 16
ANSWER_WITHIN_S = 1.0


class HandOver:
    """See the module. `instance`: name of the actor that leaves."""

    def __init__(self, bus: Bus, held: HeldGroups, metrics: ActorMetrics, *, instance: str) -> None:
        self._bus, self._held, self._metrics, self._instance = bus, held, metrics, instance
        self._at_once = asyncio.Semaphore(AT_ONCE)

    async def run(self, timeout_s: float) -> None:
        """Returns when every group in hand is handed over or given back, after `timeout_s` and a little at most."""
        until = asyncio.get_running_loop().time() + timeout_s
        await asyncio.gather(*(self._one(remainder, until) for remainder in self._held.remainders()))
        with suppress(TimeoutError):  # what is done comes again, and is recognised by its sequences' ids
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await self._held.settle_all()

    async def _one(self, remainder: Remainder, until: float) -> None:
        group_id = remainder.group.group_id
        try:
            async with asyncio.timeout_at(until), self._at_once:
                anew = not remainder.untouched or any(one.num_deliveries > 1 for one in remainder.deliveries)
                if anew:  # an untouched one too, once: else orderly stops would add up to too many deliveries
                    await self._publish(remainder)
        except (BusError, MessageError, TimeoutError) as error:
            lost = sum(len(partial.completion_token_ids) for partial in remainder.partials)
            log.error(
                "group %s cannot be handed over, its %d missing samples start anew and %d tokens are lost: %s",
                group_id, len(remainder.missing), lost, error or "the stream did not take it in time",
            )  # fmt: skip
            await self._answer(remainder, acknowledge=False)
        else:
            await self._answer(remainder, acknowledge=anew)
        self._held.forget(group_id)

    async def _publish(self, remainder: Remainder) -> None:
        """Raises `BusError`, `MessageError`."""
        group_id, sound = remainder.group.group_id, [p for p in remainder.partials if _is_sound(remainder.group, p)]
        payloads, left_out = messages_of(
            remainder.group, remainder.missing, sound, self._bus.max_payload_bytes - HEADER_ROOM_BYTES
        )
        if left_out or len(sound) < len(remainder.partials):
            bad = len(remainder.partials) - len(sound)
            log.error("group %s: %d tokens are too many for a message, %d samples unsound", group_id, left_out, bad)
        headers = headers_of(trace_in(remainder.deliveries[0].headers))  # who goes on follows the same trace
        for payload in payloads:
            msg_id = f"{group_id}/{self._instance}-{uuid.uuid4().hex[:8]}"
            await self._store(payload, msg_id, headers)
        for partial in sound:
            self._metrics.handed_over.labels(state_of(partial)).inc()

    async def _store(self, payload: bytes, msg_id: str, headers: Headers) -> None:
        await until_taken(lambda: self._bus.publish_prompt(payload, msg_id, headers), f"hand over {msg_id}")

    async def _answer(self, remainder: Remainder, *, acknowledge: bool) -> None:
        """Where that is not possible the messages are redelivered when their deadline has passed: repeated work, no loss."""
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                for delivery in remainder.deliveries:
                    await (delivery.ack() if acknowledge else delivery.give_back())
        except (BusError, TimeoutError) as error:
            log.warning("group %s is redelivered later: %s", remainder.group.group_id, error or "no answer in time")


def messages_of(
    group: PromptGroup, missing: Sequence[int], partials: Sequence[PartialSequence], max_bytes: int
) -> tuple[list[bytes], int]:
    """PROMPTS messages that together ask for the samples `missing` of `group`, each once, and each with its partial.

    Each is `max_bytes` long at most: too long a one is halved. The second value counts the tokens of samples that are too
    long by themselves; these are asked for from the prompt on. Raises `MessageError`. Pure.
    """
    others = tuple(sorted(set(range(group.num_samples)) - set(missing)))
    mine = tuple(partial for partial in partials if partial.sample_index in missing)
    payload = encode_group(replace(group, partials=mine, done_samples=others))
    if len(payload) <= max_bytes or not mine:
        return [payload], 0
    if len(missing) == 1:
        bare, _ = messages_of(group, missing, (), max_bytes)
        return bare, len(mine[0].completion_token_ids)
    half = len(missing) // 2
    first, left_out = messages_of(group, missing[:half], mine, max_bytes)
    second, also_left_out = messages_of(group, missing[half:], mine, max_bytes)
    return first + second, left_out + also_left_out


def _is_sound(group: PromptGroup, partial: PartialSequence) -> bool:
    """The next actor would accept it."""
    try:
        check_group(replace(group, partials=(partial,), done_samples=()))
    except MessageError as error:
        log.error("sequence %s is not handed over: %s", group.sequence_id(partial.sample_index), error)
        return False
    return True
