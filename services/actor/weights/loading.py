"""What can be done with received tensors: three ways to get them into a vLLM model, one interface.

`ShadowLoader` (shadow.py) prepares them in the background and swaps; `InPlaceLoader` (in_place.py) prepares them in the
background and copies; `PausedLoader` (paused.py) keeps them and loads while generation is paused. `choose` says which one a
model allows, and why not a better one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from pipelinerl.weights.manifest import Manifest

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
    from services.actor.weights.in_place import InPlaceLoader
    from services.actor.weights.paused import PausedLoader
    from services.actor.weights.shadow import ShadowLoader
    from services.actor.weights.shadow_model import ShadowModel

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
