"""The learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import math

from pipelinerl.config.recipe import TrainerConfig


def learning_rate(step: int, config: TrainerConfig) -> float:
    """Learning rate of the step that turns policy version `step` into `step + 1`.

    Linear warm-up over `warmup_steps` (its first step already learns), then constant, or linear or cosine down to 0
    at `steps`.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    if config.schedule == "linear":
        return config.learning_rate * (1 - progress)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate
