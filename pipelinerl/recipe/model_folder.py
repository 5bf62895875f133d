"""Check the folder of a Hugging Face model, count the parameters of a recipe's model, and count tokens with its tokenizer.

Only the headers of weight files are read. Weights that do not fit the architecture are noticed only when they are loaded.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pipelinerl
from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import ModelConfig, Recipe
from pipelinerl.rl.memory import Model

TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("vocab.json", "vocab.txt"),
)
"""A tokenizer has at least one of these files, unless its tokenizer_config.json names the model's own code (`auto_map`)."""
SMALL_MODELS = Path(pipelinerl.__file__).parent / "models"
"""Folder of this package's small models, which `benchmarks.small_models` made."""
_SMOLLM2_PARAMETERS = 134_515_008
_HUB_S = 20.0
_ACTIVE_IN_NAME = re.compile(r"-A(\d+(?:\.\d+)?)B(?![a-z])", re.IGNORECASE)
_COUNTED = 64
"""Only this many texts, the longest in characters, are tokenised. One of them almost always has the most tokens."""


def model_folder(model: ModelConfig) -> Path | None:
    """Return the folder of a model of source `path` or `package`; None for other sources."""
    if model.source == "path":
        return Path(model.name)
    return SMALL_MODELS / model.name if model.source == "package" else None


def problems_in(folder: Path) -> Iterator[str]:
    """Yield the problems of a model's folder, each with its fix."""
    if not os.path.isdir(folder):
        yield "is not a folder; give one that contains a Hugging Face model"
        return
    if (folder / "adapter_config.json").is_file():
        yield "has a LoRA adapter, which actors would not apply; merge it into the model, and give the merged model's folder"
    if not (folder / "config.json").is_file():
        yield "has no config.json, so it contains no Hugging Face model; give the model's folder"
        return
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except ValueError as error:
        yield f"its config.json is not JSON ({error}); copy it again"
        return
    if not isinstance(config, dict) or not config.get("architectures"):
        yield 'its config.json names no architecture; give it one, such as "architectures": ["LlamaForCausalLM"]'
    described = folder / "tokenizer_config.json"
    has_code = described.is_file() and b'"auto_map"' in described.read_bytes()
    if not has_code and not any((folder / name).is_file() for name in TOKENIZERS):
        yield "has no tokenizer (tokenizer.json); copy the tokenizer's files into it"
    yield from _weights_problems(folder)


def longest_context(folder: Path) -> int | None:
    """Return the model's maximum context in tokens; None if its config.json states none, or extends it by RoPE scaling."""
    config = text_config(folder / "config.json")
    scaled = '"factor"' in json.dumps([config.get("rope_scaling"), config.get("rope_parameters")])
    longest = config.get("max_position_embeddings")
    return longest if isinstance(longest, int) and not scaled else None


def known_model(recipe: Recipe, parameters: float) -> Model:
    """Return the sizes of the recipe's model, from its number of `parameters` and its config.json, if this machine has it."""
    share = active_share(recipe.model, parameters)
    return Model.of(recipe, parameters, kv_numbers(recipe.model), active_share=share)


def kv_numbers(model: ModelConfig) -> int:
    """Return how many numbers the KV cache holds for one token, according to the model's config.json; 0 if that file is not on
    this machine. Layers with sliding windows count like layers with full attention."""
    config = _known_config(model) or {}
    kinds = [str(kind) for kind in config.get("layer_types") or []]
    layers = sum("attention" in one and "linear" not in one for one in kinds) or _number(config, "num_hidden_layers", "n_layer")
    heads = _number(config, "num_attention_heads", "n_head")
    if latent := _number(config, "kv_lora_rank"):  # multi-head latent attention
        return layers * (latent + _number(config, "qk_rope_head_dim"))
    head_size = _number(config, "head_dim") or _number(config, "hidden_size", "n_embd") // max(1, heads)
    return 2 * layers * head_size * (_number(config, "num_key_value_heads") or heads)


def active_share(model: ModelConfig, parameters: float) -> float:
    """Return the share of the model's `parameters` that one token uses. It is below 1 for a mixture of experts. The function
    reads config.json or, if that file is not on this machine, a name such as 30B-A3B; without such a name, it returns 1."""
    config = _known_config(model)
    if not parameters or config is None:
        named = _ACTIVE_IN_NAME.search(model.name)
        return min(1.0, 1e9 * float(named[1]) / parameters) if named and parameters else 1.0
    experts = _number(config, "num_experts", "num_local_experts", "n_routed_experts")
    visited = _number(config, "num_experts_per_tok")
    if not 0 < visited < experts:
        return 1.0
    sparse = _number(config, "num_hidden_layers") - _number(config, "first_k_dense_replace")
    layers = sparse / max(1, _number(config, "decoder_sparse_step")) - len(config.get("mlp_only_layers") or [])
    expert = 3 * _number(config, "hidden_size") * _number(config, "moe_intermediate_size", "intermediate_size")
    return max(visited / experts, 1 - layers * (experts - visited) * expert / parameters)


def _known_config(model: ModelConfig) -> dict[str, Any] | None:
    """Return the fields of the model's config.json; None if it is not on this machine, empty if it is malformed."""
    folder = model_folder(model)
    path = cached(model, "config.json") if folder is None else folder / "config.json"
    try:
        return text_config(path) if path is not None and path.is_file() else None
    except (ValueError, TypeError, AttributeError):
        return {}


def _number(config: Mapping[str, Any], *names: str) -> int:
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)


def text_config(path: Path) -> dict[str, Any]:
    """Return the fields of a config.json. For a multimodal model, the text model's fields take precedence."""
    config: dict[str, Any] = json.loads(path.read_bytes())
    text = config.get("text_config")
    return config | (text if isinstance(text, dict) else {})


def _weights_problems(folder: Path) -> Iterator[str]:
    files, index = sorted(folder.glob("*.safetensors")), folder / "model.safetensors.index.json"
    try:
        shards = set(map(str, json.loads(index.read_bytes())["weight_map"].values())) if index.is_file() else set[str]()
    except (ValueError, KeyError, TypeError, AttributeError):
        yield f"its {index.name} is damaged; copy it again"
        return
    if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
        yield f"lacks {_some(missing)}, among the {len(shards)} weight files that {index.name} names; copy them"
    elif shards and folder / "model.safetensors" in files and "model.safetensors" not in shards:
        yield f"has two sets of weights, model.safetensors and those of {index.name}; delete one, since actors may load either"
    if not files and not missing and not any(folder.glob("*.bin")):
        yield "has no weights (*.safetensors); copy them into it"
    broken = []
    for path in files:
        try:
            elements_in(path)
        except ValueError as error:
            broken.append(f"{path.name} {error}")
        except OSError as error:
            broken.append(f"{path.name} cannot be read: {error.strerror}")
    if broken:
        yield f"{_some(broken)}; copy the broken files again"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def elements_in(path: Path) -> int:
    """Return the number of elements of all tensors in a safetensors file. Raises `ValueError` if the file is damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(length, size)))
            tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
            elements = sum(math.prod(tensor["shape"]) for tensor in tensors)
            end = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise ValueError("is not a safetensors file, or its header is incomplete") from None
    if size != end:
        raise ValueError(f"has {size:,} bytes, but its header says {end:,}")
    return elements


def known_parameters(model: ModelConfig) -> int:
    """Return the model's number of parameters for the sources `path`, `package` and `smollm2`, and 0 for other sources. Raises
    `FieldError` if a weight file is damaged."""
    if (folder := model_folder(model)) is None:
        return _SMOLLM2_PARAMETERS if model.source == "smollm2" else 0
    return parameters_in(folder)


def parameters_in(folder: Path) -> int:
    """Return the number of elements in all tensors of the folder's safetensors files. Raises `FieldError` if one is damaged."""
    parameters = 0
    for path in folder.glob("*.safetensors"):
        try:
            parameters += elements_in(path)
        except ValueError as error:
            raise FieldError("model.name", str(folder), f"{path.name} {error}; copy it again") from None
    return parameters


def hub_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of a hub model, from this machine's cache or from the hub; 0 if unknown."""
    found = cached(model, "model.safetensors") or cached(model, "model.safetensors.index.json")
    if found is not None and not [*_weights_problems(found.parent)]:
        return parameters_in(found.parent)
    if model.source != "hub" or importlib.util.find_spec("huggingface_hub") is None:
        return 0
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(model.name, revision=model.revision or None, expand=["safetensors"], timeout=_HUB_S)
    except Exception:  # noqa: BLE001 - the client's errors have no common base; loading the model will report the problem
        return 0
    return info.safetensors.total if info.safetensors else 0


def token_counter(model: ModelConfig) -> Callable[[Iterable[str]], int] | None:
    """Return a function that returns the largest token count of given texts; None if this machine lacks the tokenizer. Raises
    `FieldError` if tokenizer.json cannot be read."""
    folder = model_folder(model)
    path = cached(model, "tokenizer.json") if folder is None else folder / "tokenizer.json"
    if path is None or not path.is_file() or importlib.util.find_spec("tokenizers") is None:
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no error type
        raise FieldError("model.name", model.name, f"its tokenizer.json cannot be read ({error}); copy it again") from error

    def longest(texts: Iterable[str]) -> int:
        chosen = sorted(texts, key=len, reverse=True)[:_COUNTED]
        return max((len(one.ids) for one in tokenizer.encode_batch_fast(chosen)), default=0)

    return longest


def cached(model: ModelConfig, file: str) -> Path | None:
    """Return the path of a hub model's file in this machine's cache; None if it is not there."""
    if model.source != "hub" or importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model.name, file, revision=model.revision or None)
    except ValueError:  # an invalid name
        return None
    return Path(found) if isinstance(found, str) else None
