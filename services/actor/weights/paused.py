"""Loads received weights while generation is paused, through vLLM's layerwise reload: for models that cannot be swapped.

The stall is the whole load, and all received tensors are held until then. See `shadow.py` for the better way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipelinerl.errors import TransferError
from pipelinerl.weights.manifest import Manifest

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
