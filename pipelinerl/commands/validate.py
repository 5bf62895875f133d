"""`pipelinerl validate RECIPE`: says whether a recipe can be used, listing everything that is wrong with it.

Judges the recipe and what it names (files, folders, functions), so that one meant for a cluster validates on a laptop;
what this machine lacks for running it, such as a GPU, is printed as a note and does not change the verdict.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelinerl.recipe.fields import Recipe

NAME = "validate"
HELP = "check a recipe and print a summary of it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="recipe file, or the name of one under recipes/")
    parser.add_argument(
        "--set", dest="overrides", metavar="a.b=c", action="append", default=[],
        help="override one field of the recipe; the value is YAML (repeatable)",
    )  # fmt: skip


def execute(args: argparse.Namespace) -> int:
    """Exit code 0; raises `UserError` with everything that is wrong otherwise."""
    from pipelinerl.recipe.loading import RecipeError, load_recipe
    from pipelinerl.recipe.preflight import Lacking, examine
    from pipelinerl.rl.throughput import recipe_lag, too_small_max_lag

    recipe = load_recipe(args.recipe, args.overrides)
    found = examine(recipe)
    if mistakes := [problem for problem in found if not isinstance(problem, Lacking)]:
        raise RecipeError(recipe.name, mistakes)
    print(f"{recipe.name}: valid")
    for name, value in outline(recipe):
        print(f"  {name:<11}  {value}")
    if warning := too_small_max_lag(recipe, recipe_lag(recipe, recipe.actor.count)):
        print(f"warning:\n  - {warning}")
    if found:
        print("not runnable on this machine:")
    for problem in found:
        print(f"  - {problem}")
    return 0


def outline(recipe: Recipe) -> list[tuple[str, str]]:
    """What a person wants to see of a recipe at a glance, as (name, value) rows. Pure."""
    lag = recipe.algorithm.max_lag
    model = recipe.model
    return [
        ("mode", recipe.mode),
        ("model", f"{model.name or model.source}, {model.dtype}, context {model.max_context}"),
        ("task", f"{recipe.task.name} ({recipe.task.path or recipe.task.source}), {recipe.task.prompt_style} prompts"),
        ("reward", recipe.reward.scorer),
        ("sampling", f"{recipe.sampling.group_size} per prompt, at most {recipe.sampling.max_tokens} tokens"),
        ("actors", f"{recipe.actor.count} x {recipe.actor.sequences_in_progress} sequences in progress"),
        ("algorithm", _algorithm(recipe)),
        ("max lag", "-" if lag is None else f"{lag}, of {recipe.algorithm.max_lag_of.replace('_', ' ')}"),
        ("largest lag", _largest_lag(recipe)),
        (
            "trainer",
            f"{recipe.trainer.steps} steps of {recipe.trainer.batch_size}, lr {recipe.trainer.learning_rate:g} "
            f"{recipe.trainer.schedule}, {recipe.trainer.optimizer}",
        ),
        ("trained", "all weights" if recipe.trainer.lora is None else f"adapters of rank {recipe.trainer.lora.rank}"),
        ("ranks", _ranks(recipe)),
        ("evaluation", f"{recipe.task.heldout_problems} problems every {recipe.evaluation.every_steps} steps"),
    ]


def _largest_lag(recipe: Recipe) -> str:
    """By the formula; how long completions are in the mean is not known before a run."""
    from pipelinerl.rl.throughput import recipe_lag

    longest, actors = recipe.sampling.max_tokens, recipe.actor.count
    if recipe.mode == "conventional":
        return f"{recipe_lag(recipe, actors)}: algorithm.conventional_g - 1"
    means = sorted({longest, max(1, longest // 4)}, reverse=True)
    lags = [f"{recipe_lag(recipe, actors, longest, mean)} for a mean length of {mean}" for mean in means]
    return f"{', '.join(lags)} tokens (⌈H I L / (L̄ B)⌉, L = {longest})"


def _algorithm(recipe: Recipe) -> str:
    algorithm = recipe.algorithm
    terms = [algorithm.loss, f"{algorithm.advantage} baseline"]
    if algorithm.normalize_std:
        terms.append("divided by std")
    terms.append(f"normalised by {algorithm.normalization}")
    if algorithm.mask != "none":
        terms.append(f"mask {algorithm.mask}")
    if algorithm.kl_coefficient:
        terms.append(f"KL {algorithm.kl_coefficient:g}")
    return ", ".join(terms)


def _ranks(recipe: Recipe) -> str:
    trainer = recipe.trainer
    shards = f", {trainer.shard_ranks} share one copy" if trainer.shard_ranks else ""
    rows = f", {trainer.context_parallel} share a row" if trainer.context_parallel > 1 else ""
    return f"{trainer.nproc}{shards}{rows}"
