"""A second instance of the served model, built, filled and post-processed by vLLM's own code beside the live one.

Built by vLLM's own model class, filled by its own `load_weights` and finished by its own post-processing, as at start-up:
fused, packed and tied weights come out right by construction. Between updates it holds no memory: its parameters are on `meta`.

How its weights become the live ones is for the loaders (`shadow.py`, `in_place.py`); it does not receive anything.

Swaps a shadow model with the live one, module by module: where the modules alone hold what depends on the weights.

A swap exchanges parameters and whatever post-processing left on a module (on CPU: the closure `cpu_linear` over a packed oneDNN
weight); KV caches, attention state and module identity stay with the live modules.

Not for quantised, compiled or CUDA-graph models (`loading.obstacle`, `in_place.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipelinerl.errors import ManifestMismatch
from pipelinerl.transfer.manifest import Manifest, ManifestDiffers

if TYPE_CHECKING:
    from vllm.config import VllmConfig


Blueprint = list[tuple[nn.Module, str, Tensor]]
"""(module, attribute, parameter on `meta`): a tied parameter occurs several times as the same object."""


class ShadowModel:
    """See the module. Construct it where no decode step runs: building a model sets torch's default dtype.

    `pairs`: every live module with its shadow; `names`: theirs, in the same order.
    """

    def __init__(self, live: nn.Module, vllm_config: VllmConfig, device: torch.device) -> None:
        self._model_config = vllm_config.model_config
        self._device = device
        self._model = _build(vllm_config, device)
        self.pairs = _pair_up(live, self._model)
        self.names = [name for name, _ in live.named_modules()]
        self._pristine = {shadow: dict(shadow.__dict__) for _, shadow in self.pairs}
        self._blueprint = _blueprint(self._model)
        self.drop()

    def check(self, manifest: Manifest) -> None:
        """Runs the model's own loading on `meta` tensors: names, shapes, and that every element is written. No memory."""
        heads = [spec.name for spec in manifest.parameters if spec.name.endswith("lm_head.weight")]
        if heads and getattr(self._model_config.hf_config, "tie_word_embeddings", False):
            raise ManifestDiffers(heads[0], "presence", "tied to the embedding", "sent")
        tensors = (
            (spec.name, torch.empty(spec.shape, dtype=getattr(torch, manifest.sent_dtype(spec)), device="meta"))
            for spec in manifest.parameters
        )
        needed = sum(parameter.numel() for parameter in self._model.parameters())
        written = _WrittenElements()
        try:
            with written:
                self._fill(tensors)
        except (AssertionError, KeyError, ValueError, RuntimeError, AttributeError) as error:
            raise ManifestMismatch(
                f"the served model refuses these weights: {type(error).__name__}: {error}"
            ) from error
        finally:
            self.drop()
        if written.count < needed:  # such as a fused qkv of which only q is sent
            raise ManifestDiffers("(manifest)", "number of elements", needed, written.count)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take a whole version and finish it. After an error it is as if nothing had been loaded."""
        try:
            self._materialise()
            self._fill(tensors)
            self._finish()
        except BaseException:
            self.drop()
            raise

    def post_process_nothing(self) -> None:
        """Post-process weights that hold no values: shows what post-processing makes of them. `drop` them afterwards."""
        self._materialise()
        self._finish()

    def drop(self) -> None:
        """Forget what is loaded. Idempotent."""
        for _, shadow in self.pairs:
            for name in self.derived(shadow):
                del shadow.__dict__[name]
        for module, name, meta in self._blueprint:
            module.register_parameter(name, meta)  # type: ignore[arg-type]

    def derived(self, shadow: nn.Module) -> list[str]:
        """Attributes that post-processing added to a module since it was built."""
        return [name for name in shadow.__dict__ if name not in self._pristine[shadow]]

    def _materialise(self) -> None:
        self.drop()
        new: dict[int, Tensor] = {}
        for module, name, meta in self._blueprint:
            if id(meta) not in new:
                new[id(meta)] = _materialise(meta, self._device)
            module.register_parameter(name, new[id(meta)])  # type: ignore[arg-type]

    @torch.no_grad()
    def _fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        expected = {name for name, _ in self._model.named_parameters()}
        iterator = iter(tensors)
        loaded = self._model.load_weights(iterator)  # type: ignore[operator]
        for name, _ in iterator:  # a model may stop early; the stream must be taken to its end
            raise ManifestDiffers(name, "presence", "unused", "present")
        if missing := sorted(expected - set(loaded)):
            raise ManifestDiffers(missing[0], "presence", "needed", "missing")

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

    # Layers register by name for the forward pass and for KV caches; the shadow's must not be found there.
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.mode = CompilationMode.NONE  # it never runs
    dtype = vllm_config.model_config.dtype
    assert isinstance(dtype, torch.dtype)  # resolved from "auto" by now
    with set_default_torch_dtype(dtype), device:
        return initialize_model(vllm_config=config).eval()


def _pair_up(live: nn.Module, shadow: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    pairs = []
    for (name, mine), (other_name, other) in zip(live.named_modules(), shadow.named_modules(), strict=True):
        assert name == other_name, (name, other_name)
        assert type(mine) is type(other), name
        pairs.append((mine, other))
    return pairs


def _blueprint(model: nn.Module) -> Blueprint:
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

    metas: dict[int, Tensor] = {}
    found = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in metas:
                    metas[id(parameter)] = to_meta_tensor(parameter)
                found.append((module, name, metas[id(parameter)]))
    return found


def _materialise(meta: Tensor, device: torch.device) -> Tensor:
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

    with device:
        return materialize_meta_tensor(meta)


class ShadowLoader:
    """See `loading.Loader`."""

    mode = "shadow"

    def __init__(self, shadow: ShadowModel) -> None:
        self._shadow = shadow

    def check(self, manifest: Manifest) -> None:
        self._shadow.check(manifest)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._shadow.load(tensors)

    def swap(self) -> None:
        for live, shadow in self._shadow.pairs:
            _exchange(live._parameters, shadow._parameters, shadow._parameters.keys())
            if hasattr(shadow, "quant_method"):
                _exchange(live.__dict__, shadow.__dict__, self._shadow.derived(shadow))

    def drop(self) -> None:
        self._shadow.drop()


def _exchange(left: dict[str, Any], right: dict[str, Any], names: Iterable[str]) -> None:
    for name in list(names):
        left[name], right[name] = right[name], left[name]
