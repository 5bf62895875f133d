"""From prompt groups to published sequences.

The generation loop takes groups and keeps H (`actor.sequences_in_progress`) sequences decoding, the sampler samples them, and
the finisher gets their rewards and publishes them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
from opentelemetry.trace import SpanKind

from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.protocol import Headers, Subjects
from pipelinerl.bus.reader import PromptDelivery
from pipelinerl.errors import BusError, MessageError, PayloadTooLarge, ServiceError
from pipelinerl.messages import sequences
from pipelinerl.messages.sequences import (
    Completion,
    PartialSequence,
    PromptGroup,
    SamplingParams,
    Sequence,
    TokenIds,
    building,
    encode_sequence,
)
from pipelinerl.messages.verification import VerifierClient, item_of, judged, status_name
from pipelinerl.rl.ledger import failed_sample
from pipelinerl.service.logs import AGGREGATED
from pipelinerl.service.retry import Backoff, retry_forever
from pipelinerl.tasks.source import Split
from pipelinerl.telemetry import attributes
from pipelinerl.telemetry.metrics import BoundedLabels
from pipelinerl.telemetry.tracing import Trace, child, headers_of, trace_in, trace_of
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_OK
from services.actor import engine
from services.actor.engine import EngineError, InferenceEngine, Made, defect_of, failed_sequence, seed_of, without_arrays
from services.actor.episodes.episode import Episodes, sequence_of_episode, verdict_of
from services.actor.hand_over import HEADER_ROOM_BYTES, HeldGroups, answered, publish_samples
from services.actor.metrics import ActorMetrics
from services.actor.weight_sync.updates import ServingGate

log = logging.getLogger(__name__)

REASON_CHARACTERS = 1000
FETCH_TIMEOUT_S = 5.0
FETCH_RETRY_S = 1.0
ABORT_AGAIN_S = 0.01
"""Seconds until an abort is repeated, because an abort misses a request that is just entering the engine."""
FINISHER_TASKS = 4
"""Number of batches that are verified or published at the same time."""


@dataclass(eq=False)
class Sampler:
    """Samples completions and episodes of prompt groups. At most `places` completions or turns are decoded at once. An actor
    has two samplers: one for training, which counts in `metrics` and can be interrupted, and one for held-out evaluation."""

    engine: InferenceEngine
    gate: ServingGate
    _: KW_ONLY
    instance: str
    max_context: int
    places: int
    split: Split = Split.TRAIN
    episodes: Episodes | None = None
    """Required for episodic tasks."""
    metrics: ActorMetrics | None = None
    """If None, nothing is counted."""
    keep: Callable[[PromptGroup, PartialSequence], None] = lambda group, partial: None
    """Callback that receives all usable tokens of a sample when it finishes or is interrupted."""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that ends the episodes in progress."""
    interrupted: bool = field(default=False, init=False)
    generating: set[str] = field(default_factory=set, init=False)
    _playing: set[asyncio.Task[Any]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._free_places = asyncio.Semaphore(self.places)

    async def sample(self, group: PromptGroup, start: PartialSequence, trace: Trace) -> Sequence | None:
        """Continue `start` and return the finished sequence, or a failed one with its reason, or None if it was interrupted.
        `trace` is the parent of an episode's spans. Raises `EngineError` only if the engine is dead."""
        return await (self._play(group, start, trace) if group.episodic else self._complete(group, start))

    async def interrupt(self, timeout_s: float) -> None:
        """Stop sampling for good. Unfinished sequences that the engine returns within `timeout_s` are passed to `keep`; the new
        tokens of other sequences are lost. Then stop the episodes, and wait for them for another `timeout_s` at most."""
        self.interrupted = True
        try:
            async with asyncio.timeout(timeout_s):
                while self.generating:
                    await self.engine.abort(sorted(self.generating))
                    await asyncio.sleep(ABORT_AGAIN_S)
        except (EngineError, TimeoutError) as error:
            left = len(self.generating)
            why = str(error) or f"no answer within {timeout_s:g} s"
            log.error("the new tokens of %d sequences are lost, because the engine did not return them: %s", left, why)
        self.stopped.set()  # ends the episodes, whose recorded turns are kept
        if self._playing:
            await asyncio.wait(self._playing, timeout=timeout_s)

    async def _play(self, group: PromptGroup, start: PartialSequence, trace: Trace) -> Sequence | None:
        index, began_s = start.sample_index, time.monotonic()
        salt, is_kept = "", False  # the first turn with tokens fixes the salt, so that later turns find the cached prefix
        if self.episodes is None or group.task not in self.episodes.tasks:
            problem = f"{group.task!r:.100} is not an episodic task of this actor's recipe; use the trainer's recipe"
            return failed_sequence(group, index, self.instance, f"unknown_task: {problem}")
        task = asyncio.current_task()
        assert task is not None
        self._playing.add(task)
        task.add_done_callback(self._playing.discard)

        def salt_of_turn() -> str:
            nonlocal salt
            salt = salt if is_kept else self.gate.cache_salt
            return salt

        async def sample(context: TokenIds, made: Completion, sampling: SamplingParams, number: int) -> Completion:
            nonlocal is_kept
            carried, name = len(made.completion_token_ids), f"{group.sequence_id(index)}.{number}"
            seed = seed_of(group, index, len(context) + carried, number)
            turn, _ = await self.extend(name, context, made, sampling, seed, salt_of_turn)
            is_kept = is_kept or len(turn.completion_token_ids) > carried
            return turn

        episode, result = await self.episodes.play(group, start, sample, split=self.split, stopped=self.stopped, trace=trace)
        made = episode.partial(index, start.generation_s + time.monotonic() - began_s)
        self.keep(group, made)
        is_cut = any(not turn.is_finished for turn in episode.served)
        if result is None:
            return None
        failed = verdict_of(episode, result)[0] or episode.finish_reason is None
        if self.interrupted and (is_cut or failed):  # the interruption may be the failure's cause
            return None
        sequence = sequence_of_episode(group, made, episode, result, self.instance)
        if sequence.failure:
            log.error("episode %s failed: %s", sequence.sequence_id, sequence.failure)
        return sequence

    async def _complete(self, group: PromptGroup, start: PartialSequence) -> Sequence | None:
        prompt, index, name = group.prompt_token_ids, start.sample_index, group.sequence_id(start.sample_index)
        room = self.max_context - len(prompt)
        if room < 1:
            problem = f"prompt_too_long: {len(prompt)} tokens leave no room in model.max_context ({self.max_context})"
            return failed_sequence(group, index, self.instance, problem)
        sampling = replace(group.sampling, max_tokens=min(group.sampling.max_tokens, room))
        seed = seed_of(group, index, len(start.completion_token_ids))
        try:
            sample, elapsed_s = await self.extend(name, prompt, start, sampling, seed, lambda: self.gate.cache_salt)
        except EngineError as error:
            await self.engine.check_health()
            log.error("sequence %s failed: %s", name, error)
            return failed_sequence(group, index, self.instance, f"engine: {error}")
        sample = replace(sample, generation_s=start.generation_s + elapsed_s)
        if not defect_of(sample):
            self.keep(group, sample)
        if sample.finish_reason is None and self.interrupted:
            return None
        text = engine.before_stop(self.engine.decode(sample.completion_token_ids), group.sampling.stop)
        return engine.sequence_of(group, sample, self.instance, text)

    async def extend(
        self, name: str, context: TokenIds, made: Made, sampling: SamplingParams, seed: int | None, salt: Callable[[], str]
    ) -> tuple[Made, float]:
        """Wait until a place (`places`) is free. Continue `made`, the tokens after `context`, until it ends, is interrupted or
        has `sampling.max_tokens` tokens. Return the extended completion and the seconds in the engine. Raises `EngineError`."""
        carried, elapsed_s = len(made.completion_token_ids), 0.0
        if made.finish_reason is None and carried >= sampling.max_tokens:
            made = replace(made, finish_reason=sequences.FinishReason.LENGTH)
        if made.finish_reason is not None:
            return made, elapsed_s
        token_ids = np.concatenate([context, made.completion_token_ids]).astype(np.int32)
        left = replace(sampling, max_tokens=sampling.max_tokens - carried)
        async with self._free_places:
            if self.interrupted:
                return made, elapsed_s
            began_s = time.monotonic()
            self.generating.add(name)
            try:
                with self.metrics.busy if self.metrics else nullcontext():
                    more = await self.engine.generate(engine.GenerationRequest(name, token_ids, left, seed, salt))
            finally:
                self.generating.discard(name)
            elapsed_s = time.monotonic() - began_s
        if self.metrics:
            self.metrics.count_generated(len(more.completion_token_ids))
        return engine.cut_at_stop(engine.followed_by(made, more), carried, sampling.stop, self.engine.decode), elapsed_s


@dataclass(frozen=True, eq=False)
class FinishedSample:
    """A sequence with its group. An episode already has its reward, and a sequence with a `failure` gets none."""

    group: PromptGroup
    sequence: Sequence
    trace: Trace = None
    """Parent of the sample's next span."""


@dataclass(eq=False)
class Finisher:
    """Gets rewards from the verifier, publishes each finished sample on SEQUENCES and then calls
    `on_published(group, sample_index)`. If the verifier or the stream is unavailable, nothing is dropped: the bounded buffer
    fills, and generation stops until work resumes."""

    bus: Bus
    verifier: VerifierClient
    metrics: ActorMetrics
    on_published: Callable[[PromptGroup, int], Awaitable[None]]
    _: KW_ONLY
    buffer_size: int
    batch_size: int
    _reasons: BoundedLabels = field(default_factory=BoundedLabels, init=False)

    def __post_init__(self) -> None:
        self.buffer = asyncio.Queue[FinishedSample](maxsize=self.buffer_size)
        """Finished samples that callers put here. `buffer.join()` waits until the stream has stored all of them."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(FINISHER_TASKS):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        while True:
            batch = [await self.buffer.get()]
            while len(batch) < self.batch_size and not self.buffer.empty():
                batch.append(self.buffer.get_nowait())
            try:
                async with asyncio.TaskGroup() as tasks:  # publish the batch at once, in one round trip to the stream
                    for sample in await self.rewarded(batch):
                        tasks.create_task(self._publish(sample))
            finally:
                for _ in batch:
                    self.buffer.task_done()

    async def rewarded(self, batch: list[FinishedSample]) -> list[FinishedSample]:
        """Return the samples in any order, each with a reward or a failure. A refused sample does not affect the others."""
        done = [sample for sample in batch if sample.group.episodic or sample.sequence.failure]
        good = [sample for sample in batch if sample not in done]
        try:
            return done + (await self._verified(good) if good else [])
        except (ServiceError, MessageError) as error:
            if len(good) > 1:
                log.warning("cannot verify %d sequences in one batch; verifying them one by one: %s", len(good), error)
                return done + [rewarded for sample in good for rewarded in await self.rewarded([sample])]
            log.error("sequence %s gets no reward: %s", good[0].sequence.sequence_id, error)
            failure = f"verifier_refused: {error}"[:500]
            return [*done, replace(good[0], sequence=without_arrays(good[0].sequence, failure))]

    async def _verified(self, samples: list[FinishedSample]) -> list[FinishedSample]:
        """Return the samples with rewards or failures. Raises `ServiceError` or `MessageError` if the batch is refused."""
        started = time.monotonic()
        with ExitStack() as spans, building("VerifyItem"):
            items = []
            for sample in samples:
                about = attributes.rpc("pipelinerl.v1.VerifierService/Verify")
                about |= {attributes.SEQUENCE_ID: sample.sequence.sequence_id}
                span = child(sample.trace, "sequence.verify", kind=SpanKind.CLIENT, attributes=about)
                headers = headers_of(trace_of(spans.enter_context(span)))
                items.append(item_of(sample.sequence, sample.group.sampling.max_tokens, headers.get("traceparent", "")))
            results = await self.verifier.verify(items)
        self.metrics.verify_seconds.observe(time.monotonic() - started)
        rewarded = []
        for sample, result in zip(samples, results, strict=True):
            failure = f"reward_{status_name(result.status)}: {result.message}"[:500]
            is_good = result.status == VERIFY_STATUS_OK
            sequence = judged(sample.sequence, result) if is_good else without_arrays(sample.sequence, failure)
            rewarded.append(replace(sample, sequence=sequence))
        return rewarded

    async def _publish(self, sample: FinishedSample) -> None:
        started, sequence = time.monotonic(), sample.sequence
        about = attributes.messaging("send", Subjects(sequence.run).sequences, sequence.sequence_id)
        about |= {attributes.SEQUENCE_ID: sequence.sequence_id, attributes.REWARD: sequence.reward}
        with child(sample.trace, "sequence.publish", kind=SpanKind.PRODUCER, attributes=about) as span:
            failure = await self._store(sequence, headers_of(trace_of(span) or sample.trace))
        self.metrics.publish_seconds.observe(time.monotonic() - started)
        if failure:
            self.metrics.failed.labels(self._reasons.of(failure)).inc()
        await self.on_published(sample.group, sequence.sample_index)

    async def _store(self, sequence: Sequence, headers: Headers) -> str:
        """Publish a sequence, as a failed one if it is invalid or too large. Return its failure, or "" for a good sequence."""
        name = sequence.sequence_id

        async def publish(payload: bytes) -> None:
            await retry_forever(lambda: self.bus.publish_sequence(payload, name, headers), f"publish {name}")

        payload, failure = encoded(sequence)
        try:
            await publish(payload)
        except PayloadTooLarge as error:
            payload, failure = bare(sequence, f"too_large: {error}")
            await publish(payload)
        return failure


def encoded(sequence: Sequence) -> tuple[bytes, str]:
    """Return an encoded sequence and its `failure`. An invalid sequence becomes a failed one without arrays or text."""
    try:
        return encode_sequence(sequence), sequence.failure
    except MessageError as error:
        return bare(sequence, f"invalid: {error}"[:500])


def bare(sequence: Sequence, failure: str) -> tuple[bytes, str]:
    """Encode a sequence as failed, without arrays, text or reward. Return the bytes and `failure`."""
    log.error("sequence %s cannot be stored as it is: %s", sequence.sequence_id, failure)
    identity = sequence.run, sequence.group_id, sequence.sample_index, sequence.group_size
    failed = failed_sample(*identity, failure)
    origin = replace(failed, task=sequence.task, actor=sequence.actor, group_token=sequence.group_token)
    return encode_sequence(origin), failure


@dataclass(eq=False)
class GenerationLoop:
    """Takes the next prompt group when the serving gate is open and fewer than `samples_in_progress` samples are in progress,
    so that H (`actor.sequences_in_progress`) sequences keep decoding."""

    bus: Bus
    sampler: Sampler
    finisher: Finisher
    held: HeldGroups
    gate: ServingGate
    metrics: ActorMetrics
    _: KW_ONLY
    instance: str
    samples_in_progress: int
    """A sample is in progress from its start until it enters the finisher's bounded buffer. An episode that waits for its
    environment is in progress, but does not count towards the H sequences (or turns) that the sampler decodes."""

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(self.samples_in_progress)

    async def run(self) -> None:
        """Generate until the sampler is interrupted or this call is cancelled. Raises `EngineError` if the engine dies."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self.gate.opened.wait()
                await self.slots.acquire()
                # The gate may have closed during the wait for a slot.
                taken = await self._next_group() if self.gate.opened.is_set() else None
                if taken is None:
                    self.slots.release()
                    continue
                group, samples, trace = taken
                for position, sample_index in enumerate(samples):
                    if position:
                        await self.slots.acquire()
                    if self.sampler.interrupted:
                        return
                    if not self.gate.opened.is_set() and await self._handed_back(group, samples[position:]):
                        self.slots.release()
                        break
                    tasks.create_task(self._sample(group, sample_index, trace))

    async def _next_group(self) -> tuple[PromptGroup, list[int], Trace] | None:
        delivery = await retry_forever(
            lambda: self.bus.next_prompt(FETCH_TIMEOUT_S), "fetch prompts", backoff=Backoff(first_s=FETCH_RETRY_S)
        )
        if delivery is None:
            return None
        if self.gate.draining:  # the drain began during this fetch
            await answered(delivery.give_back(), "hand back a group")
            return None
        return await self.admit(delivery)

    async def admit(self, delivery: PromptDelivery) -> tuple[PromptGroup, list[int], Trace] | None:
        """Take a message and return its group, the samples to generate and the trace. Return None if there is nothing to
        generate. A group that is unreadable or was delivered too often ends as failed sequences and a dead letter."""
        try:
            group = sequences.decode_group(delivery.payload, expected_run=self.bus.run)
        except MessageError as error:
            log.error("a prompt group cannot be read and is given up: %s", error, extra=AGGREGATED)
            self.metrics.bad_messages.labels("prompt_group").inc()
            remains = sequences.remains_of_group(delivery.payload, run=self.bus.run)
            await self._give_up(remains, delivery, f"unreadable_group: {error}")
            return None
        if delivery.num_deliveries > self.bus.limits.max_deliveries and not self.held.holds(group, delivery):
            # The group may have crashed several actors.
            log.error("group %s was delivered %d times and is given up", group.group_id, delivery.num_deliveries)
            await self._give_up(group, delivery, "redelivered_too_often")
            return None
        samples = self.held.take(group, delivery)
        await self.held.acknowledge(group.group_id)  # needed if the message asks for no sample
        return (group, samples, trace_in(delivery.headers)) if samples else None

    async def _handed_back(self, group: PromptGroup, samples: list[int]) -> bool:
        """Hand unstarted samples to another actor. Return False if their message is invalid or too large."""
        try:
            await publish_samples(self.bus, self.held[group.group_id], samples, self.instance)
        except (MessageError, PayloadTooLarge) as error:
            log.warning(
                "cannot hand back %d samples of group %s, so they are generated here: %s", len(samples), group.group_id, error
            )
            return False
        for sample_index in samples:
            await self.held.published(group, sample_index)
        log.info(
            "handed %d unstarted samples of group %s back for another actor to generate: %s",
            len(samples), group.group_id, self.gate.reason,
        )  # fmt: skip
        return True

    async def _give_up(self, group: PromptGroup | None, delivery: PromptDelivery, failure: str) -> None:
        """Store the message as a dead letter, then publish its samples as failed sequences and acknowledge it. If `group` is
        None, because the message does not identify its group, no samples are published."""
        letter = sequences.DeadLetter(
            run=self.bus.run,
            msg_id=delivery.msg_id,
            prompt_group=delivery.payload,
            reason=failure[:REASON_CHARACTERS],
            deliveries=delivery.num_deliveries,
            actor=self.instance,
            at_s=time.time(),
        )
        if letter.ByteSize() > self.bus.max_payload_bytes - HEADER_ROOM_BYTES:
            letter.reason += f" (this letter omits the group, because its {len(letter.prompt_group)} bytes are too many)"
            letter.ClearField("prompt_group")
        try:
            await self.bus.publish_dead_letter(letter.SerializeToString(), f"position-{delivery.position}")
        except BusError as error:  # the message will be delivered again
            log.warning("cannot store the dead letter of a prompt group, which NATS will therefore deliver again: %s", error)
            return
        self.metrics.dead_letters.inc()
        if group is None:
            await answered(delivery.terminate(failure), "terminate a group")
            return
        for sample_index in self.held.take(group, delivery):
            failed = failed_sequence(group, sample_index, self.instance, failure)
            await self.finisher.buffer.put(FinishedSample(group, failed, trace_in(delivery.headers)))
        await self.held.acknowledge(group.group_id)

    async def _sample(self, group: PromptGroup, sample_index: int, trace: Trace) -> None:
        start = engine.start_of(group, sample_index)
        about: attributes.Attributes = {
            attributes.SEQUENCE_ID: group.sequence_id(sample_index),
            attributes.GROUP_ID: group.group_id,
            "gen_ai.operation.name": "invoke_agent" if group.episodic else "text_completion",
        }
        if carried := start.num_sampled_tokens:
            about[attributes.CARRIED_TOKENS] = carried
            self.metrics.continued.labels(engine.state_of(start)).inc()
            self.metrics.carried_tokens.inc(carried)
        name = "episode.generate" if group.episodic else "sequence.generate"
        try:
            episodes = self.metrics.episodes.track_inprogress() if group.episodic else nullcontext()
            with child(trace, name, attributes=about) as span, episodes:
                follows = trace_of(span) or trace
                sequence = await self.sampler.sample(group, start, follows)
                if sequence is None:  # another actor continues it
                    span.add_event("interrupted")
                elif span.is_recording():
                    span.set_attributes(attributes.generated(sequence))
            if sequence is not None:  # its place is already free, so a full buffer does not block episodes' turns
                self.metrics.count_finished(sequence.finish_reason.value, sequence.num_episode_tokens)
                await self.finisher.buffer.put(FinishedSample(group, sequence, follows))
        finally:
            self.slots.release()
