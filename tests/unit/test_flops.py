"""FLOPs of known shapes by hand, of every known architecture against its parameters, and the share of a peak."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Gemma2Config, LlamaConfig, PretrainedConfig, Qwen2Config

from pipelinerl.rl.memory import peak_flops
from services.trainer.learn.meter import GATED_MODELS, mfu, model_flops

LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)
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
    config = CONFIG_MAPPING[model_type](**SMALL | fields)
    assert isinstance(config, PretrainedConfig)
    return config


def matrices(config: PretrainedConfig) -> dict[str, int]:
    """Sizes of the model's matrices by name, none of them in memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: weight.numel() for name, weight in model.named_parameters() if weight.ndim >= 2}


MIXTURES = {"mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}


@pytest.mark.parametrize("model_type", sorted(GATED_MODELS - MIXTURES))
def test_a_token_meets_every_matrix_once(model_type: str) -> None:
    config = config_of(model_type)
    flops = model_flops(config, num_parameters=0)
    sizes = {name: size for name, size in matrices(config).items() if "embed_tokens" not in name}
    head = sizes.pop("lm_head.weight", SMALL["vocab_size"] * SMALL["hidden_size"])
    assert flops.per_token == 2 * sum(sizes.values())
    assert flops.per_output_token == 2 * head


@pytest.mark.parametrize("model_type", sorted(MIXTURES))
def test_a_token_meets_its_experts_only(model_type: str) -> None:
    """2 of 6 experts: the flops are those of a model of 2 experts, but for a router of 6 outputs."""
    fields = {"num_experts_per_tok": 2, **({"moe_intermediate_size": 40} if model_type.startswith("qwen") else {})}
    experts = "num_local_experts" if model_type == "mixtral" else "num_experts"
    few, many = (config_of(model_type, **fields, **{experts: number}) for number in (2, 6))
    sizes = {name: size for name, size in matrices(few).items() if "embed_tokens" not in name}
    sizes.pop("lm_head.weight")
    router = 4 * SMALL["hidden_size"] * SMALL["num_hidden_layers"]
    assert model_flops(few, num_parameters=0).per_token == 2 * sum(sizes.values())
    assert model_flops(many, num_parameters=0).per_token == 2 * (sum(sizes.values()) + router)


def test_layers_without_experts_are_dense_and_an_unknown_architecture_costs_twice_its_parameters() -> None:
    fields: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    sparse, mixed = (config_of("qwen3_moe", mlp_only_layers=dense, **fields) for dense in ([], [1]))
    # 3 · 48 · 80 instead of 2 experts of 3 · 48 · 40 and a router of 48 · 4
    difference = model_flops(mixed, 0).per_token - model_flops(sparse, 0).per_token
    assert difference == 2 * (11_520 - (2 * 5_760 + 192))
    flops = model_flops(CONFIG_MAPPING["gpt2"](), num_parameters=1000)
    assert flops.of([10]).tolist() == [20_000]


def test_windows_bound_the_layers_that_have_them() -> None:
    half = Gemma2Config(**SMALL | {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 8})
    unused = Qwen2Config(**SMALL | {"use_sliding_window": False, "sliding_window": 8})
    for config, full, windowed in (
        (half, 2, 2),
        (config_of("mistral", sliding_window=8), 0, 3),
        (config_of("mistral", sliding_window=None), 3, 0),
        (unused, 3, 0),
    ):
        flops = model_flops(config, num_parameters=0)
        assert (flops.per_pair, flops.per_windowed_pair) == (full * 4 * 4 * 16, windowed * 4 * 4 * 16)
        assert flops.window == (8 if windowed else 0)


def test_utilization_by_hand() -> None:
    # 4e15 FLOPs in 2 s on 4 devices of 1e15 FLOP/s
    assert mfu(4e15, 2.0, 4, 1e15) == 0.5
    assert mfu(4e15, 2.0, 4, None) is None
    assert mfu(4e15, 0.0, 4, 1e15) is None


@pytest.mark.parametrize(
    ("name", "bfloat16", "float16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 989.4),
        ("NVIDIA GeForce RTX 4090", 165.2, 165.2),
        ("NVIDIA GB200", 2500.0, 2500.0),
        ("AMD Instinct MI250X", 191.5, 191.5),
        ("Tesla V100-SXM2-16GB", None, 125.0),
        *((name, None, None) for name in ("cpu", "", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A10G", "NVIDIA H1000")),
        *((f"NVIDIA GeForce RTX 4090 {variant}", None, None) for variant in ("Laptop GPU", "D")),
    ],
)
def test_only_devices_that_are_known_exactly_have_a_peak(name: str, bfloat16: float | None, float16: float | None) -> None:
    for dtype, tera_flops in (("bfloat16", bfloat16), ("float16", float16), ("float32", None)):
        peak = peak_flops(name, dtype)
        assert peak == (None if tera_flops is None else pytest.approx(tera_flops * 1e12))
