"""What can be done with received tensors: three ways to get them into a vLLM model, one interface.

`ShadowLoader` (shadow.py) prepares them in the background and swaps; `InPlaceLoader` (in_place.py) prepares them in the
background and copies; `PausedLoader` (paused.py) keeps them and loads while generation is paused. `choose` says which one a
model allows, and why not a better one.

Takes the factors of adapters, and gives another loader whole weights: those of the checkpoint with B·A added.

The base is what the engine was started from, file for file and by vLLM's own reading. Safetensors files stay mapped: they take
no memory of their own, all processes of a machine share their pages, and the kernel may drop what nobody reads. So every loader
works as it does with weights from the wire; what differs is where most of their bytes come from.

It does not receive anything, and knows nothing of versions: what is loaded is a whole model each time.

Loads received weights while generation is paused, through vLLM's layerwise reload: for models that cannot be swapped.

The stall is the whole load, and all received tensors are held until then. See `shadow.py` for the better way.

Copies a shadow model's weights into the live ones where they lie: for CUDA graphs and compiled models, which hold addresses.

The shadow is filled and post-processed in the background, as for a swap; what is left for the pause is one copy of the weights
within the device. Sound where the live parameters are all that depends on the weights: post-processing must leave nothing else
on a module, and must give every parameter the layout that the live one has. `obstacle` finds out, by trying it on the shadow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from pipelinerl.errors import ManifestMismatch, TransferError
from pipelinerl.transfer.chunks import add_low_rank
from pipelinerl.transfer.manifest import LowRank, Manifest, ManifestDiffers
from services.actor.weight_sync.shadow_model import ShadowModel

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


class Loader(Protocol):
    """`mode` is reported; `load` and `drop` run on a background thread, `swap` on the engine's while it is paused."""

    mode: str

    def check(self, manifest: Manifest) -> None:
        """Raises ManifestMismatch when the model cannot take these parameters. Moves no weights."""
        ...

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take a whole version. After an error the loader is as if nothing had been loaded."""
        ...

    def swap(self) -> None:
        """Make the loaded version the live one; on a device, by what is queued on the caller's stream."""
        ...

    def drop(self) -> None:
        """Forget what is loaded but not live. Idempotent."""
        ...


def obstacle(model: torch.nn.Module, vllm_config: VllmConfig) -> str:
    """Why no second instance of this model can be prepared for it beside it; empty when one can.

    Quantised and MLA layers derive tensors elsewhere than on their own module.
    """
    from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if vllm_config.quant_config is not None:
        return "the model is quantised"
    if vllm_config.lora_config is not None or vllm_config.speculative_config is not None:
        return "LoRA or speculative decoding is on"
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            return f"{name} has weights of kind {type(method).__name__}"
        if is_deferred_attention_layer(module) and type(module) is not Attention:
            return f"{name} is attention of kind {type(module).__name__}"
    return ""


def held_addresses(vllm_config: VllmConfig) -> str:
    """What beside the modules knows where the weights lie; empty when nothing does."""
    from vllm.config import CompilationMode

    if vllm_config.compilation_config.mode != CompilationMode.NONE:
        return "the model is compiled (set enforce_eager)"
    if not vllm_config.model_config.enforce_eager:
        return "CUDA graphs hold the weights' addresses (set enforce_eager)"
    return ""


def choose(
    model: torch.nn.Module, vllm_config: VllmConfig, device: torch.device, force_paused: bool
) -> tuple[Loader, str]:
    """The loader for `model`, and why it is not the shadow one (empty when it is). Call it where no decode step runs."""
    from services.actor.weight_sync.shadow_model import ShadowLoader, ShadowModel

    reason = "asked for" if force_paused else obstacle(model, vllm_config)
    if reason:
        return PausedLoader(model, vllm_config, device), reason
    shadow = ShadowModel(model, vllm_config, device)
    if not (reason := held_addresses(vllm_config)):
        return ShadowLoader(shadow), ""
    in_place = InPlaceLoader(shadow)
    if problem := in_place.obstacle():
        return PausedLoader(model, vllm_config, device), f"{reason}; {problem}"
    return in_place, reason


Named = tuple[str, Tensor]


class MergingLoader:
    """See `loading.Loader`. `base`: the checkpoint's tensors; `device`: where sums are computed."""

    def __init__(self, within: Loader, base: Iterable[Named], manifest: Manifest, device: torch.device) -> None:
        self.mode = within.mode
        self._within, self._base, self._device = within, list(base), device
        self._adapted = {item.name: item for item in manifest.low_rank}

    def check(self, manifest: Manifest) -> None:
        """The rest of the model is what it started with, which its own loading has taken already."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self._base}
        for item in manifest.low_rank:
            if item.name not in shapes:
                fix = "set trainer.lora.send: merged"
                raise ManifestDiffers(item.name, "presence", f"not in the checkpoint of this actor ({fix})", "adapted")
            if shapes[item.name] != item.shape:
                raise ManifestDiffers(item.name, "shape", shapes[item.name], item.shape)

    def load(self, tensors: Iterable[Named]) -> None:
        factors = {name: tensor.clone() for name, tensor in tensors}  # clones: the chunks' memory is wanted back
        self._within.load(self._merged(factors))

    def swap(self) -> None:
        self._within.swap()

    def drop(self) -> None:
        self._within.drop()

    def _merged(self, factors: dict[str, Tensor]) -> Iterator[Named]:
        for name, tensor in self._base:
            item = self._adapted.get(name)
            yield name, tensor if item is None else self._sum(tensor, item, factors)

    def _sum(self, base: Tensor, item: LowRank, factors: dict[str, Tensor]) -> Tensor:
        weight = base.to(self._device, getattr(torch, item.dtype))
        a, b = (factors[name].to(self._device) for name in (item.a, item.b))
        return add_low_rank(weight, a, b, item.scaling, item.transposed)


def checkpoint_weights(model: nn.Module, vllm_config: VllmConfig) -> Iterator[Named]:
    """What vLLM has loaded `model` from, by the names of its files. Raises ManifestMismatch where that cannot be read again."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    quiet = dataclasses.replace(vllm_config.load_config, use_tqdm_on_load=False)
    loader = get_model_loader(quiet)
    if not isinstance(loader, DefaultModelLoader):
        kind = type(loader).__name__
        raise ManifestMismatch(f"adapters need a checkpoint to merge into, not {kind}: set trainer.lora.send: merged")
    return loader.get_all_weights(vllm_config.model_config, model)


class PausedLoader:
    """See `loading.Loader`."""

    mode = "paused"

    def __init__(self, live: nn.Module, vllm_config: VllmConfig, device: torch.device) -> None:
        self._live, self._model_config, self._device = live, vllm_config.model_config, device
        self._tensors: list[tuple[str, Tensor]] | None = None

    def check(self, manifest: Manifest) -> None:
        """Cannot tell before loading: the live model is the only instance there is."""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.drop()
        self._tensors = list(tensors)

    @torch.no_grad()
    def swap(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        if self._tensors is None:
            raise TransferError("nothing is loaded")
        with self._device:
            initialize_layerwise_reload(self._live)
            self._live.load_weights(iter(self._tensors))  # type: ignore[operator]
            finalize_layerwise_reload(self._live, self._model_config)
        _refresh_tied_heads(self._live)
        self.drop()

    def drop(self) -> None:
        self._tensors = None


def _refresh_tied_heads(model: nn.Module) -> None:
    """On CPU an embedding and a head tied to it each pack a copy of the weight; layerwise reload rebuilds only the first."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)


class InPlaceLoader:
    """See `loading.Loader`."""

    mode = "in_place"

    def __init__(self, shadow: ShadowModel) -> None:
        self._shadow = shadow
        self._loaded = False

    def obstacle(self) -> str:
        """Why this model cannot be updated in place; empty when it can. Takes the memory of an update meanwhile."""
        if tied := _tied_in_live_only(self._shadow):
            return tied
        try:
            self._shadow.post_process_nothing()
            for name, (live, shadow) in zip(self._shadow.names, self._shadow.pairs, strict=True):
                if problem := _difference(live, shadow, self._shadow.derived(shadow)):
                    return f"{name}: {problem}"
        finally:
            self._shadow.drop()
        return ""

    def check(self, manifest: Manifest) -> None:
        self._shadow.check(manifest)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._loaded = False
        self._shadow.load(tensors)
        self._loaded = True

    @torch.no_grad()
    def swap(self) -> None:
        """Queues the copies on the caller's stream; they are done when that is synchronised."""
        if not self._loaded:
            raise TransferError("nothing is loaded")
        copied: set[int] = set()
        for live, shadow in self._shadow.pairs:
            for name, parameter in live._parameters.items():
                if parameter is None or id(parameter) in copied:
                    continue
                new = shadow._parameters[name]
                assert new is not None
                assert _layout(new) == _layout(parameter), name
                parameter.copy_(new, non_blocking=True)
                copied.add(id(parameter))
        self._loaded = False

    def drop(self) -> None:
        self._loaded = False
        self._shadow.drop()


def _tied_in_live_only(shadow: ShadowModel) -> str:
    """vLLM ties equal embeddings and heads at start-up, also where the model's configuration does not: they may part."""
    counterparts: dict[int, int] = {}
    for name, (live, other) in zip(shadow.names, shadow.pairs, strict=True):
        for key, parameter in live._parameters.items():
            mine = id(other._parameters.get(key))
            if parameter is not None and counterparts.setdefault(id(parameter), mine) != mine:
                return f"{name}: {key} is tied in the live model only"
    return ""


def _difference(live: nn.Module, shadow: nn.Module, derived: list[str]) -> str:
    if hasattr(shadow, "quant_method"):
        for name in derived:
            if not _holds_nothing(shadow.__dict__[name]):
                return f"post-processing derives {name} from the weights"
    if live._parameters.keys() != shadow._parameters.keys():
        return f"parameters are {sorted(live._parameters)}, post-processing makes {sorted(shadow._parameters)}"
    for name, parameter in live._parameters.items():
        new = shadow._parameters[name]
        if (parameter is None) != (new is None):
            return f"{name} is there in one instance only"
        if parameter is not None and new is not None and _layout(parameter) != _layout(new):
            return f"{name} is laid out as {_layout(parameter)}, post-processing makes {_layout(new)}"
    return ""


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _holds_nothing(value: object) -> bool:
    """A function without a closure computes from what it is given: it cannot hold weights."""
    return isinstance(value, FunctionType) and not value.__closure__ and not value.__defaults__
