"""Rules about values of recipe fields that spoil a run on any task: sampling, optimizer and loss. Pure.

They are applied to a recipe before a run, and again with a run's records. If the run has learned, findings get gravity `note`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipelinerl.doctor.findings import Rows, percent
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.rules import value_at
from pipelinerl.rl.groups import CUTTING, groups_per_step

_TOY = 2e7
"""Number of parameters below which a model needs a hundred times the learning rate of a language model."""
_USUAL_PARAMETERS, _USUAL_WIDTH = 1e8, 4096
"""Assumed number of parameters of a model of unknown size (low, so that rules report less), and assumed width of all models."""
_ANY = (-math.inf, math.inf)


@dataclass
class Settings:
    """A recipe, and its model's `parameters` (0 = unknown). `earned`: largest absolute reward that a user's
    function gave in trial calls, by key of `recipe.sets_by_place`."""

    recipe: Recipe
    parameters: int = 0
    earned: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_toy(self) -> bool:
        return self.recipe.model.source == "package" or 0 < self.parameters < _TOY


def optimizer(view: Settings) -> Rows:
    """Examine the optimizer.

    learning-rate-high (learning.md#learning-rate): The learning rate is so high that it destroys the model: It exceeds a limit:
        with adapters, 0.004 divided by their scaling; without adapters, 0.01 for models of under 20 million parameters, and
        5e-5 for others. The finding is grave from 20 times the limit.
    learning-rate-low (learning.md#learning-rate): The learning rate is too low to change the policy: In a run of at least 50
        steps, the rate times the number of steps is under a limit: 3e-5 in 16 bits (half the spacing of bfloat16 numbers at
        0.01), or 1e-6 in float32. With adapters, the limit applies to the movement of their product B · A at a width of 4,096.
        The finding is grave at a tenth of the limit or less.
    optimizer-settings (learning.md#the-optimizer): Settings of AdamW spoil its steps: Weight decay shrinks weights by over
        5 % in the run (grave from half). Or epsilon exceeds the typical element of a clipped gradient (grave from ten times).
        Or beta1 is at least √beta2.
    """
    recipe, trainer, lora, rate = view.recipe, view.recipe.trainer, view.recipe.trainer.lora, view.recipe.trainer.learning_rate
    most, usual = (4e-3 / lora.scaling, 1e-5) if lora else (1e-2, 1e-4) if view.is_toy else (5e-5, 1e-6)
    moved = rate * max(1, trainer.steps - min(trainer.warmup_steps, trainer.steps) / 2)
    if lora is not None:  # A's elements are about 1 / √width, and B begins at 0
        moved *= lora.scaling * math.sqrt(lora.rank / _USUAL_WIDTH)
    least = 3e-5 if "bfloat16" in (recipe.model.dtype, recipe.weights.wire_dtype) else 1e-6
    shrunk = 1 - math.exp(-rate * trainer.weight_decay * trainer.steps)
    norm = trainer.max_grad_norm or (recipe.max_tokens if recipe.algorithm.normalization == "batch" else 1.0)
    element, epsilon = norm / math.sqrt(view.parameters or _USUAL_PARAMETERS), trainer.epsilon
    name, fix = ("epsilon", "use 1e-8") if epsilon > 1e-7 else ("max_grad_norm", "use 1, or null")
    for id_, value, grave, told, field_, advice in (
        ("learning-rate-high", rate / most, 20, f"at most {most:.1g} is usual", "learning_rate", f"use about {usual:g}"),
        ("learning-rate-low", least / moved * (trainer.steps >= 50), 10, f"a weight moves by at most {moved:.2g}",
         "learning_rate", "raise it tenfold; usual values are 1e-6, for adapters 1e-5, for toy models 1e-4"),
        ("optimizer-settings", 20 * shrunk, 10, f"weights shrink by {percent(shrunk)}", "weight_decay", "use 0 to 0.1"),
        ("optimizer-settings", epsilon / element, 10, f"epsilon {epsilon:g}, elements of about {element:.1g}", name, fix),
        ("optimizer-settings", 1.001 * (trainer.beta1 >= math.sqrt(trainer.beta2)), 10,
         f"beta1 {trainer.beta1:g}, beta2 {trainer.beta2:g}", "beta2", "use 0.95 to 0.999, and 0.9 for beta1"),
    ):  # fmt: skip
        yield id_, value >= grave, value > 1 + 1e-9 and told, f"trainer.{field_}", advice


def ranges(view: Settings) -> Rows:
    """Examine fields that have a usual range.

    temperature (learning.md#from-rewards-to-advantages): Completions are too similar or too random: sampling.temperature is
        below 0.5 (grave: 0.1 or less) or above 1.5 (grave: 2 or more), or evaluation.temperature is above 1.5.
    penalty-dominates (learning.md#losses): Another term of the loss outweighs the reward, or the value head learns too fast:
        kl_coefficient is above 0.2 (grave from 10), entropy_coefficient above 0.05 (grave from 1), or value_coefficient above 5
        (grave from 1,000). Or trainer.value_learning_rate is above 0.05 (grave from 1).
    bounds-wrong (learning.md#losses): The loss's bounds keep few tokens, or bound nothing: clip_high is outside 0.01 to 10
        (with cispo, above 10; with gspo, above 0.05), or clamp is outside 1 to 100. Or mask_low or mask_high is within 10 % of
        1 (grave: within 1 %), or mask_kl is under 0.001.
    reward-scale (recipes.md#rewards): Rewards are unusually large or small: reward.correct, or the largest reward that your
        function gives in a trial call, is above 50 or under 0.01. The finding is a note if advantages are divided by the
        standard deviation of rewards.
    batch-small (learning.md#from-rewards-to-advantages): Too few problems shape the gradient: trainer.batch_size equals
        sampling.group_size, so that a step has one problem. Or a task of the mixture gets under 10 groups in the whole run.
    """
    recipe, size = view.recipe, view.recipe.sampling.group_size
    loss, mask = recipe.algorithm.loss, recipe.algorithm.mask
    is_ratio, num = mask in ("icepop", "sequence"), recipe.trainer.steps * groups_per_step(recipe)
    for id_, is_used, name, low, high, grave, usual in (
        ("temperature", True, "sampling.temperature", 0.5, 1.5, (0.1, 2), "1"),
        ("temperature", True, "evaluation.temperature", 0, 1.5, _ANY, "0 or 1"),
        ("penalty-dominates", True, "algorithm.kl_coefficient", 0, 0.2, (-1, 10), "0 to 0.05"),
        ("penalty-dominates", True, "algorithm.entropy_coefficient", 0, 0.05, (-1, 1), "0 to 0.01"),
        ("penalty-dominates", True, "algorithm.value_coefficient", 0, 5, (-1, 1000), "0.1"),
        ("penalty-dominates", recipe.trainer.value_learning_rate, "trainer.value_learning_rate", 0, 0.05, (-1, 1), "null"),
        ("bounds-wrong", is_ratio, "algorithm.mask_low", 0, 0.9, (-1, 0.99), "0.5"),
        ("bounds-wrong", is_ratio, "algorithm.mask_high", 1.1, math.inf, (1.01, math.inf), "5"),
        ("bounds-wrong", mask == "off_policy_sequence", "algorithm.mask_kl", 1e-3, math.inf, _ANY, "0.5"),
        ("bounds-wrong", loss == "reinforce", "algorithm.clamp", 1, 100, _ANY, "5"),
        ("bounds-wrong", loss == "gspo", "algorithm.clip_high", 0, 0.05, _ANY, "4e-4, and 3e-4 for clip_low"),
        ("bounds-wrong", loss == "cispo", "algorithm.clip_high", 0, 10, _ANY, "4"),
        ("bounds-wrong", loss in CUTTING and loss != "gspo", "algorithm.clip_high", 0.01, 10, _ANY, "0.2"),
    ):  # fmt: skip
        is_odd = is_used and not low <= (value := value_at(recipe, name)) <= high
        yield id_, is_odd and not grave[0] < value < grave[1], is_odd and f"{low:g} to {high:g} is usual", name, f"use {usual}"
    for place, share in recipe.tasks_by_place.items():
        value, gravity = view.earned.get(place, share.reward.correct), recipe.algorithm.normalize_std and "note"
        told = not 0.01 <= value <= 50 and f"up to {value:g}"
        yield "reward-scale", gravity, told, f"{place}reward.correct", "let full marks be about 1"
        taken = num * share.weight / sum(one.weight for one in recipe.mixture.values())
        told = taken < min(10, num) and f"{taken:.2g} groups in the run"
        yield "batch-small", False, told, f"{place}weight", "raise it, or remove the task"
    told = size > 1 and groups_per_step(recipe) == 1 and "1 group"
    yield "batch-small", False, told, "trainer.batch_size", f"use {16 * size}, for 16 problems a step"


SETTINGS_RULES = (optimizer, ranges)
