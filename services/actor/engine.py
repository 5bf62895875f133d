"""The interface to an inference engine, and pure functions that convert its completions to sequences."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from pipelinerl.errors import PipelineRLError
from pipelinerl.messages import sequences
from pipelinerl.messages.sequences import Completion, FinishReason, Logprobs, PartialSequence, PromptGroup, Sequence, TokenIds

if TYPE_CHECKING:
    from services.actor.weight_sync.client import WeightUpdateClient

_SEED_STEP = 0x9E3779B97F4A7C15
"""Large odd factor. It keeps the seeds of a sample's later requests apart from the seeds of samples with nearby indices."""
UNFINISHED = "engine: generation stopped before the sequence was finished"


class EngineError(PipelineRLError):
    """The engine did not start, refused a request, returned unusable results, or died."""


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """A request for one completion."""

    request_id: str
    prompt_token_ids: TokenIds
    """int32[tokens]."""
    sampling: sequences.SamplingParams
    seed: int | None = None
    """None selects the engine's own random stream."""
    cache_salt: Callable[[], str] = str
    """Called at each start of the request, which restarts if weights are swapped before the first token. Requests with equal
    salts share cached keys and values of a common prefix."""


class InferenceEngine(Protocol):
    """Generates with one policy version at a time. `vllm_engine.py` implements this protocol; tests use a fake."""

    @property
    def weights(self) -> WeightUpdateClient: ...

    @property
    def vocab_size(self) -> int: ...

    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate until the completion ends or is aborted. Raises `EngineError` if the request fails or the engine is dead."""

    async def abort(self, request_ids: abc.Sequence[str]) -> None:
        """Make the `generate` calls of these requests return their tokens so far. Ignores unknown ids. Raises `EngineError`."""

    async def score(self, token_ids: TokenIds) -> Logprobs:
        """Return log π(token[i] | token[:i]) for i >= 1, float32[tokens - 1], nats, at temperature 1. Raises `EngineError`."""

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""

    def decode(self, token_ids: abc.Sequence[int] | TokenIds) -> str: ...

    async def check_health(self) -> None:
        """Raise `EngineError` if the engine is dead."""


OnStep = Callable[[float | None, float], None]
"""Callback after an engine step: seconds since the previous step (None after idle time), and share of the KV cache in use."""
StartEngine = Callable[..., AbstractAsyncContextManager[InferenceEngine]]
"""Function with the arguments of `vllm_engine.start_engine`: recipe, initial model, stop event, `on_step`, `bind_host`."""


def start_of(group: PromptGroup, sample_index: int) -> PartialSequence:
    """Return the `PartialSequence` that the group has for this sample, or an empty one."""
    given = (partial for partial in group.partials if partial.sample_index == sample_index)
    return next(given, None) or PartialSequence(sample_index=sample_index)


def seed_of(group: PromptGroup, sample_index: int, num_tokens: int = 0, number: int = 0) -> int | None:
    """Return a request's seed, or None if the group has none. The seed depends on the sample, on the sample's `num_tokens` so
    far, and on the request's `number` within an episode."""
    return (group.seed + sample_index + (num_tokens + (number << 32)) * _SEED_STEP) % (1 << 63) if group.seed else None


Made = TypeVar("Made", bound=Completion)


def followed_by(made: Made, more: Completion) -> Made:
    """Return `made` followed by `more`. Each token keeps its log-probability and version."""
    carried, spans = len(made.completion_token_ids), list(made.spans)
    for span in more.spans:
        moved = replace(span, start=span.start + carried, end=span.end + carried)
        if spans and (spans[-1].incarnation, spans[-1].version) == (span.incarnation, span.version):
            spans[-1] = replace(spans[-1], end=moved.end)
        else:
            spans.append(moved)
    return replace(
        made,
        completion_token_ids=np.concatenate([made.completion_token_ids, more.completion_token_ids]),
        behaviour_logprobs=np.concatenate([made.behaviour_logprobs, more.behaviour_logprobs]),
        spans=tuple(spans),
        finish_reason=more.finish_reason,
    )


def before_stop(text: str, stop: abc.Iterable[str]) -> str:
    """Return a completion's text before the stop string that ends first, or the whole text if it contains none."""
    found = ((text.find(one) + len(one), len(one)) for one in stop if one in text)
    end, length = min(found, default=(len(text), 0))
    return text[: end - length]


def cut_at_stop(made: Made, carried: int, stop: abc.Sequence[str], decode: Callable[[TokenIds], str]) -> Made:
    """Cut `made` after a stop string that begins in its first `carried` tokens. The engine searches only later tokens, so it
    misses such a string. The cut is where a single uninterrupted request would have stopped."""
    tokens = made.completion_token_ids
    if not stop or not carried:
        return made
    most = len(decode(tokens[:carried])) + max(map(len, stop))
    for end in range(carried + 1, len(tokens) + 1):
        text = decode(tokens[:end])
        if any(one in text for one in stop):
            return replace(
                made,
                completion_token_ids=tokens[:end],
                behaviour_logprobs=made.behaviour_logprobs[:end],
                spans=tuple(replace(span, end=min(span.end, end)) for span in made.spans if span.start < end),
                finish_reason=FinishReason.STOP,
            )
        if len(text) >= most:  # the engine itself finds later stop strings
            break
    return made


def sequence_of(group: PromptGroup, sample: PartialSequence, actor: str, text: str = "", failure: str = "") -> Sequence:
    """Return a sample as a sequence with the reward 0. An unfinished or defective sample becomes a failed sequence."""
    failure = failure or (defect_of(sample) if sample.finish_reason else UNFINISHED)
    sequence = Sequence(
        **{**vars(sample), "finish_reason": sample.finish_reason or FinishReason.STOP, "branches": ()},
        run=group.run,
        sequence_id=group.sequence_id(sample.sample_index),
        group_id=group.group_id,
        group_size=group.num_samples,
        task=group.task,
        prompt_token_ids=group.prompt_token_ids,
        reward=0.0,
        actor=actor,
        completion_text=text,
        prompt_text=group.prompt_text,
        reference_json=group.reference_json,
        group_token=group.token,
    )
    return without_arrays(sequence, failure) if failure else sequence


def failed_sequence(group: PromptGroup, sample_index: int, actor: str, failure: str) -> Sequence:
    """Return a sequence without tokens for a sample that could not be generated."""
    return sequence_of(group, PartialSequence(sample_index=sample_index), actor, failure=failure[:500])


def defect_of(made: Completion) -> str:
    """Return the defect that keeps these tokens from being trained on or continued; empty if there is none."""
    num_tokens = len(made.completion_token_ids)
    if not num_tokens:
        return sequences.EMPTY_COMPLETION
    if not np.isfinite(made.behaviour_logprobs).all():
        return "non_finite_logprobs"
    covered = sum(span.end - span.start for span in made.spans)
    return "" if covered == num_tokens else f"version_spans: cover {covered} of {num_tokens} tokens"


def without_arrays(sequence: Sequence, failure: str) -> Sequence:
    """Return the sequence as failed, without its completion tokens, which may be invalid. Its `completion_text` remains."""
    return replace(
        sequence,
        completion_token_ids=np.empty(0, dtype=np.int32),
        behaviour_logprobs=np.empty(0, dtype=np.float32),
        spans=(),
        turns=(),
        branches=(),
        failure=failure,
    )


def state_of(partial: PartialSequence) -> str:
    return "unfinished" if partial.finish_reason is None else "finished"
