"""ActorService over gRPC: state, drain, held-out generation, the parity probe.

Each call reads the request, uses the engine beside the training sequences, and streams back. Bad input is answered with
INVALID_ARGUMENT and the field's name, token ids outside the vocabulary included: an engine would fail on them, or read
another token. A request beyond `MAX_PROMPTS` is refused whole.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import numpy as np
from opentelemetry.trace import SpanKind

from pipelinerl.errors import MessageError
from pipelinerl.messages.sequences import (
    FinishReason,
    SamplingParams,
    TokenIds,
    finish_reason_to_proto,
    sampling_from_proto,
    spans_to_proto,
    token_ids_from_bytes,
)
from pipelinerl.telemetry import attributes as a
from pipelinerl.telemetry.spans import child, trace_in
from pipelinerl.v1 import actor_pb2, actor_pb2_grpc
from services.actor.completions import UNFINISHED, defect_of
from services.actor.engine import EngineError, GenerationRequest, InferenceEngine
from services.actor.generation import GenerationLoop, ServingGate
from services.actor.metrics import ActorMetrics
from services.actor.weight_sync.updates import UpdateListener

MAX_PROMPTS = 100_000


@dataclass(frozen=True, eq=False)
class ActorService(actor_pb2_grpc.ActorServiceServicer):
    """What it answers from. `started_at` is monotonic, when the engine was up."""

    instance: str
    engine: InferenceEngine
    gate: ServingGate
    generation: GenerationLoop
    updates: UpdateListener
    metrics: ActorMetrics
    started_at: float
    max_context: int

    async def GetState(
        self, request: actor_pb2.GetStateRequest, context: grpc.aio.ServicerContext
    ) -> actor_pb2.ActorState:
        served = self.gate.served
        return actor_pb2.ActorState(
            instance=self.instance,
            phase=actor_pb2.ActorPhase.Value(f"ACTOR_PHASE_{self.gate.phase.upper()}"),
            policy_version=served.number if served else 0,
            incarnation=served.incarnation if served else 0,
            epoch=self.updates.epoch.epoch if self.updates.epoch else 0,
            sequences_in_progress=self.generation.num_in_progress,
            generated_tokens=self.metrics.tokens_total,
            busy_s=self.metrics.busy.total_s,
            uptime_s=time.monotonic() - self.started_at,
            sequences_finished=self.metrics.finished_total,
        )

    async def Drain(
        self, request: actor_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> actor_pb2.DrainResponse:
        self.gate.drain()
        try:
            async with asyncio.timeout(max(0.0, request.timeout_s)):
                await self.generation.idle()
        except TimeoutError:
            pass
        return actor_pb2.DrainResponse(sequences_left=self.generation.num_in_progress)

    async def Generate(
        self, request: actor_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[actor_pb2.GenerateResult]:
        try:
            sampling, prompts = read_prompts(request, self.engine.vocab_size)
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        trace, about = trace_in(dict(context.invocation_metadata() or ())), a.rpc("pipelinerl.v1.ActorService/Generate")
        with child(trace, "evaluation.generate", kind=SpanKind.SERVER, attributes={**about, a.PROMPTS: len(prompts)}):
            tasks = [asyncio.create_task(self._complete(key, p, sampling, request.seed)) for key, p in prompts.items()]
            try:
                for finished in asyncio.as_completed(tasks):
                    yield await finished
            finally:
                for task in tasks:
                    task.cancel()

    async def Score(
        self, request: actor_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> actor_pb2.ScoreResponse:
        try:
            tokens = read_tokens(request.token_ids, self.engine.vocab_size, "ScoreRequest", "token_ids")
        except MessageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not 2 <= len(tokens) < self.max_context:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"token_ids: {len(tokens)} tokens, give 2 to {self.max_context - 1}",
            )
        async with self.updates.serving:
            served = self.gate.served
            if served is None:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no policy version is served yet")
                raise AssertionError("abort raises")
            try:
                logprobs = await self.engine.score(tokens)
            except EngineError as error:
                await context.abort(grpc.StatusCode.INTERNAL, str(error))
        return actor_pb2.ScoreResponse(
            logprobs=logprobs.tobytes(), policy_version=served.number, incarnation=served.incarnation
        )

    async def _complete(
        self, key: str, prompt: TokenIds, sampling: SamplingParams, seed: int
    ) -> actor_pb2.GenerateResult:
        request = GenerationRequest(f"eval-{key}-{os.urandom(4).hex()}", prompt, sampling, seed or None)
        try:
            generation = await self.engine.generate(request)
        except EngineError as error:
            return actor_pb2.GenerateResult(id=key, failure=str(error)[:500])
        return actor_pb2.GenerateResult(
            id=key,
            completion_token_ids=generation.completion_token_ids.tobytes(),
            behaviour_logprobs=np.asarray(generation.behaviour_logprobs, dtype=np.float32).tobytes(),
            spans=spans_to_proto(generation.spans),
            finish_reason=finish_reason_to_proto(generation.finish_reason or FinishReason.STOP),
            completion_text=self.engine.decode(generation.completion_token_ids),
            failure=defect_of(generation) if generation.finish_reason else UNFINISHED,
        )


def read_prompts(request: actor_pb2.GenerateRequest, vocab_size: int) -> tuple[SamplingParams, dict[str, TokenIds]]:
    """Sampling and prompts by id. Raises `MessageError`. Pure."""
    kind = "GenerateRequest"
    if len(request.prompts) > MAX_PROMPTS:
        raise MessageError(kind, "prompts", f"{len(request.prompts)} given, {MAX_PROMPTS} allowed")
    prompts = {
        prompt.id: read_tokens(prompt.prompt_token_ids, vocab_size, kind, f"prompts[{prompt.id}].prompt_token_ids")
        for prompt in request.prompts
    }
    return sampling_from_proto(request.sampling), prompts


def read_tokens(data: bytes, vocab_size: int, kind: str, field: str) -> TokenIds:
    """int32[tokens]. Raises `MessageError` with the position and value of the first one outside the vocabulary. Pure."""
    tokens = token_ids_from_bytes(data, kind, field)
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if len(outside):
        first = outside[0]
        raise MessageError(kind, field, f"token {first} is {tokens[first]}, allowed are 0 to {vocab_size - 1}")
    return tokens
