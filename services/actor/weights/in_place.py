"""Copies a shadow model's weights into the live ones where they lie: for CUDA graphs and compiled models, which hold addresses.

The shadow is filled and post-processed in the background, as for a swap; what is left for the pause is one copy of the weights
within the device. Sound where the live parameters are all that depends on the weights: post-processing must leave nothing else
on a module, and must give every parameter the layout that the live one has. `obstacle` finds out, by trying it on the shadow.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from pipelinerl.errors import TransferError
from pipelinerl.weights.manifest import Manifest
from services.actor.weights.shadow_model import ShadowModel


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
