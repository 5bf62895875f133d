"""Rules about what a policy can learn from: lengths, answers and rewards of its completions, in the order of causes. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

from pipelinerl.doctor.findings import Found, Rule, Verdict, add_to, percent, worse
from pipelinerl.doctor.run_records import Record, RunRecords, number_at
from pipelinerl.tasks.final_answer import bare_answer, final_answer, occurs

RULES: list[Rule] = []
rule = add_to(RULES)
_NO_ANSWERS = ("json_schema", "regex", "judge", "code")
"""Scorers whose reference is not a right answer."""
_DEAD, _FEW = 0.95, 0.75
"""Share of the groups with equal rewards that leaves no signal, or a quarter of it."""


def _shown(sample: Record) -> dict[str, Any]:
    text = {key: str(sample.get(key) or "")[-400:] for key in ("prompt", "completion", "reference", "answer", "reason")}
    return {"step": sample.get("step"), **text, "reward": sample.get("reward"), "tokens": (sample.get("tokens") or [])[-24:]}


def _last(run: RunRecords, kind: Callable[[Record], bool] = bool) -> dict[str, Any] | None:
    return next((_shown(one) for one in reversed(run.trained_samples) if kind(one)), None)


def _written(sample: Record) -> bool:
    """Return whether the completion has the reference, even in a place where the reward does not look."""
    return occurs(str(sample.get("reference") or ""), str(sample.get("completion")))


def _right(sample: Record) -> bool:
    """Return whether the answer that the reward found is the reference or ends with it, apart from a unit, case and `.0`."""
    reference, answer = (bare_answer(str(sample.get(key) or "")) for key in ("reference", "answer"))
    return bool(reference) and re.search(rf"(?<![\w.]){re.escape(reference)}\W*$", answer) is not None


def _earned(samples: Iterable[Record]) -> list[float]:
    """Return the answer terms of samples with a reward, or the reward if it has no such term."""
    terms = [({n: v for n, v in (one.get("terms") or {}).items() if n.partition(".")[0] == "answer"}, one) for one in samples]
    return [sum(of.values()) if of else one["reward"] for of, one in terms if number_at(one, "reward") is not None]


def _compared(run: RunRecords) -> list[Record]:
    """Return the samples, held-out ones too, of tasks whose reference is a right answer."""
    comparing = [name for name, one in run.recipe.mixture.items() if one.reward.scorer not in _NO_ANSWERS]
    return [one for one in run.samples if one.get("reference") and one.get("task") in comparing]


@rule("learning.md#log-probabilities")
def model_broken(run: RunRecords) -> Verdict:
    """The model does not write language before any training: completions of the first 3 steps, half of 4 with 16 tokens, repeat
    one token; or their entropy exceeds 4 nats at a temperature of at most 1.5. Text has 1 to 3."""

    def repeats(one: Record) -> bool:
        return Counter(tokens := one["tokens"]).most_common(1)[0][1] > len(tokens) / 2

    first = [one for one in run.trained_samples if number_at(one, "step") in (1, 2, 3) and len(one.get("tokens") or ()) >= 16]
    share = fmean(map(repeats, first)) if len(first) >= 4 else 0.0
    entropy = max(run.values("entropy", slice(3)) or [0.0]) if run.recipe.sampling.temperature <= 1.5 else 0.0
    told = f"{percent(share)} of the first completions repeat one token; entropy {entropy:.2g} nats"
    fix = "compare weights, tokenizer and dtype with those of another copy; generate a text with transformers"
    return (share >= 0.5 or entropy > 4) and Found("grave", told, "model.name", fix, _shown(first[0]) if first else None)


@rule("learning.md#truncated-completions")
def all_cut(run: RunRecords) -> Verdict:
    """Completions are cut at their length limit: 50 % of a run that has not learned; grave from 90 % if rewards are equal, or
    if the loss leaves cut completions out."""
    share, limit = run.mean("truncated_fraction"), run.recipe.max_tokens
    field, fix = "sampling.max_tokens", f"is {limit}; use {4 * limit} with model.max_context to match, or ask for less"
    shortest = min(one.max_tokens for one in run.recipe.mixture.values())
    if run.mean("completion_tokens_mean") < 0.9 * shortest * share:  # the context was full before
        field, fix = "model.max_context", f"is {run.recipe.model.max_context}; raise it by {limit}, or shorten the prompts"
    gravity = worse(share, 0.9) if run.first_task.reward.truncated == "mask" or not run.has_signal else "warning"
    is_bad = share >= 0.5 and not run.has_learned
    return is_bad and Found(gravity, f"{percent(share)} of the completions", field, fix, _last(run))


@rule("recipes.md#chat-templates")
def think_unclosed(run: RunRecords) -> Verdict:
    """Reasoning is opened and never closed, so that no answer follows: half of 8 samples, with a mean reward below 0.5."""

    def is_open(one: Record) -> bool:
        text = f"{str(one.get('prompt') or '')[-40:]}{one.get('completion')}"
        return text.rfind("<think>") > text.rfind("</think>")

    samples = run.trained_samples
    share = fmean(map(is_open, samples)) if len(samples) >= 8 else 0.0
    fix = f"is {run.recipe.max_tokens}; raise it, or switch reasoning off by model.chat_template_kwargs"
    is_bad, told = share >= 0.5 and run.late("reward_mean") < 0.5, f"{percent(share)} of the samples"
    return is_bad and Found(worse(not run.has_signal, 1), told, "sampling.max_tokens", fix, _last(run, is_open))


@rule("learning.md#from-rewards-to-advantages")
def completions_identical(run: RunRecords) -> Verdict:
    """The completions of a group are all the same text: 75 % of the groups of a run that has not learned; grave from 95 %,
    or if rewards are equal."""
    share, temperature = run.mean("identical_groups"), run.recipe.sampling.temperature
    fix = f"is {temperature:g}; use 1" if temperature < 0.9 else "is not the cause: this model is certain of its answers"
    is_bad, gravity = share >= _FEW and not run.has_learned, worse(share, _DEAD if run.has_signal else _FEW)
    return is_bad and Found(gravity, f"{percent(share)} of the groups", "sampling.temperature", fix, _last(run))


@rule("recipes.md#rewards")
def answers_absent(run: RunRecords) -> Verdict:
    """The reward hardly ever finds an answer: under 5 %; grave if rewards are equal or the reference occurs in 5 %."""
    reward, absent, missed = run.first_task.reward, run.mean("answers_absent"), run.mean("answers_missed")
    form = r"\boxed{}" if reward.scorer == "math_boxed" else f"reward.answer_pattern = {reward.answer_pattern!r}"
    told = f"no answer found in {percent(absent)} of the completions"
    field, fix = "task.instruction", f"ask for the form that {form} expects, and check template and stop texts"
    if is_missed := missed >= 0.05:
        told = f"{told}; {percent(missed)} contain the reference"
        field, fix = "reward.answer_pattern", f"completions do not have the form of {form}; change it, or ask for that form"
    if stop := run.recipe.sampling.stop:
        field, fix = "sampling.stop", f"is {stop}; leave it out if answers come after it"
    sample = _last(run, _written if is_missed else bool)
    return absent >= 0.95 and Found(worse(is_missed or not run.has_signal, 1), told, field, fix, sample)


@rule("recipes.md#rewards")
def answers_misread(run: RunRecords) -> Verdict:
    """The reward takes another part of the completion as its answer: 20 % of 8 samples end with the reference, and earn nothing
    for the answer that was found."""

    def is_misread(one: Record) -> bool:
        end = re.findall(r"-?\w+(?:\.\d+)?", str(one.get("completion")))[-1:]
        return end == [final_answer(str(one["reference"]))] and not _right(one) and _earned([one]) == [0]

    samples = [one for one in _compared(run) if one.get("answer")]
    share = fmean(map(is_misread, samples)) if len(samples) >= 8 else 0.0
    told, fix = f"{percent(share)} of the samples", "does not find the last answer; describe what stands around it"
    field = "reward.answer_pattern"
    return share >= 0.2 and Found(worse(not run.has_learned, 1), told, field, fix, _last(run, is_misread))


@rule("recipes.md#rewards")
def right_unrewarded(run: RunRecords) -> Verdict:
    """Answers that equal the reference, apart from a unit, earn no more than others: 80 % of 4 earn nothing, or 10 of each kind
    earn alike."""
    samples = _compared(run)
    right, others = [one for one in samples if _right(one)], _earned(one for one in samples if not _right(one))
    if len(paid := _earned(right)) < 4:
        return False
    is_unpaid = fmean(one > 0 for one in paid) <= 0.2 and not run.has_learned
    spread = max([*paid, *others]) - min([*paid, *others])
    is_alike = min(len(paid), len(others)) >= 10 and fmean(paid) < fmean(others) + 0.1 * spread
    told = f"{len(paid)} right answers earn {fmean(paid):.3g}, {len(others)} others {fmean(others or [0.0]):.3g} on average"
    fix = "does not compare answer and reference: try it by pipelinerl validate, and read the sample's reason"
    is_own = any(run.recipe.mixture[str(one["task"])].reward.is_function for one in right)  # it may want something else
    gravity = worse(not (is_own and run.has_signal), 1)
    return (is_unpaid or is_alike) and Found(gravity, told, "reward.scorer", fix, _shown(right[-1]))


@rule("recipes.md#tasks")
def references_unrelated(run: RunRecords) -> Verdict:
    """Answers equal the reference of their own problem no more often than that of another: in a run that has not learned, and
    in 24 samples by 2 standard errors; grave with 5 different references."""
    samples = [one for one in _compared(run) if one.get("answer")]
    answers, references = ([bare_answer(str(one[key])) for one in samples] for key in ("answer", "reference"))
    counts, own = Counter(references), sum(a == b for a, b in zip(answers, references, strict=True))
    chance = sum(counts[answer] for answer in answers) / max(1, len(answers))  # number of right answers after shuffling
    share = run.mean(f"reported.{run.first_task.name}.answer") / run.first_task.reward.correct
    is_bad = (
        len(answers) >= 24
        and len(counts) > 1
        and chance >= 0.5
        and own < chance + 2 * chance**0.5
        and share < 1.2 * chance / len(answers)
    )
    told = f"{percent(share)} right, and {percent(chance / max(1, len(answers)))} would be if references were shuffled"
    fix = "check that each line has the answer to its own question; else take easier problems"
    return is_bad and run.is_stuck and Found(worse(len(counts), 5), told, "task.path", fix, _last(run))


@rule("recipes.md#tasks")
def groups_all_wrong(run: RunRecords) -> Verdict:
    """No answer of a group is right: 75 % of the groups of a run that has not learned; grave from 95 % with equal rewards."""
    share, size = run.mean("groups_all_wrong"), run.recipe.sampling.group_size
    fix = f"take problems that the model solves in 1 to {size - 1} of {size} tries, or larger groups; check the references"
    is_bad = share >= _FEW and run.is_stuck and run.first_task.reward.scorer != "judge"
    gravity = "warning" if run.has_signal else worse(share, _DEAD)
    return is_bad and Found(gravity, f"{percent(share)} of the groups", "task", fix, _last(run))


@rule("recipes.md#tasks")
def groups_all_right(run: RunRecords) -> Verdict:
    """Every answer is right, so that nothing is left to learn: 75 % of the last groups, a note. In a run that has not learned,
    a warning if it is 75 % of all its groups, and grave from 95 %."""
    share, late = run.mean("groups_all_right"), run.late("groups_all_right")
    samples = [one for one in run.trained_samples if one.get("reference")]
    is_accurate = len(samples) < 4 or any(map(_written, samples))  # otherwise the reward is constant
    gravity = "note" if run.has_learned or share < _FEW else worse(share, _DEAD)
    fix = "take harder problems, or check whether the reward also accepts wrong answers"
    return late >= _FEW and is_accurate and Found(gravity, f"{percent(late)} of the last groups", "task", fix, _last(run))


@rule("recipes.md#rewards")
def reward_constant(run: RunRecords) -> Verdict:
    """Rewards, or the marks of a judge, do not vary within groups: 75 % of a run that has not learned; grave from 95 %."""
    share, right = run.mean("equal_reward_groups"), run.late("groups_all_right")
    values = sorted(set(_earned(run.trained_samples)))[:4]
    field, fix = "reward.scorer", "check its arguments, what it compares, and what it returns by default"
    if run.first_task.reward.scorer == "judge":
        field, fix = "reward.judge.template", "ask for a graded mark by criteria, and check pattern and full_marks on an answer"
    is_bad = share >= _FEW and run.is_stuck and not (share < _DEAD and right >= 0.5)
    told = f"{percent(share)} of the groups; rewards such as {', '.join(f'{value:g}' for value in values)}"
    return is_bad and Found(worse(share, _DEAD), told, field, fix, _last(run))


@rule("recipes.md#rewards")
def reward_plateau(run: RunRecords) -> Verdict:
    """The reward has risen and stopped below its maximum: rewards are equal in 75 % of the last groups, and the last quarter
    earns under 0.9 of the maximum and gains under 0.05 of it on the quarter before."""
    share, reward, best = run.late("equal_reward_groups"), run.late("reward_mean"), run.first_task.reward.correct
    before = fmean(run.values("reward_mean", slice(-2 * run.window, -run.window)) or [reward])
    is_bad = run.has_learned and share >= _FEW and reward < min(0.9 * best, before + 0.05 * best)
    told = f"reward {reward:.3g} of {best:g}; rewards are equal in {percent(share)} of the last groups"
    fix = f"give partial credit, change the prompt, or raise sampling.temperature ({run.recipe.sampling.temperature:g})"
    return is_bad and run.recipe.algorithm.advantage != "value" and Found("warning", told, "reward.scorer", fix, _last(run))


@rule("recipes.md#rewards")
def term_dominates(run: RunRecords) -> Verdict:
    """A term other than the answer decides who is better: 80 % of the terms' spread within groups, answers below 0.9; or the
    format is earned, 80 % of it, and under 2 % of the answers (grave if equal)."""
    reward, name = run.first_task.reward, f"reported.{run.first_task.name}"
    form, right = run.late(f"{name}.format"), run.late(f"{name}.answer")
    if run.is_long and form >= 0.8 * reward.format_weight > 0 and right < 0.02 * reward.correct:
        told = f"format {form:.3g} of {reward.format_weight:g}, answer {right:.3g} of {reward.correct:g}"
        fix = "check the references and the scorer, or take easier problems"
        return Found(worse(not run.has_signal, 1), told, "task", fix, _last(run))
    spread = {term: run.mean(f"term_spread.{term}") for step in run.trained for term in sorted(step.get("term_spread") or {})}
    most = max(spread, key=lambda one: spread[one], default="answer")
    field = {"format": "reward.format_weight", "overlong": "reward.overlong.penalty"}.get(most, "reward.scorer")
    told = ", ".join(f"{one} {value:.3g}" for one, value in spread.items())
    is_bad = most.partition(".")[0] != "answer" and spread[most] >= 0.8 * sum(spread.values()) > 0 and right < 0.9
    return is_bad and Found("warning", f"spread: {told}", field, f"let {most} weigh less than the answer", _last(run))


@rule("recipes.md#rewards")
def format_never(run: RunRecords) -> Verdict:
    """The format term is never earned, so that it teaches nothing: in a run of 12 steps."""
    reward, earned = run.first_task.reward, run.values(f"reported.{run.first_task.name}.format")
    is_bad = run.is_long and bool(earned) and reward.format_weight > 0 and not any(earned)
    told, fix = f"in no completion of {len(earned)} steps", "ask for this form in the prompt, with an example, or correct it"
    return is_bad and Found("warning", told, "reward.format_pattern", fix, _last(run))


@rule("recipes.md#tasks")
def task_starves(run: RunRecords) -> Verdict:
    """A task of the mixture gets too few sequences, or earns nothing: a quarter of its share; a mean reward of 0."""
    shares = run.recipe.mixture
    for name, share in shares.items() if len(shares) > 1 and run.is_long else ():
        wanted = share.weight / sum(one.weight for one in shares.values())
        taken = sum(run.values(f"tasks.{name}.sequences")) / max(1.0, sum(run.values("sequences_trained")))
        reward = run.mean(f"tasks.{name}.reward_mean")
        if taken < wanted / 4 or reward == 0:
            told = f"{name}: {percent(taken)} of the sequences for a weight of {percent(wanted)}, reward {reward:.3g}"
            fix = "look at its samples and reasons: its reward, pattern or prompts may be wrong"
            found = _last(run, lambda one: one.get("task") == name)  # noqa: B023 - called at once
            return Found("warning", told, f"tasks ({name})", fix, found)
    return False


@rule("learning.md#normalisation")
def length_grows(run: RunRecords) -> Verdict:
    """Completions grow while the reward does not: 1.5 times the first length, by 3 standard errors."""
    early, late = run.early("completion_tokens_mean"), run.late("completion_tokens_mean")
    is_bad = late >= 1.5 * early and run.change("completion_tokens_mean") > 3 and run.change("reward_mean") < 1
    fix = "add it, or use algorithm.normalization: token, with which long wrong answers weigh more"
    told = f"{early:.4g} -> {late:.4g} tokens"
    return is_bad and not run.has_learned and Found("warning", told, "reward.overlong", fix, _last(run))
