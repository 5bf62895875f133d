"""The repeated blocks of a decoder-only model: what is sharded, compiled and recomputed one by one."""

from __future__ import annotations

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """In order of depth: what transformers marks as its layers, else the longest list of modules; empty without one."""
    marked: list[nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return marked or max(lists, key=len, default=[])
