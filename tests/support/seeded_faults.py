"""Seeded faults: a recipe or a data file with one thing wrong, and the finding that `pipelinerl doctor` must put first.

The faults follow public reports about systems that train language models by reinforcement learning, in our own words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
_FAULTY = "benchmarks.faulty_rewards"


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
_JUDGED: Row = {"reward.scorer": "judge", "reward.answer_pattern": ""}
_JUDGE: Row = {"url": "http://judge", "model": "judge", "pattern": r"Score: (\d+)", "full_marks": 10.0,
          "template": "Problem: {prompt}\nMark from 0 to 10: {completion}\nEnd with Score: and the mark."}  # fmt: skip
_LETTERS: Row = {"reward.answer_pattern": "Answer: ([A-D])", "task.system_prompt": "End with Answer: and the letter."}


def _moved(rows: list[Row]) -> list[Row]:
    """Return questions of choice, each with the answer of the next one."""
    words = [f"word{row['answer']}of{i}" for i, row in enumerate(rows)]
    return [row | {"prompt": f"Which is longer, {word} or {i}?", "answer": words[(i + 1) % len(rows)]}
            for i, (row, word) in enumerate(zip(rows, words, strict=True))]  # fmt: skip


_SPEAKERS = (("user", "prompt"), ("assistant", "answer"))


def _turns(rows: list[Row]) -> list[Row]:
    """Return conversations of three turns, each as three rows."""
    said = [{"role": role, "content": row[name]} for row in rows for role, name in _SPEAKERS]
    return [{"prompt": said[2 * (i - i % 3) : 2 * i + 1], "answer": row["answer"]} for i, row in enumerate(rows)]


RECIPE_FAULTS = (
    RecipeFault("a misspelt field is refused, not ignored", "recipe-mistake", {"trainer.learnig_rate": 1e-6}),
    RecipeFault("the reward's function is misspelt", "recipe-mistake", {"reward.scorer": f"{_FAULTY}:constnat"}),
    RecipeFault("the reward raises", "recipe-mistake", {"reward.scorer": f"{_FAULTY}:raising"}, tried=True),
    RecipeFault("the reward compares a text with a number", "references-unpaid",
                {"reward.scorer": f"{_FAULTY}:compares_types"}, tried=True),
    RecipeFault("references are decimals, and the pattern reads whole numbers", "references-unpaid", {},
                _with(answer=lambda row: f"{row['answer']}.50"), tried=True),
    RecipeFault("half of the references are empty", "answers-empty", {},
                lambda rows: [row | {"answer": ""} if i % 2 else row for i, row in enumerate(rows)]),
    RecipeFault("prompts occur three times", "prompts-repeated", {}, lambda rows: rows * 3),
    RecipeFault("the answer's column is a constant", "one-answer", {}, _with(answer=lambda row: "1")),
    RecipeFault("references are whole solutions", "references-unmatched", {},
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
    RecipeFault("a small model's sum does not fit", "max-tokens-small", _TOY | {"sampling.max_tokens": 4}),
    RecipeFault("prompts ask for a box, and for another form, too", "form-unsaid",
                {"task.instruction": r"Put the answer into \boxed{}."}),
    RecipeFault("steps do not fit", "max-tokens-small", {"sampling.max_tokens": 32}),
    RecipeFault("thinking does not fit", "max-tokens-small", {"model.chat_template_kwargs": {"enable_thinking": True}}),
    RecipeFault("references do not fit", "max-tokens-small", {"sampling.max_tokens": 16, "reward.scorer": "exact",
                "reward.answer_pattern": "", "task.system_prompt": "Write the sentence."},
                _with(answer=lambda row: "The sum of both of the numbers in the question above, which one can find by adding "
                      f"them, is exactly {row['answer']} and nothing else")),
    RecipeFault("a line end stops the first step", "stop-cuts-answers", {"sampling.stop": ["\n"]}),
    RecipeFault("a stop text begins the answer", "stop-cuts-answers", {"sampling.stop": ["Answer:"]}),
    RecipeFault("a stop text occurs in the references", "stop-cuts-answers", {"sampling.stop": ["1"]}),
    RecipeFault("the format earns more than the answer", "terms-outweigh",
                {"reward.format_pattern": "<think>.*</think>.*", "reward.format_weight": 2.0}),
    RecipeFault("sampling is nearly greedy", "temperature", {"sampling.temperature": 0.05}),
    RecipeFault("the learning rate is that of pretraining", "learning-rate-high", {"trainer.learning_rate": 1e-3}),
    RecipeFault("the learning rate of adapters is too high", "learning-rate-high",
                {"trainer.lora": {"rank": 16}, "trainer.learning_rate": 1e-2}),
    RecipeFault("the learning rate is nothing in bfloat16", "learning-rate-low", {"trainer.learning_rate": 1e-9}),
    RecipeFault("the learning rate is nothing in float32", "learning-rate-low",
                {"model.dtype": "float32", "trainer.learning_rate": 1e-12}),
    RecipeFault("warm-up is longer than the run", "warmup-too-long", {"trainer.warmup_steps": 1000}),
    RecipeFault("actors are throttled by the lag limit", "max-lag-too-small",
                {"algorithm.max_lag": 1, "actor.sequences_in_progress": 512}),
    RecipeFault("a bound is set, but no mask", "fields-unused", {"algorithm.mask_high": 2.0}),
    RecipeFault("the KL term outweighs the reward", "penalty-dominates", {"algorithm.kl_coefficient": 5.0}),
    RecipeFault("the entropy bonus outweighs the reward", "penalty-dominates", {"algorithm.entropy_coefficient": 1.0}),
    RecipeFault("the clip range of sequences is used for tokens", "bounds-wrong",
                {"algorithm.loss": "ppo_clip", "algorithm.clip_low": 3e-4, "algorithm.clip_high": 4e-4}),
    RecipeFault("the clip range of tokens is used for sequences", "bounds-wrong",
                {"algorithm.loss": "gspo", "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2}),
    RecipeFault("the mask accepts only equal probabilities", "bounds-wrong",
                {"algorithm.mask": "icepop", "algorithm.mask_low": 1.0, "algorithm.mask_high": 1.0}),
    RecipeFault("references are short solutions", "references-unmatched", {},
                _with(answer=lambda row: f"{row['prompt'][8:-1]} equals {row['answer']}")),
    RecipeFault("references are percentages, and texts are compared", "references-unmatched",
                {"reward.answer_pattern": "Answer: (.+)"}, _with(answer=lambda row: f"{row['answer']}%")),
    RecipeFault("empty cells have become nan", "references-unmatched", {"reward.answer_pattern": "Answer: (.+)"},
                lambda rows: [row | {"answer": row["answer"] if i % 3 else "nan"} for i, row in enumerate(rows)]),
    RecipeFault("six of seven answers are no", "one-answer",
                {"reward.answer_pattern": "Answer: (yes|no)", "task.system_prompt": "End with Answer: yes or Answer: no."},
                lambda rows: [row | {"answer": "no" if i % 7 else "yes"} for i, row in enumerate(rows)]),
    RecipeFault("the prompt's column is that of the answer", "columns-mixed", {"task.prompt_field": "answer"}),
    RecipeFault("the answer's column numbers the rows", "columns-mixed", {"task.answer_field": "id"},
                lambda rows: [row | {"id": i} for i, row in enumerate(rows)]),
    RecipeFault("the prompt's column names the rows", "columns-mixed", {"task.prompt_field": "id"},
                lambda rows: [row | {"id": f"question-{i}"} for i, row in enumerate(rows)]),
    RecipeFault("prompts tell their answer", "columns-mixed", {},
                _with(prompt=lambda row: f"{row['prompt']} (Answer: {row['answer']})")),
    RecipeFault("rows hold prompts in a chat template", "template-twice", {},
                _with(prompt=lambda row: f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n")),
    RecipeFault("the system prompt begins with a token of its own", "template-twice",
                {"task.system_prompt": "<|begin_of_text|>Reason step by step. End with Answer: and the number."}),
    RecipeFault("prompts end with the next speaker, in a chat", "template-twice", {},
                _with(prompt=lambda row: f"User: {row['prompt']}\nAssistant:")),
    RecipeFault("the system prompt forbids the form of answers", "form-unsaid",
                {"task.system_prompt": "Reason step by step. Give the number alone, and do not write Answer: before it."}),
    RecipeFault("the pattern has other letters than the prompt", "form-unsaid", {"reward.answer_pattern": r"ANSWER: (-?\d+)"}),
    RecipeFault("the pattern reads the first number", "form-unsaid", {"reward.answer_pattern": r"^\D*(\d+)"}),
    RecipeFault("nobody asks for the format that earns", "form-unsaid",
                {"reward.format_pattern": "<reasoning>.*</reasoning>.*", "reward.format_weight": 0.1}),
    RecipeFault("a stop text ends the reasoning, before the answer", "stop-cuts-answers",
                {"sampling.stop": ["</think>"], "task.system_prompt": "Think in <think></think>, then write Answer: and it.",
                 "sampling.max_tokens": 1024}),
    RecipeFault("any text has the format", "terms-outweigh", {"reward.format_pattern": ".*", "reward.format_weight": 0.5}),
    RecipeFault("the penalty of length outweighs the answer", "terms-outweigh",
                {"reward.overlong": {"buffer_tokens": 64, "penalty": 100.0}}),
    RecipeFault("every length is penalized", "terms-outweigh", {"reward.overlong": {"buffer_tokens": 512, "penalty": 1.0}}),
    RecipeFault("rewards are in the thousands", "reward-scale", {"reward.correct": 5000.0}),
    RecipeFault("weight decay erases the model", "optimizer-settings", {"trainer.weight_decay": 1e4}),
    RecipeFault("AdamW's epsilon is above any gradient", "optimizer-settings", {"trainer.epsilon": 1.0}),
    RecipeFault("gradients are clipped to nothing", "optimizer-settings", {"trainer.max_grad_norm": 1e-6}),
    RecipeFault("AdamW forgets squares sooner than means", "optimizer-settings", {"trainer.beta2": 0.5}),
    RecipeFault("the learning rate of all weights is used for adapters", "learning-rate-low", {"trainer.lora": {"rank": 16}}),
    RecipeFault("importance weights are unbounded", "bounds-wrong", {"algorithm.clamp": 1e9}),
    RecipeFault("evaluations come after the end", "evaluation-blind", {"evaluation.every_steps": 10_000}),
    RecipeFault("one problem is held out", "evaluation-blind", {"task.heldout_problems": 1}),
    RecipeFault("two problems are left for training", "problems-few", {}, lambda rows: rows[:34]),
    RecipeFault("a step sees one problem", "batch-small", {"trainer.batch_size": 8}),
    RecipeFault("the file was read in a wrong encoding", "texts-damaged", {},
                _with(prompt=lambda row: f"It’s a sum: {row['prompt']}".encode().decode("cp1252"))),
    RecipeFault("prompts are cut at 120 characters", "texts-damaged", {}, _with(
        prompt=lambda row: f"{row['prompt']} {'Add the tens, then the ones, and care. ' * (int(row['answer']) % 7)}"[:120])),
    RecipeFault("the chat template never begins an answer", "template-unused",
                {"model.chat_template": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"}),
    RecipeFault("the reward prefers short texts, so that nothing is best", "wrong-paid",
                {"reward.scorer": f"{_FAULTY}:brief", "task.answer_field": ""}, tried=True),
    RecipeFault("the judge sees neither problem nor reference", "judge-misled", _JUDGED | {"reward.judge": _JUDGE | {
        "template": "Mark this answer from 0 to 10: {completion}\nEnd with Score: and the mark."}}),
    RecipeFault("the judge's highest mark is another", "judge-misled",
                _JUDGED | {"reward.judge": _JUDGE | {"full_marks": 1.0}}),
    RecipeFault("the judge's pattern takes one digit", "judge-misled", _JUDGED | {"reward.judge": _JUDGE | {
        "pattern": r"Score: (\d)"}}),
    RecipeFault("the reward counts characters", "wrong-paid", {"reward.scorer": f"{_FAULTY}:of_length",
                "reward.answer_pattern": "", "task.system_prompt": "Give the number."}, tried=True),
    RecipeFault("references are LaTeX, and texts are compared", "references-unmatched",
                {"reward.answer_pattern": "Answer: (.+)"}, _with(answer=lambda row: rf"\frac{{{row['answer']}}}{{7}}")),
    RecipeFault("the reward looks for the answer anywhere in the completion", "wrong-paid",
                {"reward.scorer": f"{_FAULTY}:anywhere"}, tried=True),
    RecipeFault("the reward is a percentage", "reward-scale", {"reward.scorer": f"{_FAULTY}:in_percent"}, tried=True),
    RecipeFault("each answer stands in the row after its question", "references-shifted",
                {"reward.answer_pattern": "Answer: (.+)"}, _moved),
    RecipeFault("choices are left out of the prompts", "columns-mixed", _LETTERS,
                lambda rows: [row | {"answer": "ABCD"[i % 4]} for i, row in enumerate(rows)]),
    RecipeFault("prompts are hashes", "columns-mixed", {}, _with(prompt=lambda row: f"{hash(row['prompt']) % 16**16:016x}")),
    RecipeFault("the system prompt has an empty place", "texts-damaged",
                {"task.system_prompt": "Solve {{ question }} step by step. End with Answer: and the number."}),
    RecipeFault("roles have the names of ShareGPT", "template-unused", {},
                _with(prompt=lambda row: [{"role": "human", "content": row["prompt"]}])),
    RecipeFault("rows have another system prompt, which hides the recipe's", "form-unsaid", {},
                _with(prompt=lambda row: [{"role": one, "content": row["prompt"]} for one in ("system", "user")])),
    RecipeFault("a whole solution is compared with the number", "form-unsaid", {"reward.answer_pattern": ""}),
    RecipeFault("most prompts leave room for half an answer", "prompts-fill-context", {"model.max_context": 600},
                _with(prompt=lambda row: f"{'Read this carefully. ' * 110}{row['prompt']}")),
    RecipeFault("groups of two rarely differ", "groups-small", {"sampling.group_size": 2}),
    RecipeFault("a task of the mixture is never drawn", "batch-small", {"task": None, "tasks": [
        {"name": name, "weight": weight, "task": RECIPE["task"]} for name, weight in (("a", 1.0), ("b", 1e-5))]}),
    RecipeFault("the judge is not told how to write its mark", "judge-misled", _JUDGED | {"reward.judge": _JUDGE | {
        "pattern": r"RATING=(\d+)"}}),
)  # fmt: skip

HEALTHY_RECIPES: dict[str, tuple[Row, Callable[[list[Row]], list[Row]]]] = {
    "as it is": ({}, list),
    "choices": ({"reward.answer_pattern": r"Answer: ([A-D])", "task.system_prompt": "End with Answer: and the letter."},
                lambda rows: [row | {"prompt": f"{row['prompt']}\nA) 1\nB) 2\nC) 3\nD) 4", "answer": "ABCD"[i % 4]}
                              for i, row in enumerate(rows)]),
    "solutions in the form of GSM8K": (
        {"reward.scorer": "math", "reward.answer_pattern": "", "task.answer_pattern": r"####\s*(.+)"},
        _with(answer=lambda row: f"First we add the tens, and then we add the ones.\n#### {row['answer']}")),
    "solutions in the form of MATH": (
        {"reward.scorer": "math_boxed", "reward.answer_pattern": "", "task.system_prompt": r"Give the answer in \boxed{}."},
        _with(answer=lambda row: rf"First we add the tens, and then the ones, so that it is $\boxed{{{row['answer']}}}$.")),
    "a base model in the form of R1-Zero": (
        {"task.prompt_style": "plain", "task.system_prompt": "", "sampling.stop": ["\nUser:"],
         "task.prompt_template": "User: {prompt} Reason first. End with Answer: and the number.\nAssistant:"}, list),
    "a thinking model": (
        {"model.name": "Qwen/Qwen3-4B", "sampling.max_tokens": 1536, "reward.format_pattern": "<think>.*</think>.*",
         "reward.format_weight": 0.1, "task.system_prompt": "End with Answer: and the number."}, list),
    "the end tag of the answer stops": (
        {"sampling.stop": ["</answer>"], "reward.answer_pattern": r"<answer>\s*(-?\d+)",
         "task.system_prompt": "Reason step by step, then write <answer>the number</answer>."}, list),
    "a judge": (_JUDGED | {"reward.judge": _JUDGE}, list),
    "prompts spell out the answers that are allowed": (
        {"reward.answer_pattern": "Answer: (yes|no)", "task.system_prompt": "Reason step by step."},
        lambda rows: [row | {"prompt": f"Is {i} prime? End with Answer: yes or Answer: no.", "answer": ("yes", "no")[i % 2]}
                      for i, row in enumerate(rows)]),
    "questions are numbered": ({}, lambda rows: [row | {"prompt": f"{i}. How many cards has player {'ABCDE'[i % 5]}?"}
                                                 for i, row in enumerate(rows, 1)]),
    "answers are numbers in a text, in the order of a loop": (
        {"reward.scorer": "math", "reward.answer_pattern": "", "task.system_prompt": "Reason step by step."},
        lambda rows: [row | {"prompt": f"Solve {a}x = {a * b}", "answer": f"x = {b}"}
                      for row, (a, b) in zip(rows, ((a, b) for a in range(3, 11) for b in range(2, 17)), strict=True)]),
    "the pattern of MMLU-Pro": (
        {"reward.answer_pattern": r"[Tt]he (?:final )?answer is:? \(?([A-D])\)?",
         "task.system_prompt": "Reason step by step. End with: The answer is (X)."},
        lambda rows: [row | {"prompt": f"{row['prompt']}\nA) 1\nB) 2\nC) 3\nD) 4", "answer": "ABCD"[i % 4]}
                      for i, row in enumerate(rows)]),
    "prompts are windows of a series": (
        {}, lambda rows: [row | {"prompt": f"What follows {' '.join(str(37 * j % 1009) for j in range(i, i + 8))} next?",
                                 "answer": str(37 * (i + 8) % 1009)} for i, row in enumerate(rows)]),
    "conversations have a row for each turn": ({}, _turns),
    "prompts and answers have units, as the instruction says": (
        {"reward.answer_pattern": "Answer: (.+)", "task.system_prompt": "End with Answer: and the length, such as 500 cm."},
        _with(answer=lambda row: f"{row['answer']} cm")),
}  # fmt: skip
"""Changes of RECIPE and ROWS that are no faults."""
