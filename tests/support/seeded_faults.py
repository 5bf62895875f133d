"""Seeded faults: a recipe, a data file or a run with one thing wrong, and the finding that `pipelinerl doctor` must put first.

The faults follow public reports about systems that train language models by reinforcement learning, in our own words. Faults of
a recipe are checked by tests/unit/test_doctor.py. Faults of a run are played by `python -m benchmarks.doctor`, since only a run
shows them: the recipe itself is well-formed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
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
             ("policy-collapsed", "entropy-explodes", "ess-low"), ("trainer.learning_rate=0.03",), steps=20),
    RunFault("entropy-bonus", "the entropy bonus outweighs the reward", ("entropy-explodes", "policy-collapsed"),
             ("algorithm.entropy_coefficient=5",), steps=40),
    RunFault("mask-narrow", "the mask accepts only a ratio of 1", ("mask-takes-all",),
             ("algorithm.mask=icepop", "algorithm.mask_low=1", "algorithm.mask_high=1")),
    RunFault("clip-narrow", "the clip range is narrower than rounding", ("clip-cuts",),
             ("algorithm.loss=ppo_clip", "algorithm.clip_low=1e-6", "algorithm.clip_high=1e-6")),
    RunFault("norm-tiny", "every gradient is clipped to almost nothing", ("gradient-clipped",),
             ("trainer.max_grad_norm=0.001",)),
    RunFault("format-heavy", "the format term outweighs the answer", ("term-dominates", "format-without-answer"),
             ("reward.format_pattern='.{0,18}'", "reward.format_weight=5"), steps=16),
    RunFault("lag-small", "max_lag is below the lag of full actors", ("dropped-stale", "bottleneck"),
             ("algorithm.max_lag=0",)),
    RunFault("one-guess", "episodes end before they can succeed", ("groups-all-wrong", "reward-constant"),
             ("task.max_turns=1",), "guess"),
    RunFault("episode-timeout", "episodes exceed their time limit", ("episodes-fail",),
             ("task.episode_timeout_s=0.02",), "guess"),
    RunFault("context", "prompts leave no room in the context", ("sequences-lost", "all-cut"),
             ("model.max_context=24", "sampling.max_tokens=8")),
)  # fmt: skip

ROWS: list[Row] = [
    {"prompt": f"What is {a} plus {b}?", "answer": str(a + b)} for a, b in ((37 * i % 101, 53 * i % 97) for i in range(120))
]
RECIPE: Row = {
    "name": "seeded",
    "model": {"source": "hub", "name": "org/base-model", "dtype": "bfloat16", "max_context": 2048},
    "task": {"source": "jsonl", "path": "rows.jsonl", "prompt_style": "chat", "heldout_problems": 32,
             "system_prompt": "Reason step by step. End with Answer: and the number."},
    "reward": {"scorer": "exact", "answer_pattern": r"Answer: (-?\d+)"},
    "sampling": {"group_size": 8, "max_tokens": 512},
    "actor": {"count": 1, "sequences_in_progress": 64},
    "algorithm": {"max_lag": 8},
    "trainer": {"steps": 200, "batch_size": 64, "learning_rate": 1e-6},
}  # fmt: skip
"""A recipe without a fault, for ROWS."""


@dataclass(frozen=True)
class RecipeFault:
    """`changes`: values by dotted field. `rows`: what becomes of ROWS. `tried`: the reward must be called to notice."""

    name: str
    expected: str
    changes: dict[str, Any] = field(default_factory=dict)
    rows: Callable[[list[Row]], list[Row]] = list
    tried: bool = False


def _with(**columns: Callable[[Row], object]) -> Callable[[list[Row]], list[Row]]:
    return lambda rows: [row | {name: make(row) for name, make in columns.items()} for row in rows]


_TOY = {"model": {"source": "package", "name": "arithmetic", "max_context": 128}, "sampling": {"max_tokens": 64},
        "reward": {"answer_pattern": r"#(-?\d+)$"},
        "task": {"source": "reasoning_gym", "name": "chain_sum", "prompt_style": "compact"}}  # fmt: skip
RECIPE_FAULTS = (
    RecipeFault("a misspelt field is refused, not ignored", "recipe-mistake", {"trainer.learnig_rate": 1e-6}),
    RecipeFault("a temperature of 0 gives equal completions", "recipe-mistake", {"sampling.temperature": 0.0}),
    RecipeFault("a batch has half a group", "recipe-mistake", {"trainer.batch_size": 60}),
    RecipeFault("a group has one sample, so its advantage is 0", "recipe-mistake", {"sampling.group_size": 1}),
    RecipeFault("the completion fills the context", "recipe-mistake", {"sampling.max_tokens": 2048}),
    RecipeFault("float16 underflows", "recipe-mistake", {"model.dtype": "float16"}),
    RecipeFault("the prompt's column is missing", "recipe-mistake", {"task.prompt_field": "question"}),
    RecipeFault("the file is missing", "recipe-mistake", {"task.path": "other.jsonl"}),
    RecipeFault("the file is empty", "recipe-mistake", {}, lambda rows: []),
    RecipeFault("more problems are held out than exist", "recipe-mistake", {"task.heldout_problems": 500}),
    RecipeFault("the reward's function is misspelt", "recipe-mistake",
                {"reward.scorer": "tests.support.faulty_rewards:constnat"}),
    RecipeFault("the reward raises", "recipe-mistake", {"reward.scorer": "tests.support.faulty_rewards:raising"}, tried=True),
    RecipeFault("a pattern has no group", "recipe-mistake", {"reward.answer_pattern": r"Answer: -?\d+"}),
    RecipeFault("the reward compares a text with a number", "references-unpaid",
                {"reward.scorer": "tests.support.faulty_rewards:compares_types"}, tried=True),
    RecipeFault("the reward is constant", "references-unpaid",
                {"reward.scorer": "tests.support.faulty_rewards:constant"}, tried=True),
    RecipeFault("references are decimals, and the pattern reads whole numbers", "references-unpaid", {},
                _with(answer=lambda row: f"{row['answer']}.50"), tried=True),
    RecipeFault("half of the references are empty", "answers-empty", {},
                lambda rows: [row | {"answer": ""} if i % 2 else row for i, row in enumerate(rows)]),
    RecipeFault("prompts occur three times", "prompts-repeated", {}, lambda rows: rows * 3),
    RecipeFault("the answer's column is a constant", "one-answer", {}, _with(answer=lambda row: "1")),
    RecipeFault("nearly all answers are yes", "one-answer", {"reward.answer_pattern": "Answer: (yes|no)"},
                lambda rows: [row | {"answer": "yes" if i > 2 else "no"} for i, row in enumerate(rows)]),
    RecipeFault("references are whole solutions", "references-long", {},
                _with(answer=lambda row: f"{'We add the tens and then the ones. ' * 8}#### {row['answer']}")),
    RecipeFault("the evaluation set is the training file", "heldout-trained-on", {"evaluation.sets": [
        {"name": "test", "task": {"source": "jsonl", "path": "rows.jsonl", "prompt_style": "chat", "heldout_problems": 100}}]}),
    RecipeFault("prompts differ only in case and spaces", "heldout-trained-on", {},
                lambda rows: [*rows, *(row | {"prompt": f"  {row['prompt'].upper()}"} for row in rows)]),
    RecipeFault("prompts are longer than the context", "prompts-fill-context", {},
                _with(prompt=lambda row: f"{'Read this carefully. ' * 1000}{row['prompt']}")),
    RecipeFault("an instruction-tuned model gets bare prompts", "template-unused",
                {"model.name": "org/Model-7B-Instruct", "task.prompt_style": "plain", "task.system_prompt": "",
                 "task.instruction": "End with Answer: and the number."}),
    RecipeFault("nobody asks for a box", "form-unsaid", {"reward.scorer": "math_boxed", "reward.answer_pattern": ""}),
    RecipeFault("a small model never writes a box", "form-unsaid", _TOY | {"reward.answer_pattern": r"\\boxed\{(-?\d+)\}"}),
    RecipeFault("a small model's sum does not fit", "answers-too-long", _TOY | {"sampling.max_tokens": 4}),
    RecipeFault("nobody asks for ####", "form-unsaid", {"reward.answer_pattern": r"####\s*(-?\d+)"}),
    RecipeFault("nobody asks for answer tags", "form-unsaid",
                {"reward.answer_pattern": "<answer>(.*?)</answer>", "task.system_prompt": "You are a helpful assistant."}),
    RecipeFault("steps do not fit", "reasoning-cut", {"sampling.max_tokens": 32}),
    RecipeFault("thinking does not fit", "reasoning-cut", {"model.chat_template_kwargs": {"enable_thinking": True}}),
    RecipeFault("references do not fit", "answers-too-long", {"sampling.max_tokens": 16, "reward.scorer": "exact",
                "reward.answer_pattern": "", "task.system_prompt": "Write the sentence."},
                _with(answer=lambda row: "The sum of both of the numbers in the question above, which one can find by adding "
                      f"them, is exactly {row['answer']} and nothing else")),
    RecipeFault("a line end stops the first step", "stop-cuts-answers", {"sampling.stop": ["\n"]}),
    RecipeFault("a stop text begins the answer", "stop-cuts-answers", {"sampling.stop": ["Answer:"]}),
    RecipeFault("one token holds no answer", "answers-too-long",
                {"sampling.max_tokens": 1, "task.system_prompt": "End with Answer: and the number."}),
    RecipeFault("a stop text occurs in the references", "stop-cuts-answers", {"sampling.stop": ["1"]}),
    RecipeFault("the format earns more than the answer", "format-outweighs",
                {"reward.format_pattern": "<think>.*</think>.*", "reward.format_weight": 2.0}),
    RecipeFault("sampling is nearly greedy", "temperature", {"sampling.temperature": 0.05}),
    RecipeFault("sampling is nearly random", "temperature", {"sampling.temperature": 2.0}),
    RecipeFault("the learning rate is that of pretraining", "learning-rate-high", {"trainer.learning_rate": 1e-3}),
    RecipeFault("the learning rate is that of adapters", "learning-rate-high", {"trainer.learning_rate": 1e-4}),
    RecipeFault("the learning rate of adapters is too high", "learning-rate-high",
                {"trainer.lora": {"rank": 16}, "trainer.learning_rate": 1e-2}),
    RecipeFault("the learning rate is nothing in bfloat16", "learning-rate-low", {"trainer.learning_rate": 1e-9}),
    RecipeFault("the learning rate is nothing in float32", "learning-rate-low",
                {"model.dtype": "float32", "trainer.learning_rate": 1e-12}),
    RecipeFault("warm-up is longer than the run", "warmup-too-long", {"trainer.warmup_steps": 1000}),
    RecipeFault("actors are throttled by the lag limit", "max-lag-too-small",
                {"algorithm.max_lag": 1, "actor.sequences_in_progress": 512}),
    RecipeFault("the KL term outweighs the reward", "penalty-dominates", {"algorithm.kl_coefficient": 5.0}),
    RecipeFault("the entropy bonus outweighs the reward", "penalty-dominates", {"algorithm.entropy_coefficient": 1.0}),
    RecipeFault("the clip range of sequences is used for tokens", "bounds-narrow",
                {"algorithm.loss": "ppo_clip", "algorithm.clip_low": 3e-4, "algorithm.clip_high": 4e-4}),
    RecipeFault("the clip range of tokens is used for sequences", "bounds-narrow",
                {"algorithm.loss": "gspo", "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2}),
    RecipeFault("the mask accepts only equal probabilities", "bounds-narrow",
                {"algorithm.mask": "icepop", "algorithm.mask_low": 1.0, "algorithm.mask_high": 1.0}),
)  # fmt: skip

HEALTHY = tuple(
    RunFault(f"{recipe}-{seed}", "a shipped recipe with another seed", (), (f"seed={seed}",), recipe, steps)
    for recipe, steps, seeds in (
        ("arithmetic", 30, 7), ("repeated-addition", 12, 3), ("code", 16, 3), ("guess", 20, 4), ("calculator", 20, 3),
    )
    for seed in range(seeds)
)  # fmt: skip
