"""Seeded faults: a recipe, a data file or a run with one thing wrong, and the finding that `pipelinerl doctor` must put first.

The faults follow public reports about systems that train language models by reinforcement learning, in our own words. Faults of
a recipe are checked by tests/unit/test_doctor.py. Faults of a run are played by `python -m benchmarks.doctor`, since only a run
shows them: the recipe itself is well-formed.
"""

from __future__ import annotations

from dataclasses import dataclass

_REWARDS = "reward.scorer=tests.support.faulty_rewards"


@dataclass(frozen=True)
class RunFault:
    """`expected`: ids of findings that name the cause; the first finding must be one of them."""

    name: str
    about: str
    expected: tuple[str, ...]
    overrides: tuple[str, ...]
    recipe: str = "arithmetic"
    steps: int = 12


RUN_FAULTS = (
    RunFault("cut", "max_tokens is shorter than any answer", ("all-cut",), ("sampling.max_tokens=4",)),
    RunFault("cut-masked", "every completion is cut, and cut ones are masked", ("all-cut", "all-masked"),
             ("sampling.max_tokens=4", "reward.truncated=mask")),
    RunFault("pattern-hashes", "the pattern wants #### and the policy writes #", ("answers-missed",),
             (r"reward.answer_pattern='####\s*(-?\d+)'",)),
    RunFault("pattern-boxed", "the pattern wants a box that nobody asked for", ("answers-missed",),
             (r"reward.answer_pattern='\\boxed\{(-?\d+)\}'",)),
    RunFault("pattern-newline", "the pattern wants a line end after the answer", ("answers-missed",),
             (r"reward.answer_pattern='#(-?\d+)\n'",)),
    RunFault("stop-early", "a stop text occurs before the answer", ("answers-absent", "answers-missed"),
             ("sampling.stop=[';']",)),
    RunFault("greedy", "a temperature of almost 0 makes all completions of a group alike", ("completions-identical",),
             ("sampling.temperature=0.01",)),
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
             ("policy-collapsed", "entropy-explodes", "ess-low", "ess-low-by-lag"), ("trainer.learning_rate=0.03",), steps=20),
    RunFault("entropy-bonus", "the entropy bonus outweighs the reward", ("entropy-explodes", "policy-collapsed"),
             ("algorithm.entropy_coefficient=5",), steps=40),
    RunFault("mask-narrow", "the mask accepts only a ratio of 1", ("mask-takes-all",),
             ("algorithm.mask=icepop", "algorithm.mask_low=1", "algorithm.mask_high=1")),
    RunFault("clip-narrow", "the clip range is narrower than rounding", ("clip-cuts",),
             ("algorithm.loss=ppo_clip", "algorithm.clip_low=1e-6", "algorithm.clip_high=1e-6")),
    RunFault("norm-tiny", "every gradient is clipped to almost nothing", ("gradient-clipped",),
             ("trainer.max_grad_norm=0.001",)),
    RunFault("format-heavy", "the format term outweighs the answer", ("term-dominates", "format-without-answer"),
             ("reward.format_pattern='[^;]*'", "reward.format_weight=5"), steps=16),
    RunFault("lag-small", "max_lag is below the lag of full actors", ("dropped-stale", "max-lag-throttles"),
             ("algorithm.max_lag=0",)),
    RunFault("one-guess", "episodes end before they can succeed", ("turns-used-up", "groups-all-wrong", "reward-constant"),
             ("task.max_turns=1",), "guess"),
    RunFault("episode-timeout", "episodes exceed their time limit", ("episodes-fail",),
             ("task.episode_timeout_s=0.02",), "guess"),
    RunFault("context", "prompts leave no room in the context", ("prompts-too-long", "all-cut", "all-masked"),
             ("model.max_context=24", "sampling.max_tokens=8")),
)  # fmt: skip

HEALTHY = tuple(
    RunFault(f"{recipe}-{seed}", "a shipped recipe with another seed", (), (f"seed={seed}",), recipe, steps)
    for recipe, steps, seeds in (
        ("arithmetic", 30, 7), ("repeated-addition", 12, 3), ("code", 16, 3), ("guess", 20, 4), ("calculator", 20, 3),
    )
    for seed in range(seeds)
)  # fmt: skip
