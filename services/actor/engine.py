"""What the actor needs from an inference engine: generation, and the data that crosses that line.

`vllm_engine.py` implements it over vLLM; tests bring a light one. What gives an engine new weights is in
`weight_sync/client.py`. Tokens go in and come out; nothing here knows prompts as text, rewards or streams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pipelinerl.errors import PipelineRLError
from pipelinerl.messages.sequences import FinishReason, Logprobs, PolicyVersion, SamplingParams, TokenIds, VersionSpan

if TYPE_CHECKING:
    from services.actor.weight_sync.client import WeightUpdateClient


class EngineError(PipelineRLError):
    """The engine refused a request or died."""


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """`prompt_token_ids` int32[tokens]; `seed` None draws from the engine's own stream."""

    request_id: str
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    seed: int | None = None


@dataclass(frozen=True, eq=False)
class Generation:
    """A completion. `behaviour_logprobs` are log μ of the sampling distribution (temperature and truncation included);
    `spans` cover the tokens, end-of-sequence included. `finish_reason` None: it was aborted, and these are its tokens so far.
    """

    completion_token_ids: TokenIds
    behaviour_logprobs: Logprobs
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason | None


class InferenceEngine(Protocol):
    """Generates on one policy version at a time."""

    @property
    def weights(self) -> WeightUpdateClient:
        """Through which this engine gets new weights."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Raises `EngineError` when the request is refused (prompt too long) or the engine died."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Their `generate` returns at once, with what there is. One that the engine has not yet or no more is left out.
        Raises `EngineError` when the engine is dead."""
        ...

    def progress(self) -> Mapping[str, int]:
        """Tokens that are generated so far, by id of the requests under way."""
        ...

    async def score(self, token_ids: TokenIds) -> Logprobs:
        """float32[tokens - 1]: log π(token[i] | token[:i]) for i >= 1, nats, temperature 1, no cached KV used."""
        ...

    def decode(self, token_ids: Sequence[int] | TokenIds) -> str: ...

    async def check_health(self) -> None:
        """Raises `EngineError` when the engine is dead."""
        ...


OnStep = Callable[[float | None, float], None]
"""Seconds since the step before, None where the engine had nothing to do in between; share of the KV cache in use."""
StartEngine = Callable[..., AbstractAsyncContextManager[InferenceEngine]]
"""Called with recipe, initial model, the event of a stop, `on_step` and `bind_host`, as `vllm_engine.start_engine`."""


def parse_version(text: str) -> PolicyVersion:
    """The engine labels weights `<incarnation>:<number>`; weights no trainer sent are version 0 of incarnation 0."""
    incarnation, separator, number = text.partition(":")
    if not separator:
        return PolicyVersion(0, 0)
    return PolicyVersion(int(incarnation), int(number))
