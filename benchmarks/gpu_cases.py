"""Models and rows on which the trainer's use of a GPU is measured, in three sizes of the whole measurement.

Rows hold long-tailed lengths, as completions have them. A model's weights are random, made on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, Qwen2Config

from benchmarks.random_models import qwen2_1b5_config, smollm2_config
from benchmarks.training_data import long_tailed_lengths, make_groups
from pipelinerl.recipe.fields import TrainerConfig
from services.trainer.learn.batch import TrainingGroup

PROMPT_TOKENS = 128


@dataclass(frozen=True)
class GpuCase:
    """Steps of `rows` packed rows of `row_tokens` tokens."""

    model: str
    config: Callable[[], Any]
    row_tokens: int
    rows: int
    shortest: int
    """Of the sequences, prompts included."""
    longest: int
    recomputed: bool = False
    """Activations recomputed in the backward pass (`trainer.gradient_checkpointing`)."""
    compiled: bool = False
    goal_mfu: float | None = None

    @property
    def name(self) -> str:
        marks = [f"{self.row_tokens} tokens", *(["recomputed"] if self.recomputed else [])]
        return ", ".join([self.model, *marks, *(["compiled"] if self.compiled else [])])

    def lengths(self) -> list[int]:
        return long_tailed_lengths(self.shortest, self.longest, self.rows * self.row_tokens)

    def groups(self, vocabulary: int) -> list[TrainingGroup]:
        return make_groups(self.lengths(), vocabulary, min(PROMPT_TOKENS, self.shortest // 2))

    def trainer(self) -> TrainerConfig:
        return TrainerConfig(tokens_per_microbatch=self.row_tokens, gradient_checkpointing=self.recomputed, learning_rate=1e-6)


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    cases: tuple[GpuCase, ...]
    warm_up: int
    """Steps of each loop before those that count."""
    steps: int


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def small_llama() -> LlamaConfig:
    return LlamaConfig(**SMALL)


def small_qwen2() -> Qwen2Config:
    return Qwen2Config(**SMALL)


def _cases(compiled: bool) -> tuple[GpuCase, ...]:
    return (
        GpuCase("SmolLM2-135M", smollm2_config, 8192, 4, 512, 4096, compiled=compiled),
        GpuCase("SmolLM2-135M", smollm2_config, 32_768, 2, 512, 8192, recomputed=True, compiled=compiled),
        GpuCase("Qwen2 1.5B", qwen2_1b5_config, 8192, 4, 512, 4096, compiled=compiled, goal_mfu=0.45),
        GpuCase("Qwen2 1.5B", qwen2_1b5_config, 32_768, 2, 512, 32_768, recomputed=True, compiled=compiled, goal_mfu=0.45),
    )  # fmt: skip


_EAGER, _COMPILED = _cases(compiled=False), _cases(compiled=True)
PLANS = {
    "full": Plan(_EAGER + _COMPILED, warm_up=3, steps=8),
    "short": Plan(_EAGER + _COMPILED, warm_up=2, steps=3),
    "tiny": Plan(
        (
            GpuCase("tiny Llama", small_llama, 256, 2, 16, 128),
            GpuCase("tiny Qwen2", small_qwen2, 512, 2, 16, 512, recomputed=True, goal_mfu=0.45),
        ),
        warm_up=1,
        steps=2,
    ),
}
"""`tiny` shows on a CPU that everything works; its figures say nothing."""
