"""The learning rate as a pure function of the optimizer step. Not here: which combinations are refused (`rules.py`)."""

from __future__ import annotations

import math

from pipelinerl.config.recipe import TrainerConfig


def learning_rate(step: int, config: TrainerConfig) -> float:
    """Learning rate of the step that turns policy version `step` into `step + 1`.

    Linear warm-up over `warmup_steps` (its first step already learns) to the peak, then by `schedule`:
    constant; linear or cosine down to `final_learning_rate` of the peak at `steps`; `wsd` (warm-up, stable, decay:
    MiniCPM, arXiv 2404.06395), constant and then linear down to it over the last `decay_steps`; or `inverse_sqrt`,
    peak · √(warmup_steps / step) (arXiv 1706.03762, section 5.3), never below it.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    return config.learning_rate * _share_of_peak(step, config)


def _share_of_peak(step: int, config: TrainerConfig) -> float:
    final = config.final_learning_rate
    match config.schedule:
        case "linear":
            return 1 - (1 - final) * _progress(step, config.warmup_steps, config.steps)
        case "cosine":
            angle = math.pi * _progress(step, config.warmup_steps, config.steps)
            return final + (1 - final) * 0.5 * (1 + math.cos(angle))
        case "wsd":
            return 1 - (1 - final) * _progress(step, config.steps - config.decay_steps, config.steps)
        case "inverse_sqrt":
            return max(final, math.sqrt(max(1, config.warmup_steps) / max(1, step)))
        case _:
            return 1.0


def _progress(step: int, first: int, last: int) -> float:
    """From 0 up to `first` to 1 from `last` on."""
    return min(1.0, max(0.0, (step - first) / max(1, last - first)))
