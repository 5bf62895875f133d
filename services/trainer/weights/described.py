"""What will be sent of a model, as a manifest: all its weights as actors load them, or the factors of its adapters.

Reads names, shapes and dtypes only, so that one rank can do it alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedModel

from pipelinerl.weights.manifest import LowRank, Manifest, build_manifest
from pipelinerl_torch.chunks import describe, dtype_name
from services.trainer.learn.lora import LayerAdapter, layer_adapters
from services.trainer.learn.weights import factor_names, served_parameters


def whole_weights(model: PreTrainedModel, *, wire_dtype: str, chunk_bytes: int) -> Manifest:
    """Of `served_weights`."""
    return describe(served_parameters(model), wire_dtype=wire_dtype, chunk_bytes=chunk_bytes)


def adapter_factors(model: PreTrainedModel, *, wire_dtype: str, chunk_bytes: int) -> Manifest:
    """Of `adapter_weights`, and what receivers are to do with them."""
    adapters = layer_adapters(model)
    factors = (factor for name, adapter in adapters.items() for factor in _factors(name, adapter))
    low_rank = (_low_rank(name, adapter) for name, adapter in adapters.items())
    return build_manifest(factors, wire_dtype=wire_dtype, chunk_bytes=chunk_bytes, low_rank=low_rank)


def _factors(name: str, adapter: LayerAdapter) -> Iterator[tuple[str, tuple[int, ...], str]]:
    for factor_name, factor in zip(factor_names(name), (adapter.a, adapter.b), strict=True):
        yield factor_name, tuple(factor.shape), dtype_name(adapter.weight.dtype)


def _low_rank(name: str, adapter: LayerAdapter) -> LowRank:
    a, b = factor_names(name)
    shape, dtype = tuple(adapter.weight.shape), dtype_name(adapter.weight.dtype)
    return LowRank(f"{name}.weight", shape, dtype, a, b, adapter.scaling, adapter.transposed)
