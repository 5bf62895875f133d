"""Going on with what another actor has begun: what the engine is asked for, and what becomes of the two parts."""

from __future__ import annotations

import numpy as np
import pytest

from pipelinerl.messages.sequences import FinishReason, PartialSequence, SamplingParams, VersionSpan
from services.actor.completions import continued, finish_of, request_of, start_of
from services.actor.engine import Generation
from tests.unit.builders import make_group


def partial(*tokens: int, index: int = 1, finish: FinishReason | None = None) -> PartialSequence:
    spans = (VersionSpan(3, 0, len(tokens)),) if tokens else ()
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32)
    return PartialSequence(index, np.array(tokens, np.int32), logprobs, spans, finish, generation_s=2.0)


def generated(*tokens: int, spans: tuple[VersionSpan, ...]) -> Generation:
    logprobs = np.full(len(tokens), -0.5, np.float32)
    return Generation(np.array(tokens, np.int32), logprobs, spans, FinishReason.STOP)


def test_a_continuation_follows_the_tokens_that_are_there_up_to_the_same_length() -> None:
    group = make_group(prompt=(1, 2, 3), sampling=SamplingParams(temperature=0.5, max_tokens=16), seed=100)
    request = request_of(group, partial(7, 8))
    assert request.prompt_token_ids.tolist() == [1, 2, 3, 7, 8]
    assert request.prompt_token_ids.dtype == np.int32
    assert request.sampling == SamplingParams(temperature=0.5, max_tokens=14)
    assert request.request_id == "g00000000.1"


def test_a_sample_from_the_prompt_is_asked_for_as_the_group_says() -> None:
    group = make_group(seed=100)
    request = request_of(group, start_of(group, 1))
    assert request.prompt_token_ids.tolist() == [1, 2, 3]
    assert (request.sampling, request.seed) == (group.sampling, 101)
    assert request_of(make_group(seed=0), start_of(group, 1)).seed is None


def test_no_continuation_draws_the_random_numbers_of_another() -> None:
    group = make_group(seed=2**62, num_samples=4)
    seeds = {request_of(group, partial(*range(n), index=i)).seed for i in range(4) for n in range(10)}
    assert len(seeds) == 40
    assert all(seed is not None and 0 < seed < 2**63 for seed in seeds)
    assert request_of(make_group(seed=0), partial(7)).seed is None


def test_both_parts_keep_their_logprobs_and_versions() -> None:
    whole = continued(partial(7, 8), generated(9, 2, spans=(VersionSpan(4, 0, 1), VersionSpan(5, 1, 2))))
    assert whole.token_ids.tolist() == [7, 8, 9, 2]
    assert whole.behaviour_logprobs.tolist() == [-1.0, -2.0, -0.5, -0.5]
    assert whole.spans == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3), VersionSpan(5, 3, 4))
    assert (whole.token_ids.dtype, whole.behaviour_logprobs.dtype) == (np.int32, np.float32)
    assert whole.finish_reason is FinishReason.STOP


def test_spans_of_one_version_become_one_but_not_those_of_two_incarnations() -> None:
    whole = continued(partial(7, 8), generated(9, 2, spans=(VersionSpan(3, 0, 1), VersionSpan(4, 1, 2))))
    assert whole.spans == (VersionSpan(3, 0, 3), VersionSpan(4, 3, 4))
    whole = continued(partial(7), generated(9, spans=(VersionSpan(3, 0, 1, incarnation=2),)))
    assert whole.spans == (VersionSpan(3, 0, 1), VersionSpan(3, 1, 2, incarnation=2))


def test_a_continuation_that_added_nothing_changes_nothing() -> None:
    whole = continued(partial(7, 8), generated(spans=()))
    assert (whole.token_ids.tolist(), whole.spans) == ([7, 8], (VersionSpan(3, 0, 2),))
    begun = generated(9, spans=(VersionSpan(4, 0, 1),))
    assert continued(partial(), begun) is begun


@pytest.mark.parametrize(
    ("start", "max_tokens", "max_context", "expected"),
    [
        (partial(), 4, 64, None),
        (partial(7, 8, 9), 4, 64, None),
        (partial(7, 8, 9, 10), 4, 64, FinishReason.LENGTH),
        (partial(7, 8, 9), 16, 6, FinishReason.LENGTH),  # three of the prompt
        (partial(7, 8), 16, 6, None),
        (partial(7, finish=FinishReason.STOP), 16, 64, FinishReason.STOP),
        (partial(7, 8, 9, 10, finish=FinishReason.STOP), 4, 64, FinishReason.STOP),
    ],
)
def test_what_is_at_its_end_is_finished(
    start: PartialSequence, max_tokens: int, max_context: int, expected: FinishReason | None
) -> None:
    group = make_group(prompt=(1, 2, 3), sampling=SamplingParams(max_tokens=max_tokens))
    assert finish_of(group, start, max_context) is expected


def test_the_start_of_a_sample_is_what_was_handed_over() -> None:
    group = make_group(num_samples=3, partials=(partial(7, index=2),))
    assert start_of(group, 2).completion_token_ids.tolist() == [7]
    assert len(start_of(group, 0).completion_token_ids) == 0
