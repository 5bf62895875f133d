"""Held-out accuracy of saved policies, measured after the runs that saved them: no run waits for it, and all are judged alike.

Problems, prompts, scorers and temperature are those of the recipe's own evaluation, on more problems than a run evaluates.
Decoding is transformers' forward pass in batches that shrink as completions end. Neither side of any comparison uses this loop,
and nothing here is timed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from pipelinerl.errors import FieldError
from pipelinerl.messages.sequences import PromptGroup, TokenIds
from pipelinerl.recipe.fields import Recipe
from pipelinerl.tasks.source import Problem, Split, make_source
from pipelinerl.v1.verifier_pb2 import VerifyItem
from services.trainer.data.evaluation import is_right
from services.trainer.data.feeder import encode
from services.verifier.rewards.compose import make_reward, score_item

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS = 512
"""Prompts that are decoded together at first."""
_SHRINK_AT = 0.75
"""Share of rows that still decode below which the others leave the batch; to move the cache at every end costs more."""


def with_spares(number: int) -> int:
    """Held-out problems to draw where `number` are needed: some may be found among a run's training problems."""
    return number + number // 8


def heldout_problems(
    recipe: Recipe, number: int, seeds: Iterable[int], tokenizer: PreTrainedTokenizerBase
) -> list[PromptGroup]:
    """The first `number` problems of the held-out split that no run of `recipe` with one of `seeds` is trained on.

    Problems that a run draws in place of stale ones are counted in, up to as many again. Raises `FieldError` for a task that
    has too few.
    """
    groups = 2 * recipe.trainer.steps * recipe.trainer.batch_size // recipe.sampling.group_size
    trained: set[str] = set()
    for seed in seeds:
        source = make_source(recipe.task, seed)
        trained.update(source.problem(Split.TRAIN, index).question for index in range(groups))
    untrained: list[Problem] = []
    for drawn in (with_spares(number), 2 * number, 4 * number):  # each begins with the one before
        source = make_source(recipe.task.model_copy(update={"heldout_problems": drawn}), recipe.seed)
        try:
            problems = [source.problem(Split.HELDOUT, index) for index in range(drawn)]
        except FieldError:  # the task has not so many
            break
        untrained = [problem for problem in problems if problem.question not in trained]
        if len(untrained) >= number:
            (share,) = recipe.mixture.values()
            return [encode(recipe, share, index, problem, tokenizer) for index, problem in enumerate(untrained[:number])]
    fix = f"of the held-out problems, only {len(untrained)} are in no run's training; judge on so many, or fewer"
    raise FieldError("--problems", number, fix)


class PolicyJudge:
    """Judges policies on the same problems."""

    def __init__(self, recipe: Recipe, problems: list[PromptGroup], tokenizer: PreTrainedTokenizerBase) -> None:
        self._recipe, self._problems, self._tokenizer = recipe, problems, tokenizer
        self._reward = make_reward(recipe.reward, recipe.task)
        disable_progress_bar()  # of each policy that is loaded

    def right(self, folder: Path | str) -> NDArray[np.bool_]:
        """[P]: whether the policy in `folder` answers each problem."""
        return self.are_right(self.completions(folder))

    def completions(self, folder: Path | str) -> list[list[int]]:
        """[P] of the policy in `folder`, each with its end token, if it has come to one."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=self._recipe.model.dtype).eval()
        prompts = [problem.prompt_token_ids for problem in self._problems]
        longest = min(self._recipe.sampling.max_tokens, self._recipe.model.max_context - max(map(len, prompts)))
        return decode(model, prompts, longest, self._recipe.evaluation.temperature)

    def are_right(self, completions: list[list[int]]) -> NDArray[np.bool_]:
        """[P]"""
        pairs = zip(self._problems, completions, strict=True)
        return np.array([self._is_right(problem, completion) for problem, completion in pairs])

    def _is_right(self, problem: PromptGroup, token_ids: list[int]) -> bool:
        item = VerifyItem(
            sequence_id="judged",
            task=problem.task,
            prompt_text=problem.prompt_text,
            completion_text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
            reference_json=problem.reference_json,
            completion_tokens=len(token_ids),
            max_tokens=self._recipe.sampling.max_tokens,
        )
        return is_right(score_item(self._reward, item).components, self._recipe.reward.correct)


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(source)


def decode(
    model: PreTrainedModel, prompts: list[TokenIds], max_tokens: int, temperature: float, seed: int = 0
) -> list[list[int]]:
    """Completions of `prompts`, in their order, of at most `max_tokens` tokens, end token included. Greedy at temperature 0."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    generator = torch.Generator().manual_seed(seed)
    completions: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(order), ROWS):
        members = order[first : first + ROWS]
        of_rows = _decode_rows(model, [prompts[index] for index in members], max_tokens, temperature, generator)
        for index, completion in zip(members, of_rows, strict=True):
            completions[index] = completion
    return completions


@torch.inference_mode()
def _decode_rows(
    model: PreTrainedModel, prompts: list[TokenIds], max_tokens: int, temperature: float, generator: torch.Generator
) -> list[list[int]]:
    width, ends = max(map(len, prompts)), end_tokens(model)
    input_ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):  # padded on the left: all rows' next token is at the same place
        input_ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, width - len(prompt) :] = 1
    completions: list[list[int]] = [[] for _ in prompts]
    rows, decoding = torch.arange(len(prompts)), torch.ones(len(prompts), dtype=torch.bool)
    cache, positions = DynamicCache(config=model.config), (mask.cumsum(-1) - 1).clamp(min=0)
    for _ in range(max_tokens):
        logits = model(
            input_ids=input_ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits[:, -1]
        tokens = sampled(logits, temperature, generator)
        for row, token in zip(rows[decoding].tolist(), tokens[decoding].tolist(), strict=True):
            completions[row].append(token)
        decoding &= ~torch.isin(tokens, ends)
        if not decoding.any():
            break
        input_ids, positions = tokens[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        if decoding.float().mean() < _SHRINK_AT:
            left = decoding.nonzero()[:, 0]
            cache.batch_select_indices(left)
            rows, input_ids, positions, mask = rows[left], input_ids[left], positions[left], mask[left]
            decoding = decoding[left]
    return completions


def sampled(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    """int64[rows], of logits [rows, vocabulary]."""
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def end_tokens(model: PreTrainedModel) -> torch.Tensor:
    """Token ids that end a completion."""
    ends = model.generation_config.eos_token_id
    return torch.tensor(ends if isinstance(ends, list) else [] if ends is None else [ends], dtype=torch.long)
