"""Load and prepare the policy: any Hugging Face causal language model, from a folder or, by name, from the hub. Dropout and
other noise are always off, because the policy that is trained must be the one that sampled."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from pipelinerl.errors import FieldError, first_line
from pipelinerl.recipe.fields import ModelConfig, TrainerConfig
from services.trainer.learn.attention import VARLEN, varlen_attention
from services.trainer.learn.lora import add_adapters
from services.trainer.learn.policy import Policy, checked_policy, without_gradient

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULTS = TrainerConfig()


def load_policy(
    source: str, config: ModelConfig, trainer: TrainerConfig = DEFAULTS, device: torch.device | str = "cpu"
) -> Policy:
    """Load the model from folder or hub id `source` onto `device`, with new adapters if `trainer.lora` is set. Raises
    `FieldError` if the model does not load or does not suit the recipe."""
    if Path(source).is_dir():
        if not (Path(source) / "config.json").is_file():
            raise FieldError("model.name", source, "the folder has no config.json: name a Hugging Face model folder")
    elif config.source != "hub" or Path(source).is_absolute():
        raise FieldError("model.name", source, "there is no such folder: name a Hugging Face model folder")
    hub = hub_arguments(source, config)
    model: Any = _load_weights(source, _load_config(source, config, hub), config, hub)
    if trainer.lora is not None:
        add_adapters(model, trainer.lora, source)
    model.to(device)
    how = {"gradient_checkpointing": trainer.gradient_checkpointing, "float32_head": _has_float32_head(config)}
    policy = wrap_model(model, config.attention, **how)
    if lost := without_gradient(policy):
        fix = f"{lost} computes no gradient in evaluation mode, so it would not be trained; use another architecture"
        raise FieldError("model.name", source, fix)
    text = model.config.get_text_config()
    window = None if getattr(text, "layer_types", None) else getattr(text, "sliding_window", None)
    # A model that passes no window to its attention applies the window only in masks, which packed attention does not use.
    is_ignored = policy.attention == VARLEN and not any(vars(one).get("packed_window") for one in model.modules())
    if is_ignored and window and window < config.max_context:
        fix = f"is above the model's sliding_window of {window:,} tokens, which packed attention ignores; lower it"
        raise FieldError("model.max_context", config.max_context, f"{fix}, or set model.attention: eager")
    return policy


def blank_policy(source: str, config: ModelConfig, trainer: TrainerConfig, attention: str, own_logits: bool) -> Policy:
    """Return a policy on the meta device, without weights. `attention` and `own_logits` come from the rank that loaded and
    checked the policy. Raises `FieldError` if the model's configuration does not load or suit the recipe."""
    hf_config = _load_config(source, config, hub_arguments(source, config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=DTYPES[config.dtype], trust_remote_code=config.trust_remote_code
        )
        if trainer.lora is not None:
            add_adapters(model, trainer.lora, source)
    _prepare(model, trainer.gradient_checkpointing)
    model.set_attn_implementation(attention)
    return Policy(model, attention, own_logits=own_logits, float32_head=_has_float32_head(config))


def wrap_model(
    model: PreTrainedModel, attention: str = "auto", *, gradient_checkpointing: bool = False, float32_head: bool = True
) -> Policy:
    """Return a policy of `model`. With `attention` `auto`, use this project's attention, or `eager` if the former does not
    reproduce the model's log-probabilities. Raises the `FieldError` of `checked_policy`."""
    _prepare(model, gradient_checkpointing)
    if attention != "auto":
        return checked_policy(model, attention, float32_head)
    try:
        return checked_policy(model, VARLEN, float32_head)
    except FieldError:
        return checked_policy(model, "eager", float32_head)


def _has_float32_head(config: ModelConfig) -> bool:
    return "float32" in (config.dtype, config.head_dtype)


def _prepare(model: PreTrainedModel, gradient_checkpointing: bool) -> None:
    AttentionInterface.register(VARLEN, varlen_attention)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _disable_dropout(model.config)
    model.eval()  # in training mode, some models also add noise to their routers
    for module in model.modules():
        _disable_dropout(module)
        module.training = getattr(module, "gradient_checkpointing", False)  # recomputing activations needs training mode


def frozen_copy(policy: Policy) -> Policy:
    return copy.deepcopy(policy).requires_grad_(False).eval()


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the decoder layers in order of depth: those that transformers marks; else the longest `ModuleList`, if any."""
    modules = list(model.modules())
    marked: list[torch.nn.Module] = [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
    lists = [list(module) for module in modules if isinstance(module, torch.nn.ModuleList)]
    return marked or max(lists, key=len, default=[])


def compile_policy(policy: Policy, device: torch.device) -> None:
    """Have `torch.compile` compile the decoder layers and the work on logits when they are first used. Raises `FieldError` if
    this machine cannot compile, or if the model's layers cannot be found."""
    layers = decoder_layers(policy.model)
    if not layers:
        fix = f"{type(policy.model).__name__} has no list of layers to compile; set it to false"
        raise FieldError("trainer.compile", True, fix)
    try:
        torch.compile(lambda x: 2 * x)(torch.ones(8, device=device))
    except RuntimeError as error:
        needed = "a C++ compiler (g++, or the one that CXX names)" if device.type == "cpu" else "Triton and a C compiler"
        fix = f"torch.compile needs {needed}: install it, or set false ({first_line(error)})"
        raise FieldError("trainer.compile", True, fix) from error
    AttentionInterface.register(VARLEN, torch.compiler.disable(varlen_attention, reason="its layout differs by row"))
    for layer in layers:
        layer.compile(dynamic=True)  # in place, so weights keep their names; dynamic, because packed rows differ in length
    policy.compiled_head = True


def hub_arguments(source: str, config: ModelConfig) -> dict[str, Any]:
    hub: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    return {**hub, "revision": config.revision} if config.revision and not Path(source).is_dir() else hub


def _load_config(source: str, config: ModelConfig, hub: dict[str, Any]) -> PretrainedConfig:
    try:
        hf_config = AutoConfig.from_pretrained(source, **hub)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise FieldError("model.name", source, f"its configuration does not load: {first_line(error)}") from error
    if getattr(hf_config, "quantization_config", None):
        raise FieldError("model.name", source, "its weights are quantised and cannot be trained; name the original checkpoint")
    text = hf_config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    limits = {name: getattr(text, name, None) for name in ("max_position_embeddings", "attention_chunk_size")}
    name = "original_max_position_embeddings"
    if rope.get("rope_type") == "dynamic":  # beyond this length, a token's embedding depends on the length of its row
        limits[name] = rope.get(name)
    elif rope.get("rope_type") == "longrope" and config.max_context > rope[name]:
        rope["short_factor"] = rope["long_factor"]  # as in vLLM; transformers chooses a factor by each row's longest sequence
    for name, longest in limits.items():
        if longest is not None and longest < config.max_context:
            fix = f"is above the model's {name} of {longest:,} tokens; lower it"
            raise FieldError("model.max_context", config.max_context, fix)
    return hf_config


def _disable_dropout(holder: PretrainedConfig | torch.nn.Module) -> None:
    for name, value in list(vars(holder).items()):
        if isinstance(value, float) and "drop" in name:
            setattr(holder, name, 0.0)


def _load_weights(source: str, hf_config: PretrainedConfig, config: ModelConfig, hub: dict[str, Any]) -> PreTrainedModel:
    loaded: Any
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            source, config=hf_config, dtype=DTYPES[config.dtype], attn_implementation="eager", output_loading_info=True, **hub
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise FieldError("model.name", source, f"does not load as a causal language model: {first_line(error)}") from error
    model, report = loaded
    if report["missing_keys"] or report["mismatched_keys"]:
        lacking = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
        fix = f"weights are missing or do not fit config.json ({', '.join(lacking[:3])}); use a complete checkpoint"
        raise FieldError("model.name", source, fix)
    return model
