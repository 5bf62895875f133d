"""The generation loop: keeps H sequences in progress, sample by sample.

Consumes prompt groups from PROMPTS, produces finished samples for `finishing.Finisher`. It waits for the serving gate (a
commit opens it), for a free slot (a finished sample frees it, once the finisher has taken it) and for a group (the
trainer's feeder issues it). A group is admitted sample by sample, so a large one never leaves slots empty.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from dataclasses import replace

import numpy as np

from pipelinerl.bus.protocol import Bus, PromptDelivery
from pipelinerl.codec import decode_group, remains_of_group
from pipelinerl.errors import BusError, MessageError
from pipelinerl.retry import until_taken
from pipelinerl.types import FinishReason, PromptGroup, Sequence
from services.actor.engine import EngineError, Generation, GenerationRequest, InferenceEngine
from services.actor.finishing import FinishedSample, Finisher, without_arrays
from services.actor.gate import ServingGate
from services.actor.held_groups import HeldGroups
from services.actor.metrics import ActorMetrics

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 5.0
FETCH_RETRY_S = 1.0


class GenerationLoop:
    """See the module. `num_in_progress` is what /metrics and the gRPC state show."""

    def __init__(
        self,
        bus: Bus,
        engine: InferenceEngine,
        finisher: Finisher,
        held: HeldGroups,
        gate: ServingGate,
        metrics: ActorMetrics,
        *,
        instance: str,
        sequences_in_progress: int,
        max_context: int,
    ) -> None:
        self._bus, self._engine, self._finisher = bus, engine, finisher
        self._held, self._gate, self._metrics = held, gate, metrics
        self._instance, self._max_context = instance, max_context
        self._slots = asyncio.Semaphore(sequences_in_progress)
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_in_progress = 0

    async def run(self) -> None:
        """Runs until cancelled; raises `EngineError` when the engine died."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._gate.wait_open()
                await self._slots.acquire()
                taken = await self._next_group()
                if taken is None:
                    self._slots.release()
                    continue
                group, samples = taken
                for position, sample_index in enumerate(samples):
                    if position:
                        await self._slots.acquire()
                    self._enter()
                    tasks.create_task(self._sample(group, sample_index))

    async def idle(self) -> None:
        """Returns when no sequence is in progress."""
        await self._idle.wait()

    async def _next_group(self) -> tuple[PromptGroup, list[int]] | None:
        delivery = await until_taken(
            lambda: self._bus.next_prompt(FETCH_TIMEOUT_S), "fetch prompts", first_s=FETCH_RETRY_S
        )
        if delivery is None:
            return None
        if self._gate.draining:  # it began to while this one was on its way
            await _as_far_as_possible(delivery.give_back(), "hand back a group")
            return None
        return await self._admit(delivery)

    async def _admit(self, delivery: PromptDelivery) -> tuple[PromptGroup, list[int]] | None:
        try:
            group = decode_group(delivery.payload, expected_run=self._bus.run)
        except MessageError as error:
            await self._set_aside(delivery, error)
            return None
        samples = self._held.take(group, delivery)
        if samples is None:
            return None
        if not samples:
            await self._held.published(group, -1)
            return None
        if delivery.num_deliveries > self._bus.limits.max_deliveries:
            # It took several actors down with it.
            log.error("group %s was delivered %d times and is given up", group.group_id, delivery.num_deliveries)
            await self._give_up(group, samples, "redelivered_too_often")
            return None
        return group, samples

    async def _set_aside(self, delivery: PromptDelivery, error: MessageError) -> None:
        """A group that cannot be read ends as failed sequences where it says which, and is never delivered again."""
        log.error("a prompt group is set aside: %s", error)
        self._metrics.bad_messages.labels("prompt_group").inc()
        group = remains_of_group(delivery.payload, run=self._bus.run)
        if group is None:
            await _as_far_as_possible(delivery.terminate(str(error)), "terminate a group")
        elif samples := self._held.take(group, delivery):
            await self._give_up(group, samples, f"unreadable_group: {error}"[:500])

    async def _give_up(self, group: PromptGroup, samples: list[int], failure: str) -> None:
        """Ends these samples as failed sequences; with the last one stored the group is acknowledged."""
        for sample_index in samples:
            failed = failed_sequence(group, sample_index, self._instance, failure)
            await self._finisher.put(FinishedSample(group, failed))

    async def _sample(self, group: PromptGroup, sample_index: int) -> None:
        try:
            sequence = await self._generate(group, sample_index)
            self._metrics.count_finished(sequence.finish_reason.value, sequence.num_completion_tokens)
            await self._finisher.put(FinishedSample(group, sequence))
        finally:
            self._leave()
            self._slots.release()

    async def _generate(self, group: PromptGroup, sample_index: int) -> Sequence:
        """The finished sequence, or a failed one with its reason. Raises `EngineError` only when the engine is dead."""
        room = self._max_context - len(group.prompt_token_ids)
        if room < 1:
            tokens = len(group.prompt_token_ids)
            return failed_sequence(
                group, sample_index, self._instance, f"prompt_too_long: {tokens} tokens, context {self._max_context}"
            )
        request = GenerationRequest(
            request_id=group.sequence_id(sample_index),
            prompt_token_ids=group.prompt_token_ids,
            sampling=group.sampling,
            seed=group.seed + sample_index if group.seed else None,
        )
        started = time.monotonic()
        try:
            generation = await self._engine.generate(request)
        except EngineError as error:
            await self._engine.check_health()
            log.error("sequence %s failed: %s", request.request_id, error)
            return failed_sequence(group, sample_index, self._instance, f"engine: {error}"[:500])
        text = self._engine.decode(generation.token_ids)
        return sequence_of(group, sample_index, self._instance, generation, text, time.monotonic() - started)

    def _enter(self) -> None:
        self.num_in_progress += 1
        self._idle.clear()
        self._metrics.busy.enter()
        self._metrics.in_progress.set(self.num_in_progress)

    def _leave(self) -> None:
        self.num_in_progress -= 1
        if self.num_in_progress == 0:
            self._idle.set()
        self._metrics.busy.leave()
        self._metrics.in_progress.set(self.num_in_progress)


async def _as_far_as_possible(answer: Awaitable[None], action: str) -> None:
    """A delivery that is not answered comes again, and is answered then."""
    try:
        await answer
    except BusError as error:
        log.warning("cannot %s, it will come again: %s", action, error)


def sequence_of(
    group: PromptGroup,
    sample_index: int,
    actor: str,
    generation: Generation,
    text: str = "",
    generation_s: float = 0.0,
) -> Sequence:
    """A finished completion as a sequence without reward; what cannot be trained on carries its reason."""
    defect = defect_of(generation)
    sequence = Sequence(
        run=group.run,
        sequence_id=group.sequence_id(sample_index),
        group_id=group.group_id,
        sample_index=sample_index,
        group_size=group.num_samples,
        task=group.task,
        prompt_token_ids=group.prompt_token_ids,
        completion_token_ids=generation.token_ids,
        behaviour_logprobs=generation.behaviour_logprobs,
        spans=generation.spans,
        reward=0.0,
        finish_reason=generation.finish_reason,
        actor=actor,
        completion_text=text,
        prompt_text=group.prompt_text,
        reference_json=group.reference_json,
        generation_s=generation_s,
    )
    return without_arrays(sequence, defect) if defect else sequence


def defect_of(generation: Generation) -> str:
    """Why this completion cannot be trained on; empty for a good one."""
    if len(generation.token_ids) == 0:
        return "empty_completion"
    if not np.isfinite(generation.behaviour_logprobs).all():
        return "non_finite_logprobs"
    covered = sum(span.end - span.start for span in generation.spans)
    if covered != len(generation.token_ids):
        return f"version_spans: cover {covered} of {len(generation.token_ids)} tokens"
    return ""


def failed_sequence(group: PromptGroup, sample_index: int, actor: str, failure: str) -> Sequence:
    """Accounts for a sample that was not generated."""
    nothing = Generation(np.empty(0, np.int32), np.empty(0, np.float32), (), FinishReason.STOP)
    return replace(sequence_of(group, sample_index, actor, nothing), failure=failure)
