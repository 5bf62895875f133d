"""Going on with what another actor has begun: what the engine is asked for, and what becomes of the two parts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.messages.sequences import FinishReason, PartialSequence, PolicyVersion, SamplingParams, VersionSpan
from services.actor.engine import before_stop, cut_at_stop, followed_by, seed_of
from services.actor.generation import Sampler
from services.actor.weight_sync.updates import ServingGate
from tests.support.generation import STOP, ScriptedEngine, generated, partial
from tests.unit.builders import make_group


def sampler_of(engine: ScriptedEngine, max_context: int = 64) -> Sampler:
    engine.open.set()
    gate = ServingGate(max_lag=None)
    gate.serve(PolicyVersion(1, 3))
    return Sampler(engine, gate, instance="a", max_context=max_context, places=1)


def test_no_continuation_draws_the_random_numbers_of_another() -> None:
    group = make_group(seed=2**62, num_samples=4)
    seeds = {seed_of(group, i, tokens, number) for i in range(4) for tokens in range(10) for number in range(3)}
    assert len(seeds) == 120
    assert all(seed is not None and 0 < seed < 2**63 for seed in seeds)
    assert (seed_of(make_group(seed=100), 1), seed_of(make_group(seed=0), 1, 7)) == (101, None)


@pytest.mark.parametrize(
    ("start", "spans", "expected"),
    [
        ((7, 8), [(3, 0, 1), (4, 1, 2)], [(3, 0, 3), (4, 3, 4)]),  # one version, one span
        ((7,), [(3, 0, 1, 2)], [(3, 0, 1), (3, 1, 2, 2)]),  # of another incarnation
        ((7, 8), [], [(3, 0, 2)]),
        ((), [(4, 0, 1)], [(4, 0, 1)]),
    ],
)
def test_spans_of_both_parts(start: tuple[int, ...], spans: list[Any], expected: list[Any]) -> None:
    rest = replace(generated(*range(spans[-1][2] if spans else 0)), spans=tuple(VersionSpan(*span) for span in spans))
    whole = followed_by(replace(partial(1, *start, version=3), generation_s=2.0), rest)
    assert whole.spans == tuple(VersionSpan(*span) for span in expected)
    assert (whole.completion_token_ids.dtype, whole.behaviour_logprobs.dtype) == (np.int32, np.float32)
    assert (whole.sample_index, whole.finish_reason, whole.generation_s) == (1, STOP, 2.0)


@pytest.mark.parametrize(
    ("start", "max_tokens", "max_context", "expected"),
    [
        (partial(1), 4, 64, None),
        (partial(1, 7, 8, 9), 4, 64, None),
        (partial(1, 7, 8, 9, 10), 4, 64, FinishReason.LENGTH),
        (partial(1, 7, 8, 9), 16, 6, FinishReason.LENGTH),  # three of the prompt
        (partial(1, 7, 8), 16, 6, None),
        (partial(1, 7, finish=STOP), 16, 64, STOP),
        (partial(1, 7, 8, 9, 10, finish=STOP), 4, 64, STOP),
    ],
)
async def test_only_an_unfinished_sample_is_extended_within_its_limits(
    start: PartialSequence, max_tokens: int, max_context: int, expected: FinishReason | None
) -> None:
    group, engine = make_group(prompt=(1, 2, 3), sampling=SamplingParams(0.5, max_tokens), seed=100), ScriptedEngine()
    sequence = await sampler_of(engine, max_context).sample(group, start, None)
    begun = start.completion_token_ids.tolist()
    if expected is not None:
        assert engine.requests == {}
        assert (sequence.completion_token_ids.tolist(), sequence.finish_reason) == (begun, expected)
        return
    (request,) = engine.requests.values()
    assert (request.request_id, request.prompt_token_ids.tolist()) == ("g00000000.1", [1, 2, 3, *begun])
    assert request.prompt_token_ids.dtype == np.int32
    assert request.sampling == SamplingParams(0.5, min(max_tokens, max_context - 3) - len(begun))
    assert (request.seed == 101) == (not begun)
    assert engine.salts == {"g00000000.1": "begun at 1:3"}


def test_a_text_ends_before_the_stop_text_that_is_complete_first() -> None:
    assert before_stop("x = 1\nEND", ["END", "\n"]) == "x = 1"
    assert before_stop("abcd", ["abcd", "bc"]) == "a"  # "bc" was there one character earlier
    assert before_stop("abc", []) == "abc"


PIECES = ("a", "b", "ab", "ba", "", "bb")
"""What a token stands for."""


def text_of(tokens: Any) -> str:
    return "".join(PIECES[token] for token in tokens)


def engine_tokens(tokens: list[int], stop: list[str]) -> tuple[list[int], FinishReason | None]:
    ends = (end for end in range(1, len(tokens) + 1) if any(one in text_of(tokens[:end]) for one in stop))
    end = next(ends, None)
    return (tokens, None) if end is None else (tokens[:end], STOP)


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), min_size=2, max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_a_sample_ends_at_the_same_token_with_any_hand_over(tokens: list[int], stop: list[str], data: st.DataObject) -> None:
    whole, finish = engine_tokens(tokens, stop)
    carried = data.draw(st.integers(0, len(whole) - 1))
    rest, rest_finish = engine_tokens(tokens[carried:], stop)
    sample = followed_by(partial(1, *tokens[:carried], version=3), generated(*rest, version=4, finish=rest_finish))
    ended = cut_at_stop(sample, carried, stop, text_of)
    assert (ended.completion_token_ids.tolist(), ended.finish_reason) == (whole, finish)
    assert ended.behaviour_logprobs.tolist() == [-3.0] * carried + [-4.0] * (len(whole) - carried)
    assert ended.spans[-1].end == len(whole)
    text = before_stop(text_of(whole), stop)
    assert text_of(whole).startswith(text)
    assert not any(one in text for one in stop)
