"""Models and recipes of the episode benchmarks: two shapes, conversations of random words, turns of a given length."""

from __future__ import annotations

import random
from pathlib import Path

from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe

CASES = ("tiny", "smollm2")
MAX_CONTEXT = 512
TURNS, PROMPT_WORDS, OBSERVATION_WORDS = 4, 64, 16
"""Of an episode; an observation comes before each turn but the first."""
_WORDS = 4000
"""Of which messages are made; both models have more."""


def build_model(case: str, folder: Path) -> None:
    """Random weights of the layers of `arithmetic`'s model, or of SmolLM2-135M's shape; both with a chat template."""
    from benchmarks.random_models import build_chat, smollm2_config, tiny_config

    config = smollm2_config()
    if case == "tiny":
        config = tiny_config(load_recipe("arithmetic"))
        config.vocab_size = config.max_position_embeddings = 4096
    build_chat(config, folder)


def episode_recipe(model: str, in_progress: int, max_tokens: int, *more: str) -> Recipe:
    """`model`: its folder. `in_progress`: H. `max_tokens`: of a turn. `more`: overrides."""
    return load_recipe(
        "calculator",
        [
            "model.source=path",
            f"model.name={model}",
            f"model.max_context={MAX_CONTEXT}",
            f"sampling.max_tokens={max_tokens}",
            f"actor.sequences_in_progress={in_progress}",
            "actor.engine.kv_cache_gib=2",
            *more,
        ],
    )


def words(rng: random.Random, number: int) -> str:
    """A message of as many tokens."""
    return " ".join(f"w{rng.randrange(_WORDS)}" for _ in range(number))
