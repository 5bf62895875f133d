"""Swaps a shadow model with the live one, module by module: where the modules alone hold what depends on the weights.

A swap exchanges parameters and whatever post-processing left on a module (on CPU: the closure `cpu_linear` over a packed oneDNN
weight); KV caches, attention state and module identity stay with the live modules.

Not for quantised, compiled or CUDA-graph models (`loading.obstacle`, `in_place.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from pipelinerl.weights.manifest import Manifest
from services.actor.weights.shadow_model import ShadowModel


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
