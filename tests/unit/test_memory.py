"""What fits an accelerator, by hand, for 7.6B parameters in 16 bits: 14.16 GiB, and 0.49 GiB of KV cache for 9,216 tokens."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipelinerl.errors import FieldError
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.rl.memory import (
    GIB,
    Model,
    actor_problem,
    checkpoint_bytes,
    kv_cache_gib,
    sent_bytes,
    snapshot_gib,
    state_bytes,
    trainer_problem,
    update_gib,
)
from services.actor.weight_sync import loaders
from services.trainer.loading import check_memory, has_room_for_snapshots

SEVEN_B = Model(parameters=7.6e9, kv_bytes=56 * 1024)
SHARE = "actor.engine.gpu_memory_utilization"


@pytest.mark.parametrize(
    ("share", "memory_gib", "field", "said"),
    [
        (0.75, 80.0, "", ""),
        # 12 GiB outside vLLM for 14.16 + 2; 1 - 16.16 / 80 = 0.798.
        (0.85, 80.0, SHARE, "at most 0.79, because a weight update needs 16.2 GiB: a second instance of the weights (14.2)"),
        # (14.16 + 0.49 + 3) / 80 = 0.2206.
        (0.2, 80.0, SHARE, "vLLM needs at least 0.23 for weights"),
        # 2 * 14.16 + 0.49 + 5 = 33.8 on one, 19.4 on each of two.
        (0.5, 24.0, "actor.engine.tensor_parallel_size", "do not fit accelerators of 24 GiB; use 2"),
        (0.5, 5.0, "actor.engine.tensor_parallel_size", "even 64, the maximum, are too few"),
    ],
)
def test_an_actor_holds_the_weights_twice(share: float, memory_gib: float, field: str, said: str) -> None:
    problem = actor_problem(load_recipe("gsm", [f"{SHARE}={share}"]), SEVEN_B, memory_gib)
    assert (problem.field if problem else "") == field
    assert said in str(problem or "")


def test_what_is_advised_fits() -> None:
    at_most = load_recipe("gsm", [f"{SHARE}=0.79"])
    assert actor_problem(at_most, SEVEN_B, 80.0) is None
    assert kv_cache_gib(at_most, SEVEN_B, 80.0) == pytest.approx(0.79 * 80 - 3 - 15.2e9 / GIB)
    assert actor_problem(load_recipe("gsm", [f"{SHARE}=0.23"]), SEVEN_B, 80.0) is None
    two = load_recipe("gsm", ["actor.engine.tensor_parallel_size=2", f"{SHARE}=0.6"])
    assert actor_problem(two, SEVEN_B, 24.0) is None
    large = load_recipe("gsm", ["trainer.lora.rank=8", "trainer.lora.send=adapter", f"{SHARE}=auto"])
    assert str(actor_problem(large, Model(70e9, 320 * 1024), 140.0)).endswith("use a value between these"), "not auto"


def test_ranks_that_share_the_states() -> None:
    """18 bytes for each parameter are 127.4 GiB, of which a rank of 80 GiB takes 56: two would hold 63.7 each, three 42.5."""
    recipe = load_recipe("gsm")
    assert trainer_problem(recipe, SEVEN_B, 80.0, ranks=3) is None
    said = str(trainer_problem(recipe, SEVEN_B, 80.0, ranks=2))
    assert said.startswith("trainer.nproc = 4: weights, gradients and optimizer state, shared by 2 ranks, take 63.7 GiB")
    assert said.endswith("use at least 3 ranks")
    of_four = str(trainer_problem(load_recipe("gsm", ["trainer.shard_ranks=2"]), SEVEN_B, 80.0, ranks=2))
    assert of_four.startswith(
        "trainer.shard_ranks = 2: weights, gradients and optimizer state, shared by 2 ranks, take 63.7 GiB"
    )
    assert of_four.endswith("use 4 ranks"), "three do not divide the recipe's four"
    in_8_bits = load_recipe("gsm", ["trainer.optimizer=adamw_8bit"])
    assert trainer_problem(in_8_bits, SEVEN_B, 80.0, ranks=2) is None
    assert checkpoint_bytes(in_8_bits, 1000) == checkpoint_bytes(recipe, 1000) == 1000 * (2 + 4 + 8), (
        "moments are float32 there"
    )


def test_adapters_have_states_and_an_update_of_their_own() -> None:
    """8e9 to the power of 2/3 is 4e6, and 0.9 of that for each rank of 64 are 230.4e6; of 1e9 it is 1e6, and 57.6e6."""
    whole, mixture = Model(8e9, 1024), Model(8e9, 1024, active_share=1 / 8)
    recipe = load_recipe("gsm", ["trainer.lora.rank=64"])
    assert state_bytes(recipe, whole) == pytest.approx(16e9 + 18 * 230.4e6)
    assert state_bytes(recipe, mixture) == pytest.approx(16e9 + 18 * 57.6e6)
    assert state_bytes(recipe, Model(8e9, 1024, adapters=100)) == 16e9 + 18 * 100
    assert sent_bytes(recipe, whole) == pytest.approx(2 * 230.4e6)
    assert update_gib(recipe, whole) == pytest.approx(2 + 0.429, abs=1e-3)
    assert actor_problem(recipe, whole, 22.0) is not None, "the recipe's share of 0.75"
    assert actor_problem(load_recipe("gsm", ["trainer.lora.rank=64", f"{SHARE}=auto"]), whole, 22.0) is None
    assert sent_bytes(load_recipe("gsm"), mixture) == 16e9
    merged = load_recipe("arithmetic", ["trainer.lora={rank: 64, send: merged}"])
    assert sent_bytes(merged, Model(8e9, 1024, dtype_bytes=4)) == 32e9
    assert sent_bytes(load_recipe("gsm", ["weights.wire_dtype=bfloat16"]), Model(8e9, 1024, dtype_bytes=4)) == 16e9


def test_a_quantised_actor_holds_its_weights_once_and_two_layers() -> None:
    """70e9 parameters are 65.2 GiB in fp8, 16.3 on each of four GPUs. In 16 bits they are 130.4, over an estimated 58.7 layers
    of 2.22: an update needs 4.44 and 2, whatever the number of GPUs."""
    seventy = Model(parameters=70e9, kv_bytes=320 * 1024)
    fp8 = ("actor.engine.quantization=fp8", "actor.engine.tensor_parallel_size=4")
    recipe = load_recipe("gsm", [*fp8, f"{SHARE}=0.9"])
    assert update_gib(recipe, seventy) == pytest.approx(6.44, abs=0.01)
    assert kv_cache_gib(recipe, seventy, 80.0) == pytest.approx(4 * (72 - 3) - 70e9 / GIB)
    mixture = Model(parameters=70e9, kv_bytes=320 * 1024, active_share=0.2)
    assert update_gib(recipe, mixture) == pytest.approx(2 + 2 * 4.44, abs=0.01), "half as many layers"
    in_float32 = load_recipe("gsm", [*fp8, "weights.wire_dtype=float32"])
    assert update_gib(in_float32, seventy) == pytest.approx(2 + 2 * 4.44, abs=0.01)
    assert actor_problem(recipe, seventy, 80.0) is None
    said = str(actor_problem(load_recipe("gsm", [*fp8, f"{SHARE}=0.95"]), seventy, 80.0))
    assert "and may have at most 0.91, because a weight update needs 6.4 GiB: twice the largest layer (4.4), and 2" in said
    whole = load_recipe("gsm", ["actor.engine.tensor_parallel_size=4", f"{SHARE}=0.5"])
    assert update_gib(whole, seventy) == pytest.approx(140e9 / GIB / 4 + 2)
    said = str(actor_problem(load_recipe("gsm", [*fp8[:1], f"{SHARE}=0.5"]), seventy, 40.0))
    assert "65 GiB of weights, 2.8 GiB of KV cache" in said
    assert "9.44 GiB of overhead on each accelerator do not fit accelerators of 40 GiB; use 4" in said


def test_snapshots_stay_on_a_gpu_that_has_room_for_them() -> None:
    """Of 1.5e9 parameters, states are 25.1 GiB and three snapshots 8.4: 33.5 GiB, which are 70 % of 47.9."""
    model = Model(parameters=1.5e9, kv_bytes=28 * 1024)
    alone = load_recipe("math", ["trainer.nproc=1"])
    assert snapshot_gib(alone, model, 48.0) == (pytest.approx(9e9 / GIB), 0)
    assert snapshot_gib(alone, model, 47.8) == (0, pytest.approx(3 * 3e9 / GIB))
    assert snapshot_gib(load_recipe("math", ["trainer.nproc=1", "weights.wire_dtype=float32"]), model, 80.0)[0] == 18e9 / GIB
    for elsewhere in ("trainer.nproc=2", "weights.backend=gloo", "trainer.lora.rank=16"):
        there = load_recipe("math", ["trainer.nproc=1", elsewhere, "weights.probe_tokens=512"])
        assert snapshot_gib(there, model, 80.0)[0] == 0
    log = ["trainer.nproc=1", "weights.log=nats"]
    assert snapshot_gib(load_recipe("math", log), model, 60.0) == (pytest.approx(15e9 / GIB), 0), "with two more for the log"
    assert snapshot_gib(load_recipe("math", log), model, 48.0) == (0, pytest.approx(5 * 3e9 / GIB))
    assert snapshot_gib(load_recipe("math", [*log, "weights.backend=gloo"]), model)[1] == pytest.approx(5 * 3e9 / GIB)
    with_adapters = load_recipe("math", [*log, "trainer.lora={rank: 16, send: adapter}"])
    assert snapshot_gib(with_adapters, Model(1.5e9, 28 * 1024, adapters=1000))[1] == 0
    with_reference = load_recipe("math", ["trainer.nproc=1", "algorithm.kl_coefficient=0.1"])
    assert snapshot_gib(with_reference, model, 48.0)[0] == 0
    assert trainer_problem(with_reference, model, 39.0, ranks=1) is not None, "27.9 GiB with the reference"
    assert trainer_problem(alone, model, 39.0, ranks=1) is None


def test_an_engine_that_leaves_too_little_beside_it_is_named_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 GiB of weights and 2 beside 9 free ones of 40: three too few, 7.5% of the device."""
    rooms, gpu = iter((9, 12, 3)), torch.device("cuda", 0)
    monkeypatch.setattr(loaders, "device_room", lambda device: (next(rooms) * GIB, 40 * GIB))
    said = loaders.no_room(gpu, 0.7, weights=10 * GIB)
    assert said.startswith(
        "9.0 of 40.0 GiB of GPU memory are free outside vLLM, but a weight update needs 12.0: 10.0 for a second"
    )
    assert "Set actor.engine.gpu_memory_utilization to at most 0.62" in said
    assert loaders.no_room(gpu, 0.7, weights=10 * GIB) == ""
    said = loaders.no_room(gpu, 0.7, layer=2 * GIB)
    assert "a weight update needs 6.0: 4.0 for twice the largest layer and 2 for receiving" in said
    assert said.endswith("to at most 0.62"), "more ranks leave a layer as large"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A stand-in for a GPU of 8 GiB, of which 3 are free and 1 is kept by torch."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 * GIB)
    return torch.device("cuda", 0)


def weights(gib: float) -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(1024, int(gib * GIB) // 4096, bias=False)


def test_an_actor_asks_its_device_for_a_second_instance(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    assert "Set actor.engine.gpu_memory_utilization to at most 0.52" in loaders.no_room(device, 0.9, weights=5 * GIB)
    assert caplog.text == ""
    assert loaders.no_room(device, 0.9, weights=3 * GIB) == "", "close: two of five GiB are for what is received"
    assert "Set actor.engine.gpu_memory_utilization to at most 0.77" in caplog.text
    caplog.clear()
    assert loaders.no_room(device, 0.9, weights=2 * GIB) == loaders.no_room(torch.device("cpu"), 0.9, weights=99 * GIB) == ""
    assert caplog.text == ""


def test_a_rank_asks_its_device_whether_the_states_fit(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    recipe = load_recipe("arithmetic")  # float32: 16 bytes for each parameter

    def check(state_gib: float, where: torch.device = device, ranks: int = 1) -> None:
        whole: Any = weights(state_gib / 4)
        world: Any = SimpleNamespace(device=where, layout=SimpleNamespace(shard_ranks=ranks))
        check_memory(recipe, whole, world)

    with pytest.raises(FieldError, match=r"trainer\.nproc = 1: .* 9\.0 GiB .* of 8 GiB for activations; use at least 2 ranks"):
        check(9.0)
    check(9.0, ranks=2)
    check(99.0, where=torch.device("cpu"))
    assert caplog.text == ""
    whole: Any = nn.ModuleList([weights(5.0).requires_grad_(False), weights(0.25)])
    world: Any = SimpleNamespace(device=device, layout=SimpleNamespace(shard_ranks=1))
    check_memory(load_recipe("arithmetic", ["trainer.lora.rank=4096"]), whole, world)
    assert "take 6.0 GiB per rank" in caplog.text, "5 frozen and four times 0.25"
    caplog.clear()
    check(7.0)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "take 7.0 GiB per rank" in caplog.text


def test_a_rank_asks_its_device_whether_snapshots_stay_there(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 GiB, 5.6 may be taken. A float32 model of 0.75 GiB has states of 3.0 and snapshots of 2.25."""
    of_torch = [1.0]
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: of_torch[0])

    def stay(gib: float, *overrides: str) -> bool:
        whole: Any = SimpleNamespace(device=device, parameters=weights(gib).parameters)
        return has_room_for_snapshots(whole, load_recipe("arithmetic", ["weights.backend=nccl", *overrides]))

    assert stay(0.75)
    assert not stay(0.85), "3.4 and 2.55"
    of_torch[0] = 0.5  # an actor has the rest
    assert not stay(0.75)
    assert stay(0.75, "trainer.lora.rank=4"), "adapters are small"
