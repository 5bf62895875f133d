"""What becomes of a completion: a sequence without reward, a failed one with its reason, or a part that another continues.

Pure, and without an engine, stream or clock.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipelinerl.messages.sequences import FinishReason, PartialSequence, PromptGroup, Sequence
from services.actor.engine import Generation, GenerationRequest

_SEED_STEP = 0x9E3779B97F4A7C15
"""Odd, far from any small number: seeds of a sample's continuations are not those of its neighbours."""


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
        finish_reason=generation.finish_reason or FinishReason.STOP,
        actor=actor,
        completion_text=text,
        prompt_text=group.prompt_text,
        reference_json=group.reference_json,
        generation_s=generation_s,
    )
    return without_arrays(sequence, defect) if defect else sequence


def defect_of(generation: Generation) -> str:
    """Why this completion cannot be trained on; empty for a good one."""
    if generation.finish_reason is None:
        return "engine: it was ended before it was finished"
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


def without_arrays(sequence: Sequence, failure: str) -> Sequence:
    """A record that accounts for the sequence without what made it unusable. Its text stays, for people."""
    return replace(
        sequence,
        completion_token_ids=np.empty(0, dtype=np.int32),
        behaviour_logprobs=np.empty(0, dtype=np.float32),
        spans=(),
        failure=failure,
    )


def start_of(group: PromptGroup, sample_index: int) -> PartialSequence:
    """What there is of this sample: what an actor that left has handed over, or nothing yet."""
    given = (partial for partial in group.partials if partial.sample_index == sample_index)
    return next(given, PartialSequence(sample_index, np.empty(0, np.int32), np.empty(0, np.float32), ()))


def finish_of(group: PromptGroup, start: PartialSequence, max_context: int) -> FinishReason | None:
    """Why nothing is left to generate of it; None when something is. `max_context`: tokens, prompt included."""
    room = min(group.sampling.max_tokens, max_context - len(group.prompt_token_ids))
    if start.finish_reason is None and len(start.completion_token_ids) >= room:
        return FinishReason.LENGTH
    return start.finish_reason


def request_of(group: PromptGroup, start: PartialSequence) -> GenerationRequest:
    """What the engine is asked for: to go on after prompt and `start`, to the length that the group allows in all."""
    carried, sampling = len(start.completion_token_ids), group.sampling
    seed = group.seed + start.sample_index if group.seed else None
    if carried:
        sampling = replace(sampling, max_tokens=sampling.max_tokens - carried)
        # Another seed for each continuation: the same would draw the sample's first random numbers again.
        seed = (seed + carried * _SEED_STEP) % (1 << 63) if seed is not None else None
    return GenerationRequest(
        request_id=group.sequence_id(start.sample_index),
        prompt_token_ids=np.concatenate([group.prompt_token_ids, start.completion_token_ids]).astype(np.int32),
        sampling=sampling,
        seed=seed,
    )


def continued(start: PartialSequence, generation: Generation) -> Generation:
    """The whole completion: `start`, and what was generated after it. Each token keeps its log-probability and version."""
    carried, spans = len(start.completion_token_ids), list(start.spans)
    if not carried:
        return generation
    for span in generation.spans:
        moved = replace(span, start=span.start + carried, end=span.end + carried)
        if spans and (spans[-1].incarnation, spans[-1].version) == (span.incarnation, span.version):
            spans[-1] = replace(spans[-1], end=moved.end)
        else:
            spans.append(moved)
    return Generation(
        token_ids=np.concatenate([start.completion_token_ids, generation.token_ids]),
        behaviour_logprobs=np.concatenate([start.behaviour_logprobs, generation.behaviour_logprobs]),
        spans=tuple(spans),
        finish_reason=generation.finish_reason,
    )


def partial_of(sample_index: int, generation: Generation, generation_s: float) -> PartialSequence:
    """What another actor goes on with, or only has to verify and publish."""
    return PartialSequence(
        sample_index=sample_index,
        completion_token_ids=generation.token_ids,
        behaviour_logprobs=generation.behaviour_logprobs,
        spans=generation.spans,
        finish_reason=generation.finish_reason,
        generation_s=generation_s,
    )


def state_of(partial: PartialSequence) -> str:
    """For metrics and logs."""
    return "unfinished" if partial.finish_reason is None else "finished"
