"""Decoder layers compiled by `torch.compile`, each by itself and in place: names of weights stay as they are.

All layers share what is compiled for the first, so it costs seconds to a minute once, whatever the depth. Lengths of
packed rows differ, so shapes are dynamic. This project's attention runs as it is, between two compiled parts of the
layer: it works from a layout that no graph should depend on. Activation checkpointing wraps the compiled layer.

Not here: embedding, head and optimizer, which are a few large operations each. A copy of a model is not compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from pipelinerl.errors import FieldError
from services.trainer.learn.attention import VARLEN, decoder_layers, varlen_attention

FIELD = "trainer.compile"


def compile_layers(model: PreTrainedModel, device: torch.device) -> None:
    """Has every decoder layer of `model` compiled when it is first used, on `device`.

    Raises `FieldError` when nothing can be compiled here, or the model does not say what its layers are.
    """
    layers = decoder_layers(model)
    if not layers:
        fix = f"{type(model).__name__} has no list of layers to compile; set false"
        raise FieldError(FIELD, True, fix)
    _try_compiler(device)
    AttentionInterface.register(VARLEN, torch.compiler.disable(varlen_attention, reason="its layout differs by row"))
    for layer in layers:
        layer.compile(dynamic=True)


def _try_compiler(device: torch.device) -> None:
    """Compiles something small: whether a compiler works is known when it did."""

    def double(x: Tensor) -> Tensor:
        return 2 * x

    try:
        torch.compile(double)(torch.ones(8, device=device))
    except RuntimeError as error:
        needed = (
            "a C++ compiler (g++, or the one that CXX names)" if device.type == "cpu" else "Triton and a C compiler"
        )
        line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise FieldError(FIELD, True, f"torch.compile needs {needed}: install that, or set false ({line})") from error
