"""Llama folders with random weights: the same cost per token as trained ones, and nothing to download.

Their tokenizers have no end-of-sequence token: a random model would end anywhere, so lengths are the caller's to set.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from benchmarks.small_models.__main__ import MODELS
from benchmarks.small_models.supervised import Lessons
from pipelinerl.recipe.fields import Recipe

CHARACTERS = "0123456789+-*/=;#.,()<> "
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
"""ChatML on one line. Words are separated by spaces, so that an answer's text has the sampled tokens, whoever tokenises it."""


def tiny_config(recipe: Recipe, lessons: Lessons = MODELS["arithmetic"]) -> LlamaConfig:
    """The shape of a small model of the package; one token per character."""
    return LlamaConfig(
        vocab_size=len(CHARACTERS),
        hidden_size=lessons.hidden_size,
        intermediate_size=lessons.intermediate_size,
        num_hidden_layers=lessons.num_layers,
        num_attention_heads=lessons.num_heads,
        num_key_value_heads=lessons.num_heads,
        head_dim=lessons.head_dim,
        max_position_embeddings=recipe.model.max_context,
        tie_word_embeddings=False,
    )


def smollm2_config() -> LlamaConfig:
    """SmolLM2-135M's shape and vocabulary size."""
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def build_tiny(recipe: Recipe, folder: Path, lessons: Lessons = MODELS["arithmetic"]) -> None:
    _save(tiny_config(recipe, lessons), list(CHARACTERS), folder)


def build_smollm2_shape(recipe: Recipe, folder: Path) -> None:
    """The words are made up."""
    _save(smollm2_config(), _made_up_words(smollm2_config().vocab_size), folder)


def billion_config() -> LlamaConfig:
    """1.07 billion parameters: Llama 3.2 1B's layers with SmolLM2's vocabulary."""
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def half_qwen2_config() -> Qwen2Config:
    """Qwen2.5-0.5B's shape and vocabulary size with 12 of its 24 layers: 315 million parameters."""
    return Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=12,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )


def qwen2_1b5_config() -> Qwen2Config:
    """Qwen2.5-1.5B's shape and vocabulary size: 1.54 billion parameters."""
    return Qwen2Config(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    )


def build_billion(recipe: Recipe, folder: Path) -> None:
    """In bfloat16. The words are made up."""
    _save(billion_config(), _made_up_words(billion_config().vocab_size), folder, torch.bfloat16)


def build_chat(config: LlamaConfig, folder: Path) -> None:
    """A model for conversations, of made-up words, one token each: `w0`, `w1`, ... Only one word of the whole vocabulary ends
    a turn."""
    roles = ["system", "user", "assistant", "tool"]
    words = [f"w{index}" for index in range(config.vocab_size - len(roles) - 2)]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate([*words, *roles])}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    _save_model(config, folder, torch.float32)
    end = "<|im_end|>"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, chat_template=CHAT_TEMPLATE).save_pretrained(folder)


def _made_up_words(number: int) -> list[str]:
    return [*CHARACTERS, *(f"w{index}" for index in range(number - len(CHARACTERS)))]


def _save(config: LlamaConfig, words: list[str], folder: Path, dtype: torch.dtype = torch.float32) -> None:
    _save_model(config, folder, dtype)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def _save_model(config: LlamaConfig, folder: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config.bos_token_id = config.eos_token_id = None
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder, max_shard_size="100GB")
