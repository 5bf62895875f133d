"""Which GPU each process of a local run gets, on machines of 1, 2, 4 and 8 GPUs that are made up, and what is refused. What
fits an accelerator, by hand, for 7.6B parameters in 16 bits: 14.16 GiB, and 0.49 GiB of KV cache for 9,216 tokens."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from pipelinerl.errors import FieldError, UserError
from pipelinerl.local.placing import placed_here, write_placement
from pipelinerl.recipe import devices
from pipelinerl.recipe.devices import Device, Devices
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.rl import placement
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
from pipelinerl.rl.placement import Placement, numbered, table
from pipelinerl.run_dir import RunDir, read_json
from services.actor.weight_sync import loaders
from services.trainer.devices import described
from services.trainer.loading import check_memory, has_room_for_snapshots

H100, RTX = "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"
AUTO = ("trainer.nproc=auto", "actor.count=auto", "actor.engine.gpu_memory_utilization=auto")
SMALL, LARGE = 494_032_768, 7_615_616_512
"""Parameters of Qwen2.5-0.5B and of Qwen2.5-7B."""


def gpu(number: int, *, total: float = 80, free: float | None = None, linked: tuple[int, ...] = (), name: str = H100) -> Device:
    """Return GPU `number`; memory in GiB."""
    left = total - 1 if free is None else free
    others = tuple(f"GPU-{other}" for other in linked if other != number)
    return Device(uuid=f"GPU-{number}", name=name, total_bytes=int(total * GIB), free_bytes=int(left * GIB), linked=others)


def recipe(*overrides: str) -> Recipe:
    return load_recipe("gsm8k", [*AUTO, *overrides])


class Placed(NamedTuple):
    recipe: Recipe
    placement: Placement


def place(wanted: Recipe, here: list[Device], parameters: int, active_share: float = 1.0) -> Placed:
    model = Model.of(wanted, parameters, active_share=active_share) if parameters else None
    return Placed(*placement.place(wanted, here, model))


def pinned(wanted: Recipe, here: list[Device], text: str, parameters: int) -> Placed:
    return Placed(*placement.pinned(wanted, here, text, Model.of(wanted, parameters) if parameters else None))


def uuids(*numbers: int) -> tuple[str, ...]:
    return tuple(f"GPU-{number}" for number in numbers)


def numbers_of(placed: Placed) -> tuple[int | None, int | None]:
    return placed.recipe.trainer.nproc, placed.recipe.actor.count


def refusal(wanted: Recipe, here: list[Device], parameters: int = SMALL, active_share: float = 1.0) -> str:
    with pytest.raises(FieldError) as raised:
        place(wanted, here, parameters, active_share)
    return str(raised.value)


@pytest.mark.parametrize(("count", "expected"), [(2, (1, 1)), (4, (2, 2)), (8, (4, 4))])
def test_without_a_data_sheet_trainer_and_actors_get_half_each(count: int, expected: tuple[int, int]) -> None:
    here = [gpu(number, total=24, name="NVIDIA Some New GPU") for number in range(count)]
    placed = place(recipe(), here, SMALL)
    assert numbers_of(placed) == expected
    used = [*placed.placement.trainer, *(uuid for group in placed.placement.actors for uuid in group)]
    assert sorted(used) == sorted(uuids(*range(count))), "each GPU has one process"
    assert not placed.placement.is_shared


def test_tensor_parallel_groups_stay_on_linked_gpus() -> None:
    island = {number: tuple(range(number // 4 * 4, number // 4 * 4 + 4)) for number in range(8)}
    here = [gpu(number, linked=island[number]) for number in range(8)]
    placed = place(recipe("trainer.nproc=2", "actor.engine.tensor_parallel_size=2"), here, SMALL)
    assert placed.placement.trainer == uuids(0, 1)
    assert placed.placement.actors == (uuids(2, 3), uuids(4, 5), uuids(6, 7))
    pairs = [gpu(number, linked=(number, number ^ 1)) for number in (0, 2, 1, 3)]
    assert place(recipe("trainer.nproc=2"), pairs, SMALL).placement.trainer in (uuids(0, 1), uuids(2, 3))


def test_numbers_that_are_given_stay_and_spare_gpus_are_for_actors_that_scale_adds() -> None:
    here = [gpu(number) for number in range(4)]
    placed = place(recipe("trainer.nproc=1", "actor.count=2"), here, SMALL)
    assert numbers_of(placed) == (1, 2)
    assert (placed.placement.actors, placed.placement.spare) == ((uuids(1), uuids(2)), (uuids(3),))
    again = pinned(recipe(), here, placed.placement.model_dump_json(), SMALL)
    assert again == placed, "what a run has written can be given to the next one"
    assert numbers_of(place(recipe("actor.count=1"), here, SMALL)) == (3, 1)
    assert numbers_of(place(recipe("actor.count=1", "trainer.context_parallel=2"), here, SMALL)) == (2, 1)


def test_what_does_not_fit_is_refused_with_what_does() -> None:
    here = [gpu(number, name=RTX) for number in range(4)]
    said = refusal(recipe("trainer.nproc=3", "actor.count=2"), here)
    assert said == (
        "actor.count = 2: 3 trainer ranks and 2 actors of 1 GPU need 5 GPUs, but 4 GPUs are here; "
        "use trainer.nproc=2 and actor.count=2, or auto"
    )
    assert "nproc = 2: there is one GPU here, so one rank and one actor share" in refusal(recipe("trainer.nproc=2"), here[:1])
    assert "context_parallel = 2: does not divide the 1 rank" in refusal(recipe("trainer.context_parallel=2"), here[:1])
    assert "shard_ranks = 2: does not divide" in refusal(recipe("trainer.shard_ranks=2", "trainer.nproc=3"), here)
    assert "tensor_parallel_size = 4: there is one GPU" in refusal(recipe("actor.engine.tensor_parallel_size=4"), here[:1])
    large = load_recipe("gsm", ["trainer.nproc=1", "actor.count=1"])
    assert place(large, [gpu(0), gpu(1)], 0).placement.trainer == uuids(0), "without a size, the processes check"


def test_of_different_gpus_the_trainer_gets_those_with_the_most_room() -> None:
    """The states of 3.21e9 parameters take 53.8 GiB, which is too much for 24 GiB, and the weights of an actor 6.0."""
    small, large = gpu(0, total=24, name=RTX), gpu(1)
    placed = place(recipe(), [small, large], 3_210_000_000)
    assert (placed.placement.trainer, placed.placement.actors) == (uuids(1), (uuids(0),))
    four = [small, large, gpu(2, total=24, name=RTX), gpu(3)]
    assert place(recipe("actor.count=2"), four, 3_210_000_000).placement.trainer == uuids(1, 3)
    said = refusal(recipe(), [large, *(gpu(number, total=24, name=RTX) for number in (2, 3, 4))], LARGE)
    assert "GiB for vLLM, but NVIDIA H100 80GB HBM3 has 79.0 GiB free; train adapters" in said, "the others hold no actor"


def test_gpus_without_room_for_an_actor_are_left_out() -> None:
    tiny = gpu(9, total=4, name="NVIDIA T400")
    for numbers in ((), ("trainer.nproc=1", "actor.count=1")):
        assert place(recipe(*numbers), [gpu(0), gpu(1), tiny], SMALL) == place(recipe(*numbers), [gpu(0), gpu(1)], SMALL)
    assert place(recipe(), [gpu(0), tiny], SMALL) == place(recipe(), [gpu(0)], SMALL), "trainer and actor share the other one"


def test_bfloat16_needs_gpus_that_have_it() -> None:
    old, new = gpu(0, name="Tesla T4").model_copy(update={"capability": 75}), gpu(1)
    assert place(recipe(), [old, new], SMALL).placement.trainer == place(recipe(), [new], SMALL).placement.trainer
    said = refusal(recipe(), [old], SMALL)
    assert said.startswith("model.dtype = 'bfloat16': Tesla T4 cannot compute in this dtype (compute capability 8.0 is")
    small = old.model_copy(update={"free_bytes": 16 * GIB, "total_bytes": 16 * GIB})
    assert refusal(recipe(), [small, small], 1_543_714_304) == said
    with pytest.raises(FieldError, match=r"model\.dtype"):
        pinned(recipe(), [old, new], '{"trainer": ["1"], "actors": [["0"]]}', SMALL)
    assert place(load_recipe("arithmetic"), [old], SMALL).placement.trainer == uuids(0)


def test_a_gpu_that_another_process_fills_is_left_out() -> None:
    here = [gpu(0, free=3), gpu(1), gpu(2)]
    placed = place(recipe(), here, SMALL)
    assert numbers_of(placed) == (1, 1)
    assert set(placed.placement.trainer) | set(placed.placement.actors[0]) == set(uuids(1, 2))
    assert next(table(placed.placement, here)).endswith("3.0 of 80.0 GiB free  not used")
    said = refusal(recipe("trainer.nproc=2", "actor.count=1"), here)
    assert "2 GPUs of 3 have enough free memory; use trainer.nproc=1 and actor.count=1" in said
    assert "other processes use every GPU here" in refusal(recipe(), [gpu(0, free=3)])


def test_on_one_gpu_vllm_gets_what_trainer_and_updates_leave() -> None:
    here = [gpu(0, total=24, name=RTX)]
    placed = place(recipe(), here, SMALL)
    assert placed.placement.trainer == placed.placement.actors[0] == uuids(0)
    # By hand, in GiB: 18 bytes a parameter are 8.28, activations at least 4.0, contexts 1.0, and an update 2.92. That leaves
    # 6.80 of the 23 that are free, which are 28 % of 24. What is sent is in host memory.
    assert placed.recipe.actor.engine.gpu_memory_utilization == 0.28
    of_both = {"CUDA_VISIBLE_DEVICES": "GPU-0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert placed.placement.environment(placed.placement.groups[0]) == of_both
    limit = "per_process_memory_fraction:0.56"  # 13.3 of 24 GiB
    assert placed.placement.trainer_environment({}) == {**of_both, "PYTORCH_ALLOC_CONF": limit}
    for said in (refusal(recipe(f"actor.engine.gpu_memory_utilization={share}"), here) for share in (0.5, 0.03)):
        assert "needs at least 0.17 for weights" in said
        assert "and may have at most 0.28; use a value between these, or auto" in said
    with_reference = place(recipe("algorithm.kl_coefficient=0.1"), here, SMALL).recipe
    assert with_reference.actor.engine.gpu_memory_utilization == 0.24, "0.92 GiB more"
    adapters = place(recipe("trainer.lora.rank=16", "trainer.learning_rate=1e-5"), here, SMALL)
    assert adapters.recipe.actor.engine.memory_share > 0.5
    unknown = place(recipe(), here, 0)
    assert unknown.recipe.actor.engine.gpu_memory_utilization == 0.4
    assert unknown.placement.trainer_share == 0.52, "12.4 of 24 GiB: what vLLM and 2 GiB for updates leave"


TURNS = ("mode=conventional", "algorithm.max_lag=null", "actor.colocate=true")


def test_in_turns_vllm_gets_what_the_states_leave_and_the_trainer_what_stays_of_a_sleeping_engine() -> None:
    here = [gpu(0, total=24, free=20, name=RTX), gpu(1, total=24, name=RTX)]
    placed = place(recipe(*TURNS), here, SMALL)
    assert (placed.placement.trainer, placed.placement.groups) == (uuids(1), (uuids(1),)), "one GPU, that with more room"
    # By hand, in GiB: 8.28 of states, 1 of cache, 1 of contexts and 2.92 for an update leave 9.80 of 23, 40 % of 24.
    assert placed.recipe.actor.engine.gpu_memory_utilization == 0.4
    # Without vLLM's 3 and 1 of contexts, 19 of 24 are left to torch.
    variables, limit = placed.placement.trainer_environment({}, takes_turns=True), "per_process_memory_fraction:0.79"
    assert variables["PYTORCH_ALLOC_CONF"] == f"expandable_segments:True,{limit}"
    assert pinned(recipe(*TURNS), here, placed.placement.model_dump_json(), SMALL) == placed
    with pytest.raises(FieldError, match="name that GPU for both"):
        pinned(recipe(*TURNS), here, '{"trainer": ["0"], "actors": [["1"]]}', SMALL)
    # 2.98e9 parameters: 50 of states take 71.4 with their activations and 1 of contexts; vLLM keeps 3 of the 75 that are free.
    said = refusal(recipe(*TURNS), [gpu(0, free=75)], 2_982_616_178)
    assert "needs 72.4 GiB for the trainer, 3.0 GiB for the sleeping engine, but" in said
    assert "has 75.0 GiB free; train adapters" in said


def test_without_a_gpu_nothing_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.local.placing.find_devices", lambda: Devices(problem="this machine has no NVIDIA GPU"))
    with pytest.raises(FieldError, match=r"actor\.colocate = True: needs a GPU: this machine has no NVIDIA GPU; use"):
        placed_here(recipe(*TURNS))


def test_a_mixture_with_adapters_fits_eight_gpus_and_not_one() -> None:
    """56.9 GiB of weights and 1.1 of adapters' states are too much for 70 % of 80 GiB. An actor holds the weights once."""
    wanted, mixture = load_recipe("math-moe"), (30_532_122_624, 3_353_032_704 / 30_532_122_624)
    placed = place(wanted, [gpu(number) for number in range(8)], *mixture)
    ranks, actors = numbers_of(placed)
    assert ranks is not None
    assert actors is not None
    assert ranks >= 2
    assert ranks + 2 * actors == 8
    assert [len(group) for group in placed.placement.actors] == [2] * actors
    assert placed.recipe.actor.engine.gpu_memory_utilization == 0.9
    assert numbers_of(place(wanted, [gpu(number) for number in range(4)], *mixture)) == (2, 1)
    said = refusal(wanted, [gpu(number) for number in range(3)], *mixture)
    assert "2 trainer ranks and 1 actor of 2 GPUs need 4 GPUs, but 3 GPUs are here; lower" in said
    alone = load_recipe("math-moe", ["actor.engine.tensor_parallel_size=1"])
    assert "GiB for the trainer, 2.1 GiB for weight updates" in refusal(alone, [gpu(0)], *mixture)


def test_memory_of_others_is_not_given_away_and_adapters_need_no_second_instance() -> None:
    half = [gpu(0), gpu(1, free=42)]
    assert place(recipe("trainer.nproc=1"), half, 0).recipe.actor.engine.gpu_memory_utilization == 0.52
    said = refusal(recipe("trainer.nproc=1", "actor.engine.gpu_memory_utilization=0.9"), half, 0)
    assert "tokens, and may have at most 0.52; use" in said
    mixed = [gpu(0), gpu(1), gpu(2, total=24)]
    lora = ("trainer.lora.rank=16", "trainer.learning_rate=1e-5")
    small = place(recipe("trainer.nproc=1", *lora), mixed, 3_210_000_000).recipe
    # Of 24 GiB, 23 are free, and a weight update takes 2; of 80 GiB more would be left.
    assert small.actor.engine.gpu_memory_utilization == 0.87
    assert "8 trainer ranks and 1 actor of 1 GPU need 9 GPUs" in refusal(recipe(), [gpu(0, total=24), gpu(1, total=24)], LARGE)


def test_mig_instances_are_devices_that_form_no_group() -> None:
    whole = [gpu(number, total=40) for number in range(3)]
    here = [device.model_copy(update={"uuid": f"MIG-{number}"}) for number, device in enumerate(whole)]
    placed = place(recipe(), here, SMALL)
    assert numbers_of(placed) == (1, 2)
    assert placed.placement.actors == (("MIG-1",), ("MIG-2",))
    assert "MIG instances cannot exchange tensors" in refusal(recipe("trainer.nproc=2"), here)
    assert "MIG instances" in refusal(recipe("actor.engine.tensor_parallel_size=2"), here)
    assert "use trainer.nproc=1 and actor.count=2, or auto" in refusal(recipe("actor.count=3"), here)
    assert re.search("GiB for the trainer, .* or a larger instance or a whole GPU", refusal(recipe(), here, 3_210_000_000))


def test_a_placement_by_hand_names_gpus_by_position_or_uuid() -> None:
    here = [gpu(number) for number in range(4)]
    placed = pinned(recipe(), here, '{"trainer": ["3"], "actors": [["GPU-0"], ["1"]]}', SMALL)
    assert placed.placement.trainer == uuids(3)
    assert placed.placement.actors == (uuids(0), uuids(1))
    assert numbers_of(placed) == (1, 2)
    for text, said in (
        ("{", "give JSON such as"),
        ('{"trainer": ["0"]}', "--placement.actors = {'trainer': ['0']}: Field required; give JSON"),
        ('{"trainer": ["7"], "actors": [["1"]]}', "'7': no such GPU; use a number or UUID of these: 0 is NVIDIA H100"),
        ('{"trainer": ["0"], "actors": [["1"], ["GPU-1"]]}', "two ranks or two actors may not"),
        ('{"trainer": ["0"], "actors": []}', "GPUs for at least one actor"),
        ('{"trainer": ["0"], "actors": [["1", "2"]]}', "as many GPUs as actor.engine.tensor_parallel_size (1)"),
    ):
        with pytest.raises(FieldError, match=re.escape(said)):
            pinned(recipe(), here, text, SMALL)


def test_torch_is_limited_on_a_gpu_that_one_of_two_actors_shares() -> None:
    here = [gpu(0), gpu(1)]
    both = pinned(recipe(), here, '{"trainer": ["0"], "actors": [["0"], ["1"]]}', SMALL).placement
    assert both.trainer_share == place(recipe(), here[:1], SMALL).placement.trainer_share < 1


def test_without_a_gpu_auto_is_one() -> None:
    on_cpu = numbered(recipe())
    assert (on_cpu.trainer.nproc, on_cpu.actor.count, on_cpu.actor.engine.gpu_memory_utilization) == (1, 1, 0.9)


def test_a_run_writes_its_placement_for_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.local.placing.find_devices", lambda: Devices(devices=(gpu(0), gpu(1))))
    wanted = load_recipe("arithmetic", AUTO)
    changed, chosen, lines = placed_here(wanted)
    assert chosen is not None
    assert [line.rpartition("  ")[2] for line in lines] == ["trainer rank 0", "actor-0"]
    run_dir = RunDir(tmp_path, "x")
    write_placement(run_dir, wanted, chosen)
    assert read_json(run_dir.placement)["automatic"] == [*(field.partition("=")[0] for field in AUTO), "weights.backend"]
    assert placed_here(wanted, str(run_dir.placement)) == (changed, chosen, lines)
    with pytest.raises(FieldError, match="cannot be read"):
        placed_here(wanted, str(tmp_path / "none.json"))
    monkeypatch.setattr("pipelinerl.local.placing.find_devices", lambda: Devices(problem="the driver is too old"))
    with pytest.raises(FieldError, match="the driver is too old"):
        placed_here(wanted, str(run_dir.placement))
    assert placed_here(wanted)[1] is None


def test_two_processes_on_one_gpu_need_a_new_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, instance = gpu(0), gpu(0).model_copy(update={"uuid": "MIG-0"})
    for release, device, backend in (((2, 29, 7), whole, "gloo"), ((2, 30, 7), whole, "auto"), ((2, 30, 7), instance, "gloo")):
        here = Devices(devices=(device,), nccl=release)
        monkeypatch.setattr("pipelinerl.local.placing.find_devices", lambda here=here: here)
        assert placed_here(load_recipe("arithmetic"))[0].weights.backend == backend
    monkeypatch.setattr("pipelinerl.local.placing.find_devices", lambda: Devices(devices=(whole,), nccl=(2, 29, 7)))
    with pytest.raises(FieldError, match=r"NCCL before 2\.30 does not connect two processes on one GPU; use auto or gloo"):
        placed_here(load_recipe("arithmetic", ["weights.backend=nccl"]))


# The probe


def nvml(gpus: dict[str, list[str]], links: set[frozenset[str]] = frozenset()) -> Any:  # type: ignore[assignment]
    """Return a stand-in for NVML with GPUs by UUID and their MIG instances, of which an empty list means a whole GPU."""

    class NVMLError(Exception):
        pass

    def instance(parent: str, number: int) -> str:
        if number >= len(gpus[parent]):
            raise NVMLError("not found")
        return gpus[parent][number]

    def peers(one: str, other: str, _: int) -> int:
        if "MIG" in one + other:
            raise NVMLError("not supported")
        return 0 if frozenset((one, other)) in links else 1

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda number: [*gpus][number],
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetUUID=lambda handle: handle,
        nvmlDeviceGetName=lambda handle: handle.encode(),
        nvmlDeviceGetCudaComputeCapability=lambda handle: (7, 0) if "old" in handle else (9, 0),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=8, free=5),
        nvmlDeviceGetMigMode=lambda handle: (int(bool(gpus[handle])), 0),
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=instance,
        nvmlDeviceGetP2PStatus=peers,
    )


def torch_of(*visible: str, cuda: str | None = "13.0", error: str = "") -> Any:
    def init() -> None:
        if error:
            raise RuntimeError(error)

    found = SimpleNamespace(
        init=init,
        device_count=lambda: len(visible),
        get_device_properties=lambda n: SimpleNamespace(uuid=visible[n]),
        get_arch_list=lambda: ["sm_90a", "sm_75", "compute_120"],
    )
    return SimpleNamespace(__version__="2.13.0", version=SimpleNamespace(cuda=cuda), cuda=found)


def test_gpus_come_in_cudas_order_with_their_links() -> None:
    tool, shown = nvml({"GPU-a": [], "GPU-b": [], "GPU-c": []}, {frozenset(("GPU-a", "GPU-b"))}), ("GPU-b", "GPU-a")
    found = [Device.model_validate(one) for one in described(torch_of("b", "a"), tool, {"CUDA_VISIBLE_DEVICES": "1,0"})]
    assert [(one.uuid, one.name, one.total_bytes, one.free_bytes) for one in found] == [(name, name, 8, 5) for name in shown]
    assert [one.linked for one in found] == [("GPU-a",), ("GPU-b",)]
    assert [one.capability for one in found] == [90, 90]
    for visible in ("0,-1,1", "0,", "GPU-a"):
        assert [one["uuid"] for one in described(torch_of("a"), tool, {"CUDA_VISIBLE_DEVICES": visible})] == ["GPU-a"]
    with_old = nvml({"GPU-old": [], "GPU-a": []})
    assert [one["uuid"] for one in described(torch_of("old", "a"), with_old, {})] == ["GPU-a"], "torch has no code for old"


def test_a_divided_gpu_shows_its_instances() -> None:
    tool = nvml({"GPU-a": ["MIG-1", "MIG-2"], "GPU-b": []})
    assert [one["uuid"] for one in described(torch_of("b"), tool, {})] == ["GPU-b", "MIG-1", "MIG-2"]
    for visible, shown, expected in (
        ("MIG-2", "x", ["MIG-2"]),
        ("MIG-", "x", ["MIG-1"]),
        ("MIG-1,MIG-9", "x", ["MIG-1", "MIG-9"]),  # of which NVML says that it does not exist
        ("GPU-b,MIG-1", "b", ["GPU-b", "MIG-1"]),
        ("1", "b", ["GPU-b"]),
    ):
        found = described(torch_of(shown), tool, {"CUDA_VISIBLE_DEVICES": visible})
        assert [one["uuid"] for one in found] == expected
    with pytest.raises(UserError, match="name its MIG instances by UUID"):
        described(torch_of("x"), tool, {"CUDA_VISIBLE_DEVICES": "0"})


def test_a_gpu_that_torch_cannot_use_is_told_with_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = nvml({"GPU-a": [], "GPU-old": []})
    old = "The NVIDIA driver on your system is too old (found version 12020). Please update"
    for of_torch, environment, said in (
        (torch_of(cuda=None), {}, "built without CUDA; install the CUDA build: make clean && make install DEVICE=cuda"),
        (torch_of(error=old), {}, "too old (found version 12020); torch 2.13.0 needs a driver for CUDA 13.0"),
        (torch_of(), {"CUDA_VISIBLE_DEVICES": ""}, "torch sees no GPU; CUDA_VISIBLE_DEVICES='' decides"),
        (torch_of("a"), {"CUDA_VISIBLE_DEVICES": "0, 7,1"}, "= '0, 7,1': CUDA shows only the first 1 of these GPUs; correct"),
        (torch_of("old"), {}, "GPU-old has compute capability 7.0, but torch 2.13.0 needs 7.5 or more; use a newer GPU"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            described(of_torch, tool, environment, tmp_path)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(UserError, match=r"this user may not open .*/nvidia0"):
        described(torch_of(error="unknown error"), tool, {}, tmp_path)
    with pytest.raises(UserError, match="nvidia-ml-py is not installed"):
        described(torch_of("a"), None, {}, tmp_path)


def test_the_runner_asks_a_process_and_says_why_it_has_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(devices, "_DEVICES", tmp_path)
    answer = json.dumps({"devices": [gpu(0).model_dump()]})
    for script, problem in (
        (f"print('noise'); print({answer!r})", ""),
        ('print(\'{"problem": "no driver"}\')', "no driver"),
        ("raise SystemExit('torch is broken')", "torch cannot list the GPUs: torch is broken"),
        ("pass", "torch cannot list the GPUs"),
    ):
        monkeypatch.setattr(devices, "PROBE", (devices.sys.executable, "-c", script))
        found = devices.find_devices.__wrapped__()
        assert problem in found.problem
        assert found.devices == (() if problem else (gpu(0),))


# --- what fits

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


def test_ranks_that_share_the_states() -> None:
    """18 bytes for each parameter are 127.4 GiB, of which a rank of 80 GiB takes 56: two would hold 63.7 each, three 42.5."""
    recipe = load_recipe("gsm")
    assert trainer_problem(recipe, SEVEN_B, 80.0, ranks=3) is None
    said = str(trainer_problem(recipe, SEVEN_B, 80.0, ranks=2))
    assert said.startswith("trainer.nproc = 4: weights, gradients and optimizer state, shared by 2 ranks, take 63.7 GiB")
    assert said.endswith("use at least 3 ranks")
    of_four = trainer_problem(load_recipe("gsm", ["trainer.shard_ranks=2"]), SEVEN_B, 80.0, ranks=2)
    assert str(of_four).endswith("use 4 ranks"), "three do not divide the recipe's four"
    in_8_bits = load_recipe("gsm", ["trainer.optimizer=adamw_8bit"])
    assert trainer_problem(in_8_bits, SEVEN_B, 80.0, ranks=2) is None
    assert checkpoint_bytes(in_8_bits, 10) == checkpoint_bytes(recipe, 10) == 10 * (2 + 4 + 8), "moments are float32 there"


def test_adapters_have_states_and_an_update_of_their_own() -> None:
    """8e9 to the power of 2/3 is 4e6, and 0.9 of that for each rank of 64 are 230.4e6; of 1e9 it is 1e6, and 57.6e6."""
    whole, mixture = Model(8e9, 1024), Model(8e9, 1024, active_share=1 / 8)
    recipe = load_recipe("gsm", ["trainer.lora.rank=64"])
    assert state_bytes(recipe, whole) == pytest.approx(16e9 + 18 * 230.4e6)
    assert state_bytes(recipe, mixture) == pytest.approx(16e9 + 18 * 57.6e6)
    assert state_bytes(recipe, Model(8e9, 1024, adapters=100)) == 16e9 + 18 * 100
    assert sent_bytes(recipe, whole) == pytest.approx(2 * 230.4e6)
    assert update_gib(recipe, whole) == pytest.approx(2 + 0.429, abs=1e-3)
    assert sent_bytes(load_recipe("gsm"), mixture) == 16e9


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
    assert actor_problem(recipe, seventy, 80.0) is None
    said = str(actor_problem(load_recipe("gsm", [*fp8, f"{SHARE}=0.95"]), seventy, 80.0))
    assert "and may have at most 0.91, because a weight update needs 6.4 GiB: twice the largest layer (4.4), and 2" in said
    whole = load_recipe("gsm", ["actor.engine.tensor_parallel_size=4", f"{SHARE}=0.5"])
    assert update_gib(whole, seventy) == pytest.approx(140e9 / GIB / 4 + 2)


def test_snapshots_stay_on_a_gpu_that_has_room_for_them() -> None:
    """Of 1.5e9 parameters, states are 25.1 GiB and three snapshots 8.4: 33.5 GiB, which are 70 % of 47.9."""
    model = Model(parameters=1.5e9, kv_bytes=28 * 1024)
    alone = load_recipe("math", ["trainer.nproc=1"])
    assert snapshot_gib(alone, model, 48.0) == (pytest.approx(9e9 / GIB), 0)
    assert snapshot_gib(alone, model, 47.8) == (0, pytest.approx(3 * 3e9 / GIB))
    for elsewhere in ("trainer.nproc=2", "weights.backend=gloo", "trainer.lora.rank=16"):
        there = load_recipe("math", ["trainer.nproc=1", elsewhere, "weights.probe_tokens=512"])
        assert snapshot_gib(there, model, 80.0)[0] == 0
    log = ["trainer.nproc=1", "weights.log=nats"]
    assert snapshot_gib(load_recipe("math", log), model, 60.0) == (pytest.approx(15e9 / GIB), 0), "with two more for the log"
    assert snapshot_gib(load_recipe("math", log), model, 48.0) == (0, pytest.approx(5 * 3e9 / GIB))
    with_adapters = load_recipe("math", [*log, "trainer.lora={rank: 16, send: adapter}"])
    assert snapshot_gib(with_adapters, Model(1.5e9, 28 * 1024, adapters=1000))[1] == 0
    with_reference = load_recipe("math", ["trainer.nproc=1", "algorithm.kl_coefficient=0.1"])
    assert snapshot_gib(with_reference, model, 48.0)[0] == 0


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
