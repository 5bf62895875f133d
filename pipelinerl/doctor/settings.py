"""Rules about fields of a recipe that spoil any run, whatever its problems are: sampling, optimizer and loss. Pure.

They are applied before a run, and also to the records of a run that has not learned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipelinerl.doctor.findings import Found, Rule, Verdict, add_to, percent, worse
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.groups import CUTTING, groups_per_step

SETTINGS_RULES: list[Rule] = []
rule = add_to(SETTINGS_RULES)
_TOY = 2e7
"""Parameters below which a model learns at a hundred times the rate of a language model."""
_USUAL_PARAMETERS, _USUAL_WIDTH = 1e8, 4096
"""A small language model's number of parameters, and a large one's width, if they are unknown: both make rules accuse less."""


@dataclass(frozen=True)
class Settings:
    """A recipe and its model's number of parameters, which is 0 if unknown."""

    recipe: Recipe
    parameters: int = 0

    @property
    def is_toy(self) -> bool:
        return self.recipe.model.source == "package" or 0 < self.parameters < _TOY


@rule("learning.md#from-rewards-to-advantages")
def temperature(view: Settings) -> Verdict:
    """Completions of a group are too much alike, or too wild: a temperature below 0.5 (grave: 0.1) or above 1.5 (2)."""
    value = view.recipe.sampling.temperature
    gravity = worse(max(0.1 - value, value - 2), 0)
    return not 0.5 <= value <= 1.5 and Found(gravity, f"{value:g}", "sampling.temperature", "use 1")


@rule("learning.md#learning-rate")
def learning_rate_high(view: Settings) -> Verdict:
    """The learning rate destroys the model: 5e-5, for a toy 0.01, for adapters 0.004 / scaling; grave from 20 times that."""
    lora, rate = view.recipe.trainer.lora, view.recipe.trainer.learning_rate
    most, usual = (4e-3 / lora.scaling, 1e-5) if lora else (1e-2, 1e-4) if view.is_toy else (5e-5, 1e-6)
    return rate > most and Found(worse(rate, 20 * most), f"{rate:g}", "trainer.learning_rate", f"use about {usual:g}")


@rule("learning.md#learning-rate")
def learning_rate_low(view: Settings) -> Verdict:
    """The learning rate cannot change the policy: rate × steps, of 50 steps or more, under 3e-5 in 16 bits (half the spacing of
    bfloat16 at 0.02), 1e-6 in float32; for adapters, of B · A at a width of 4,096; grave from a tenth of that."""
    trainer, dtypes = view.recipe.trainer, (view.recipe.model.dtype, view.recipe.weights.wire_dtype)
    moved = trainer.learning_rate * max(1, trainer.steps - min(trainer.warmup_steps, trainer.steps) / 2)
    if trainer.lora is not None:  # A's elements are about 1 / √width, and B begins at 0
        moved *= trainer.lora.scaling * math.sqrt(trainer.lora.rank / _USUAL_WIDTH)
    least, told = 3e-5 if "bfloat16" in dtypes else 1e-6, f"a weight moves by at most {moved:.2g}"
    fix = f"is {trainer.learning_rate:g}; raise it tenfold (usual are 1e-6, for adapters 1e-5, for a toy 1e-4)"
    return moved < least and trainer.steps >= 50 and Found(worse(-moved, -least / 10), told, "trainer.learning_rate", fix)


@rule("learning.md#the-optimizer")
def optimizer_settings(view: Settings) -> Verdict:
    """AdamW undoes or loses its steps: weight decay shrinks weights by 5 % in the run (grave: by half), epsilon exceeds the
    elements of a clipped gradient (grave: tenfold), or beta1 is at least √beta2."""
    trainer, by_token = view.recipe.trainer, view.recipe.algorithm.normalization != "batch"
    shrunk = 1 - math.exp(-trainer.learning_rate * trainer.weight_decay * trainer.steps)
    if shrunk >= 0.05:
        return Found(worse(shrunk, 0.5), f"weights shrink by {percent(shrunk)}", "trainer.weight_decay", "use 0 to 0.1")
    norm = trainer.max_grad_norm or (1.0 if by_token else view.recipe.max_tokens)
    element = norm / math.sqrt(view.parameters or _USUAL_PARAMETERS)
    if trainer.epsilon > element:
        told = f"epsilon {trainer.epsilon:g}, elements of about {element:.1g}"
        field, fix = ("epsilon", "use 1e-8") if trainer.epsilon > 1e-7 else ("max_grad_norm", "use 1, or null")
        return Found(worse(trainer.epsilon, 10 * element), told, f"trainer.{field}", fix)
    told = f"beta1 {trainer.beta1:g}, beta2 {trainer.beta2:g}"
    is_wild = trainer.beta1 >= math.sqrt(trainer.beta2)
    return is_wild and Found("warning", told, "trainer.beta2", "use 0.95 to 0.999, and 0.9 for beta1")


@rule("learning.md#losses")
def penalty_dominates(view: Settings) -> Verdict:
    """A term outweighs the reward: algorithm.kl_coefficient from 0.3 (grave from 10), entropy_coefficient from 0.1 (1),
    value_coefficient from 10 (1,000)."""
    terms = (("kl", 0.3, 10.0, "0 to 0.05"), ("entropy", 0.1, 1.0, "0 to 0.01"), ("value", 10.0, 1000.0, "0.1"))
    for name, most, grave, usual in terms:
        if (value := getattr(view.recipe.algorithm, f"{name}_coefficient")) >= most:
            return Found(worse(value, grave), f"{value:g}", f"algorithm.{name}_coefficient", f"use {usual}")
    return None


@rule("learning.md#losses")
def bounds_wrong(view: Settings) -> Verdict:
    """The loss's bounds keep few tokens, or bound nothing: clip ranges under 0.01 (above 0.05 for gspo) or above 10, a clamp
    above 100, masks within 10 % of 1, a mask_kl under 0.001."""
    algorithm = view.recipe.algorithm
    low, high, clip = algorithm.mask_low, algorithm.mask_high, max(algorithm.clip_low, algorithm.clip_high)
    if algorithm.mask in ("icepop", "sequence") and (low > 0.9 or high < 1.1):
        return Found(worse(low - high, -0.02), f"π / μ from {low:g} to {high:g}", "algorithm.mask_low", "use 0.5, mask_high 5")
    if algorithm.mask == "off_policy_sequence" and algorithm.mask_kl < 1e-3:
        return Found("warning", f"{algorithm.mask_kl:g} nats", "algorithm.mask_kl", "use 0.5")
    if algorithm.loss == "gspo":
        told = f"{clip:g} for whole sequences"
        return clip > 0.05 and Found("warning", told, "algorithm.clip_high", "use 4e-4, clip_low 3e-4")
    if algorithm.loss == "reinforce":
        return algorithm.clamp > 100 and Found("warning", f"{algorithm.clamp:g}", "algorithm.clamp", "use 5")
    is_wrong = (algorithm.loss in CUTTING and clip < 0.01) or clip > 10
    return is_wrong and Found("warning", f"{clip:g}", "algorithm.clip_high", "use 0.2, or 4 for cispo")


@rule("recipes.md#rewards")
def reward_scale(view: Settings) -> Verdict:
    """Rewards have an unusual size, for which clipping and penalties are not made: reward.correct above 100 or under 0.01; a
    note if advantages are divided by their deviation."""
    for place, share in view.recipe.tasks_by_place.items():
        if not 0.01 <= (value := share.reward.correct) <= 100:
            is_scaled = view.recipe.algorithm.normalize_std
            return Found("note" if is_scaled else "warning", f"{value:g}", f"{place}reward.correct", "use 1")
    return None


@rule("learning.md#from-rewards-to-advantages")
def batch_small(view: Settings) -> Verdict:
    """A step sees a single problem, so that its gradient is mostly noise: trainer.batch_size equals sampling.group_size."""
    size = view.recipe.sampling.group_size
    fix = f"is {size}; use {16 * size}, which is 16 problems"
    return size > 1 and groups_per_step(view.recipe) == 1 and Found("warning", "1 group", "trainer.batch_size", fix)
