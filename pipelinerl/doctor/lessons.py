"""Rules about what a policy can learn from: lengths, answers and rewards of its completions. Pure."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from pipelinerl.doctor.findings import Rows, percent
from pipelinerl.doctor.run_records import Record, RunRecords, number_at
from pipelinerl.tasks.final_answer import bare_answer, final_answer, occurs

_NO_ANSWERS = ("json_schema", "regex", "judge", "code")
"""Scorers whose reference is not a right answer."""
_DEAD, _FEW = 0.95, 0.75
"""Shares of groups with equal rewards. At `_DEAD`, hardly any group gives a signal; at `_FEW`, only a quarter of groups do."""


def _last(samples: Sequence[Record], kind: Callable[[Record], bool] = bool) -> Record | None:
    return next(filter(kind, reversed(samples)), None)


def _share(samples: Sequence[Record], least: int, kind: Callable[[Record], bool]) -> float:
    """Return the share of the samples for which `kind` is true; 0 if there are fewer than `least` samples."""
    return fmean(map(kind, samples)) if len(samples) >= least else 0.0


def _written(sample: Record) -> bool:
    """Return whether the completion contains the reference, even in a place where the reward does not look."""
    return occurs(str(sample.get("reference") or ""), str(sample.get("completion")))


def _right(sample: Record) -> bool:
    """Return whether the answer that the reward found is the reference or ends with it, apart from a unit, case and `.0`."""
    reference, answer = (bare_answer(str(sample.get(key) or "")) for key in ("reference", "answer"))
    return bool(reference) and re.search(rf"(?<![\w.]){re.escape(reference)}\W*$", answer) is not None


def _earned(samples: Iterable[Record]) -> list[float]:
    """Return, for each sample with a reward, the sum of its terms `answer` and `answer.*` or, if it has none, the reward."""
    terms = [({n: v for n, v in (one.get("terms") or {}).items() if n.partition(".")[0] == "answer"}, one) for one in samples]
    return [sum(of.values()) if of else one["reward"] for of, one in terms if number_at(one, "reward") is not None]


def _is_open(sample: Record) -> bool:
    text = f"{str(sample.get('prompt') or '')[-40:]}{sample.get('completion')}"
    return text.rfind("<think>") > text.rfind("</think>")


def _is_blank(sample: Record) -> bool:
    return not str(sample.get("completion") or "").strip()


def _has_next_turn(sample: Record) -> bool:
    turn = r"(?i)<\|im_start\|>|<\|start_header_id\|>|\[INST\]|\n(user|human):"
    return re.search(turn, str(sample.get("completion"))) is not None


def lengths(run: RunRecords) -> Rows:
    """Examine whether completions are language, end, and differ.

    model-broken (learning.md#log-probabilities): The model does not write language even before training: In the first 3 steps,
        at least half of 4 or more completions repeat one token in over half of their length, or the entropy exceeds 4 nats at a
        temperature of at most 1.5 (the entropy of text is 1 to 3 nats).
    completions-empty (recipes.md#chat-templates): Completions end before they say anything: Half of at least 8 samples are
        blank.
    turns-continued (recipes.md#chat-templates): Completions go on with the next turn of the conversation, because nothing ends
        them: This happens in at least half of 8 or more samples of a run that has not learned.
    all-cut (learning.md#truncated-completions): Completions are cut at their length limit: In a run that has not learned, at
        least 50 % of the completions of all steps or of the last steps are cut. The finding is grave from 90 % if rewards are
        equal within groups or the loss leaves cut completions out.
    think-unclosed (recipes.md#chat-templates): Reasoning is opened and never closed: This happens in at least half of 8 or more
        samples, and the mean reward is below 0.5. The finding is grave if rewards are equal within groups.
    completions-identical (learning.md#from-rewards-to-advantages): The completions of a group are all the same text: This holds
        for 75 % of the groups of a run that has not learned. The finding is grave from 95 %, or if rewards are equal in groups.
    """
    samples, limit, temperature = run.trained_samples, run.recipe.max_tokens, run.recipe.sampling.temperature
    begun = [one for one in samples if number_at(one, "step") in (1, 2, 3) and len(one.get("tokens") or ()) >= 16]
    repeating = _share(begun, 4, lambda one: Counter(one["tokens"]).most_common(1)[0][1] > len(one["tokens"]) / 2)
    entropy = max(run.values("entropy", slice(3)), default=0.0) if temperature <= 1.5 else 0.0
    uncertain = f"; entropy {entropy:.2g} nats" if entropy else ""
    share = max(run.mean("truncated_fraction"), run.late("truncated_fraction"))
    shortest = min(one.max_tokens for one in run.recipe.mixture.values())
    field, fix = "sampling.max_tokens", f"use {4 * limit} and a model.max_context that fits it, or ask for short answers"
    if run.mean("completion_tokens_mean") < 0.9 * shortest * share:  # the context was full first
        field, fix = "model.max_context", f"raise it by {limit}, or shorten the prompts"
    needs_ends = run.first_task.reward.truncated == "mask" or not run.has_signal
    blank, turns, opened = (_share(samples, 8, kind) for kind in (_is_blank, _has_next_turn, _is_open))
    same = run.mean("identical_groups")
    certain = "use 1" if temperature < 0.9 else "this is not the cause: the model is certain of its answers"
    yield from (
        ("model-broken", True, (repeating >= 0.5 or entropy > 4)
         and f"{percent(repeating)} of the first completions repeat one token{uncertain}", "model.name",
         "compare weights, tokenizer and dtype with another copy of the model; generate a text with transformers",
         next(iter(begun), None)),
        ("completions-empty", True, blank >= 0.5 and f"{percent(blank)} of the samples", "model.chat_template",
         "look at the end of the sample's prompt, and at sampling.stop", _last(samples, _is_blank)),
        ("turns-continued", False, turns >= 0.5 and not run.has_learned and f"{percent(turns)} of the samples",
         "sampling.stop", "add the beginning of the next turn, or use prompt_style: chat", _last(samples, _has_next_turn)),
        ("all-cut", needs_ends and share >= 0.9,
         share >= 0.5 and not run.has_learned and f"{percent(share)} of the completions", field, fix, _last(samples)),
        ("think-unclosed", not run.has_signal,
         opened >= 0.5 and run.late("reward_mean") < 0.5 and f"{percent(opened)} of the samples", "sampling.max_tokens",
         "raise it, or switch reasoning off", _last(samples, _is_open)),
        ("completions-identical", same >= _DEAD or not run.has_signal, same >= _FEW and not run.has_learned
         and f"{percent(same)} of the groups", "sampling.temperature", certain, _last(samples)),
    )  # fmt: skip


def answers(run: RunRecords) -> Rows:
    """Examine whether rewards find answers, and compare them with references.

    answers-absent (recipes.md#rewards): The reward hardly ever finds an answer: It finds one in at most 5 % of the completions.
        The finding is grave if rewards are equal within groups, or if 5 % of the completions contain the reference, but the
        reward missed it.
    answers-misread (recipes.md#rewards): The reward takes another part of the completion as its answer: At least 20 % of 8 or
        more samples end with the reference, but the answer that the reward found is another one and earns nothing. The finding
        is grave if the run has not learned.
    right-unrewarded (recipes.md#rewards): Answers that equal the reference, apart from a unit, earn no more than others: At
        least 80 % of 4 or more such answers earn nothing in a run that has not learned. Or 10 or more such answers earn hardly
        more than at least 10 others on average. This is grave unless your own function scores and rewards differ within groups.
    references-unrelated (recipes.md#tasks): Answers equal their own reference no more often than another problem's: In 24 or
        more samples of a run that has not learned, the number of equal ones is less than 2 standard errors above the number
        that shuffled references would give. The finding is grave if the samples have at least 5 different references.
    """
    samples, reward, stop = run.trained_samples, run.first_task.reward, run.recipe.sampling.stop
    absent, missed = run.mean("answers_absent"), run.mean("answers_missed")
    form = r"\boxed{}" if reward.scorer == "math_boxed" else f"reward.answer_pattern = {reward.answer_pattern!r}"
    field, fix = "task.instruction", f"ask for answers that fit {form}, and check the chat template"
    if is_missed := missed >= 0.05:
        field, fix = "reward.answer_pattern", f"completions do not have the form of {form}; change it, or ask for that form"
    if stop:
        field, fix = "sampling.stop", f"is {stop}; leave it out if answers come after it"
    also = f"; {percent(missed)} contain the reference" if is_missed else ""

    def is_misread(one: Record) -> bool:
        end = re.findall(r"-?\w+(?:\.\d+)?", str(one.get("completion")))[-1:]
        return end == [final_answer(str(one.get("reference")))] and not _right(one) and _earned([one]) == [0]

    comparing = [name for name, one in run.recipe.mixture.items() if one.reward.scorer not in _NO_ANSWERS]
    compared = [one for one in run.samples if one.get("reference") and one.get("task") in comparing]
    answered = [one for one in compared if one.get("answer")]
    right, misread = [one for one in compared if _right(one)], _share(answered, 8, is_misread)
    paid, others = _earned(right), _earned(one for one in compared if not _right(one))
    is_own = any(run.recipe.mixture[str(one["task"])].reward.is_function for one in right)  # it may reward anything
    earned, usual = (fmean(one or [0.0]) for one in (paid, others))
    spread = max([*paid, *others], default=0.0) - min([*paid, *others], default=0.0)
    is_unpaid = len(paid) >= 4 and fmean(one > 0 for one in paid) <= 0.2 and not run.has_learned
    is_alike = min(len(paid), len(others)) >= 10 and earned < usual + 0.1 * spread
    given, references = ([bare_answer(str(one[key])) for one in answered] for key in ("answer", "reference"))
    counts, own, num = Counter(references), sum(map(operator.eq, given, references)), len(given)
    chance = sum(counts[one] for one in given) / max(1, num)  # expected number of right answers after shuffling
    share = run.mean(f"reported.{run.first_task.name}.answer") / reward.correct
    is_chance = chance >= 0.5 and own < chance + 2 * chance**0.5 and share < 1.2 * chance / num
    yield from (
        ("answers-absent", is_missed or not run.has_signal,
         absent >= 0.95 and f"no answer found in {percent(absent)} of the completions{also}", field, fix,
         _last(samples, _written if is_missed else bool)),
        ("answers-misread", not run.has_learned, misread >= 0.2 and f"{percent(misread)} of the samples",
         "reward.answer_pattern", "does not match the last answer; put the words that surround it into the pattern",
         _last(samples, is_misread)),
        ("right-unrewarded", not (is_own and run.has_signal), (is_unpaid or is_alike)
         and f"{len(paid)} right answers earn {earned:.3g}, {len(others)} others {usual:.3g} on average", "reward.scorer",
         "does not compare answer and reference: try it with pipelinerl validate, and read the sample's reason",
         right[-1] if right else None),
        ("references-unrelated", len(counts) >= 5, num >= 24 and len(counts) > 1 and is_chance and run.is_stuck
         and f"{percent(share)} right, and {percent(chance / num)} would be if references were shuffled", "task.path",
         "check that each line has the answer to its own question; else take easier problems", _last(samples)),
    )  # fmt: skip


def rewards(run: RunRecords) -> Rows:
    """Examine whether rewards tell better completions from worse ones.

    groups-all-wrong (recipes.md#tasks): No answer of a group is right: This holds for at least 75 % of the groups of a run that
        has not learned. The finding is grave from 95 % if rewards are also equal.
    groups-all-right (recipes.md#tasks): All answers of a group are right, so that nothing is left to learn: This holds for at
        least 75 % of the groups of the last steps. The finding is a note if the run has learned, or if this holds for under
        75 % of all groups; otherwise it is a warning, and grave from 95 %.
    reward-constant (recipes.md#rewards): Rewards, or the marks of a judge, do not vary within groups: This holds for at least
        75 % of the groups of a run that has not learned. The finding is grave from 95 %.
    reward-plateau (recipes.md#rewards): The reward has risen and stopped below its maximum: Rewards are equal in at least 75 %
        of the groups of the last steps (a quarter of the run, but 3 to 20 steps). The mean reward of these steps is under 90 %
        of reward.correct, and exceeds that of as many steps before them by less than 5 % of reward.correct.
    """
    last, reward, size = _last(run.trained_samples), run.first_task.reward, run.recipe.sampling.group_size
    is_stuck, is_judged, best = run.is_stuck, reward.scorer == "judge", reward.correct
    equal, wrong, right = map(run.mean, ("equal_reward_groups", "groups_all_wrong", "groups_all_right"))
    all_right, now_equal, earned = map(run.late, ("groups_all_right", "equal_reward_groups", "reward_mean"))
    samples = [one for one in run.trained_samples if one.get("reference")]
    is_full = all_right >= _FEW and (len(samples) < 4 or any(map(_written, samples)))  # else any text earns it
    values = ", ".join(f"{one:g}" for one in sorted(set(_earned(run.trained_samples)))[:4])
    before = fmean(run.values("reward_mean", slice(-2 * run.window, -run.window)) or [earned])
    is_flat = now_equal >= _FEW and earned < min(0.9 * best, before + 0.05 * best)
    yield from (
        ("groups-all-wrong", wrong >= _DEAD and not run.has_signal,
         wrong >= _FEW and is_stuck and not is_judged and f"{percent(wrong)} of the groups", "task",
         f"check references; use problems that the model solves in 1 to {size - 1} of {size} tries, or larger groups", last),
        ("groups-all-right", "note" if run.has_learned or right < _FEW else right >= _DEAD,
         is_full and f"{percent(all_right)} of the last groups", "task",
         "take harder problems, or check whether the reward also accepts wrong answers", last),
        ("reward-constant", equal >= _DEAD, equal >= _FEW and is_stuck and not (equal < _DEAD and all_right >= 0.5)
         and f"{percent(equal)} of the groups; rewards such as {values}",
         "reward.judge.template" if is_judged else "reward.scorer",
         "ask for marks on a scale, with criteria, and try pattern and full_marks on a judge's answer" if is_judged
         else "check its arguments, what it compares, and what it returns by default", last),
        ("reward-plateau", False, is_flat and run.has_learned and run.recipe.algorithm.advantage != "value"
         and f"reward {earned:.3g} of {best:g}; rewards are equal in {percent(now_equal)} of the last groups", "reward.scorer",
         f"give partial credit, change the prompt, or raise sampling.temperature ({run.recipe.sampling.temperature:g})", last),
    )  # fmt: skip


def terms(run: RunRecords) -> Rows:
    """Examine the parts of the reward, the tasks of a mixture, and the length that rewards lead to.

    term-dominates (recipes.md#rewards): A term other than the answer guides the policy: This term has at least 80 % of the
        spread of all terms within groups, and answers earn under 0.9. Or it has the largest spread, and what answers earn falls
        by 3 standard errors although rewards rise. Or the format earns 80 % of reward.format_weight, while answers earn under
        2 % of reward.correct; this case is grave if rewards are equal within groups.
    format-never (recipes.md#rewards): The format term is never earned, so that it teaches nothing: No completion has earned it
        in at least 12 steps.
    task-starves (recipes.md#tasks): A task of the mixture gets too few sequences, or earns nothing: The task's share of the
        sequences is under a quarter of its share of the weights in the recipe, or its mean reward is 0.
    length-drifts (learning.md#normalisation): Completions grow or shrink while the reward does not rise: Their mean length
        reaches 1.5 times its first value, or falls to a third of it, and changes by more than 3 standard errors.
    """
    reward, name, last = run.first_task.reward, f"reported.{run.first_task.name}", _last(run.trained_samples)
    form, right, forms = run.late(f"{name}.format"), run.late(f"{name}.answer"), run.values(f"{name}.format")
    spread = {term: run.mean(f"term_spread.{term}") for step in run.trained for term in sorted(step.get("term_spread") or {})}
    most = max(spread, key=lambda one: spread[one], default="answer")
    is_traded = run.change(f"{name}.answer") < -3 and run.change("reward_mean") > 0
    is_most = most.partition(".")[0] != "answer" and spread[most] >= 0.8 * sum(spread.values()) > 0 and right < 0.9
    told = f"spread: {', '.join(f'{one} {value:.3g}' for one, value in spread.items())}"
    told += f"; answer {run.early(f'{name}.answer'):.3g} -> {right:.3g}" if is_traded else ""
    early, late = run.early("completion_tokens_mean"), run.late("completion_tokens_mean")
    change, is_useless = run.change("completion_tokens_mean"), run.change("reward_mean") < 1 and not run.has_learned
    yield from (
        ("term-dominates", not run.has_signal,
         run.is_long and form >= 0.8 * reward.format_weight > 0 and right < 0.02 * reward.correct
         and f"format {form:.3g} of {reward.format_weight:g}, answer {right:.3g} of {reward.correct:g}", "task",
         "check the references and the scorer, or take easier problems", last),
        ("term-dominates", False, most.partition(".")[0] != "answer" and (is_most or is_traded) and told,
         {"format": "reward.format_weight", "overlong": "reward.overlong.penalty"}.get(most, "reward.scorer"),
         f"let {most} weigh less than the answer", last),
        ("format-never", False, run.is_long and forms and reward.format_weight > 0 and not any(forms)
         and f"in no completion of {len(forms)} steps", "reward.format_pattern",
         "ask for this form in the prompt, with an example, or correct the pattern", last),
        ("length-drifts", False, is_useless and late >= 1.5 * early and change > 3 and f"{early:.4g} -> {late:.4g} tokens",
         "reward.overlong", "add it, or use algorithm.normalization: token, with which long wrong answers weigh more", last),
        ("length-drifts", False, is_useless and late <= early / 3 and change < -3 and f"{early:.4g} -> {late:.4g} tokens",
         "reward.overlong", "do not let it reward brevity, or lower trainer.learning_rate", last),
    )  # fmt: skip
    shares = run.recipe.mixture
    for task, share in shares.items() if len(shares) > 1 and run.is_long else ():
        wanted = share.weight / sum(one.weight for one in shares.values())
        taken = sum(run.values(f"tasks.{task}.sequences")) / max(1.0, sum(run.values("sequences_trained")))
        earned = run.mean(f"tasks.{task}.reward_mean")
        told = f"{task}: {percent(taken)} of the sequences for a weight of {percent(wanted)}, reward {earned:.3g}"
        fix = "look at its samples and reasons: its reward, pattern or prompts may be wrong"
        sample = _last([one for one in run.trained_samples if one.get("task") == task])
        yield "task-starves", False, (taken < wanted / 4 or earned == 0) and told, f"tasks ({task})", fix, sample


RULES = (lengths, answers, rewards, terms)
