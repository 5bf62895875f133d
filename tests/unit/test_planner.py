"""Plans: what they rest on by hand, what they promise, and that a part of a large system stands for it."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelinerl.cli import main
from pipelinerl.commands.plan import lengths_of
from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import LoraConfig, ModelConfig, Recipe
from pipelinerl.recipe.model_folder import active_share, known_model
from pipelinerl.rl.memory import GIB, Model
from pipelinerl.rl.planner import Accelerator, Machine, estimated, longest_prompt, make_plan, misfits, play, tokens_held
from pipelinerl.rl.throughput import DecodeCurve, Lengths, split
from tests.unit.builders import make_recipe

TWO_LENGTHS = Lengths.of_bars([(10, 10, 1.0), (30, 30, 1.0)])
ROUND = Accelerator("", 10e12, name="round", memory=26 * GIB, bandwidth=10 * GIB / 0.6)


def recipe_with(max_lag: int | None, batch_size: int = 64) -> Recipe:
    return make_recipe(
        model={"source": "path", "name": "nowhere", "max_context": 60, "dtype": "bfloat16"},
        sampling={"group_size": 4, "max_tokens": 40},
        trainer={"batch_size": batch_size, "tokens_per_microbatch": 64},
        algorithm={"max_lag": max_lag},
        actor={"engine": {"gpu_memory_utilization": 0.5}},
    )


def test_speeds_from_a_data_sheet_by_hand() -> None:
    """1 GiB of weights; in progress, a sequence has 20 prompt tokens and (10² + 30²) / 2 / 2 / 20 = 12.5 of its completion."""
    model = Model(parameters=GIB / 2, kv_bytes=GIB / 32.5)
    assert tokens_held(TWO_LENGTHS, 20) == 32.5
    machine = estimated(ROUND, model, recipe_with(4), TWO_LENGTHS)
    assert machine.kv_gib == 13 - 3 - 1
    # 4 sequences: 1 + 4 GiB at 10 GiB/s, and 2 FLOPs for each weight and sequence at 6 TFLOP/s.
    assert machine.decode.step_time(4.0) == pytest.approx(5 / 10 + 4 * GIB / 6e12)
    # Two samples share a prompt in 64 tokens, 20 + 20 + 20 and 20 / 5 for its copy: half of its 20 tokens are computed for
    # each, with 6 FLOPs for each weight and token at 4 TFLOP/s.
    assert machine.training == pytest.approx(3 * GIB * (20 + 10) / 20 / 4e12)


def test_of_a_mixture_a_token_uses_some_experts_and_a_step_reads_most() -> None:
    """Half of the weights of the example above: four sequences leave 1/16 unread. Frozen weights cost two passes of three."""
    model, dense = (Model(parameters=GIB / 2, kv_bytes=GIB / 32.5, active_share=share) for share in (0.5, 1.0))
    machine, whole = (estimated(ROUND, one, recipe_with(4), TWO_LENGTHS) for one in (model, dense))
    assert machine.decode.step_time(4.0) == pytest.approx((15 / 16 + 4) / 10 + 2 * GIB / 6e12)
    assert machine.training == pytest.approx(whole.training / 2)
    assert machine.kv_gib == whole.kv_gib
    adapters = recipe_with(4).model_copy(update={"trainer": recipe_with(4).trainer.model_copy(update={"lora": LoraConfig()})})
    assert estimated(ROUND, model, adapters, TWO_LENGTHS).training == pytest.approx(machine.training * 2 / 3)


EXPERTS = {"num_hidden_layers": 48, "hidden_size": 2048, "num_experts": 128, "num_experts_per_tok": 8}
QWEN = {**EXPERTS, "moe_intermediate_size": 768, "intermediate_size": 6144}
"""Qwen3-30B-A3B: 48 · 3 · 2048 · 768 · 128 parameters of experts, of which a token uses 8 of 128, and 1.54e9 others."""


@pytest.mark.parametrize(
    ("name", "config", "parameters", "active"),
    [
        ("30B", json.dumps(QWEN), 30_532_122_624, 3_353_032_704),
        ("30B", json.dumps({"text_config": QWEN, "hidden_size": 7}), 30_532_122_624, 3_353_032_704),
        # One of 48 layers is dense: 1/48 of the experts' parameters are none.
        ("30B", json.dumps({**QWEN, "mlp_only_layers": [0]}), 30_532_122_624, 3_919_263_744),
        ("30B", json.dumps({**QWEN, "num_experts": 0}), 30_532_122_624, 30_532_122_624),
        ("30B-A3B", "", 30_000_000_000, 3_000_000_000),
        ("30B-A3B", "{", 30_000_000_000, 30_000_000_000),
        ("Qwen2.5-7B", "", 7_600_000_000, 7_600_000_000),
    ],
)
def test_a_model_tells_how_much_of_it_tokens_use(name: str, config: str, parameters: int, active: int, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    if config:
        (folder / "config.json").write_text(config)
    share = active_share(ModelConfig(source="path", name=str(folder)), parameters)
    assert share * parameters == pytest.approx(active)
    assert active_share(ModelConfig(source="hub", name=f"a/{name}"), parameters) in (1.0, 0.1)
    assert active_share(ModelConfig(source="path", name=str(folder)), 0) == 1.0


LAYERS = {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("config", "kib"),
    [
        # Qwen2.5-7B: keys and values of 28 layers, 4 heads of 3584 / 28.
        ({"num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}, 56),
        # Qwen3-30B-A3B: 48 layers, 4 heads of 128.
        ({**QWEN, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}, 96),
        ({"n_layer": 12, "n_embd": 768, "n_head": 12}, 36),
        # DeepSeek-V3: 61 layers of 512 + 64.
        ({"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 68.625),
        # One layer of four has a cache that grows: 2 heads of 256.
        ({**LAYERS, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256}, 2),
    ],
)
def test_a_models_config_tells_its_kv_cache(config: dict[str, Any], kib: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe = recipe_with(None)
    here = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": str(tmp_path)})})
    assert known_model(here, 8e9).kv_bytes == kib * 1024
    assert known_model(recipe, 8e9).kv_bytes == 128 * 1024, "assumed"


def test_a_plan_is_the_fastest_split_that_the_lag_limit_allows() -> None:
    model, lengths = Model(1e6, 1024), Lengths.of_bars([(1, 40, 1.0)])
    machine = Machine("measured", 1, DecodeCurve(((1, 100.0), (64, 3200.0))), 1 / 1600, 1.0, 1.0)
    free = make_plan(recipe_with(None), model, machine, lengths, 9)
    # A third of the accelerators generates 3 · 3200, two thirds train on 6 · 1600.
    assert (free.split.num_generators, free.split.num_trainers, free.split.generation) == (3, 6, pytest.approx(9600))
    bound = make_plan(recipe_with(3), model, machine, lengths, 9)
    assert max(bound.played.lag_histogram) <= 3
    assert bound.split.largest_lag <= 3 < free.split.largest_lag
    assert bound.played.stale_share <= 0.01
    assert bound.rate < free.rate
    assert any("algorithm.max_lag (3)" in reason for reason in bound.reasons)
    narrow = make_plan(recipe_with(None), model, replace(machine, training=1 / 3200, kv_gib=0.0015), lengths, 2)
    assert narrow.reasons[1].endswith("holds 46 sequences, fewer than the next larger H that could be tried, 48")
    wide = Machine("measured", 1, DecodeCurve(((1, 100.0), (2048, 102400.0))), 1 / 102400, 64.0, 1.0)
    most = make_plan(recipe_with(None, 512), model, wide, Lengths.of_bars([(1, 4, 1.0)]), 2)
    assert most.reasons[1].startswith("H = 1024 is the largest that was tried")
    told: list[str] = []
    fixed = make_plan(recipe_with(3), model, machine, lengths, 9, sequences_in_progress=16, tell=told.append)
    assert fixed.split.sequences_in_progress == 16
    assert told[-1].startswith(f"simulating {fixed.split.num_generators} actor")
    # A lag of 1 allows 8 actors of H = 4, with too many stale sequences; 6 make 6 · 382 tokens/s, for which 2 ranks would do.
    spare = make_plan(recipe_with(1), model, machine, lengths, 40, sequences_in_progress=4)
    assert spare.reasons[-1].startswith("8 accelerators would be as fast: 6 actors and 2 trainer ranks; to use all")
    with pytest.raises(FieldError, match=r"algorithm.max_lag = 0: the longest sequences have a lag of at least 1 in any split"):
        make_plan(recipe_with(0), model, machine, lengths, 9)
    told = [str(one) for one in misfits(recipe_with(3), model, machine, lengths, 1, 50000)]
    assert re.search(r"--sequences-in-progress = 50000: .* holds \d+ sequences", told[0])
    assert told[1:] == ["--accelerators = 1: an actor needs 1 and the trainer needs 1; give at least 2"]
    trainer = recipe_with(None).trainer.model_copy(update={"context_parallel": 2, "shard_ranks": 4})
    parts = recipe_with(None).model_copy(update={"trainer": trainer})
    uneven = make_plan(parts, model, replace(machine, per_actor=3), lengths, 9, sequences_in_progress=16)
    assert (uneven.split.num_generators, uneven.split.num_trainers) == (1, 4)
    said = "unused: 2 accelerators of 9, because an actor takes 3, and context_parallel and shard_ranks need a multiple of 4"
    assert any(one.startswith(said) for one in uneven.reasons)
    assert [str(one) for one in misfits(parts, model, replace(machine, per_actor=3), lengths, 6)] == [
        "--accelerators = 6: an actor needs 3 and the trainer needs 4; give at least 7"
    ]
    limited = parts.model_copy(update={"algorithm": recipe_with(1).algorithm})
    fewer = "5 accelerators would be as fast: 1 actor and 4 trainer ranks; "
    assert any(one.startswith(fewer) for one in make_plan(limited, model, machine, lengths, 21).reasons)
    two = 2.5 * tokens_held(lengths, longest_prompt(recipe_with(None))) * model.kv_bytes / GIB
    tight = make_plan(recipe_with(None), model, replace(machine, kv_gib=two), lengths, 9)
    assert tight.split.sequences_in_progress == 2
    assert any("the KV cache of an actor holds 2" in reason for reason in tight.reasons)


def test_a_part_of_a_large_system_stands_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("measured", 1, DecodeCurve(((1, 100.0), (64, 3200.0))), 1 / 1600, 1.0, 1.0)
    lengths, recipe = Lengths.of_bars([(1, 40, 1.0)]), recipe_with(None, batch_size=512)
    chosen = split(machine.decode, machine.training, lengths, 512, 16, 40, 60)
    whole, share = play(recipe, machine, lengths, chosen, update_s=0.2)
    assert share == 1
    monkeypatch.setattr("pipelinerl.rl.planner._MOST_SEQUENCES", 4000)
    part, share = play(recipe, machine, lengths, chosen, update_s=0.2)
    assert share < 0.5
    assert part.rate / share == pytest.approx(whole.rate, rel=0.02)
    assert _mean_lag(part.lag_histogram) == pytest.approx(_mean_lag(whole.lag_histogram), rel=0.1)


def _mean_lag(histogram: dict[int, int]) -> float:
    return float(np.average(list(histogram), weights=list(histogram.values())))


def test_lengths_as_bars_and_of_a_run(tmp_path: Path) -> None:
    recipe = recipe_with(3)
    bars, _ = lengths_of("1-3:3, 8", recipe.max_tokens)
    assert (bars.tokens.tolist(), bars.shares.tolist()) == ([1, 2, 3, 8], [0.25] * 4)
    samples = [{"heldout": tokens == 9, "spans": [[0, 0, 2], [1, 2, tokens]]} for tokens in (4, 6, 9, 40)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    # In the second half: two of up to 16 tokens, two of 17 to 32, of which nothing more is known, and four of 40.
    ended = [{"16": [5, 0]}, {}, {"16": [1, 1], "64": [1, 3]}, {"32": [1, 1]}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"ended_by_length": one}) + "\n" for one in ended))
    learned, source = lengths_of(str(tmp_path), recipe.max_tokens)
    assert source == f"8 completions of {tmp_path}"
    assert learned.tokens.tolist() == [4, 6, *range(17, 33), 40]
    assert learned.shares.tolist() == pytest.approx([1 / 8, 1 / 8, *[2 / 8 / 16] * 16, 4 / 8])
    with pytest.raises(FieldError, match=r"--lengths = '50': is longer than sampling.max_tokens \(40\)"):
        lengths_of("50", recipe.max_tokens)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"ended_by_length": {"short": 3}}))
    with pytest.raises(FieldError, match=r"holds invalid records of a run"):
        lengths_of(str(tmp_path), recipe.max_tokens)


def test_the_command_prints_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    speeds = {"decode": [[1, 100], [64, 3200]], "trained_tokens_per_s": 1600, "kv_gib": 1, "memory_gib": 1}
    (tmp_path / "mine.json").write_text(json.dumps(speeds))
    (tmp_path / "r.yaml").write_text("name: r\nmodel: {source: path, name: x}\ntask: {}\nalgorithm: {max_lag: 4}\n")
    command = ["plan", "r.yaml", "--parameters", "1M", "--accelerators", "9", "--accelerator", "mine.json", "--lengths", "1-40"]
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["actors"] + plan["trainer_ranks"] == 9
    assert plan["modelled"] is True
    assert plan["run_h"] == pytest.approx(100 * plan["step_s"] / 3600), "100 steps by default"
    assert max(map(int, plan["lag_histogram"])) == plan["lag"]["max"] <= 4
    assert main(command) == 0
    said = capsys.readouterr().out
    assert said.startswith("r: a plan for 9 accelerators (mine); all times are modelled\n")
    assert f"{plan['actors']} of 1 accelerator" in said
    assert "; 1 KiB of KV cache per token (assumed, since its config.json is not on this machine)\n" in said
    assert f"100 steps take {plan['run_h']:.3g} h" in said
    assert all(f"  - {reason}\n" in said for reason in plan["reasons"])
    assert main([*command, "--kv-kib-per-token", "2"]) == 0
    assert "; 2 KiB of KV cache per token (as given)\n" in capsys.readouterr().out
    for key, value, problem in (
        ("kv_gib", 1e-9, "does not hold one sequence"),
        ("trained_tokens_per_s", math.inf, "trained_tokens_per_s = inf: use a number, above 0 (completion tokens per second"),
        ("decode", [[1, math.inf]], "decode.0.1 = inf: Input should be a finite number"),
    ):
        (tmp_path / "mine.json").write_text(json.dumps({**speeds, key: value}).replace("Infinity", "1e999"))
        assert main(command) == 2
        assert problem in capsys.readouterr().err
