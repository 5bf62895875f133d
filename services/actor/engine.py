"""What the actor needs from an inference engine: requests to it, made of a group's samples, and what becomes of its answers.

`vllm_engine.py` implements `InferenceEngine` over vLLM; tests bring a light one. What gives an engine new weights is in
`weight_sync/client.py`. Tokens go in and come out: an engine knows no prompts as text, no rewards and no streams.

An answer becomes a sequence without reward, a failed one with its reason, or a part that another generation continues. The
functions for this are pure, without an engine, stream or clock.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from pipelinerl.errors import PipelineRLError
from pipelinerl.messages.sequences import (
    FinishReason,
    Logprobs,
    PartialSequence,
    PromptGroup,
    SamplingParams,
    Sequence,
    TokenIds,
    VersionSpan,
)

if TYPE_CHECKING:
    from services.actor.weight_sync.client import WeightUpdateClient

_SEED_STEP = 0x9E3779B97F4A7C15
"""Odd, far from any small number: seeds of a sample's continuations are not those of its neighbours."""
UNFINISHED = "engine: it was ended before it was finished"


class EngineError(PipelineRLError):
    """The engine refused a request or died."""


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """`prompt_token_ids` int32[tokens]; `seed` None draws from the engine's own stream. `cache_salt`: requests of the same salt
    share the cached keys and values of their common prefix, others do not. The engine asks for it when the request enters, and
    again when the request has to begin anew because weights were swapped before its first token."""

    request_id: str
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    seed: int | None = None
    cache_salt: Callable[[], str] = str


@dataclass(frozen=True, eq=False)
class Generation:
    """A completion. `behaviour_logprobs` are log μ of the sampling distribution (temperature and truncation included);
    `spans` cover the tokens, end-of-sequence included. `finish_reason` None: it was aborted, and these are its tokens so far.
    """

    completion_token_ids: TokenIds
    behaviour_logprobs: Logprobs
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason | None


NO_TOKENS = Generation(np.empty(0, np.int32), np.empty(0, np.float32), (), None)


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

    async def abort(self, request_ids: abc.Sequence[str]) -> None:
        """Their `generate` returns at once, with what there is. One that the engine has not yet or no more is left out.
        Raises `EngineError` when the engine is dead."""
        ...

    async def score(self, token_ids: TokenIds) -> Logprobs:
        """float32[tokens - 1]: log π(token[i] | token[:i]) for i >= 1, nats, temperature 1, no cached KV used."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The model's, of Hugging Face's kind: what writes an episode's conversation."""
        ...

    def decode(self, token_ids: abc.Sequence[int] | TokenIds) -> str: ...

    async def check_health(self) -> None:
        """Raises `EngineError` when the engine is dead."""
        ...


OnStep = Callable[[float | None, float], None]
"""Seconds since the step before, None where the engine had nothing to do in between; share of the KV cache in use."""
StartEngine = Callable[..., AbstractAsyncContextManager[InferenceEngine]]
"""Called with recipe, initial model, the event of a stop, `on_step` and `bind_host`, as `vllm_engine.start_engine`."""


def start_of(group: PromptGroup, sample_index: int) -> PartialSequence:
    """What there is of this sample: what an actor that left has handed over, or nothing yet."""
    given = (partial for partial in group.partials if partial.sample_index == sample_index)
    return next(given, None) or nothing_yet(sample_index)


def nothing_yet(sample_index: int) -> PartialSequence:
    return PartialSequence(sample_index, np.empty(0, np.int32), np.empty(0, np.float32), ())


def finish_of(group: PromptGroup, start: PartialSequence, max_context: int) -> FinishReason | None:
    """Why nothing is left to generate of it; None when something is. `max_context`: tokens, prompt included."""
    room = min(group.sampling.max_tokens, max_context - len(group.prompt_token_ids))
    if start.finish_reason is None and len(start.completion_token_ids) >= room:
        return FinishReason.LENGTH
    return start.finish_reason


def turn_seed(seed: int, num_context: int, number: int = 0) -> int:
    """For what follows `num_context` tokens, asked for after `number` others: equal questions get answers of their own."""
    return (seed + (num_context + (number << 32)) * _SEED_STEP) % (1 << 63)


def request_of(group: PromptGroup, start: PartialSequence, cache_salt: Callable[[], str] = str) -> GenerationRequest:
    """What the engine is asked for: to go on after prompt and `start`, to the length that the group allows in all."""
    carried, sampling = len(start.completion_token_ids), group.sampling
    seed = group.seed + start.sample_index if group.seed else None
    if carried:
        sampling = replace(sampling, max_tokens=sampling.max_tokens - carried)
        # Another seed for each continuation: the same would draw the sample's first random numbers again.
        seed = turn_seed(seed, carried) if seed is not None else None
    return GenerationRequest(
        request_id=group.sequence_id(start.sample_index),
        prompt_token_ids=np.concatenate([group.prompt_token_ids, start.completion_token_ids]).astype(np.int32),
        sampling=sampling,
        seed=seed,
        cache_salt=cache_salt,
    )


def appended(made: Generation, more: Generation) -> Generation:
    """`made`, and what was generated after it. Each token keeps its log-probability and version."""
    carried, spans = len(made.completion_token_ids), list(made.spans)
    for span in more.spans:
        moved = replace(span, start=span.start + carried, end=span.end + carried)
        if spans and (spans[-1].incarnation, spans[-1].version) == (span.incarnation, span.version):
            spans[-1] = replace(spans[-1], end=moved.end)
        else:
            spans.append(moved)
    return Generation(
        completion_token_ids=np.concatenate([made.completion_token_ids, more.completion_token_ids]),
        behaviour_logprobs=np.concatenate([made.behaviour_logprobs, more.behaviour_logprobs]),
        spans=tuple(spans),
        finish_reason=more.finish_reason,
    )


def continued(start: PartialSequence, generation: Generation, generation_s: float = 0.0) -> PartialSequence:
    """The sample so far: `start`, and what was generated after it in `generation_s`."""
    made = Generation(start.completion_token_ids, start.behaviour_logprobs, start.spans, start.finish_reason)
    return PartialSequence(
        **vars(appended(made, generation)), sample_index=start.sample_index, generation_s=start.generation_s + generation_s
    )


def stop_in(text: str, stop: abc.Iterable[str]) -> tuple[int, int] | None:
    """Characters [start, end) of the stop text that is complete first; None when `text` holds none."""
    found = ((text.find(one) + len(one), len(one)) for one in stop if one in text)
    end, length = min(found, default=(0, 0))
    return (end - length, end) if length else None


def before_stop(text: str, stop: abc.Iterable[str]) -> str:
    """What rewards and people see of a completion: without the stop text that ended it, nor what its last token adds."""
    found = stop_in(text, stop)
    return text if found is None else text[: found[0]]


_Made = TypeVar("_Made", Generation, PartialSequence)


def cut_at_stop(made: _Made, carried: int, stop: abc.Sequence[str], decode: Callable[[TokenIds], str]) -> _Made:
    """A sample or turn as it is, or ended at the token that completes a stop text which began in its first `carried` tokens.

    An engine looks for stop texts only in what it samples itself. What it has sampled after such a token is dropped, which
    changes no probability: the rest is what an actor that knew the whole text would have sampled.
    """
    tokens = made.completion_token_ids
    if not stop or not carried:
        return made
    most = len(decode(tokens[:carried])) + max(map(len, stop))
    for end in range(carried + 1, len(tokens) + 1):
        text = decode(tokens[:end])
        if stop_in(text, stop):
            return replace(
                made,
                completion_token_ids=tokens[:end],
                behaviour_logprobs=made.behaviour_logprobs[:end],
                spans=tuple(replace(span, end=min(span.end, end)) for span in made.spans if span.start < end),
                finish_reason=FinishReason.STOP,
            )
        if len(text) >= most:  # from here on a stop text lies in what the engine has seen
            break
    return made


def sequence_of(group: PromptGroup, sample: PartialSequence, actor: str, text: str = "", failure: str = "") -> Sequence:
    """A sample as a sequence without reward; what cannot be trained on carries its reason."""
    failure = failure or (defect_of(sample) if sample.finish_reason else UNFINISHED)
    sequence = Sequence(
        run=group.run,
        sequence_id=group.sequence_id(sample.sample_index),
        group_id=group.group_id,
        sample_index=sample.sample_index,
        group_size=group.num_samples,
        task=group.task,
        prompt_token_ids=group.prompt_token_ids,
        completion_token_ids=sample.completion_token_ids,
        behaviour_logprobs=sample.behaviour_logprobs,
        spans=sample.spans,
        reward=0.0,
        finish_reason=sample.finish_reason or FinishReason.STOP,
        actor=actor,
        completion_text=text,
        prompt_text=group.prompt_text,
        reference_json=group.reference_json,
        generation_s=sample.generation_s,
        group_token=group.token,
    )
    return without_arrays(sequence, failure) if failure else sequence


def defect_of(made: Generation | PartialSequence) -> str:
    """Why these tokens can be neither trained on nor continued; empty for good ones."""
    num_tokens = len(made.completion_token_ids)
    if not num_tokens:
        return "empty_completion"
    if not np.isfinite(made.behaviour_logprobs).all():
        return "non_finite_logprobs"
    covered = sum(span.end - span.start for span in made.spans)
    if covered != num_tokens:
        return f"version_spans: cover {covered} of {num_tokens} tokens"
    return ""


def without_arrays(sequence: Sequence, failure: str) -> Sequence:
    """A record that accounts for the sequence without what made it unusable. Its text stays, for people."""
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
    """For metrics and logs."""
    return "unfinished" if partial.finish_reason is None else "finished"
