"""Samples of a run: which tokens are which piece of the text, and how much each of them weighed in its step."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pipelinerl.messages.sequences import Turn, VersionSpan
from pipelinerl.recipe.fields import AlgorithmConfig, TrainerConfig
from pipelinerl.run_summary import to_json
from services.trainer.learn.batch import TrainingGroup
from services.trainer.learn.meter import LAG_0_TOKENS, SAMPLED_WEIGHTS, sampled_sequences
from services.trainer.learn.model import wrap_model
from services.trainer.learn.step import Learner
from services.trainer.reporting.samples import MOST_TOKENS, Sample, sample_of, token_pieces, without_tokens
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


def test_weights_that_overflow_are_infinite() -> None:
    (sequence,) = sequences_of([(3, 2)])
    far = replace(sequence, behaviour_logprobs=np.full(2, -1000.0, dtype=np.float32))
    learner = Learner(wrap_model(model_of("llama-tied")), AlgorithmConfig(clamp=1.5), TrainerConfig())
    outcome = learner.step(learner.prepare([group_of([far])], 2))
    assert outcome[SAMPLED_WEIGHTS]["g.0"].tolist() == [math.inf, math.inf]


@pytest.fixture(scope="module")
def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, one token for each byte, and a few words; the way of GPT-2, Llama 3 and Qwen."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = {char: number for number, char in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary |= {"Ġthe": 256, "<eos>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return fast_tokenizer(tokenizer)


@pytest.fixture(scope="module")
def words_tokenizer() -> PreTrainedTokenizerFast:
    """Words with a mark for the space before them; the first space is dropped. The way of SentencePiece."""
    vocabulary = {word: number for number, word in enumerate(["▁the", "▁cat", "s", "▁", "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="▁"))
    tokenizer.decoder = decoders.Metaspace()
    return fast_tokenizer(tokenizer)


def test_pieces_are_those_of_the_text(
    bytes_tokenizer: PreTrainedTokenizerFast, words_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    """A character stands at the last of its bytes; bytes that never become one are left to the text; words keep its spaces."""
    ids = bytes_tokenizer.convert_tokens_to_ids
    for tokenizer, token_ids, text, pieces in (
        (bytes_tokenizer, [*ids(["n", "Ã", "©", "Ġthe"]), 257], "né the", ["n", "", "é", " the", ""]),
        (bytes_tokenizer, ids(["ð", "Ł", "Ļ", "Ĥ", "!"]), "🙂!", ["", "", "", "🙂", "!"]),
        (bytes_tokenizer, ids(["n", "Ã"]), "n\ufffd", ["n", ""]),
        (words_tokenizer, [0, 1, 2, 0, 4], "the cats the", ["the", " cat", "s", " the", ""]),
    ):
        assert tokenizer.decode(token_ids, skip_special_tokens=True) == text
        for most in (100, 3):
            assert token_pieces(tokenizer, np.array(token_ids, dtype=np.int32), text, most) == pieces[:most]
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
    assert (second["prompt"], second["spans"]) == ("cc", [[0, 0, 1]])
    assert second["parts"] == [{**known, "start": 0, "end": 1, "text": "a", "tokens": ["a"], "weights": [0.1235]}]
    assert (line["prompt"], line["tokens"], line["weights"]) == ("abc", None, None), "what the policy saw, as of single turns"
    assert heldout(8, one, letters_tokenizer())["prompt"] == "abc"
    assert trained(8, one, None, None)["prompt"] == "the problem"
    bare = without_tokens(line)
    assert {(part.get("tokens"), part.get("weights")) for own in bare["branches"] for part in own["parts"]} == {(None, None)}
    assert [[part["text"] for part in own["parts"]] for own in bare["branches"]] == [["ab", "ca", "b"], ["a"]]
    without = trained(8, one, None, None)["branches"]
    texts = [[(part["text"], part.get("tokens")) for part in own["parts"]] for own in without]
    assert texts == [[("", None)] * 3, [("", None)]]


def test_of_a_long_completion_the_first_tokens_are_written() -> None:
    ids = tuple(index % 3 for index in range(MOST_TOKENS + 5))
    text = "".join("abc"[token] for token in ids)
    sequence = replace(make_sequence(make_group(), 0, completion=ids), completion_text=text)
    line = trained(1, sequence, letters_tokenizer(), np.ones(len(ids)))
    assert (len(line["tokens"]), len(line["weights"]), line["completion"]) == (MOST_TOKENS, MOST_TOKENS, text)
    turns = (Turn(0, 1000), Turn(1002, MOST_TOKENS + 5))
    spans = tuple(VersionSpan(0, turn.start, turn.end) for turn in turns)
    line = trained(1, replace(sequence, turns=turns, spans=spans), letters_tokenizer(), np.ones(len(ids) - 2))
    parts = line["branches"][0]["parts"]
    assert [len(part["text"]) for part in parts] == [1000, 2, 27]
    assert [len(parts[0][name]) + len(parts[2][name]) for name in ("tokens", "weights")] == [MOST_TOKENS] * 2


def test_a_held_out_sample_has_no_weights() -> None:
    sample = replace(make_sequence(make_group(), 0, completion=(0, 1)), completion_text="ab")
    line = heldout(3, sample, letters_tokenizer())
    assert (line["tokens"], line["weights"], line["heldout"]) == (["a", "b"], None, True)
    assert heldout(3, replace(sample, failure="no verdict"), None)["reward"] is None
    episode = heldout(3, make_episode(make_group(), 0), letters_tokenizer())
    assert [len(branch["parts"]) for branch in episode["branches"]] == [3, 1]
    assert {part.get("weights") for branch in episode["branches"] for part in branch["parts"]} == {None}
