"""Runs with one thing wrong, and the finding that `pipelinerl doctor` must put first; and healthy runs.

The faults follow public reports about systems that train language models by reinforcement learning, in our own words. Only a
run shows them: the recipe itself is well-formed. `python -m benchmarks.doctor` plays them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_REWARDS = "reward.scorer=benchmarks.faulty_rewards"


@dataclass(frozen=True)
class RunFault:
    """`expected`: ids of findings that name the cause; the first finding must be one of them."""

    name: str
    about: str
    expected: tuple[str, ...]
    overrides: tuple[str, ...]
    recipe: str = "arithmetic"
    """Name of a shipped recipe, or `init` and a template of `pipelinerl init`."""
    steps: int = 12
    answers: Callable[[list[str]], list[str]] | None = None
    """Makes the answers of a file of sums, which replaces the recipe's task, from the right ones."""
    event: str = ""
    """`resume`: the run is continued after `steps`, for as many again. Else the process that is killed after the fifth step."""


def sums() -> list[dict[str, str]]:
    """Return 400 sums in the form of the small model `arithmetic`."""
    drawn = random.Random(0)
    questions = {"".join(f"{drawn.choice('+-')}{drawn.randrange(10)}" for _ in range(4))[1:] for _ in range(400)}
    return [{"prompt": f"{one}=", "answer": str(eval(one))} for one in sorted(questions)]


def _shuffled(answers: list[str]) -> list[str]:
    return random.Random(1).sample(answers, len(answers))


RUN_FAULTS = (
    RunFault("cut", "max_tokens is shorter than any answer", ("all-cut",), ("sampling.max_tokens=4",)),
    RunFault("cut-masked", "every completion is cut, and cut ones are masked", ("all-cut",),
             ("sampling.max_tokens=4", "reward.truncated=mask")),
    RunFault("pattern-hashes", "the pattern wants #### and the policy writes #", ("answers-absent",),
             (r"reward.answer_pattern='####\s*(-?\d+)'",)),
    RunFault("pattern-boxed", "the pattern wants a box that nobody asked for", ("answers-absent",),
             (r"reward.answer_pattern='\\boxed\{(-?\d+)\}'",)),
    RunFault("pattern-newline", "the pattern wants a line end after the answer", ("answers-absent",),
             (r"reward.answer_pattern='#(-?\d+)\n'",)),
    RunFault("stop-early", "a stop text occurs before the answer", ("answers-absent",),
             ("sampling.stop=[';']",)),
    RunFault("greedy", "a temperature of almost 0 makes all completions of a group alike",
             ("temperature", "completions-identical"), ("sampling.temperature=0.01",)),
    RunFault("constant", "the reward returns its default for everything", ("reward-constant",), (f"{_REWARDS}:constant",)),
    RunFault("always-full", "the reward accepts any text", ("groups-all-right", "reward-constant"),
             (f"{_REWARDS}:always_full",)),
    RunFault("types", "the reward compares a text with a number", ("right-unrewarded",), (f"{_REWARDS}:compares_types",)),
    RunFault("inverted", "the sign of the reward is wrong", ("right-unrewarded",), (f"{_REWARDS}:inverted",)),
    RunFault("noise", "the reward does not depend on the answer", ("right-unrewarded",), (f"{_REWARDS}:noise",), steps=40),
    RunFault("crashing", "the reward raises for most answers", ("rewards-fail",), (f"{_REWARDS}:crashing",)),
    RunFault("nan", "the reward is not a number for wrong answers", ("rewards-fail",), (f"{_REWARDS}:not_a_number",)),
    RunFault("slow", "the reward exceeds its time limit", ("rewards-fail",), (f"{_REWARDS}:slow", "reward.timeout_s=0.1")),
    RunFault("hard", "the problems are beyond the model", ("groups-all-wrong",),
             ("task.config={min_terms: 9, max_terms: 9, min_digits: 2, max_digits: 2}",)),
    RunFault("rate-low", "the learning rate changes nothing", ("policy-unmoved",), ("trainer.learning_rate=1e-9",)),
    RunFault("rate-high", "the learning rate destroys the policy",
             ("learning-rate-high", "policy-collapsed", "entropy-explodes", "ess-low"),
             ("trainer.learning_rate=0.03",), steps=20),
    RunFault("entropy-bonus", "the entropy bonus outweighs the reward", ("penalty-dominates", "entropy-explodes"),
             ("algorithm.entropy_coefficient=5",), steps=40),
    RunFault("mask-narrow", "the mask accepts only a ratio of 1", ("bounds-wrong", "tokens-cut"),
             ("algorithm.mask=icepop", "algorithm.mask_low=1", "algorithm.mask_high=1")),
    RunFault("clip-narrow", "the clip range is narrower than rounding", ("bounds-wrong", "tokens-cut"),
             ("algorithm.loss=ppo_clip", "algorithm.clip_low=1e-6", "algorithm.clip_high=1e-6")),
    RunFault("norm-tiny", "every gradient is clipped to almost nothing", ("gradient-clipped",),
             ("trainer.max_grad_norm=0.001",)),
    RunFault("format-heavy", "the format term outweighs the answer", ("term-dominates",),
             ("reward.format_pattern='.{0,18}'", "reward.format_weight=5"), steps=16),
    RunFault("lag-small", "max_lag is below the lag of full actors", ("dropped-stale", "bottleneck"),
             ("algorithm.max_lag=0",)),
    RunFault("one-guess", "episodes end before they can succeed", ("groups-all-wrong", "reward-constant"),
             ("task.max_turns=1",), "guess"),
    RunFault("episode-timeout", "episodes exceed their time limit", ("episodes-fail",),
             ("task.episode_timeout_s=0.02",), "guess"),
    RunFault("context", "prompts leave no room in the context", ("sequences-lost", "all-cut"),
             ("model.max_context=24", "sampling.max_tokens=8")),
    RunFault("shuffled", "answers belong to other questions", ("references-unrelated",), (), answers=_shuffled),
    RunFault("units", "references have a unit", ("right-unrewarded",), ("reward.scorer=exact",),
             answers=lambda answers: [f"{one} apples" for one in answers]),
    RunFault("decimals", "references are decimals", ("right-unrewarded",), ("reward.scorer=exact",),
             answers=lambda answers: [f"{one}.0" for one in answers]),
    RunFault("first-number", "the pattern takes the first number of the solution", ("answers-misread",),
             (r"reward.answer_pattern='^(-?\d+)'",)),
    RunFault("stop-hash", "a stop text begins the answer", ("answers-absent",), ("sampling.stop=['#']",)),
    RunFault("overlong", "the length penalty outweighs the answer", ("term-dominates",),
             ("reward.overlong={buffer_tokens: 60, penalty: 20}",), steps=16),
    RunFault("of-length", "the reward counts characters", ("right-unrewarded",), (f"{_REWARDS}:of_length",), steps=40),
    RunFault("format-never", "no completion has the form that the format term wants", ("format-never",),
             ("reward.format_pattern='<think>.*</think>.*'", "reward.format_weight=0.2"), steps=16),
    RunFault("easy", "the model solves everything already", ("groups-all-right",),
             ("task.config={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}", "task.heldout_problems=64"), steps=80),
    RunFault("kl-huge", "the KL term keeps the policy where it is", ("penalty-dominates",), ("algorithm.kl_coefficient=100",),
             steps=20),
    RunFault("weight-decay", "weight decay shrinks the weights to nothing", ("optimizer-settings",),
             ("trainer.weight_decay=1000",), steps=30),
    RunFault("epsilon", "AdamW's epsilon is above any gradient", ("optimizer-settings",), ("trainer.epsilon=10",)),
    RunFault("temperature", "sampling is nearly random", ("temperature",), ("sampling.temperature=2",)),
    RunFault("reward-huge", "rewards are in the thousands and not normalized", ("reward-scale", "gradient-clipped"),
             ("reward.correct=5000", "algorithm.normalize_std=false")),
    RunFault("stop-all", "stop texts end every completion at once", ("completions-empty",),
             ("sampling.stop=['-','0','1','2','3','4','5','6','7','8','9','+']",)),
    RunFault("eval-timeout", "evaluations end before their answers come", ("heldout-unanswered",),
             ("evaluation.timeout_s=0.01",), steps=16),
    RunFault("adapter-rate", "adapters get the learning rate of all weights", ("policy-unmoved", "learning-rate-low"),
             ("trainer.lora={rank: 8}", "trainer.learning_rate=1e-7")),
)  # fmt: skip

_SMALL = ("trainer.batch_size=64", "evaluation.every_steps=0", "task.heldout_problems=64")
_HEALTHY: dict[str, tuple[int, dict[str, tuple[str, ...]]]] = {
    "arithmetic": (30, {
        "seed-0": (), "seed-1": ("seed=1",), "seed-2": ("seed=2",), "conventional": ("mode=conventional",),
        "two-actors": ("actor.count=2", "actor.sequences_in_progress=64"), "group-4": ("sampling.group_size=4",),
        "group-16": ("sampling.group_size=16",), "lora": ("trainer.lora={rank: 8}", "trainer.learning_rate=1e-3"),
        "grpo": ("algorithm.loss=grpo",), "gspo": ("algorithm.loss=gspo",), "cispo": ("algorithm.loss=cispo",),
        "value": ("algorithm.advantage=value", "algorithm.normalize_std=false"), "icepop": ("algorithm.mask=icepop",),
        "kl": ("algorithm.kl_coefficient=0.01",), "filter": ("algorithm.filter_equal_rewards=true",),
        "cosine": ("trainer.schedule=cosine",), "unbounded-lag": ("algorithm.max_lag=null",),
        "format": ("reward.format_pattern='.*#.*'", "reward.format_weight=0.1"),
    }),
    "repeated-addition": (12, {"seed-0": (), "seed-1": ("seed=1",), "cut": ("sampling.max_tokens=256",)}),
    "code": (16, {"seed-0": (), "seed-1": ("seed=1",)}),
    "guess": (14, {"shipped": (), "seed-0": _SMALL, "seed-1": (*_SMALL, "seed=1")}),
    "calculator": (14, {"shipped": (), "seed-0": _SMALL, "conventional": (*_SMALL, "mode=conventional")}),
    "smollm2": (16, {"seed-0": ("task.heldout_problems=16", "evaluation.every_steps=0")}),
    "init": (40, {"seed-0": ()}), "init code": (20, {"seed-0": ()}), "init gsm8k": (8, {"seed-0": ()}),
    "init tools": (5, {"seed-0": ()}), "init agent": (5, {"seed-0": ()}), "init environment": (10, {"seed-0": ()}),
}  # fmt: skip
"""Number of steps, and overrides by name, of healthy runs of each recipe."""
HEALTHY = tuple(
    RunFault(f"{recipe.replace(' ', '-')}-{name}", "a healthy run", (), overrides, recipe, steps)
    for recipe, (steps, kinds) in _HEALTHY.items()
    for name, overrides in kinds.items()
) + tuple(
    RunFault(f"arithmetic-{event}", "a healthy run", (), ("seed=3", "checkpoint.every_steps=4"), steps=steps, event=event)
    for event, steps in (("resume", 12), ("actor-0", 30), ("trainer", 30))
)  # fmt: skip
