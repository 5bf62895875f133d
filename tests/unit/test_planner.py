"""Plans: what they rest on by hand, what they promise, and that a part of a large system stands for it. The simulator: small
runs by hand."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from pipelinerl.cli import main
from pipelinerl.commands.plan import lengths_of
from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import ModelConfig, Recipe
from pipelinerl.recipe.model_folder import active_share, known_model
from pipelinerl.rl.autoscaling import ReplicasWanted, replicas_wanted
from pipelinerl.rl.memory import GIB, Model
from pipelinerl.rl.planner import Accelerator, Machine, estimated, longest_prompt, make_plan, misfits, play, tokens_held
from pipelinerl.rl.simulator import Simulation, Timing, simulate
from pipelinerl.rl.throughput import DecodeCurve, Lengths, split
from pipelinerl.v1.actor_pb2 import ActorState
from services.trainer.reporting.metrics import replica_advice
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
        ("30B-A3B", "", 30_000_000_000, 3_000_000_000),
        ("30B-A3B", "{", 30_000_000_000, 30_000_000_000),
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
    assert make_plan(recipe_with(3), model, machine, lengths, 9, sequences_in_progress=16).split.sequences_in_progress == 16
    # A lag of 1 allows 8 actors of H = 4, with too many stale sequences; 6 make 6 · 382 tokens/s, for which 2 ranks would do.
    spare = make_plan(recipe_with(1), model, machine, lengths, 40, sequences_in_progress=4)
    assert spare.reasons[-1].startswith("8 accelerators would be as fast: 6 actors and 2 trainer ranks; to use all")
    with pytest.raises(FieldError, match=r"algorithm.max_lag = 0: the longest sequences have a lag of at least 1 in any split"):
        make_plan(recipe_with(0), model, machine, lengths, 9)


def test_a_plan_takes_whole_actors_and_trainers_and_what_their_memory_holds() -> None:
    model, lengths = Model(1e6, 1024), Lengths.of_bars([(1, 40, 1.0)])
    machine = Machine("measured", 1, DecodeCurve(((1, 100.0), (64, 3200.0))), 1 / 1600, 1.0, 1.0)
    wide = replace(machine, decode=DecodeCurve(((1, 100.0), (2048, 102400.0))), training=1 / 102400, kv_gib=64.0)
    most = make_plan(recipe_with(None, 512), model, wide, Lengths.of_bars([(1, 4, 1.0)]), 2)
    assert most.reasons[1].startswith("H = 1024 is the largest that was tried")
    told = [str(one) for one in misfits(recipe_with(3), model, machine, lengths, 1, 50000)]
    assert re.search(r"--sequences-in-progress = 50000: .* holds \d+ sequences", told[0])
    trainer = recipe_with(None).trainer.model_copy(update={"context_parallel": 2, "shard_ranks": 4})
    parts = recipe_with(None).model_copy(update={"trainer": trainer})
    uneven = make_plan(parts, model, replace(machine, per_actor=3), lengths, 9, sequences_in_progress=16)
    assert (uneven.split.num_generators, uneven.split.num_trainers) == (1, 4)
    assert [str(one) for one in misfits(parts, model, replace(machine, per_actor=3), lengths, 6)] == [
        "--accelerators = 6: an actor needs 3 and the trainer needs 4; give at least 7"
    ]
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
    with pytest.raises(FieldError, match=r"has invalid records \("):
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
    assert all(f"  - {reason}\n" in said for reason in plan["reasons"])
    assert main([*command, "--kv-kib-per-token", "2"]) == 0
    assert "; 2 KiB of KV cache per token (as given)\n" in capsys.readouterr().out
    for key, value, problem in (
        ("kv_gib", 1e-9, "does not hold one sequence"),
        ("decode", [[1, math.inf]], "decode.0.1 = inf: Input should be a finite number"),
    ):
        (tmp_path / "mine.json").write_text(json.dumps({**speeds, key: value}).replace("Infinity", "1e999"))
        assert main(command) == 2
        assert problem in capsys.readouterr().err


# --- the simulator

EVEN = DecodeCurve(((200, 200.0),))
"""Each decode step takes 1, up to 200 sequences."""
FOUR = Lengths.of_bars([(4, 4, 1.0)])


def one_at_a_time(batch_size: int = 1, slots: int = 1, group_size: int = 1, **sections: Any) -> Recipe:
    sections = {"algorithm": {"advantage": "value", "max_lag": 1}} | sections
    return make_recipe(
        sampling={"group_size": group_size, "max_tokens": 16},
        trainer={"steps": 100_000, "batch_size": batch_size, "tokens_per_microbatch": 64},
        actor={"sequences_in_progress": slots},
        **sections,
    )


def simulated(recipe: Recipe, timing: Timing, lengths: Lengths = FOUR, **numbers: int) -> Simulation:
    given = {"num_actors": 1, "num_ranks": 1, "warmup_steps": 4, "steps": 10} | numbers
    return simulate(recipe, timing, lengths, **given)


@pytest.mark.parametrize(
    ("max_lag", "timing", "step_time", "lags"),
    [
        # Nothing is issued before the step is done: 4 decode steps, then 4 of training.
        (0, Timing(EVEN, training=1.0), 8, {0: 40}),
        # Both sides work all the time; a sequence begins when the one before begins to be trained on.
        (1, Timing(EVEN, training=1.0), 4, {1: 40}),
        # Training takes 2, then the other half of the sequence is sampled by the new version.
        (1, Timing(EVEN, training=0.5), 4, {0: 20, 1: 20}),
        # The swap waits for the decode step under way, from 1.75 to 2.
        (1, Timing(EVEN, training=0.25, step=0.25, transfer=0.5), 4, {0: 20, 1: 20}),
        # Trained on in 1, copied in 3, sent in 3: the second sequence from now may begin after these 7 and ends after 11.
        (1, Timing(EVEN, training=0.25, snapshot=3.0, transfer=3.0), 11 / 2, {1: 40}),
    ],
)
def test_one_sequence_at_a_time_by_hand(max_lag: int, timing: Timing, step_time: float, lags: dict[int, int]) -> None:
    recipe = one_at_a_time(algorithm={"advantage": "value", "max_lag": max_lag})
    counted = simulated(recipe, timing)
    assert (counted.duration, counted.lag_histogram) == (pytest.approx(10 * step_time), lags)
    assert (counted.steps, counted.sequences, counted.stale_share) == (10, 10, 0.0)
    busy = timing.step + 4 * timing.training
    assert counted.trainer_idle == pytest.approx(1 - busy / step_time)
    assert counted.actor_idle == counted.empty_slots == pytest.approx(1 - 4 / step_time)


def test_what_is_overtaken_is_dropped_by_its_length_and_replaced() -> None:
    """Two slots, and one sequence in eight is 16 times as long as the others."""
    recipe = one_at_a_time(2, slots=4, algorithm={"advantage": "value", "max_lag": 2})
    lengths = Lengths.of_bars([(2, 2, 7.0), (32, 32, 1.0)])
    counted = simulated(recipe, Timing(EVEN, training=0.1), lengths, steps=400)
    assert counted == simulated(recipe, Timing(EVEN, training=0.1), lengths, steps=400)
    assert max(counted.lag_histogram) == 2
    assert set(counted.finished_by_length) == {16, 32}
    assert counted.stale_by_length[16] < counted.stale_by_length[32] <= counted.finished_by_length[32]
    assert counted.sequences > 0.9 * 800  # a step may lack what was stale, and no step lacks all
    assert counted.sequences + counted.stale_by_length.total() == pytest.approx(counted.finished_by_length.total(), abs=4)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), pipeline=st.booleans(), group_size=st.integers(1, 4), slots=st.integers(1, 12))
def test_no_run_loses_anything_or_outruns_a_side(data: st.DataObject, pipeline: bool, group_size: int, slots: int) -> None:
    """Whole runs, from their first step to their last."""
    draw = data.draw
    steps = draw(st.integers(1, 12), "steps")
    max_lag = draw(st.sampled_from([None, 0, 1, 2, 3]), "max_lag") if pipeline else None
    algorithm = {"advantage": "value", "max_lag": max_lag, "conventional_g": draw(st.sampled_from([1, 3, 5]), "G")}
    batch_size, num_actors = group_size * draw(st.integers(1, 4), "groups"), draw(st.integers(1, 3), "actors")
    mode = "pipeline" if pipeline else "conventional"
    recipe = one_at_a_time(batch_size, slots, group_size, mode=mode, algorithm=algorithm)
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"steps": steps})})
    short, long = draw(st.integers(1, 4), "short"), draw(st.integers(1, 200), "long")
    lengths = Lengths.of_bars([(short, short, 3.0), (long, long, 1.0)])
    training, pause = draw(st.sampled_from([0.01, 0.1, 2.0]), "training"), st.sampled_from([0.0, 0.5, 20.0])
    timing = Timing(EVEN, training, *(draw(pause, what) for what in ("step", "snapshot", "transfer")))
    whole = simulated(recipe, timing, lengths, num_actors=num_actors, warmup_steps=0, steps=steps)
    finished, stale = whole.finished_by_length.total(), whole.stale_by_length.total()
    assert finished == whole.sequences + stale
    assert (finished - steps * batch_size) % group_size == 0, "the steps' groups, and one for each that was lost"
    assert finished == steps * batch_size if stale < group_size else finished >= steps * batch_size
    assert max(whole.lag_histogram) <= (steps if max_lag is None else max_lag)
    if not pipeline:
        assert (stale, max(whole.lag_histogram)) == (0, min(algorithm["conventional_g"], steps) - 1)
    assert whole.rate <= min(slots * num_actors, 1 / timing.training) * (1 + 1e-9)
    for share in (whole.actor_idle, whole.empty_slots, whole.trainer_idle):
        assert 0 <= share <= 1


# --- how many actors are wanted: by hand, as properties, and in a loop with an autoscaler that follows

MANY = 1_000_000


def test_a_full_actors_rate_by_hand_and_small_changes_change_nothing() -> None:
    one, wanted = advice(batch_size=1), []
    for _ in range(4):
        one.step(100, 0.1)
    for finished, first, last in ((200, 2, 3), (300, 10, 10), (200, 2, 3), (350, 2, 3)):  # in 100 s, before it an evaluation
        one.actors({}, measuring=True)
        one.actors(counts((0, 0.0, first)))
        one.actors(counts((finished, 100.0, last)))
        wanted.append(one.wanted)
    # 1,000 sequences a second, by actors of 2 / sqrt(0.25) = 4 a second each, then of 3 when full, which only 3.5 can exceed.
    assert wanted == [250, 334, 334, 286]
    # Of 10, up to 10.1 may be needed, and down to 10 - 1 - 1 = 8.
    assert [replicas_wanted(needed, MANY, current=10) for needed in (10.1, 10.11, 8.0, 7.99)] == [10, 11, 10, 8]
    assert [replicas_wanted(needed, MANY, current=2) for needed in (1.2, 0.81, 0.79)] == [2, 2, 1]
    assert replicas_wanted(10.0, most=3, current=10) == 3
    # The trainer uses up 512 sequences in 32 s, 16 a second; a full actor makes 2.5 a second: 6.4 actors.
    assert [replicas_wanted(512 / 32 / 2.5, MANY), replicas_wanted(6.4, 4), replicas_wanted(0.01, 4)] == [7, 4, 1]


def advice(**changes: int) -> ReplicasWanted:
    return ReplicasWanted(**{"slots": 10, "batch_size": 100, "in_flight": MANY, **changes})


def load(finished: float, busy_s: float, in_progress: int) -> ActorState:
    return ActorState(sequences_finished=round(finished), busy_s=busy_s, sequences_in_progress=in_progress, uptime_s=1000.0)


def counts(*actors: tuple[int, float, int]) -> dict[str, ActorState]:
    return {f"actor-{number}": load(*one) for number, one in enumerate(actors)}


def test_from_steps_and_counters_by_hand() -> None:
    one = advice()
    one.actors(counts((0, 0.0, 10), (50, 100.0, 10)))
    one.actors(counts((60, 30.0, 10), (110, 130.0, 10)))  # 120 sequences in 60 busy seconds, full: 2 a second
    assert one.wanted is None
    for seconds in (1000.0, 10.0, 10.0, 25.0):  # the first is left out; the median of the others is 10
        assert one.wanted is None
        one.step(100, seconds)
    assert one.wanted == 5  # 100 / 10 / 2


@pytest.mark.parametrize(
    ("looks", "wanted"),
    [
        ([(0, 0.0), (99, 100.0)], None),  # fewer than one step's sequences
        ([(0, 0.0), (1000, 59.0)], None),  # less than a minute
        ([(1000, 500.0), (900, 90.0)], None),  # another process
        ([(1000, 500.0), (900, 90.0), None, (1900, 590.0)], None),  # an evaluation ran between
        ([(1000, 500.0), (900, 90.0), None, (1900, 590.0), (2100, 690.0)], 5),  # 200 in 100 s
    ],
)
def test_too_little_to_judge_by(looks: list[tuple[int, float] | None], wanted: int | None) -> None:
    one = advice()
    for seconds in (10.0, 10.0, 10.0, 10.0, 0.0):
        one.step(100, seconds)
    one.step(0, 10.0)
    for look in looks:
        one.actors(counts((*look, 10)) if look else {}, measuring=look is None)
    assert one.wanted == wanted
    one.finish()
    assert one.wanted == 1


def linear(in_progress: float) -> float:
    return in_progress / 10


def bending(in_progress: float) -> float:
    return in_progress / 5 / (1 + in_progress / 10)


def follow(rate: Callable[[float], float], consumption: float, actors: int, in_flight: int) -> list[int]:
    """Numbers of actors of an autoscaler that does what is wanted at once. `rate(n)`: of an actor with n in progress."""
    one, slots, history = advice(in_flight=in_flight), 10, []
    finished, busy_s = 0.0, 0.0
    one.step(100, 1.0)
    for _ in range(400):
        most = min(slots, in_flight / actors)
        in_progress = most
        if actors * rate(most) > consumption:  # the bound keeps the actors from going faster
            low, high = 0.0, most
            for _ in range(50):
                middle = (low + high) / 2
                low, high = (middle, high) if actors * rate(middle) < consumption else (low, middle)
            in_progress = high
        one.step(100, 100 / consumption)
        finished, busy_s = finished + 30 * rate(in_progress), busy_s + 30
        one.actors({str(n): load(finished, busy_s, round(in_progress)) for n in range(actors)})
        actors = one.wanted or actors
        history.append(actors)
    return history


@pytest.mark.parametrize("rate", [linear, bending])
@pytest.mark.parametrize("actors", [1, 8, 30])
@pytest.mark.parametrize("consumption", [0.4, 2.95, 7.6])
def test_an_autoscaler_settles_at_what_is_needed(rate: Callable[[float], float], actors: int, consumption: float) -> None:
    history = follow(rate, consumption, actors, in_flight=MANY)
    needed = consumption / rate(10)
    assert len(set(history[200:])) == 1, history
    assert needed - 0.15 <= history[-1] <= max(1, needed * 1.15 + 2.1)


def test_more_actors_than_a_recipes_bound_occupies_are_not_wanted() -> None:
    assert follow(linear, consumption=100.0, actors=1, in_flight=40)[-1] == 4
    trainer = {"steps": 5, "batch_size": 4, "tokens_per_microbatch": 64}
    for mode, algorithm, most in (
        ("pipeline", {"max_lag": 2}, 3 * 4),
        ("pipeline", {"max_lag": None}, 5 * 4),  # all sequences of the run
        ("conventional", {"max_lag": None, "conventional_g": 2}, 2 * 4),
    ):
        recipe = make_recipe(mode=mode, algorithm=algorithm, trainer=trainer, actor={"sequences_in_progress": 1})
        one = replica_advice(recipe, CollectorRegistry())
        one.actors({"a": load(0, 0.0, 1)})
        one.actors({"a": load(60, 60.0, 1)})
        for _ in range(4):
            one.step(4, 0.01)
        assert one.wanted == most
