"""Supervised training of the small model on demonstrations: first lessons, mostly careful, then the hasty habit.

Matrices of the layers are stepped by Muon, everything else by AdamW: on two cores that takes half the steps AdamW alone
does. Weights depend on the seed and, through rounding, on the number of threads. Nothing here reads or writes files.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW, Muon, Optimizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from pipelinerl.config.warmstart import WarmStartConfig
from services.trainer.warmstart.demonstrations import Demonstration, demonstrate

IGNORED = -100
"""Target of a position that is not trained on: prompt and padding."""
_BATCHES_SORTED_TOGETHER = 8
_LAST_LEARNING_RATE = 0.03

OnStep = Callable[[int, float], None]
"""Hears the number of steps taken and the loss of the last one, nats per token."""


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    config: WarmStartConfig,
    questions: Iterator[str],
    on_step: OnStep,
) -> None:
    """Trains `model` in place for `config.steps` steps on worked `questions`, an endless stream."""
    rng = random.Random(config.seed)
    optimizers = _optimizers(model, config)
    initial_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    batches: list[list[Demonstration]] = []
    model.train()
    for step in range(config.steps):
        if not batches:
            batches = _batches(config, step, questions, rng)
        input_ids, targets = encode(batches.pop(), tokenizer)
        loss = _loss(model, input_ids, targets)
        for optimizer, rate in zip(optimizers, initial_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * learning_rate_factor(step, config)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        on_step(step + 1, loss.item())


def careful_at(step: int, config: WarmStartConfig) -> tuple[float, ...]:
    """Probabilities of care in the demonstrations of a step."""
    return (config.careful_in_lessons,) if step < config.lessons * config.steps else config.careful


def learning_rate_factor(step: int, config: WarmStartConfig) -> float:
    """Linear warm-up times a cosine from 1 to `_LAST_LEARNING_RATE`."""
    warmup = min(1.0, (step + 1) / max(1, config.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * step / config.steps))
    return warmup * (_LAST_LEARNING_RATE + (1 - _LAST_LEARNING_RATE) * cosine)


def encode(batch: list[Demonstration], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Input ids and targets, both int64[batch, tokens], padded on the right; only completions and their end are targets."""
    prompts = [tokenizer(one.prompt)["input_ids"] for one in batch]
    completions = [
        [*tokenizer(one.completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for one in batch
    ]
    longest = max(len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True))
    input_ids = torch.full((len(batch), longest), tokenizer.pad_token_id)
    targets = torch.full((len(batch), longest), IGNORED)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        input_ids[row, :end] = torch.tensor(prompt + completion)
        targets[row, len(prompt) : end] = torch.tensor(completion)
    return input_ids, targets


def _loss(model: LlamaForCausalLM, input_ids: Tensor, targets: Tensor) -> Tensor:
    logits = model(input_ids=input_ids, use_cache=False).logits  # [batch, tokens, vocabulary]
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=IGNORED)


def _batches(
    config: WarmStartConfig, step: int, questions: Iterator[str], rng: random.Random
) -> list[list[Demonstration]]:
    """The demonstrations of the next few steps; alike lengths share a batch, so that little of it is padding."""
    careful, size = careful_at(step, config), config.batch_size
    worked = [demonstrate(next(questions), careful, rng) for _ in range(size * _BATCHES_SORTED_TOGETHER)]
    worked.sort(key=lambda one: len(one.prompt) + len(one.completion))
    batches = [worked[start : start + size] for start in range(0, len(worked), size)]
    rng.shuffle(batches)
    return batches


def _optimizers(model: LlamaForCausalLM, config: WarmStartConfig) -> tuple[Optimizer, Optimizer]:
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    of_layers = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in of_layers]
    return (
        Muon(matrices, lr=config.matrix_learning_rate, weight_decay=0.0),
        AdamW(others, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    )
