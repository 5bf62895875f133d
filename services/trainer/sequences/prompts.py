"""From a problem to prompt tokens: the one place where the trainer tokenises. Completions are never tokenised again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipelinerl.config.recipe import Recipe, TaskConfig
from pipelinerl.errors import FieldError
from pipelinerl.tasks.registry import make_source
from pipelinerl.tasks.source import Problem, Split
from services.trainer.evaluation import HeldoutProblem
from services.trainer.sequences.feeder import EncodedProblem, ProblemStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def training_problems(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> ProblemStream:
    """The feeder's stream. Raises `FieldError` or `UserError` for a task that cannot be used."""
    source = make_source(recipe.task, recipe.seed)

    def problem(index: int) -> EncodedProblem:
        return encode(source.problem(Split.TRAIN, index), recipe.task, tokenizer)

    return problem


def heldout_problems(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[HeldoutProblem]:
    """The evaluator's problems. One that does not fit the context stays without a verdict."""
    source = make_source(recipe.task, recipe.seed)
    problems = []
    for index in range(recipe.task.heldout_problems):
        encoded = encode(source.problem(Split.HELDOUT, index), recipe.task, tokenizer)
        problems.append(
            HeldoutProblem(
                f"h{index:06d}",
                encoded.task,
                encoded.prompt_token_ids,
                encoded.prompt_text,
                encoded.reference_json,
            )
        )
    return problems


def encode(problem: Problem, config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> EncodedProblem:
    """Prompt tokens int32[tokens] in the recipe's style. Raises `FieldError` when the tokenizer has no chat template."""
    text = prompt_text(problem.question, config, tokenizer)
    # A chat template writes its own special tokens.
    token_ids = tokenizer(text, add_special_tokens=config.prompt_style != "chat")["input_ids"]
    return EncodedProblem(problem.task, np.array(token_ids, dtype=np.int32), text, problem.reference_json)


def prompt_text(question: str, config: TaskConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    asked = f"{question}\n{config.instruction}" if config.instruction else question
    if config.prompt_style != "chat":
        return asked
    if not tokenizer.chat_template:
        raise FieldError("task.prompt_style", "chat", "this tokenizer has no chat template; use plain")
    messages = [{"role": "user", "content": asked}]
    if config.system_prompt:
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
