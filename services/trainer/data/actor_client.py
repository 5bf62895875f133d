"""Direct questions to actors over gRPC: held-out generation, the parity probe, their state.

Training sequences do not pass here. Every call has a deadline; an actor that does not answer raises `ServiceError`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from pipelinerl.errors import FieldError, ServiceError
from pipelinerl.messages.sequences import (
    FinishReason,
    Logprobs,
    PolicyVersion,
    SamplingParams,
    TokenIds,
    VersionSpan,
    logprobs_from_bytes,
    sampling_to_proto,
    spans_from_proto,
    token_ids_from_bytes,
)
from pipelinerl.service.grpc import explained, open_channel
from pipelinerl.telemetry.spans import Trace, headers_of
from pipelinerl.v1 import actor_pb2, actor_pb2_grpc, sequence_pb2


@dataclass(frozen=True, eq=False)
class EvaluatedCompletion:
    """One held-out completion; `failure` empty for a good one."""

    problem_id: str
    token_ids: TokenIds
    spans: tuple[VersionSpan, ...]
    text: str
    finish_reason: FinishReason
    failure: str


class ActorClient:
    """One actor. Use as an async context manager."""

    def __init__(self, name: str, address: str, *, tls_dir: Path | None = None, tls_name: str = "") -> None:
        """`tls_dir`: certificates (`pipelinerl.service.tls`), None = plain text; `tls_name`: the name in the actor's, which is
        reached by address."""
        self.name, self.address = name, address
        self._tls_dir, self._tls_name = tls_dir, tls_name

    async def __aenter__(self) -> ActorClient:
        """Raises `ServiceError` when the certificates cannot be used."""
        try:
            self._channel = open_channel(self.address, self._tls_dir, self._tls_name)
        except FieldError as error:
            raise ServiceError(f"actor {self.name} at {self.address} is not called: {error}") from error
        self._stub = actor_pb2_grpc.ActorServiceStub(self._channel)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()

    async def generate(
        self, prompts: dict[str, TokenIds], sampling: SamplingParams, seed: int, timeout_s: float, trace: Trace = None
    ) -> AsyncIterator[EvaluatedCompletion]:
        """Completions as they finish. `trace`: what the actor's span follows. Raises `ServiceError`, `MessageError`."""
        request = actor_pb2.GenerateRequest(
            prompts=[
                actor_pb2.GeneratePrompt(id=problem_id, prompt_token_ids=tokens.tobytes())
                for problem_id, tokens in prompts.items()
            ],
            sampling=sampling_to_proto(sampling),
            seed=seed,
        )
        try:
            metadata = tuple(headers_of(trace).items())
            async for result in self._stub.Generate(request, timeout=timeout_s, metadata=metadata):
                yield EvaluatedCompletion(
                    problem_id=result.id,
                    token_ids=token_ids_from_bytes(
                        result.completion_token_ids, "GenerateResult", "completion_token_ids"
                    ),
                    spans=spans_from_proto(result.spans),
                    text=result.completion_text,
                    finish_reason=FinishReason.LENGTH
                    if result.finish_reason == sequence_pb2.FINISH_REASON_LENGTH
                    else FinishReason.STOP,
                    failure=result.failure,
                )
        except grpc.aio.AioRpcError as error:
            raise self._unreachable("Generate", error) from error

    async def score(self, token_ids: TokenIds, timeout_s: float) -> tuple[Logprobs, PolicyVersion]:
        """Log-probabilities [tokens - 1] and the version that gave them. Raises `ServiceError`, `MessageError`."""
        try:
            request = actor_pb2.ScoreRequest(token_ids=token_ids.tobytes())
            response = await self._stub.Score(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._unreachable("Score", error) from error
        logprobs = logprobs_from_bytes(response.logprobs, "ScoreResponse", "logprobs")
        return logprobs, PolicyVersion(response.incarnation, response.policy_version)

    async def state(self, timeout_s: float) -> actor_pb2.ActorState:
        """Raises `ServiceError`."""
        try:
            state: actor_pb2.ActorState = await self._stub.GetState(actor_pb2.GetStateRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._unreachable("GetState", error) from error
        return state

    def _unreachable(self, call: str, error: grpc.aio.AioRpcError) -> ServiceError:
        return ServiceError(
            f"actor {self.name} at {self.address} does not answer {call}: {explained(error, self._tls_dir)}"
        )


ActorClients = Callable[[str, str], ActorClient]
"""A client for the actor of a name at an address."""
