"""Takes the factors of adapters, and gives another loader whole weights: those of the checkpoint with B·A added.

The base is what the engine was started from, file for file and by vLLM's own reading. Safetensors files stay mapped: they take
no memory of their own, all processes of a machine share their pages, and the kernel may drop what nobody reads. So every loader
works as it does with weights from the wire; what differs is where most of their bytes come from.

It does not receive anything, and knows nothing of versions: what is loaded is a whole model each time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipelinerl.errors import ManifestMismatch
from pipelinerl.weights.errors import ManifestDiffers
from pipelinerl.weights.manifest import LowRank, Manifest
from pipelinerl_torch.low_rank import add_low_rank
from services.actor.weights.loading import Loader

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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
