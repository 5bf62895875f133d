"""Model FLOPs: what a step's mathematics needs, from a model's configuration, and the share of the peak that it reaches.

Matrix products only, a multiply-add counting 2: projections, feed-forward layers (of a mixture of experts, those that a token
visits), attention over the pairs that a causal query sees, and the head where a token is predicted. A training step counts
three forward passes, one for the forward and two for the backward pass, also where activations are computed again: model
FLOPs utilization as in PaLM, arXiv 2204.02311, appendix B. Its formula counts attention without the causal half; here the
pairs that no kernel needs are left out, so the figure is the lower one.

Where only adapters are trained it counts two of the three in frozen products.

Not here: norms, activations, optimizer, and forward passes beside training's (a KL reference). They take time and count
nothing. What a device could do: `devices.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from pipelinerl.algorithms.step_cost import CostModel

TRAINING_PASSES = 3
"""Forward passes that a training step is worth."""

GATED_MODELS = frozenset(
    {
        "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
        "granite", "hunyuan_v1_dense", "llama", "ministral", "mistral", "mixtral", "olmo", "olmo2", "olmo3",
        "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    }
)  # fmt: skip
"""Values of `model_type` whose layers are known: grouped-query attention and a feed-forward layer of three matrices."""


def model_flops(config: PretrainedConfig, num_parameters: int) -> CostModel:
    """FLOPs of one forward pass of a decoder-only model, as a function of sequence lengths.

    An architecture that is not known here costs twice its `num_parameters` (a tied embedding once) for each token:
    attention is left out, and of a mixture of experts all experts count.
    """
    text: Any = config.get_text_config()
    if text.model_type not in GATED_MODELS:
        return CostModel(per_token=2.0 * num_parameters)
    hidden, heads = text.hidden_size, text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    attention = 2 * hidden * head_dim * (heads + key_value_heads)
    windowed = _windowed_layers(text)
    per_pair = 4 * heads * head_dim
    return CostModel(
        per_token=2.0 * (text.num_hidden_layers * attention + sum(_feed_forward(text))),
        per_output_token=2.0 * hidden * text.vocab_size,
        per_pair=float(per_pair * (text.num_hidden_layers - windowed)),
        per_windowed_pair=float(per_pair * windowed),
        window=text.sliding_window if windowed else 0,
    )


def frozen_flops(forward: CostModel, num_trained: int) -> CostModel:
    """A third of what a training step costs where all weights of `forward` are frozen but for `num_trained` in adapters.

    No gradient of frozen weights is computed: two passes in their matrix products instead of three. Adapters are met by every
    token, and attention, which has no weights, costs what it did.
    """
    share = (TRAINING_PASSES - 1) / TRAINING_PASSES
    return replace(
        forward,
        per_token=share * forward.per_token + 2.0 * num_trained,
        per_output_token=share * forward.per_output_token,
    )


def _windowed_layers(text: Any) -> int:
    """Layers that see the last `sliding_window` tokens only."""
    if not getattr(text, "sliding_window", None) or not getattr(text, "use_sliding_window", True):
        return 0
    kinds: Sequence[str] | None = getattr(text, "layer_types", None)
    return text.num_hidden_layers if kinds is None else sum(kind == "sliding_attention" for kind in kinds)


def _feed_forward(text: Any) -> list[int]:
    """Weights of each layer's feed-forward part that one token meets."""
    dense = 3 * text.hidden_size * text.intermediate_size
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    if not experts:
        return [dense] * text.num_hidden_layers
    expert_size = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    shared_size = getattr(text, "shared_expert_intermediate_size", None) or 0
    shared = 3 * shared_size * text.hidden_size + (text.hidden_size if shared_size else 0)
    sparse = 3 * text.hidden_size * expert_size * text.num_experts_per_tok + shared + text.hidden_size * experts
    every, dense_layers = getattr(text, "decoder_sparse_step", 1), getattr(text, "mlp_only_layers", None) or []
    return [
        dense if layer in dense_layers or (layer + 1) % every else sparse for layer in range(text.num_hidden_layers)
    ]


def training_flops(cost_model: CostModel, lengths: Sequence[int], outputs: Sequence[int]) -> float:
    """Model FLOPs of one optimizer step on sequences of `lengths` tokens, of which `outputs` are predicted."""
    return TRAINING_PASSES * float(cost_model.of(lengths, outputs).sum())


def mfu(flops: float, seconds: float, num_devices: int, peak: float | None) -> float | None:
    """Model FLOPs utilization: `flops` in `seconds` over what `num_devices` of `peak` FLOP/s each could do.

    None where the peak is not known or no time has passed.
    """
    if peak is None or seconds <= 0:
        return None
    return flops / (seconds * num_devices * peak)
