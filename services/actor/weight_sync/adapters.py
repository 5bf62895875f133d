"""Low-rank adapters inside a vLLM model: each adapted layer computes W·x + s · B·(A·x), as the trainer's forward pass does.

Adapters are not merged into W, because rounding to 16 bits would lose small updates. For the same reason, the sum of both
products is rounded only once if W is unquantised and 16 bits wide. Before vLLM compiles the model or captures CUDA graphs,
`install` wraps the linear method of each adapted layer. A and B have fixed addresses, start at zero, and change between two
decode steps.

vLLM's weight loaders split A and B over tensor-parallel ranks. A layer that fuses several checkpoint layers (q, k and v) stacks
their A, and holds their B as one block-diagonal matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm import envs
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.utils import set_weight_attrs

from pipelinerl.errors import ManifestMismatch
from pipelinerl.recipe.fields import LoraConfig
from pipelinerl.transfer.manifest import Manifest, ManifestDiffers

CONFIG = "pipelinerl_lora"
"""Key under which vLLM's `additional_config` holds the recipe's `trainer.lora`."""
LINEAR = (ReplicatedLinear, ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear)
"""Layers that compute nothing besides their linear method. Subclasses may compute more and get no adapter."""

Named = tuple[str, Tensor]


class AdaptedLinearMethod(LinearMethodBase):
    """Adds the low-rank product to the output of `plain`, the layer's own method. If the weights W are unquantised and 16 bits
    wide, this class computes W·x itself, so that the sum is rounded once.

    A is [parts · r, in] and B [out, parts · r] for an adapter of rank r and a layer that fuses `parts` checkpoint layers;
    in and out are the sizes on this tensor-parallel rank."""

    def __init__(self, layer: LinearBase, plain: LinearMethodBase, parts: int, config: LoraConfig, like: Tensor) -> None:
        self.plain, self.rank, self.scaling = plain, config.rank, config.scaling
        self.in_size, out_size = getattr(layer, "input_size_per_partition", layer.input_size), sum(_part_sizes(layer))
        self.a = like.new_zeros(parts * self.rank, self.in_size)
        self.b = like.new_zeros(out_size, parts * self.rank)
        is_plain = type(plain) is UnquantizedLinearMethod and not envs.VLLM_BATCH_INVARIANT
        self.rounds_once = is_plain and like.dtype != torch.float32
        is_packed = self.rounds_once and not layer.get_parameter("weight").numel()
        self.unpacked = like.new_empty(self.in_size, out_size) if is_packed else None
        """A plain copy of W, [in, out], if vLLM has packed W, as on a CPU."""
        self.unpack(layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["plain"], name)

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        self.plain.create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.plain.process_weights_after_loading(layer)

    @torch.no_grad()
    def unpack(self, layer: LinearBase) -> None:
        """Unless `unpacked` is None, fill it with W: vLLM's packed weights applied to the identity matrix, which is exact."""
        if self.unpacked is not None:
            for some in torch.arange(self.in_size).split(1024):
                rows = torch.zeros(len(some), self.in_size, dtype=self.a.dtype)
                rows[torch.arange(len(some)), some] = 1
                self.unpacked[some] = self.plain.apply(layer, rows)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the layer's output plus the adapter's. If `rounds_once`, round the sum once, as the trainer does."""
        low_rank = nn.functional.linear(nn.functional.linear(x.to(self.a.dtype), self.a), self.b) * self.scaling
        if not self.rounds_once:
            y = self.plain.apply(layer, x, bias)
            return (y + low_rank).to(y.dtype)
        weight = layer.weight.t() if self.unpacked is None else self.unpacked
        y = torch.addmm(low_rank.flatten(0, -2), x.flatten(0, -2), weight).view_as(low_rank)
        return y if bias is None else y + bias


def _part_sizes(layer: LinearBase) -> list[int]:
    return list(getattr(layer, "output_partition_sizes", None) or getattr(layer, "output_sizes", None) or [layer.output_size])


def _whole_sizes(layer: LinearBase) -> list[int]:
    """Return each checkpoint layer's number of output features over all ranks. Replicated key and value heads count once."""
    if isinstance(layer, QKVParallelLinear):
        keys = layer.total_num_kv_heads
        return [layer.total_num_heads * layer.head_size, keys * layer.head_size, keys * layer.v_head_size]
    return list(getattr(layer, "output_sizes", None) or [layer.output_size])


@dataclass(frozen=True)
class Place:
    """The vLLM layer that applies a checkpoint layer's adapter. If it fuses several checkpoint layers, `part` is the index of
    the adapter's layer among them, and `shard` is vLLM's name for that layer. Otherwise, `part` is 0 and `shard` is None."""

    layer: LinearBase
    rows: int
    """Number of output features of the checkpoint layer, over all tensor-parallel ranks."""
    part: int = 0
    shard: str | int | None = None

    @property
    def method(self) -> AdaptedLinearMethod:
        assert isinstance(self.layer.quant_method, AdaptedLinearMethod)
        return self.layer.quant_method


def install(model: nn.Module, vllm_config: VllmConfig, device: torch.device) -> dict[str, Place]:
    """Prepare each layer that `trainer.lora` selects, before the model is compiled. Return a `Place` for each checkpoint layer,
    by the layer's name. Layers whose weights other modules also use, as in MLA, are left out."""
    content = vllm_config.additional_config.get(CONFIG) if isinstance(vllm_config.additional_config, dict) else None
    if content is None:
        return {}
    config = LoraConfig.model_validate(content)
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    dtype = vllm_config.model_config.dtype
    assert isinstance(dtype, torch.dtype)
    like = torch.empty(0, dtype=dtype, device=device)
    attention = [m for m in model.modules() if is_deferred_attention_layer(m) and type(m) is not Attention]
    used_elsewhere = {id(inner) for module in attention for inner in module.modules()}
    places: dict[str, Place] = {}
    for name, layer in model.named_modules():
        if type(layer) not in LINEAR or id(layer) in used_elsewhere:
            continue
        owner, _, leaf = name.rpartition(".")
        parts = packed.get(leaf, [leaf])
        sizes = _part_sizes(layer)
        names = [f"{owner}.{part}" if owner else part for part in parts]
        targets = config.target_modules
        is_meant = targets == "all-linear" or any(f".{one}".endswith(f".{target}") for one in names for target in targets)
        if len(parts) not in (1, len(sizes)) or not is_meant:
            continue
        layer.quant_method = AdaptedLinearMethod(layer, layer.quant_method, len(parts), config, like)
        shards: list[Any] = ["q", "k", "v"] if isinstance(layer, QKVParallelLinear) else list(range(len(sizes)))
        for number, one in enumerate(names):
            rows = _whole_sizes(layer)[number] if len(parts) > 1 else layer.output_size
            places[one] = Place(layer, rows, number, shards[number] if len(parts) > 1 else None)
    return places


class AdapterLoader:
    """Stages new adapter factors A and B beside those in use, and copies them into place while generation is paused."""

    mode = "adapter"

    def __init__(self, model: nn.Module, places: dict[str, Place]) -> None:
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._mapper, self._places = mapper and mapper.get_rename_mapper(), places
        self._factors: dict[str, tuple[Place, bool]] = {}
        """By a factor's name: its `Place`, and True for a factor A or False for a factor B."""
        self._staged: dict[int, tuple[AdaptedLinearMethod, Tensor, Tensor]] = {}

    def check(self, manifest: Manifest) -> None:
        """Check that rank and scaling are those with which the engine started. Check all shapes by loading zeros."""
        specs, self._factors = {spec.name: tuple(spec.shape) for spec in manifest.parameters}, {}
        for item in manifest.low_rank:
            name = item.name.removesuffix(".weight")
            renamed = (self._mapper.apply_list([name]) or [name])[0] if self._mapper else name
            place = self._places.get(renamed) or self._places.get(name)
            if place is None:
                problem = "has an adapter that this engine cannot apply; leave the layer out of trainer.lora.target_modules"
                raise ManifestDiffers(item.name, problem)
            if specs[item.a][0] != place.method.rank:
                raise ManifestDiffers(item.name, "rank", place.method.rank, specs[item.a][0])
            if not math.isclose(item.scaling, place.method.scaling, rel_tol=1e-6):
                raise ManifestDiffers(item.name, "scaling", place.method.scaling, item.scaling)
            self._factors[item.a], self._factors[item.b] = (place, True), (place, False)
        try:
            self.load((name, torch.zeros(shape)) for name, shape in specs.items())
        except (AssertionError, ValueError, RuntimeError) as error:
            raise ManifestMismatch(f"the served model refuses this adapter: {error}") from error
        finally:
            self.drop()

    @torch.no_grad()
    def load(self, tensors: Iterable[Named]) -> None:
        self.drop()
        for name, tensor in tensors:
            self._stage(name, tensor)

    def _stage(self, name: str, tensor: Tensor) -> None:
        place, is_a = self._factors[name]
        method, layer = place.method, place.layer
        _, a, b = self._staged.setdefault(id(method), (method, torch.zeros_like(method.a), torch.zeros_like(method.b)))
        columns = slice(place.part * method.rank, (place.part + 1) * method.rank)
        whole = (method.rank, layer.input_size) if is_a else (place.rows, method.rank)
        if tensor.shape != whole:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, not {whole}")
        split = isinstance(layer, RowParallelLinear)
        if is_a and not split:
            a[columns] = tensor.to(a)
        elif split and not is_a:
            b.copy_(tensor)
        else:
            target = nn.Parameter(a if is_a else torch.zeros_like(b[:, columns]).contiguous(), requires_grad=False)
            set_weight_attrs(target, {"input_dim": 1} if is_a else {"output_dim": 0})
            shard = () if place.shard is None else (place.shard,)
            layer.weight_loader(target, tensor.to(a), *shard)  # type: ignore[operator]
            if not is_a:
                b[:, columns] = target

    @torch.no_grad()
    def swap(self) -> None:
        for method, a, b in self._staged.values():
            method.a.copy_(a)
            method.b.copy_(b)

    def drop(self) -> None:
        self._staged = {}
