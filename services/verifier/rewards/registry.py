"""From a recipe's words to the reward they mean. Libraries are imported here, by the scorer that needs them."""

from __future__ import annotations

import difflib

from pipelinerl.config.recipe import SCORERS, RewardConfig, TaskConfig
from pipelinerl.errors import FieldError
from services.verifier.rewards.compose import ComposedReward
from services.verifier.rewards.exact import exact, regex
from services.verifier.rewards.item import Scorer
from services.verifier.rewards.json_schema import json_schema_scorer
from services.verifier.rewards.math import math_scorer
from services.verifier.rewards.reasoning_gym import reasoning_gym_scorer
from services.verifier.rewards.user import user_scorer


def make_reward(config: RewardConfig, task: TaskConfig) -> ComposedReward:
    """Raises `FieldError` for a scorer, a reasoning-gym family or a function that does not exist, with near names."""
    return ComposedReward(config, make_scorer(config, task), graded=":" in config.scorer)


def make_scorer(config: RewardConfig, task: TaskConfig) -> Scorer:
    """What `reward.scorer` names. Raises `FieldError`."""
    match config.scorer:
        case "task" if task.source == "reasoning_gym":
            return reasoning_gym_scorer(task.name)
        case "task" | "exact":
            return exact
        case "regex":
            return regex
        case "math":
            return math_scorer(config.timeout_s)
        case "json_schema":
            return json_schema_scorer(config.json_schema)
        case path if ":" in path:
            return user_scorer(path)
    near = difflib.get_close_matches(config.scorer, SCORERS, n=3) or SCORERS
    raise FieldError("reward.scorer", config.scorer, f"no such scorer; did you mean {' or '.join(near)}?")
