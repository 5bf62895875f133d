"""Adapters beside the base weights of vLLM's layers, against products computed by hand.

The module under test imports vLLM, which takes 12 s. Only the worker that runs these tests pays for it, in the fixture.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from pipelinerl.errors import ManifestMismatch
from pipelinerl.recipe.fields import LoraConfig
from pipelinerl.transfer.manifest import LowRank, Manifest, ManifestDiffers, build_manifest

if TYPE_CHECKING:
    from services.actor.weight_sync.adapters import AdapterLoader, Place

IN, OUT = 8, {"q_proj": 8, "k_proj": 4, "v_proj": 4, "gate_proj": 6, "up_proj": 6, "down_proj": 8}
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
CPU = torch.device("cpu")


class Served(nn.Module):
    packed_modules_mapping = FUSED

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear

        super().__init__()
        self.qkv_proj = QKVParallelLinear(IN, 4, 2, 1, bias=True)  # heads of 4: two of queries, one of keys and values
        self.gate_up_proj = MergedColumnParallelLinear(IN, [6, 6], bias=True)
        self.down_proj = RowParallelLinear(6, 8, bias=True)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
            parameter.requires_grad_(False)
        layers: dict[str, Any] = dict(self.named_children())
        self.weights = {name: (layer.weight.clone(), layer.bias.clone()) for name, layer in layers.items()}
        for layer in layers.values():
            layer.quant_method.process_weights_after_loading(layer)  # as vLLM does before a layer computes


@pytest.fixture
def config(tmp_path: Any) -> Iterator[Any]:
    """vLLM's, with one tensor-parallel rank."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    content = VllmConfig(device_config=DeviceConfig("cpu"))
    with set_current_vllm_config(content):
        init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield content
        destroy_model_parallel()
        destroy_distributed_environment()


def installed(model: Served, dtype: torch.dtype = torch.float32, **lora: Any) -> dict[str, Place]:
    from services.actor.weight_sync.adapters import CONFIG, install

    additional, model_config = {CONFIG: LoraConfig(**lora).model_dump()}, SimpleNamespace(dtype=dtype)
    content: Any = SimpleNamespace(additional_config=additional, model_config=model_config)
    return install(model, content, CPU)


def factors(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {}
    for name, rows in OUT.items():
        made[f"{name}.a"] = torch.randn(rank, 6 if name == "down_proj" else IN, generator=generator)
        made[f"{name}.b"] = torch.randn(rows, rank, generator=generator)
    return made


def manifest_of(sent: dict[str, Tensor], scaling: float) -> Manifest:
    names = [name.removesuffix(".a") for name in sent if name.endswith(".a")]
    shapes = {name: (len(sent[f"{name}.b"]), sent[f"{name}.a"].shape[1]) for name in names}
    items = [
        LowRank(name=f"{n}.weight", shape=shapes[n], dtype="float32", a=f"{n}.a", b=f"{n}.b", scaling=scaling) for n in names
    ]
    return build_manifest([(name, tuple(t.shape), "float32") for name, t in sent.items()], low_rank=items)


def loader_of(*arguments: Any) -> AdapterLoader:
    from services.actor.weight_sync.adapters import AdapterLoader

    return AdapterLoader(*arguments)


def staged(model: Served, places: dict[str, Place], sent: dict[str, Tensor], scaling: float) -> AdapterLoader:
    loader = loader_of(model, places)
    loader.check(manifest_of(sent, scaling))
    loader.load(sent.items())
    return loader


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, IN, generator=torch.Generator().manual_seed(2))


def change(layer: Any, x: Tensor, before: Tensor) -> Tensor:
    return layer.quant_method.apply(layer, x, layer.bias) - before


@pytest.mark.parametrize(
    ("rslora", "scaling", "targets"), [(False, 1.5, [*OUT]), (True, 3.0, [*OUT]), (False, 1.5, ["k_proj"])]
)
def test_each_part_of_a_fused_layer_gets_its_own_product(config: Any, rslora: bool, scaling: float, targets: list[str]) -> None:
    """Scaled by 6 / 4 or 6 / √4. Only a layer that has a target is wrapped, and other parts of that layer stay as they are."""
    from services.actor.weight_sync.adapters import AdaptedLinearMethod

    model, x = Served(), inputs(5)
    layers = {
        "qkv_proj": (model.qkv_proj, x),
        "gate_up_proj": (model.gate_up_proj, x),
        "down_proj": (model.down_proj, x[:, :6]),
    }
    plain = {name: nn.functional.linear(x, *model.weights[name]) for name, (_, x) in layers.items()}
    places = installed(model, rank=4, alpha=6.0, rslora=rslora, target_modules=targets)
    sent = {name: tensor for name, tensor in factors(rank=4).items() if name.partition(".")[0] in targets}
    for name, (layer, x) in layers.items():
        is_wrapped = isinstance(layer.quant_method, AdaptedLinearMethod)
        assert is_wrapped == any(part in targets for part in FUSED.get(name, [name]))
        torch.testing.assert_close(layer.quant_method.apply(layer, x, layer.bias), plain[name])  # B is 0
    addresses = [(place.method.a.data_ptr(), place.method.b.data_ptr()) for place in places.values()]

    loader = staged(model, places, sent, scaling)
    for name, (layer, x) in layers.items():
        assert change(layer, x, plain[name]).abs().max() < 1e-5, "staged factors are not served"
    loader.swap()
    for name, (layer, x) in layers.items():
        products = [
            scaling * x @ sent[f"{part}.a"].T @ sent[f"{part}.b"].T if part in targets else torch.zeros(5, OUT[part])
            for part in FUSED.get(name, [name])
        ]
        expected = torch.cat(products, -1)
        torch.testing.assert_close(change(layer, x, plain[name]), expected, atol=1e-4, rtol=1e-4)
    assert addresses == [(place.method.a.data_ptr(), place.method.b.data_ptr()) for place in places.values()]


@pytest.mark.parametrize("is_packed", [False, True])
def test_sixteen_bit_products_below_half_a_unit_in_the_last_place_survive_on_average(config: Any, is_packed: bool) -> None:
    model, x = Served(torch.bfloat16), inputs(2, 500).bfloat16()
    layer, (weight, bias) = model.gate_up_proj, model.weights["gate_up_proj"]
    if is_packed:  # as vLLM does it on a CPU that multiplies in bfloat16
        layer.cpu_linear = lambda x, _, bias: nn.functional.linear(x, weight, bias)
        layer.weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)
    places, sent = installed(model, torch.bfloat16, rank=4, alpha=4.0, target_modules=["gate_proj", "up_proj"]), factors(rank=4)
    sent = {name: t * (1e-4 if name.endswith(".b") else 1) for name, t in sent.items() if name[:2] in ("ga", "up")}
    method: Any = layer.quant_method
    before = method.apply(layer, x, layer.bias)
    torch.testing.assert_close(before, nn.functional.linear(x, weight, bias), atol=0.05, rtol=0.02)
    staged(model, places, sent, 1.0).swap()
    changed = method.apply(layer, x, layer.bias).float() - before.float()
    product = torch.cat([x.float() @ sent[f"{part}.a"].T @ sent[f"{part}.b"].T for part in FUSED["gate_up_proj"]], -1)
    assert product.abs().mean() < before.abs().mean() / 1000
    assert (changed * product).sum().item() == pytest.approx((product**2).sum().item(), rel=0.2)
    if is_packed:
        method.unpacked.zero_()
        method.unpack(layer)
        assert torch.equal(method.unpacked, weight.T)


def test_two_tensor_parallel_ranks_have_the_whole_product_between_them(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has one of two heads of queries, the one head of keys and values, and three of six rows of gate and up; its part
    of down's inputs gives a sum."""
    from vllm.model_executor.layers import linear

    x, sent = inputs(5), factors(rank=4)
    product = {n: x[:, : sent[f"{n}.a"].shape[1]] @ sent[f"{n}.a"].T @ sent[f"{n}.b"].T * 1.5 for n in OUT}
    summed = torch.zeros(5, 8)
    monkeypatch.setattr(linear, "get_tensor_model_parallel_world_size", lambda: 2)
    for rank in (0, 1):
        monkeypatch.setattr(linear, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        model, inner = Served(), slice(3 * rank, 3 * rank + 3)
        staged(model, installed(model, rank=4, alpha=6.0), sent, 1.5).swap()
        own = {"qkv_proj": x, "gate_up_proj": x, "down_proj": x[:, :6][:, inner]}
        plain = {name: nn.functional.linear(of, *model.weights[name]) for name, of in own.items()}
        changes = {name: change(getattr(model, name), of, plain[name]) for name, of in own.items()}
        queries = product["q_proj"][:, 4 * rank : 4 * rank + 4]
        expected = {
            "qkv_proj": torch.cat([queries, product["k_proj"], product["v_proj"]], -1),
            "gate_up_proj": torch.cat([product["gate_proj"][:, inner], product["up_proj"][:, inner]], -1),
        }
        for name, values in expected.items():
            torch.testing.assert_close(changes[name], values, atol=1e-4, rtol=1e-4)
        summed += changes["down_proj"]
    torch.testing.assert_close(summed, product["down_proj"], atol=1e-4, rtol=1e-4)


def test_factors_that_do_not_fit_are_refused(config: Any) -> None:
    model = Served()
    places, sent = installed(model, rank=4, alpha=4.0), factors(rank=4)
    with pytest.raises(ManifestDiffers, match="rank"):
        loader_of(model, places).check(manifest_of(factors(2), 1.0))
    with pytest.raises(ManifestDiffers, match="scaling"):
        loader_of(model, places).check(manifest_of(sent, 2.0))
    for name, shape in (("v_proj.b", (5, 4)), ("up_proj.a", (4, 7)), ("down_proj.a", (4, 7)), ("down_proj.b", (9, 4))):
        wrong = manifest_of(sent | {name: torch.zeros(shape)}, 1.0)
        with pytest.raises(ManifestMismatch, match=name.partition(".")[0]):
            loader_of(model, places).check(wrong)
    unknown = manifest_of({"o_proj.a": torch.zeros(4, 8), "o_proj.b": torch.zeros(8, 4)}, 1.0)
    with pytest.raises(ManifestDiffers, match=r"o_proj.*target_modules"):
        loader_of(model, places).check(unknown)
