"""Rules about fields of a recipe that spoil any run, whatever its problems are: sampling, optimizer and loss. Pure.

They are applied before a run, and also to the records of a run that has not learned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipelinerl.doctor.findings import Finding, Findings, Gravity, percent, worse
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.groups import CUTTING, groups_per_step

_TOY = 2e7
"""Parameters below which a model learns at a hundred times the rate of a language model."""
_USUAL_PARAMETERS, _USUAL_WIDTH = 1e8, 4096
"""A small language model's number of parameters, and a large one's width, if they are unknown: both make rules accuse less."""
_COEFFICIENTS = (
    ("kl_coefficient", 0.3, 10.0, "0 to 0.05"),
    ("entropy_coefficient", 0.1, 1.0, "0 to 0.01"),
    ("value_coefficient", 10.0, 1000.0, "0.1"),
)
"""Field, value from which it outweighs the reward, value from which this is grave, and usual values."""


@dataclass(frozen=True)
class Settings:
    """A recipe and its model's number of parameters, which is 0 if unknown."""

    recipe: Recipe
    parameters: int = 0

    @property
    def is_toy(self) -> bool:
        return self.recipe.model.source == "package" or 0 < self.parameters < _TOY


def optimizer(view: Settings) -> Findings:
    """Examine sampling and the optimizer.

    temperature (learning.md#from-rewards-to-advantages): Completions of a group are too much alike, or too wild: a temperature
        below 0.5 (grave: 0.1) or above 1.5 (2).
    learning-rate-high (learning.md#learning-rate): The learning rate destroys the model: 5e-5, for a toy 0.01, for adapters
        0.004 / scaling; grave from 20 times that.
    learning-rate-low (learning.md#learning-rate): The learning rate cannot change the policy: rate × steps, of 50 steps or
        more, under 3e-5 in 16 bits (half the spacing of bfloat16 at 0.02), 1e-6 in float32; for adapters, of B · A at a width
        of 4,096; grave from a tenth of that.
    optimizer-settings (learning.md#the-optimizer): AdamW undoes or loses its steps: weight decay shrinks weights by 5 % in the
        run (grave: by half), epsilon exceeds the elements of a clipped gradient (grave: tenfold), or beta1 is at least √beta2.
    """
    recipe, trainer, lora, rate = view.recipe, view.recipe.trainer, view.recipe.trainer.lora, view.recipe.trainer.learning_rate
    if not 0.5 <= (value := recipe.sampling.temperature) <= 1.5:
        yield Finding("temperature", worse(max(0.1 - value, value - 2), 0), f"{value:g}", "sampling.temperature", "use 1")
    most, usual = (4e-3 / lora.scaling, 1e-5) if lora else (1e-2, 1e-4) if view.is_toy else (5e-5, 1e-6)
    if rate > most:
        fix = f"use about {usual:g}"
        yield Finding("learning-rate-high", worse(rate, 20 * most), f"{rate:g}", "trainer.learning_rate", fix)
    moved = rate * max(1, trainer.steps - min(trainer.warmup_steps, trainer.steps) / 2)
    if lora is not None:  # A's elements are about 1 / √width, and B begins at 0
        moved *= lora.scaling * math.sqrt(lora.rank / _USUAL_WIDTH)
    least = 3e-5 if "bfloat16" in (recipe.model.dtype, recipe.weights.wire_dtype) else 1e-6
    if moved < least and trainer.steps >= 50:
        told, fix = f"a weight moves by at most {moved:.2g}", "raise it tenfold; usual: 1e-6, for adapters 1e-5, for a toy 1e-4"
        yield Finding("learning-rate-low", worse(-moved, -least / 10), told, "trainer.learning_rate", fix)
    shrunk = 1 - math.exp(-rate * trainer.weight_decay * trainer.steps)
    if shrunk >= 0.05:
        told = f"weights shrink by {percent(shrunk)}"
        yield Finding("optimizer-settings", worse(shrunk, 0.5), told, "trainer.weight_decay", "use 0 to 0.1")
    norm = trainer.max_grad_norm or (recipe.max_tokens if recipe.algorithm.normalization == "batch" else 1.0)
    element = norm / math.sqrt(view.parameters or _USUAL_PARAMETERS)
    if trainer.epsilon > element:
        told = f"epsilon {trainer.epsilon:g}, elements of about {element:.1g}"
        field, fix = ("epsilon", "use 1e-8") if trainer.epsilon > 1e-7 else ("max_grad_norm", "use 1, or null")
        yield Finding("optimizer-settings", worse(trainer.epsilon, 10 * element), told, f"trainer.{field}", fix)
    if trainer.beta1 >= math.sqrt(trainer.beta2):
        told, fix = f"beta1 {trainer.beta1:g}, beta2 {trainer.beta2:g}", "use 0.95 to 0.999, and 0.9 for beta1"
        yield Finding("optimizer-settings", "warning", told, "trainer.beta2", fix)


def loss(view: Settings) -> Findings:
    """Examine the loss, the rewards' size and the batch.

    penalty-dominates (learning.md#losses): A term outweighs the reward: algorithm.kl_coefficient from 0.3 (grave from 10),
        entropy_coefficient from 0.1 (1), value_coefficient from 10 (1,000).
    bounds-wrong (learning.md#losses): The loss's bounds keep few tokens, or bound nothing: clip ranges under 0.01 (above 0.05
        for gspo) or above 10, a clamp above 100, masks within 10 % of 1, a mask_kl under 0.001.
    reward-scale (recipes.md#rewards): Rewards have an unusual size, for which clipping and penalties are not made:
        reward.correct above 100 or under 0.01; a note if advantages are divided by their deviation.
    batch-small (learning.md#from-rewards-to-advantages): A step sees a single problem, so that its gradient is mostly noise:
        trainer.batch_size equals sampling.group_size.
    """
    algorithm, size = view.recipe.algorithm, view.recipe.sampling.group_size
    for name, most, grave, usual in _COEFFICIENTS:
        if (value := getattr(algorithm, name)) >= most:
            yield Finding("penalty-dominates", worse(value, grave), f"{value:g}", f"algorithm.{name}", f"use {usual}")
    low, high, clip = algorithm.mask_low, algorithm.mask_high, max(algorithm.clip_low, algorithm.clip_high)
    if algorithm.mask in ("icepop", "sequence") and (low > 0.9 or high < 1.1):
        told, fix = f"π / μ from {low:g} to {high:g}", "use 0.5, mask_high 5"
        yield Finding("bounds-wrong", worse(low - high, -0.02), told, "algorithm.mask_low", fix)
    if algorithm.mask == "off_policy_sequence" and algorithm.mask_kl < 1e-3:
        yield Finding("bounds-wrong", "warning", f"{algorithm.mask_kl:g} nats", "algorithm.mask_kl", "use 0.5")
    if algorithm.loss == "reinforce" and algorithm.clamp > 100:
        yield Finding("bounds-wrong", "warning", f"{algorithm.clamp:g}", "algorithm.clamp", "use 5")
    if algorithm.loss == "gspo" and clip > 0.05:
        told, fix = f"{clip:g} for whole sequences", "use 4e-4, clip_low 3e-4"
        yield Finding("bounds-wrong", "warning", told, "algorithm.clip_high", fix)
    if algorithm.loss not in ("gspo", "reinforce") and (clip > 10 or (algorithm.loss in CUTTING and clip < 0.01)):
        yield Finding("bounds-wrong", "warning", f"{clip:g}", "algorithm.clip_high", "use 0.2, or 4 for cispo")
    for place, share in view.recipe.tasks_by_place.items():
        if not 0.01 <= (value := share.reward.correct) <= 100:
            gravity: Gravity = "note" if algorithm.normalize_std else "warning"
            yield Finding("reward-scale", gravity, f"{value:g}", f"{place}reward.correct", "use 1")
    if size > 1 and groups_per_step(view.recipe) == 1:
        yield Finding("batch-small", "warning", "1 group", "trainer.batch_size", f"use {16 * size}, which is 16 problems")


SETTINGS_RULES = (optimizer, loss)
