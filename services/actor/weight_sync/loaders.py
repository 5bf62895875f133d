"""Loaders that put received tensors into a vLLM model. Each load brings a whole version of the weights.

`choose` prefers the `ShadowLoader`. CUDA graphs and compiled models hold the addresses of weights, and need an `InPlaceLoader`.
`PausedLoader` is for models that allow neither, and for devices without room for a second instance of the model.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipelinerl.errors import ManifestMismatch
from pipelinerl.rl.memory import GIB, UPDATE_GIB, update_bytes
from pipelinerl.transfer.manifest import Manifest, ManifestDiffers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.parallel_state import GroupCoordinator

log = logging.getLogger(__name__)

Named = tuple[str, Tensor]


class Loader(Protocol):
    """`load` and `drop` run on a background thread, `swap` on the engine's thread. `mode` is the loader's name in reports."""

    mode: str

    def check(self, manifest: Manifest) -> None:
        """Raise ManifestMismatch if the model cannot take these parameters. Moves no weights."""

    def load(self, tensors: Iterable[Named]) -> None:
        """Load a whole version. After an error, the caller must call `drop`."""

    def swap(self) -> None:
        """Make the loaded version live. On a GPU, queue work on the caller's stream, and free no memory that the work reads."""

    def drop(self) -> None:
        """Drop a version that is loaded or partly loaded, but not live. Idempotent."""


def no_room(device: torch.device, share: float, *, weights: int = 0, layer: int = 0) -> str:
    """Return why an update does not fit on a GPU beside an engine that has `share` of the GPU's memory; empty if it fits. If
    only the memory for receiving is lacking, log a warning and return "". `weights`: bytes of a second instance of the weights.
    `layer`: bytes of the largest decoder layer, for a paused load."""
    if device.type != "cuda":
        return ""
    (free, total), needed = device_room(device), update_bytes(weights, layer)
    if needed <= free:
        return ""
    most = max(0.0, math.floor(100 * (share - (needed - free) / total)) / 100)
    held = "twice the largest layer" if layer else "a second copy of the weights"
    fix = "" if layer else ", or raise actor.engine.tensor_parallel_size"
    shortage = (
        f"{free / GIB:.1f} of {total / GIB:.1f} GiB of GPU memory are free outside vLLM, but a weight update needs "
        f"{needed / GIB:.1f}: {needed / GIB - UPDATE_GIB:.1f} for {held} and {UPDATE_GIB:g} for receiving. Set "
        f"actor.engine.gpu_memory_utilization to at most {most}{fix}"
    )
    if free < weights + 2 * layer:
        return shortage
    log.warning("%s", shortage)
    return ""


def device_room(device: torch.device) -> tuple[int, int]:
    """Return the free bytes of a GPU, including torch's cache, and its total bytes."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def host_room() -> int:
    """Return the available bytes of host memory, within the container's limit."""
    available = int(re.findall(r"MemAvailable: +(\d+) kB", (PROC / "meminfo").read_text())[0]) * 1024
    own = (PROC / "self/cgroup").read_text().rpartition("::")[2].strip() if (PROC / "self/cgroup").exists() else "/"
    for folder in (CGROUP / own.lstrip("/"), *(CGROUP / own.lstrip("/")).parents):  # any ancestor may have a limit
        with suppress(OSError, ValueError):  # without cgroup v2, or a limit of "max"
            limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            available = min(available, limit - used + int(counts.get("inactive_file", 0)))
    return available


def largest_layer(manifest: Manifest) -> int:
    """Return the bytes on the wire of the largest decoder layer, or of a parameter outside the layers if that is larger."""
    sizes = Counter[str]()
    for spec, num_bytes in zip(manifest.parameters, manifest.sizes, strict=True):
        sizes[re.sub(r"(\.\d+\.).*", r"\1", spec.name)] += num_bytes  # "model.layers.0." for all parameters of that layer
    return max(sizes.values())


def choose(live: nn.Module, vllm_config: VllmConfig, device: torch.device, force_paused: bool) -> tuple[Loader, str]:
    """Return the loader for `live`, and why it is not the shadow loader ("" if it is). Must not run during a decode step."""
    from vllm.config import CompilationMode
    from vllm.distributed.parallel_state import get_tp_group

    weights = sum(parameter.numel() * parameter.element_size() for parameter in live.parameters())
    lacking = no_room(device, vllm_config.cache_config.gpu_memory_utilization, weights=weights)
    reason, peers = "requested" if force_paused else shadow_obstacle(live, vllm_config) or lacking, get_tp_group()
    reason = _of_any_rank(reason, peers)
    if not reason:
        if vllm_config.compilation_config.mode != CompilationMode.NONE:
            reason = "the model is compiled (set enforce_eager)"
        elif not vllm_config.model_config.enforce_eager:
            reason = "CUDA graphs hold the weights' addresses (set enforce_eager)"
        elif vllm_config.model_config.enable_sleep_mode:
            reason = "sleep frees only the memory of the engine's first weights"
        else:
            return ShadowLoader(live, vllm_config, device), ""
        in_place = InPlaceLoader(live, vllm_config, device)
        if not (problem := _of_any_rank(in_place.obstacle(), peers)):
            return in_place, reason
        reason = f"{reason}; {problem}"
    return PausedLoader(live, vllm_config, device, peers), reason


def _of_any_rank(reason: str, peers: Any) -> str:
    """Return `reason`, or a general one if only another rank has a reason, or "". All ranks must call this."""
    there = torch.tensor(int(bool(reason)))
    torch.distributed.all_reduce(there, torch.distributed.ReduceOp.MAX, group=peers.cpu_group)
    return reason or ("another rank of this actor cannot prepare weights while it generates" if there else "")


def shadow_obstacle(model: nn.Module, vllm_config: VllmConfig) -> str:
    """Return why a second instance of this model cannot be prepared in the background; empty if it can. For example, quantised
    layers and MLA prevent it, because they keep derived tensors outside their own module."""
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from services.actor.weight_sync.adapters import AdaptedLinearMethod

    if vllm_config.quant_config is not None:
        return "the model is quantised"
    if vllm_config.lora_config is not None or vllm_config.speculative_config is not None:
        return "LoRA or speculative decoding is on"
    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        method = method.plain if isinstance(method, AdaptedLinearMethod) else method
        if method is not None and type(method) not in plain:
            return f"{name} has weights of kind {type(method).__name__}"
        if is_deferred_attention_layer(module) and type(module) is not Attention:
            return f"{name} is attention of kind {type(module).__name__}"
        if problem := _routing_obstacle(module):
            return f"{name} {problem}"
    return ""


def _routing_obstacle(module: nn.Module) -> str:
    """Return why a swap would leave the routing of a mixture of experts stale; empty if it would not."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    if not isinstance(module, MoERunner):
        return ""
    if module.gate is not None and module.shared_expert_gate is not None:
        return "merges two gates into one weight at its first use"
    held = [name for name, value in vars(module.router).items() if isinstance(value, Tensor)]
    return f"has a router that holds {held[0]}" if held else ""


def _kernel_of(module: nn.Module) -> dict[str, Any] | None:
    """Return the `quant_method.__dict__` of an unquantised expert layer, which holds `_KERNEL`; None for other modules."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method = getattr(module, "quant_method", None)
    return vars(method) if isinstance(method, UnquantizedFusedMoEMethod) else None


_KERNEL = ("moe_kernel", "moe_quant_config")
"""Attributes that post-processing sets on an expert layer's `quant_method`. They are set to None before a load, because vLLM on
CPU converts new weights to the kernel's layout only if no kernel is set."""


class ShadowLoader:
    """Prepares a second instance of the served model, the shadow, and exchanges its weights with the live ones.

    vLLM loads and post-processes the shadow as at start-up, so that fused, packed and tied weights are correct. Between updates
    the shadow's parameters are on `meta` and take no memory. A swap leaves KV caches and attention state with the live modules.
    Construct this loader between decode steps, because building a model sets torch's default dtype."""

    mode = "shadow"
    _swaps = 0

    def __init__(self, live: nn.Module, vllm_config: VllmConfig, device: torch.device) -> None:
        from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

        self._model_config, self._device = vllm_config.model_config, device
        self._model = _build(vllm_config, device)
        self.pairs: dict[str, tuple[nn.Module, nn.Module]] = {}
        """Live module and shadow, by the module's name."""
        for (name, mine), (other_name, other) in zip(live.named_modules(), self._model.named_modules(), strict=True):
            assert name == other_name, (name, other_name)
            assert type(mine) is type(other), name
            self.pairs[name] = (mine, other)
        self._pristine = {shadow: dict(shadow.__dict__) for _, shadow in self.pairs.values()}
        kernels = ((_kernel_of(mine), _kernel_of(other)) for mine, other in self.pairs.values())
        self._kernels = [(mine, other) for mine, other in kernels if mine is not None and other is not None]
        # `_blueprint` has (module, attribute, parameter on `meta`). A tied parameter occurs several times as the same object.
        metas = {id(parameter): to_meta_tensor(parameter) for parameter in self._model.parameters()}
        self._blueprint: list[tuple[nn.Module, str, Tensor]] = [
            (module, name, metas[id(parameter)])
            for module in self._model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self.drop()

    def check(self, manifest: Manifest) -> None:
        """Load `meta` tensors, which take no memory, to check names and shapes and that every element is written."""
        from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

        heads = [spec.name for spec in manifest.parameters if spec.name.endswith("lm_head.weight")]
        if heads and getattr(self._model_config.hf_config, "tie_word_embeddings", False):
            raise ManifestDiffers(heads[0], "is sent, but the model here uses its embedding as the head (tie_word_embeddings)")
        tensors = (
            (spec.name, torch.empty(tuple(spec.shape), dtype=getattr(torch, manifest.sent_dtype(spec)), device="meta"))
            for spec in manifest.parameters
        )
        needed = sum(get_tensor_load_numel(parameter) for parameter in self._model.parameters())  # padding is not sent
        written = _WrittenElements()
        try:
            with written:
                self._fill(tensors)
        except (AssertionError, KeyError, ValueError, RuntimeError, AttributeError) as error:
            raise ManifestMismatch(f"the served model refuses these weights: {type(error).__name__}: {error}") from error
        finally:
            self.drop()
        if written.count < needed:  # for example, only q of a fused qkv is sent
            raise ManifestDiffers("(manifest)", "number of elements", needed, written.count)

    def load(self, tensors: Iterable[Named]) -> None:
        self._materialise()
        self._fill(tensors)
        self._finish()

    def swap(self) -> None:
        for live, shadow in self.pairs.values():
            _exchange(live._parameters, shadow._parameters, shadow._parameters.keys())
            if hasattr(shadow, "quant_method"):
                _exchange(live.__dict__, shadow.__dict__, self.derived(shadow))
        for live_kernel, shadow_kernel in self._kernels:
            _exchange(live_kernel, shadow_kernel, _KERNEL)
        self._swaps += 1

    def drop(self) -> None:
        for _, shadow in self.pairs.values():
            for name in self.derived(shadow):
                del shadow.__dict__[name]
        for _, shadow_kernel in self._kernels:
            shadow_kernel.update(dict.fromkeys(_KERNEL))
        for module, name, meta in self._blueprint:
            module.register_parameter(name, meta)  # type: ignore[arg-type]
        if self._swaps == 1 and self._device.type == "cuda":
            # torch caches the memory of the first weights for the stream that loaded them; updates use another stream.
            torch.cuda.empty_cache()

    def derived(self, shadow: nn.Module) -> list[str]:
        """Return the names of the attributes that post-processing added to a module."""
        return [name for name in shadow.__dict__ if name not in self._pristine[shadow]]

    def _materialise(self) -> None:
        from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

        self.drop()
        new: dict[int, Tensor] = {}
        for module, name, meta in self._blueprint:
            if id(meta) not in new:
                with self._device:
                    new[id(meta)] = materialize_meta_tensor(meta)
            module.register_parameter(name, new[id(meta)])  # type: ignore[arg-type]

    @torch.no_grad()
    def _fill(self, tensors: Iterable[Named]) -> None:
        expected = {name for name, _ in self._model.named_parameters()}
        iterator = iter(tensors)
        loaded = self._model.load_weights(iterator)  # type: ignore[operator]
        for name, _ in iterator:  # read the stream to its end; a tensor that is left was not used
            raise ManifestDiffers(name, "the manifest has this parameter, but the model here does not use it")
        if missing := sorted(expected - set(loaded)):
            raise ManifestDiffers(missing[0], "the model here needs this parameter, but the manifest lacks it")

    @torch.no_grad()
    def _finish(self) -> None:
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        process_weights_after_loading(self._model, self._model_config, self._device)


class _WrittenElements(TorchDispatchMode):
    """Counts the elements that in-place copies and fills write."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def _build(vllm_config: VllmConfig, device: torch.device) -> nn.Module:
    from vllm.config import CompilationMode
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    # Layers register by name for the forward pass and for KV caches. The shadow's layers have the same names as the live ones.
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    config.compilation_config.mode = CompilationMode.NONE  # the shadow never runs
    dtype = vllm_config.model_config.dtype
    assert isinstance(dtype, torch.dtype)  # resolved from "auto" by now
    with set_default_torch_dtype(dtype), device:
        return initialize_model(vllm_config=config).eval()


def _exchange(left: dict[str, Any], right: dict[str, Any], names: Iterable[str]) -> None:
    for name in list(names):
        left[name], right[name] = right[name], left[name]


class InPlaceLoader(ShadowLoader):
    """Copies the shadow's weights into the live ones. The pause lasts for one copy within the device. vLLM's post-processing
    must change only parameters, and give each parameter the layout of the live parameter. `obstacle` checks this condition."""

    mode = "in_place"

    def obstacle(self) -> str:
        """Return why this model cannot be updated in place; empty if it can. Temporarily takes as much memory as an update."""
        if tied := self._tied_in_live_only():
            return tied
        try:
            self._materialise()  # any values, because only the layout after post-processing matters
            self._finish()
            for name, (live, shadow) in self.pairs.items():
                if problem := _difference(live, shadow, self.derived(shadow)):
                    return f"{name}: {problem}"
        finally:
            self.drop()
            if self._device.type == "cuda":  # torch caches this memory for this stream; updates load on another one
                torch.cuda.empty_cache()
        return ""

    @torch.no_grad()
    def swap(self) -> None:
        """Queue copies from shadow to live weights on the caller's stream. The caller must then synchronise this stream."""
        pairs = [(live._parameters, shadow._parameters) for live, shadow in self.pairs.values()]
        new = {parameter: shadow[name] for live, shadow in pairs for name, parameter in live.items()}  # tied ones occur once
        for parameter, replacement in new.items():
            if parameter is not None:
                assert replacement is not None
                assert _layout(replacement) == _layout(parameter)
                parameter.copy_(replacement, non_blocking=True)

    def _tied_in_live_only(self) -> str:
        """Describe the first weight that is tied only in the live model; empty if none is. vLLM ties an embedding and a head
        with equal initial values, which an update may make different."""
        counterparts: dict[int, int] = {}
        for name, (live, other) in self.pairs.items():
            for key, parameter in live._parameters.items():
                mine = id(other._parameters.get(key))
                if parameter is not None and counterparts.setdefault(id(parameter), mine) != mine:
                    return f"{name}: {key} is tied in the live model only"
        return ""


def _difference(live: nn.Module, shadow: nn.Module, derived: list[str]) -> str:
    if hasattr(shadow, "quant_method"):
        for name in derived:
            value = shadow.__dict__[name]
            # A function without a closure or defaults cannot hold weights.
            if not isinstance(value, FunctionType) or value.__closure__ or value.__defaults__:
                return f"post-processing derives {name} from the weights"
    if live._parameters.keys() != shadow._parameters.keys():
        return f"has the parameters {sorted(live._parameters)}, but post-processing makes {sorted(shadow._parameters)}"
    for name, parameter in live._parameters.items():
        new = shadow._parameters[name]
        if (parameter is None) != (new is None):
            return f"{name} exists in only one instance"
        if parameter is not None and new is not None and _layout(parameter) != _layout(new):
            return f"{name} has the layout {_layout(parameter)}, but post-processing makes {_layout(new)}"
    return ""


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


class PausedLoader:
    """Loads while generation is paused, with vLLM's layerwise reload, which takes GPU memory for two layers.

    Until the pause, each tensor-parallel rank (`peers`) keeps a share of the received tensors, on its GPU or, if that lacks
    room, in host memory. During the pause, it sends them to the other ranks."""

    mode = "paused"

    def __init__(self, live: nn.Module, config: VllmConfig, device: torch.device, peers: GroupCoordinator) -> None:
        self._live, self._config, self._device, self._peers = live, config, device, peers
        self._layout: dict[str, tuple[Tensor, int]] = {}
        """By parameter name, in the manifest's order: a tensor on `meta`, and the rank that keeps the parameter."""
        self._kept: dict[str, Tensor] = {}

    def check(self, manifest: Manifest) -> None:
        """Decide where tensors are kept. Raises ManifestMismatch if memory is lacking. Wrong names or shapes fail in `swap`."""
        self.drop()
        self._layout, kept = {}, 0
        for spec, offset, num_bytes in zip(manifest.parameters, manifest.offsets, manifest.sizes, strict=True):
            dtype, keeper = getattr(torch, manifest.sent_dtype(spec)), offset * self._peers.world_size // manifest.total_bytes
            self._layout[spec.name] = torch.empty(tuple(spec.shape), dtype=dtype, device="meta"), keeper
            kept += num_bytes * (keeper == self._peers.rank_in_group)
        layer = largest_layer(manifest)
        if self._device.type == "cuda" and update_bytes(kept, layer) <= device_room(self._device)[0]:
            self._kept_on = self._device
            return
        self._kept_on = torch.device("cpu")
        problem = no_room(self._device, self._config.cache_config.gpu_memory_utilization, layer=layer)
        if not problem and (room := host_room()) < manifest.total_bytes:
            needed = f"a weight update needs {manifest.total_bytes / GIB:.1f} GiB of host memory for received weights"
            problem = f"{needed}, but {room / GIB:.1f} are available: give this actor more memory"
        if problem:
            raise ManifestMismatch(problem)

    def load(self, tensors: Iterable[Named]) -> None:
        self.drop()
        mine = ((name, tensor) for name, tensor in tensors if self._layout[name][1] == self._peers.rank_in_group)
        self._kept = {name: tensor.to(self._kept_on, copy=True) for name, tensor in mine}  # a view would keep its whole chunk

    @torch.no_grad()
    def swap(self) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        if self._device.type == "cpu":  # otherwise vLLM would not convert new experts from the checkpoint's layout
            for kernel in filter(None, map(_kernel_of, self._live.modules())):
                kernel.update(dict.fromkeys(_KERNEL))
        with self._device:
            initialize_layerwise_reload(self._live)
            tensors = self._from_all_ranks()
            try:
                self._live.load_weights(tensors)  # type: ignore[operator]
            finally:
                deque(tensors, maxlen=0)  # the other ranks wait for this rank's tensors, even if loading fails here
            finalize_layerwise_reload(self._live, self._config.model_config)
        # On CPU an embedding and a head tied to it each pack a copy of the weight; layerwise reload rebuilds only the first.
        for module in self._live.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(module)

    def drop(self) -> None:
        self._kept = {}

    def _from_all_ranks(self) -> Iterator[Named]:
        """Yield all received tensors in the manifest's order, each from the rank that kept it. All ranks iterate together."""
        for name, (form, keeper) in self._layout.items():
            tensor = self._kept.get(name)
            if self._peers.world_size > 1:
                tensor = torch.empty_like(form, device=self._device) if tensor is None else tensor.to(self._device)
                self._peers.broadcast(tensor, keeper)
            assert tensor is not None
            yield name, tensor
            del tensor
