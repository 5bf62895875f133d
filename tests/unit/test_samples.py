"""Figures of a step, which come from statistics of each rank's tokens and are those of all tokens together. Samples of a run:
which tokens are which piece of the text, and how much each of them weighed in its step.
"""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pipelinerl.messages.sequences import VersionSpan
from pipelinerl.recipe.fields import AlgorithmConfig, TrainerConfig
from pipelinerl.rl.groups import LAG_BUCKETS, lag_bucket
from pipelinerl.run_summary import to_json
from services.trainer.learn.batch import TrainingGroup
from services.trainer.learn.meter import (
    LAG_0_TOKENS,
    SAMPLED_WEIGHTS,
    TokenStatistics,
    effective_sample_size,
    sampled_sequences,
    token_figures,
    token_statistics,
    weight_sums,
)
from services.trainer.learn.model import wrap_model
from services.trainer.learn.step import Learner
from services.trainer.reporting.samples import Sample, sample_of, token_pieces, without_tokens
from tests.support.learner import (
    EPISODES,
    episodes_of,
    fast_tokenizer,
    group_of,
    letters_tokenizer,
    model_of,
    plain_logprobs,
    sequences_of,
)
from tests.unit.builders import make_episode, make_group, make_sequence


def groups_of_two(lengths: list[tuple[int, int]]) -> list[TrainingGroup]:
    sequences = sequences_of(lengths)
    spans = (VersionSpan(0, 0, 1), VersionSpan(1, 1, lengths[2][1]))
    sequences[2] = replace(sequences[2], spans=spans)
    return [group_of(sequences[begin : begin + 2]) for begin in range(0, len(sequences), 2)]


def test_the_first_sequence_and_one_that_spans_versions_are_sampled() -> None:
    groups = groups_of_two([(3, 2), (1, 9), (1, 4), (4, 1)])
    assert [one.sequence_id for one in sampled_sequences(groups)] == ["g.0", "g.2"]
    assert [one.sequence_id for one in sampled_sequences(groups[:1])] == ["g.0", "g.1"]
    assert [one.sequence_id for one in sampled_sequences([group_of(sequences_of([(1, 1)]))])] == ["g.0"]


SINGLE_TURNS = groups_of_two([(2, 9), (5, 3), (1, 4), (4, 17), (3, 2), (6, 8)])
OF_EPISODES = [group_of([one]) for one in episodes_of(EPISODES[1:])]


def middle(log_weights: list[float]) -> float:
    """A bound that lies between two of them, so that rounding does not matter."""
    ordered = sorted(map(abs, log_weights))
    return sum(ordered[len(ordered) // 2 - 1 :][:2]) / 2


@pytest.mark.parametrize("groups", [SINGLE_TURNS, OF_EPISODES], ids=["single turns", "episodes"])
@pytest.mark.parametrize("budget", [24, 512])
def test_weights_of_a_step_are_those_of_each_branch_alone(budget: int, groups: list[TrainingGroup]) -> None:
    """In several micro-batches or one: exp(log π − log μ) at the version whose gradient is taken."""
    model = model_of("llama-tied")
    sampled = [groups[0].sequences[0], groups[1].sequences[0]]
    expected = {
        one.sequence_id: np.concatenate(
            [np.exp(plain_logprobs(model, own).detach().numpy() - own.behaviour_logprobs) for own in one.all_branches]
        )
        for one in sampled
    }
    named = [
        replace(group, sequences=tuple(replace(one, actor=f"a{place % 2}") for one in group.sequences))
        for place, group in enumerate(groups)
    ]
    branches = [own for group in named for one in group.sequences for own in one.all_branches]
    version = max(span.version for own in branches for span in own.spans)
    of_lag_0: dict[str, list[float]] = {"a0": [], "a1": []}
    for one in (one for group in named for one in group.sequences):
        for own in one.all_branches:
            versions = np.concatenate([np.full(span.end - span.start, span.version) for span in own.spans])
            log_weights = plain_logprobs(model, own).detach().numpy() - own.behaviour_logprobs
            of_lag_0[one.actor] += log_weights[versions == version].tolist()
    trainer, bound = TrainerConfig(tokens_per_microbatch=budget), middle(of_lag_0["a0"] + of_lag_0["a1"])
    learner = Learner(wrap_model(model), AlgorithmConfig(clamp=1.5), trainer, bound=bound)
    outcome = learner.step(learner.prepare(named, version))
    off = {actor: int((np.abs(tokens) > bound).sum()) for actor, tokens in of_lag_0.items()}
    assert any(off.values())
    expected_tokens = {actor: [len(tokens), off[actor]] for actor, tokens in of_lag_0.items()}
    assert {"a0": [0, 0], "a1": [0, 0], **outcome[LAG_0_TOKENS]} == expected_tokens
    assert (outcome["microbatches"] > 1) == (budget == 24)
    assert outcome[SAMPLED_WEIGHTS].keys() == expected.keys()
    for key, weights in expected.items():
        np.testing.assert_allclose(outcome[SAMPLED_WEIGHTS][key], weights, rtol=1e-3)


@pytest.fixture
def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, one token for each byte, and a few words; the way of GPT-2, Llama 3 and Qwen."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = {char: number for number, char in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary |= {"Ġthe": 256, "<eos>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return fast_tokenizer(tokenizer)


def test_pieces_are_those_of_the_text(bytes_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture) -> None:
    """A character stands at the last of its bytes; bytes that never become one are left to the text."""
    ids = bytes_tokenizer.convert_tokens_to_ids
    for token_ids, text, pieces in (
        ([*ids(["n", "Ã", "©", "Ġthe"]), 257], "né the", ["n", "", "é", " the", ""]),
        (ids(["ð", "Ł", "Ļ", "Ĥ", "!"]), "🙂!", ["", "", "", "🙂", "!"]),
        (ids(["n", "Ã"]), "n\ufffd", ["n", ""]),
    ):
        for most in (100, 3):
            assert token_pieces(bytes_tokenizer, np.array(token_ids, dtype=np.int32), text, most) == pieces[:most]
    two = np.array(ids(["n", "n"]), dtype=np.int32)
    assert token_pieces(bytes_tokenizer, two, "another text", 100) is None
    assert token_pieces(None, two, "nn", 100) is None
    failing = letters_tokenizer()
    for _ in range(2):
        assert token_pieces(failing, -two, "nn", 100) is None
    (warning,) = [one.getMessage() for one in caplog.records]
    assert warning == "samples are written without their tokens because the tokenizer fails"


def trained(step: int, *about: Any) -> Sample:
    return sample_of(*about, step=step, version=step - 1)


def heldout(version: int, *about: Any) -> Sample:
    return sample_of(*about, step=version, version=version, heldout=True)


def test_a_trained_sample_has_text_version_and_weight_of_each_token() -> None:
    spans = (VersionSpan(6, 0, 1), VersionSpan(7, 1, 3))
    sequence = replace(make_sequence(make_group(), 0, completion=(0, 1, 2), spans=spans), completion_text="abc")
    line = trained(9, sequence, letters_tokenizer(), np.array([1.0, 0.123456, np.inf]))
    assert (line["tokens"], line["spans"]) == (["a", "b", "c"], [[6, 0, 1], [7, 1, 3]])
    assert json.loads(to_json(line))["weights"] == [1.0, 0.1235, None]
    bare = trained(9, sequence, None, None)
    assert (bare["tokens"], bare["weights"]) == (None, None)


def test_a_sample_of_an_episode_has_its_turns_and_what_it_observed_branch_by_branch() -> None:
    """Turn ab, observation ca, turn b, and a branch that saw cc and said a; versions 6 and 7 sampled."""
    ids = {"prompt_token_ids": np.array([2, 2], np.int32), "completion_token_ids": np.array([0], np.int32)}
    one = make_episode(make_group(), 0, **ids)
    spans = (VersionSpan(6, 0, 1), VersionSpan(7, 1, 2), VersionSpan(7, 4, 5))
    tokens = np.array([0, 1, 2, 0, 1], np.int32)
    one = replace(one, prompt_token_ids=tokens[:3], completion_token_ids=tokens, spans=spans, prompt_text="the problem")
    line = trained(8, one, letters_tokenizer(), np.array([1.0, 2.0, 0.5, 0.123456]))
    first, second = line["branches"]
    known = {"role": "assistant", "finish_reason": "stop"}
    assert json.loads(to_json(first)) == {
        "prompt": "abc",
        "spans": [[6, 0, 1], [7, 1, 2], [7, 4, 5]],
        "parts": [
            {**known, "start": 0, "end": 2, "text": "ab", "tokens": ["a", "b"], "weights": [1.0, 2.0]},
            {"role": "observation", "start": 2, "end": 4, "text": "ca"},
            {**known, "start": 4, "end": 5, "text": "b", "tokens": ["b"], "weights": [0.5]},
        ],
    }
    assert second["parts"] == [{**known, "start": 0, "end": 1, "text": "a", "tokens": ["a"], "weights": [0.1235]}]
    assert (line["prompt"], line["tokens"], line["weights"]) == ("abc", None, None), "what the policy saw, as of single turns"
    bare = without_tokens(line)
    assert {(part.get("tokens"), part.get("weights")) for own in bare["branches"] for part in own["parts"]} == {(None, None)}
    assert [[part["text"] for part in own["parts"]] for own in bare["branches"]] == [["ab", "ca", "b"], ["a"]]
    without = trained(8, one, None, None)
    assert (without["prompt"], [part["text"] for part in without["branches"][0]["parts"]]) == ("the problem", [""] * 3)
    unweighed = heldout(8, one, letters_tokenizer())["branches"]
    assert {part.get("weights") for branch in unweighed for part in branch["parts"]} == {None}


def test_a_held_out_sample_has_no_weights() -> None:
    sample = replace(make_sequence(make_group(), 0, completion=(0, 1)), completion_text="ab")
    line = heldout(3, sample, letters_tokenizer())
    assert (line["tokens"], line["weights"], line["heldout"]) == (["a", "b"], None, True)
    assert heldout(3, replace(sample, failure="no verdict"), None)["reward"] is None


# Figures of all ranks' tokens

TOTALS = np.array([0.5, 0.0, 0.25, 1.0])
BOUND = 0.5


def rows(lags: np.ndarray, returns: np.ndarray, actors: np.ndarray | None = None) -> Any:
    """Micro-batches of at most seven tokens, each of a branch of its own. Every third branch is reported."""
    numbers = np.arange(len(lags))
    actors = np.zeros(len(lags), np.int64) if actors is None else actors
    reported = np.where(numbers % 3 == 0, numbers, -1)
    return tuple(
        SimpleNamespace(
            lags=lags[part],
            advantages=returns[part],
            actors=actors[part],
            reported=reported[part],
            branch_index=np.arange(len(part)),
        )
        for part in np.split(numbers, range(7, len(lags), 7))
    )


def statistics(values: np.ndarray, lags: np.ndarray, returns: np.ndarray, actors: np.ndarray | None = None) -> TokenStatistics:
    return token_statistics(values.astype(np.float32), rows(lags, returns.astype(np.float32), actors), BOUND)


def plain_ess(log_weights: np.ndarray) -> float:
    weights = np.exp(log_weights - log_weights.max())
    return weights.sum() ** 2 / (len(weights) * (weights**2).sum())


def plain_figures(values: np.ndarray, lags: np.ndarray, returns: np.ndarray) -> dict[str, Any]:
    """All tokens at once."""
    log_weights, clipped, masked, entropy, *baseline = values.astype(np.float64)
    buckets, fresh = lag_bucket(lags), log_weights[lags == 0]
    labels = {LAG_BUCKETS[bucket]: buckets == bucket for bucket in np.unique(buckets)}
    found, counts = np.unique(lags, return_counts=True)
    spread = float(np.var(returns.astype(np.float64)))
    explained = 1 - float(np.var(returns - baseline[0])) / spread if baseline and np.ptp(returns) > 0 else None
    return {
        "entropy": entropy.mean(),
        "ess": plain_ess(log_weights),
        "ess_by_lag": {label: plain_ess(log_weights[own]) for label, own in labels.items()},
        "clip_fraction": clipped.mean(),
        "clip_fraction_by_lag": {label: clipped[own].mean() for label, own in labels.items()},
        "mask_fraction": masked.mean(),
        "mismatch_kl": np.mean(np.expm1(np.minimum(fresh, 80)) - fresh) if len(fresh) else None,
        "explained_variance": explained,
        "log_weight_abs_max": np.abs(log_weights).max(),
        "lag": {"mean": lags.mean(), "p95": np.percentile(lags, 95), "max": lags.max()},
        "lag_histogram": dict(zip(found.tolist(), counts.tolist(), strict=True)),
        "tokens_trained": len(lags),
    }


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1e-3, 1.0, 300.0]),
    st.integers(1, 40),
    st.booleans(),
)
def test_figures_of_ranks_are_those_of_all_tokens(sizes: list[int], seed: int, scale: float, lag: int, baseline: bool) -> None:
    """Some ranks may have no token, and weights up to e^±1000 occur."""
    rng, num_tokens = np.random.default_rng(seed), sum(sizes)
    values = rng.normal(0, 1, (5 if baseline else 4, num_tokens)).astype(np.float32)
    values[0] *= scale
    values[1:3] = values[1:3] > 0.5
    lags, returns = rng.integers(0, lag, num_tokens), rng.integers(0, 3, num_tokens).astype(np.float32)
    ends = np.cumsum(sizes)[:-1]
    divided = zip(np.split(values, ends, axis=1), np.split(lags, ends), np.split(returns, ends), strict=True)
    figures = token_figures([statistics(*part) for part in divided], TOTALS, [30, 50], 64)
    for name, expected in plain_figures(values, lags, returns).items():
        assert figures[name] == (None if expected is None else pytest.approx(expected, rel=1e-9, abs=1e-12)), name
    assert (figures["value_loss"] is not None) == baseline
    assert (figures["microbatches"], figures["tokens_computed"], figures["packing_fill"]) == (2, 80, 80 / 128)
    assert json.loads(json.dumps(figures))["loss"] == 0.5


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_give_no_figures_and_count_as_off(broken: float) -> None:
    values = np.zeros((4, 5))
    values[0] = [0.1, broken, 0.6, -0.7, 5.0]
    values[1, 2] = 1.0
    part = statistics(values, np.array([0, 0, 0, 0, 1]), np.zeros(5), np.array([0, 0, 2, 0, 1]))
    figures = token_figures([statistics(np.zeros((4, 1)), np.zeros(1, np.int64), np.zeros(1)), part], TOTALS, [6], 6)
    assert [figures[name] for name in ("ess", "mismatch_kl", "log_weight_abs_max")] == [None, None, None]
    assert (figures["ess_by_lag"], figures["clip_fraction_by_lag"], figures["clip_fraction"]) == ({}, {}, pytest.approx(1 / 6))
    assert part.actors.tolist() == [[3, 2], [0, 0], [1, 1]], "0.1 is below the bound of 0.5, and only lag 0 counts"
    assert part.reported.tolist() == [[0.0, pytest.approx(0.1)], [3.0, pytest.approx(-0.7)]]


def test_equal_returns_explain_nothing_however_they_are_divided() -> None:
    """0.1 is no binary fraction, so that the means of the ranks may be rounded differently."""
    sizes, baseline = (3, 7, 0, 11), 0.25
    parts = [statistics(np.full((5, size), baseline), np.zeros(size, np.int64), np.full(size, 0.1)) for size in sizes]
    assert token_figures(parts, TOTALS, [1], 1)["explained_variance"] is None


@pytest.mark.parametrize(
    ("log_weights", "ratio"),
    [
        (np.log([1.0, 3.0]), 0.8),  # (1 + 3)² / (2 · (1 + 9))
        (np.zeros(100), 1.0),
        (np.log([1.0, 1.0, 1.0, 97.0]), 100**2 / (4 * (3 + 97**2))),  # clamped at 5 this would be 0.57
        (np.array([2000.0, 2000.0, -2000.0]), 2 / 3),  # weights that no float holds
        (np.array([-2000.0, -2000.0]), 1.0),
    ],
)
def test_ess_by_hand(log_weights: np.ndarray, ratio: float) -> None:
    """In one part, or divided into three, one of which is empty."""
    assert effective_sample_size(weight_sums(log_weights)[None]) == pytest.approx(ratio)
    parts = [weight_sums(own) for own in (log_weights[:1], log_weights[:0], log_weights[1:])]
    assert effective_sample_size(np.array(parts)) == pytest.approx(ratio)
