"""The loader that waits for the pause: what it keeps and where, on several ranks and with too little memory, without vLLM. What
forbids a copy into live weights, on a small tree of modules; tests/integration and tests/gpu copy into real models."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipelinerl.errors import ManifestMismatch
from pipelinerl.rl.memory import GIB
from pipelinerl.transfer.chunks import describe
from pipelinerl.transfer.manifest import Manifest, build_manifest
from services.actor.weight_sync import loaders
from services.actor.weight_sync.loaders import InPlaceLoader, PausedLoader

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CONFIG: Any = SimpleNamespace(model_config=None, cache_config=SimpleNamespace(gpu_memory_utilization=0.7))
MIB = 2**20


class Peers:
    """One of the ranks of an engine, each of which is a thread."""

    def __init__(self, rank: int, world_size: int, meeting: threading.Barrier | None = None) -> None:
        self.rank_in_group, self.world_size, self._meeting = rank, world_size, meeting
        self.sent_bytes = 0
        self.others: list[Peers] = []
        self._offered: Tensor | None = None

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        assert self._meeting is not None
        if src == self.rank_in_group:
            self._offered = tensor
            self.sent_bytes += tensor.nbytes
        self._meeting.wait(60)
        if src != self.rank_in_group:
            offered = self.others[src]._offered
            assert offered is not None
            tensor.copy_(offered)
        self._meeting.wait(60)
        return tensor


class Model(nn.Module):
    """Keeps what it is given; `fails_at` is a name at which it raises."""

    def __init__(self, fails_at: str = "") -> None:
        super().__init__()
        self.got: dict[str, Tensor] = {}
        self.fails_at = fails_at

    def load_weights(self, weights: Any) -> set[str]:
        for name, tensor in weights:
            if name == self.fails_at:
                raise RuntimeError("out of memory")
            self.got[name] = tensor.clone()
        return set(self.got)


@pytest.fixture
def reloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins for the three modules of vLLM that a swap uses; real ones are in tests/integration/test_engine.py."""
    calls: list[str] = []
    layers = "vllm.model_executor.layers"
    modules = {
        f"{layers}.vocab_parallel_embedding": {"UnquantizedEmbeddingMethod": type("Embedding", (), {})},
        f"{layers}.fused_moe.unquantized_fused_moe_method": {"UnquantizedFusedMoEMethod": type("Experts", (), {})},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": lambda model: calls.append("begin"),
            "finalize_layerwise_reload": lambda model, config: calls.append("end"),
        },
    }
    for name, content in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))  # type: ignore[arg-type]
    return calls


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (64, 8), "model.layers.0.a.weight": (8, 8), "model.layers.0.b.weight": (24, 8)}
    shapes |= {"model.layers.1.a.weight": (16, 8), "model.layers.1.b.weight": (16, 8), "head.weight": (64, 8)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def ranks_of(count: int, manifest: Manifest, fails_at: str = "") -> list[tuple[PausedLoader, Model, Peers]]:
    """Loaders that have checked the manifest; the last rank's model raises at `fails_at`."""
    meeting, made = threading.Barrier(count), []
    for rank in range(count):
        model, peers = Model(fails_at if rank == count - 1 else ""), Peers(rank, count, meeting)
        group: Any = peers
        loader = PausedLoader(model, CONFIG, CPU, group)
        loader.check(manifest)
        made.append((loader, model, peers))
    for _, _, peers in made:
        peers.others = [other for _, _, other in made]
    return made


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranks_keep_the_weights_once_together_and_each_loads_all(count: int, reloads: list[str]) -> None:
    sent = weights()
    ranks = ranks_of(count, describe(sent.items()))
    whole = sum(tensor.nbytes for tensor in sent.values())
    received = {name: tensor.clone() for name, tensor in sent.items()}
    for loader, _, _ in ranks:
        loader.load(received.items())
    for tensor in received.values():
        tensor.zero_()  # the memory of chunks is used again
    with ThreadPoolExecutor(count) as pool:
        for swap in [pool.submit(loader.swap) for loader, _, _ in ranks]:
            swap.result(timeout=120)
    for _, model, _ in ranks:
        assert list(model.got) == list(sent), "in the order of the manifest"
        assert all(torch.equal(model.got[name], tensor) for name, tensor in sent.items())
    if count > 1:
        shares = [peers.sent_bytes for _, _, peers in ranks]
        assert sum(shares) == whole
        largest = max(tensor.nbytes for tensor in sent.values())
        assert max(shares) <= whole / count + largest, shares
        assert min(shares) > 0
    assert sorted(reloads) == ["begin"] * count + ["end"] * count


def test_a_rank_whose_load_fails_does_not_block_the_others(reloads: list[str]) -> None:
    sent = weights()
    ranks = ranks_of(2, describe(sent.items()), fails_at="model.layers.0.b.weight")
    for loader, _, _ in ranks:
        loader.load(sent.items())
    with ThreadPoolExecutor(2) as pool:
        first, second = [pool.submit(loader.swap) for loader, _, _ in ranks]
        with pytest.raises(RuntimeError, match="out of memory"):
            second.result(timeout=120)
        first.result(timeout=120)
    assert list(ranks[0][1].got) == list(sent)


def seventy_billion() -> Manifest:
    """In bfloat16: 80 layers of 0.85e9 parameters, 1.583 GiB each, and two matrices of 128256 x 8192; 130.6 GiB in all."""
    listed = [(f"model.layers.{n}.mlp.w{part}", (53125, 8000), "bfloat16") for n in range(80) for part in range(2)]
    ends = [(name, (128256, 8192), "bfloat16") for name in ("model.embed_tokens.weight", "lm_head.weight")]
    return build_manifest([ends[0], *listed, ends[1]])


def check_with_room(free_gib: int, host_gib: int, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_gib * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(loaders, "host_room", lambda: host_gib * GIB)
    group: Any = Peers(0, ranks)
    PausedLoader(nn.Module(), CONFIG, GPU, group).check(seventy_billion())


@pytest.mark.parametrize(
    ("free_gib", "host_gib", "ranks", "said"),
    [
        # A quarter is 32.6 GiB, the embedding 1.96. 32.6 + 2 * 1.96 + 2 = 38.6 on the device; host memory does not matter then.
        (41, 0, 4, ""),
        (24, 100, 4, "needs 130.6 GiB of host memory for received weights, but 100.0 are available: give this actor more"),
        (41, 100, 1, "needs 130.6 GiB of host memory"),
        (3, 200, 4, "3.0 of 80.0 GiB of GPU memory are free outside vLLM, but a weight update needs 5.9: 3.9 for twice the"),
    ],
)
def test_an_update_is_refused_if_neither_device_nor_host_has_room(
    free_gib: int, host_gib: int, ranks: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """70B parameters in fp8 on GPUs of 80 GiB: each rank has 16 GiB of weights, but all the received ones are 131."""
    if said:
        with pytest.raises(ManifestMismatch) as raised:
            check_with_room(free_gib, host_gib, ranks, monkeypatch)
        assert said in str(raised.value)
    else:
        check_with_room(free_gib, host_gib, ranks, monkeypatch)


def test_the_largest_layer_counts_all_its_experts() -> None:
    experts = [(f"model.layers.{n}.mlp.experts.{e}.w", (1024, 512), "bfloat16") for n in range(2) for e in range(4)]
    assert loaders.largest_layer(build_manifest(experts)) == 4 * MIB
    assert loaders.largest_layer(build_manifest([*experts, ("lm_head.weight", (4096, 1024), "bfloat16")])) == 8 * MIB


def test_host_memory_is_bounded_by_the_containers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "PROC", tmp_path)
    monkeypatch.setattr(loaders, "CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal:  4096 kB\nMemFree:  9 kB\nMemAvailable:    2048 kB\n")
    assert loaders.host_room() == 2 * MIB
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{7 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {MIB // 2}\n")
    assert loaders.host_room() == 2 * MIB
    (tmp_path / "memory.max").write_text(f"{8 * MIB}\n")
    assert loaders.host_room() == 1.5 * MIB, "pages of files are freed when memory is needed"
    job = tmp_path / "slurm" / "job_1"
    job.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("1:name=systemd:/x\n0::/slurm/job_1/step_0\n")
    for name, value in (("memory.max", MIB), ("memory.current", 0), ("memory.stat", "anon 5")):
        (job / name).write_text(f"{value}\n")
    assert loaders.host_room() == MIB, "of the group above its own"


# --- copies into live weights


class Toy(nn.Module):
    """An embedding, a linear layer and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(4, 3), nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.linear.quant_method = "unquantised"


class ToyLoader(InPlaceLoader):
    """Its shadow takes parameters as they are; `after` is what post-processing does."""

    def __init__(self, live: Toy, after: Callable[[Toy], None] = lambda model: None) -> None:
        self.model, self._after = Toy(), after
        shadows = self.model.modules()
        self.pairs = {name: (module, next(shadows)) for name, module in live.named_modules()}
        self._pristine = {module: dict(module.__dict__) for module in self.model.modules()}
        self._blueprint, self._kernels, self._device = [], [], torch.device("cpu")

    def _materialise(self) -> None:
        self.drop()

    def _finish(self) -> None:
        self._after(self.model)


def packed(model: Toy) -> None:
    handle = model.linear.weight.clone()
    model.linear.apply_packed = lambda x: x @ handle


def transposed(model: Toy) -> None:
    model.linear.weight = nn.Parameter(model.linear.weight.t().contiguous().t())


def added(model: Toy) -> None:
    model.linear.register_parameter("scale", nn.Parameter(torch.ones(1)))


@pytest.mark.parametrize(("after", "says"), [(packed, "derives apply_packed"), (transposed, "layout"), (added, "scale")])
def test_what_post_processing_makes_of_weights_can_forbid_it(after, says) -> None:
    loader = ToyLoader(Toy(), after)
    assert loader.obstacle().startswith("linear: ")
    assert says in loader.obstacle()


def test_a_function_that_holds_no_weights_forbids_nothing_and_a_head_that_only_happens_to_be_tied_does() -> None:
    """The model's own class would make them two: after an update they may differ."""

    def choose_kernel(model: Toy) -> None:
        model.linear.kernel = lambda x, weight: nn.functional.linear(x, weight)

    assert ToyLoader(Toy(), choose_kernel).obstacle() == ""
    live = Toy()
    loader = ToyLoader(live)
    loader.model.head.weight = nn.Parameter(torch.zeros(4, 3))
    assert "tied" in loader.obstacle()
