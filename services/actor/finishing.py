"""Get rewards for finished samples and store their sequences."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field, replace

from opentelemetry.trace import SpanKind

from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.protocol import Headers, Subjects
from pipelinerl.errors import MessageError, PayloadTooLarge, ServiceError
from pipelinerl.messages.sequences import PromptGroup, Sequence, building, encode_sequence
from pipelinerl.messages.verification import VerifierClient, item_of, judged, status_name
from pipelinerl.rl.ledger import failed_sample
from pipelinerl.service.retry import retry_forever
from pipelinerl.telemetry import attributes
from pipelinerl.telemetry.metrics import BoundedLabels
from pipelinerl.telemetry.tracing import Trace, child, headers_of, trace_of
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_OK
from services.actor.engine import without_arrays
from services.actor.metrics import ActorMetrics

log = logging.getLogger(__name__)

WORKERS = 4
"""Number of batches that are verified or published at the same time, so that a slow reward does not delay the others."""


@dataclass(frozen=True, eq=False)
class FinishedSample:
    """A sequence with its group. An episode already has its reward, and a sequence with a `failure` gets none."""

    group: PromptGroup
    sequence: Sequence
    trace: Trace = None
    """Parent of the sample's next span."""


@dataclass(eq=False)
class Finisher:
    """Gets a reward from the verifier for each finished sample, publishes the sample on SEQUENCES and calls
    `on_published(group, sample_index)`. If the verifier or the stream is unavailable, the bounded buffer fills and generation
    slots stay taken. Nothing is dropped. Work resumes when the verifier answers or the stream has room."""

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
        """Callers put samples here. `join` waits until all are stored."""

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(WORKERS):
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
        """Return the samples with the verifier's rewards. Raises `ServiceError` or `MessageError`."""
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
        """Publish until the stream has stored the sequence. Return its failure, or "" for a good sequence. A sequence that is
        invalid or larger than NATS's max_payload is stored as a failure without arrays or text."""
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
    """Return an encoded sequence and its failure. An invalid sequence becomes a failure without arrays or text."""
    try:
        return encode_sequence(sequence), sequence.failure
    except MessageError as error:
        return bare(sequence, f"invalid: {error}"[:500])


def bare(sequence: Sequence, failure: str) -> tuple[bytes, str]:
    """Encode a failed sequence without arrays, text or reward. Return it with its `failure`."""
    log.error("sequence %s cannot be stored as it is: %s", sequence.sequence_id, failure)
    identity = sequence.run, sequence.group_id, sequence.sample_index, sequence.group_size
    failed = failed_sample(*identity, failure)
    origin = replace(failed, task=sequence.task, actor=sequence.actor, group_token=sequence.group_token)
    return encode_sequence(origin), failure
