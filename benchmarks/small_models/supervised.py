"""Supervised training of the small model on demonstrations: first lessons, mostly careful, then the hasty habit.

The demonstrations of a step stand behind each other in a packed row, and attention stays within each (`learn.attention`), so
that a step's time follows its tokens, however much longer some demonstrations are than others: only attention within one
grows with the square of its own length. Long and short ones come in one step, as the task draws them.

Matrices of the layers are stepped by Muon, everything else by AdamW: on two cores that takes half the steps AdamW alone
does. Weights depend on the seed and, through rounding, on the number of threads. Nothing here reads or writes files.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.small_models.demonstrations import SUM_CHARACTERS
from services.trainer.learn.batch import TokenRow, token_row
from services.trainer.learn.model import wrap_model

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL = (PAD, BOS, EOS, UNKNOWN)


def character_tokenizer(max_context: int, characters: str = SUM_CHARACTERS) -> PreTrainedTokenizerFast:
    """As Hugging Face and vLLM load it: one token per character, `<bos>` in front of a prompt, `<unk>` for unknown ones.

    Token ids: special tokens first, then `characters` in order. `max_context` in tokens.
    """
    vocabulary = {token: token_id for token_id, token in enumerate((*SPECIAL, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=max_context,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


_LAST_LEARNING_RATE = 0.03


@dataclass(frozen=True)
class Lessons:
    """Architecture of a small Llama, and how it is taught."""

    max_context: int
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    head_dim: int = 32
    intermediate_size: int = 384
    initializer_std: float = 0.06
    careful: tuple[float, ...] = (0.4, 0.35, 0.3, 0.25)
    """Probability that a demonstration writes out the 1st, 2nd, ... partial result; the last one holds for all further ones."""
    careful_in_lessons: float = 0.75
    """The same probability for all results, in the steps that come first."""
    lessons: float = 0.85
    """Share of the steps that come first; the habit of `careful` follows."""
    steps: int = 600
    batch_size: int = 64
    learning_rate: float = 3e-3
    """AdamW: embedding, output layer, norms."""
    matrix_learning_rate: float = 0.02
    """Muon: matrices of the layers."""
    warmup_steps: int = 40
    max_grad_norm: float = 1.0
    seed: int = 0


Demonstrated = Callable[[Sequence[float], random.Random], list[str]]
"""The next demonstration, for probabilities of care: what is given and what is said, in turn."""
OnStep = Callable[[int, float], None]
"""Hears the number of steps taken and the loss of the last one, nats per token."""


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, config: Lessons, demonstrated: Demonstrated, on_step: OnStep
) -> None:
    """Trains `model` in place for `config.steps` steps on what is `demonstrated`."""
    rng = random.Random(config.seed)
    optimizers = _optimizers(model, config)
    initial_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    policy = wrap_model(model)
    for step in range(config.steps):
        careful = careful_at(step, config)
        shown = [demonstrated(careful, rng) for _ in range(config.batch_size)]
        row, predictors, targets = encode(shown, tokenizer)
        loss = -policy.scores(row, predictors, targets).logprobs.mean()
        for optimizer, rate in zip(optimizers, initial_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * learning_rate_factor(step, config)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        on_step(step + 1, loss.item())


def careful_at(step: int, config: Lessons) -> tuple[float, ...]:
    """Probabilities of care in the demonstrations of a step."""
    return (config.careful_in_lessons,) if step < config.lessons * config.steps else config.careful


def learning_rate_factor(step: int, config: Lessons) -> float:
    """Linear warm-up times a cosine from 1 to `_LAST_LEARNING_RATE`."""
    warmup = min(1.0, (step + 1) / max(1, config.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * step / config.steps))
    return warmup * (_LAST_LEARNING_RATE + (1 - _LAST_LEARNING_RATE) * cosine)


def encode(batch: list[list[str]], tokenizer: PreTrainedTokenizerFast) -> tuple[TokenRow, Tensor, Tensor]:
    """A packed row of demonstrations, the longest first. Each is what is given and what the model should say, in turn, with its
    end-of-sequence token: as an actor writes an episode of a model without a chat template.

    With it, of each token that the model should say, the position in the row that predicts it and the token: int64[C].
    """
    texts = iter(tokenizer([text for texts in batch for text in texts], add_special_tokens=False)["input_ids"])
    members = list[tuple[list[int], list[bool]]]()
    for demonstration in batch:
        tokens, is_said = [tokenizer.bos_token_id], [False]
        for number in range(len(demonstration)):
            said = number % 2 == 1
            part = [*next(texts), *([tokenizer.eos_token_id] if said else [])]
            tokens += part
            is_said += [said] * len(part)
        members.append((tokens, is_said))
    members.sort(key=lambda member: -len(member[0]))
    lengths = np.array([len(tokens) for tokens, _ in members])
    predicted = np.flatnonzero(np.concatenate([is_said for _, is_said in members]))
    row = token_row(np.concatenate([tokens for tokens, _ in members]), lengths)
    return row, torch.from_numpy(predicted - 1), row.input_ids[0, predicted]


def _optimizers(model: LlamaForCausalLM, config: Lessons) -> tuple[Optimizer, Optimizer]:
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    of_layers = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in of_layers]
    return (
        Muon(matrices, lr=config.matrix_learning_rate, weight_decay=0.0),
        AdamW(others, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    )
