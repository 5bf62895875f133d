"""FLOPs of several architectures against torch's own count, and the share of a peak."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Gemma2Config, PretrainedConfig, Qwen2Config

from pipelinerl.rl.memory import peak_flops
from pipelinerl.rl.packing import CostModel
from services.trainer.learn.meter import cost_model_of

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config_of(model_type: str, **fields: Any) -> PretrainedConfig:
    return CONFIG_MAPPING[model_type](**SMALL | fields)


def cost_of(config: PretrainedConfig) -> CostModel:
    """Return the cost of a model that takes no memory."""
    with torch.device("meta"):
        return cost_model_of(AutoModelForCausalLM.from_config(config))


EXPERTS = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        *((name, {}) for name in ("gemma2", "glm4", "llama", "mistral", "olmo3", "phi", "phi3", "qwen2", "qwen3")),
        ("gpt2", {"head_dim": 12}),
        ("qwen3", {"tie_word_embeddings": True}),
        *((name, EXPERTS) for name in ("gpt_oss", "mixtral", "qwen2_moe")),
        ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [1]}),
    ],
)
def test_the_cost_is_that_which_torch_counts(model_type: str, fields: dict[str, Any]) -> None:
    """torch counts the products of a pass of 7 tokens. Eager attention computes all 49 pairs, not only the causal ones."""
    model = AutoModelForCausalLM.from_config(config_of(model_type, attn_implementation="eager", **fields))
    if "num_experts" in fields:
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(input_ids=torch.arange(7)[None], use_cache=False)
    cost = cost_model_of(model)
    products = 7 * (cost.per_token + cost.per_output_token)
    assert products + 49 * (cost.per_pair + cost.per_windowed_pair) == pytest.approx(counted.get_total_flops(), rel=1e-9)


def test_windows_bound_the_layers_that_have_them() -> None:
    half = Gemma2Config(**SMALL | {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 8})
    unused = Qwen2Config(**SMALL | {"use_sliding_window": False, "sliding_window": 8})
    for config, full, windowed in (
        (half, 2, 2),
        (config_of("mistral", sliding_window=8), 0, 3),
        (config_of("mistral", sliding_window=None), 3, 0),
        (unused, 3, 0),
        (config_of("qwen3_next", layer_types=["linear_attention", "linear_attention", "full_attention"]), 1, 0),
    ):
        flops = cost_of(config)
        assert (flops.per_pair, flops.per_windowed_pair) == (full * 4 * 4 * 16, windowed * 4 * 4 * 16)
        assert flops.window == (8 if windowed else 0)


@pytest.mark.parametrize(
    ("name", "tera_flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GB200", 2500.0),
        ("AMD Instinct MI250X", 191.5),
        *((name, None) for name in ("cpu", "", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A10G", "NVIDIA H1000", "Tesla T4")),
        *((f"NVIDIA GeForce RTX 4090 {variant}", None) for variant in ("Laptop GPU", "D")),
    ],
)
def test_only_devices_that_are_known_exactly_have_a_peak(name: str, tera_flops: float | None) -> None:
    assert peak_flops(name, "bfloat16") == (None if tera_flops is None else pytest.approx(tera_flops * 1e12))
    assert peak_flops(name, "float32") is None
