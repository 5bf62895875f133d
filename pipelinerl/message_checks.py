"""What must hold of a prompt group and of a sequence, whoever made it. Used on both sides: by encoding and by decoding.

Pure. Every problem is a `MessageError` that names the message, the field and what is wrong with it. It knows nothing of
tokenizers, tasks or the state of a run: whether a version exists or a group was issued is the trainer's to judge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

from pipelinerl.arrays import check_logprobs, check_token_ids
from pipelinerl.errors import MessageError
from pipelinerl.types import DeadLetter, PartialSequence, PromptGroup, SamplingParams, Sequence, VersionSpan

MAX_SAMPLES = 65_536
"""Samples of one group at most: far above any use, and small enough that a broken count does no harm."""
_GROUP, _SEQUENCE, _SAMPLING, _DEAD = "PromptGroup", "Sequence", "SamplingParams", "DeadLetter"


def check_uint(value: int, kind: str, field: str, *, at_least: int = 0, bits: int = 32) -> None:
    """Raises `MessageError` unless `value` is in [at_least, 2**bits)."""
    if not at_least <= value < 1 << bits:
        raise MessageError(kind, field, f"{value} is not in [{at_least}, 2**{bits})")


def check_finite(value: float, kind: str, field: str, *, at_least: float = -math.inf) -> None:
    if not (math.isfinite(value) and value >= at_least):
        wanted = "a finite number" if at_least == -math.inf else f"a finite number >= {at_least:g}"
        raise MessageError(kind, field, f"{value} is not {wanted}")


def check_text(value: str, kind: str, field: str) -> None:
    if not value:
        raise MessageError(kind, field, "is empty")


def check_run(run: str, expected_run: str, kind: str) -> None:
    check_text(run, kind, "run")
    if expected_run and run != expected_run:
        raise MessageError(kind, "run", f"{run!r} is not this run, {expected_run!r}")


def check_spans(spans: Items[VersionSpan], num_tokens: int, kind: str, field: str = "spans") -> None:
    """Raises `MessageError` unless the spans cover tokens [0, num_tokens) in order, without gap or overlap."""
    covered = 0
    for span in spans:
        if span.start != covered or span.end <= span.start:
            problem = f"[{span.start}, {span.end}) does not continue a cover of [0, {covered})"
            raise MessageError(kind, field, problem)
        if not 0 <= span.version < 1 << 64:
            raise MessageError(kind, f"{field}.version", f"{span.version} is not in [0, 2**64)")
        if not 1 <= span.incarnation < 1 << 32:
            raise MessageError(kind, f"{field}.incarnation", f"{span.incarnation} is not in [1, 2**32)")
        covered = span.end
    if covered != num_tokens:
        raise MessageError(kind, field, f"cover [0, {covered}) of {num_tokens} completion tokens")


def check_sampling(sampling: SamplingParams, kind: str = _SAMPLING, prefix: str = "") -> None:
    check_finite(sampling.temperature, kind, f"{prefix}temperature", at_least=0.0)
    if not 0 < sampling.top_p <= 1:
        raise MessageError(kind, f"{prefix}top_p", f"{sampling.top_p} is not in (0, 1]")
    check_uint(sampling.top_k, kind, f"{prefix}top_k", bits=31)
    check_uint(sampling.max_tokens, kind, f"{prefix}max_tokens", at_least=1)
    for token_id in sampling.stop_token_ids:
        check_uint(token_id, kind, f"{prefix}stop_token_ids", bits=31)


def check_group(group: PromptGroup, *, expected_run: str = "") -> None:
    """Raises `MessageError`. `expected_run` "" = any."""
    check_run(group.run, expected_run, _GROUP)
    check_text(group.group_id, _GROUP, "group_id")
    check_text(group.task, _GROUP, "task")
    check_token_ids(group.prompt_token_ids, _GROUP, "prompt_token_ids")
    if not len(group.prompt_token_ids):
        raise MessageError(_GROUP, "prompt_token_ids", "is empty")
    check_sampling(group.sampling, _GROUP, "sampling.")
    for field in ("problem_index", "seed", "issued_version"):
        check_uint(getattr(group, field), _GROUP, field, bits=64)
    if not 1 <= group.num_samples <= MAX_SAMPLES:
        raise MessageError(_GROUP, "num_samples", f"{group.num_samples} is not in [1, {MAX_SAMPLES}]")
    _check_samples(group)


def check_sequence(sequence: Sequence, *, expected_run: str = "") -> None:
    """Raises `MessageError`. A sequence with a `failure` may lack its tokens. `expected_run` "" = any."""
    check_run(sequence.run, expected_run, _SEQUENCE)
    check_text(sequence.group_id, _SEQUENCE, "group_id")
    check_text(sequence.task, _SEQUENCE, "task")
    _check_place_in_group(sequence)
    _check_tokens(sequence, _SEQUENCE, "")
    check_token_ids(sequence.prompt_token_ids, _SEQUENCE, "prompt_token_ids")
    if not sequence.failure and not (len(sequence.prompt_token_ids) and len(sequence.completion_token_ids)):
        field = "completion_token_ids" if len(sequence.prompt_token_ids) else "prompt_token_ids"
        raise MessageError(_SEQUENCE, field, "is empty, and the sequence names no failure")
    check_finite(sequence.reward, _SEQUENCE, "reward")
    for name, value in sequence.reward_components.items():
        check_finite(value, _SEQUENCE, f"reward_components[{name}]")
    check_finite(sequence.generation_s, _SEQUENCE, "generation_s", at_least=0.0)


def _check_place_in_group(sequence: Sequence) -> None:
    if not 1 <= sequence.group_size <= MAX_SAMPLES:
        raise MessageError(_SEQUENCE, "group_size", f"{sequence.group_size} is not in [1, {MAX_SAMPLES}]")
    if not 0 <= sequence.sample_index < sequence.group_size:
        problem = f"{sequence.sample_index} is not in [0, group_size = {sequence.group_size})"
        raise MessageError(_SEQUENCE, "sample_index", problem)
    expected_id = f"{sequence.group_id}.{sequence.sample_index}"
    if sequence.sequence_id != expected_id:
        raise MessageError(_SEQUENCE, "sequence_id", f"{sequence.sequence_id!r} should be {expected_id!r}")


def _check_tokens(tokens: Sequence | PartialSequence, kind: str, prefix: str) -> None:
    completion, logprobs = tokens.completion_token_ids, tokens.behaviour_logprobs
    check_token_ids(completion, kind, f"{prefix}completion_token_ids")
    check_logprobs(logprobs, kind, f"{prefix}behaviour_logprobs")
    if len(logprobs) != len(completion):
        problem = f"{len(logprobs)} values for {len(completion)} completion tokens"
        raise MessageError(kind, f"{prefix}behaviour_logprobs", problem)
    check_spans(tokens.spans, len(completion), kind, f"{prefix}spans")


def _check_samples(group: PromptGroup) -> None:
    """Samples done and samples to resume: inside the group, each once."""
    seen: set[int] = set()
    partial_indices = [partial.sample_index for partial in group.partials]
    for field, indices in (("done_samples", group.done_samples), ("partials", partial_indices)):
        for index in indices:
            if not 0 <= index < group.num_samples:
                raise MessageError(_GROUP, field, f"sample {index} is not in [0, num_samples = {group.num_samples})")
            if index in seen:
                raise MessageError(_GROUP, field, f"sample {index} is listed twice")
            seen.add(index)
    for partial in group.partials:
        _check_partial(partial, group.sampling.max_tokens)


def _check_partial(partial: PartialSequence, max_tokens: int) -> None:
    _check_tokens(partial, _GROUP, "partials.")
    check_finite(partial.generation_s, _GROUP, "partials.generation_s", at_least=0.0)
    num_tokens = len(partial.completion_token_ids)
    if num_tokens > max_tokens:
        problem = f"{num_tokens} tokens of sample {partial.sample_index}, sampling.max_tokens is {max_tokens}"
        raise MessageError(_GROUP, "partials.completion_token_ids", problem)
    if partial.finish_reason is not None and not num_tokens:
        problem = f"sample {partial.sample_index} is finished ({partial.finish_reason}) without a token"
        raise MessageError(_GROUP, "partials.finish_reason", problem)


def check_dead_letter(letter: DeadLetter, *, expected_run: str = "") -> None:
    """Raises `MessageError`. The message that was given up is not looked into. `expected_run` "" = any."""
    check_run(letter.run, expected_run, _DEAD)
    check_uint(letter.deliveries, _DEAD, "deliveries")
    check_finite(letter.at_s, _DEAD, "at_s", at_least=0.0)
