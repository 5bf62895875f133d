"""Find out why a run does not learn, from its records. The rules in this file are about lost sequences, steps and runs, about
training figures such as ESS and entropy, and about waiting times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from pipelinerl.doctor import lessons
from pipelinerl.doctor.findings import Finding, Rows, apply, percent, ranked
from pipelinerl.doctor.run_records import Reasons, RunRecords, number_at, numbers_in, records_in
from pipelinerl.doctor.settings import SETTINGS_RULES, Settings
from pipelinerl.errors import UserError, counted
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import recipe_of_run
from pipelinerl.recipe.model_folder import known_parameters
from pipelinerl.rl.groups import CUTTING, LAG_BUCKETS, MOST_CUT
from pipelinerl.rl.ledger import MEANINGS
from pipelinerl.run_dir import RunDir

_EPISODES = ("episode_", "turn_timeout", "no_turns", "verifier_refused")
_OTHERS = tuple(name for name in MEANINGS if not name.startswith(("reward_", *_EPISODES, "actor_", "step skipped")))
_LOST = (
    ("rewards-fail", ("reward_",), "reward.scorer", "correct the function; pipelinerl validate RECIPE shows its error"),
    ("episodes-fail", _EPISODES, "task.name", "correct the environment; logs/verifier.log has its error"),
    ("actor-differs", ("actor_quarantined",), "actor.engine", "compare this actor's GPU and software with the others'"),
    ("sequences-lost", _OTHERS, "logs", "docs/errors.md lists causes by reason; the logs have the first error"),
)
"""Rules about failed sequences: a rule's id, the prefixes of the failure reasons that it counts, and the field and fix of its
finding. For the reasons in `_FIXES`, field and fix come from there."""
_LONG = ("model.max_context", "raise it, or drop long problems")
_FIXES = {
    "reward_timeout": ("reward.timeout_s", "raise it above the slowest call that pipelinerl validate shows"),
    "reward_out_of_memory": ("reward.memory_mib", "raise it, or make the reward need less"),
    "reward_bad_reference": ("task.answer_field", "name the field of the answer, and leave out rows without one"),
    "episode_timeout": ("task.episode_timeout_s", "raise it, or task.answer_timeout_s, or speed the environment up"),
    **dict.fromkeys(("prompt_too_long", "prompt too long", "longer than the context"), _LONG),
    "turn_timeout": ("task.turn_timeout_s", "raise it, or lower actor.episodes_in_progress"),
}
_MOST_KL = {"float32": 1e-3, "bfloat16": 0.05}
"""KL of actor and trainer at lag 0, in nats, from which it is reported. Rounding gives 1e-9 in float32, 1e-3 in bfloat16."""


def losses(run: RunRecords) -> Rows:
    """Examine what becomes of sequences and steps.

    rewards-fail (errors.md#reasons): The reward fails instead of giving a number: This happens to at least 5 % of the
        sequences. The finding is grave from 50 %.
    episodes-fail (episodes.md#how-long-it-may-take-and-what-fails-how): Episodes fail because of the environment, not of the
        policy: This happens to at least 5 % of the sequences. The finding is grave from 50 %.
    actor-differs (weight-updates.md#the-parity-probe): An actor's probabilities differ from those of its policy: At least one
        sequence failed because its actor was in quarantine. The finding is grave from 50 % of the sequences.
    sequences-lost (errors.md#reasons): Sequences are lost on their way to the trainer: At least 5 % of the sequences fail for a
        reason that has no rule of its own, such as a prompt that is too long. The finding is grave from 50 %.
    steps-skipped (learning.md#the-optimizer): Steps change no weight, as the loss or gradient is not finite: This happens in at
        least one step. The finding is grave if at least half of the last 20 steps were skipped.
    dropped-stale (architecture.md#staleness): Sequences are too old for their step, and are dropped: This happens to over 2 %
        of the sequences in a run of at least 12 steps (plans accept half of that), or to over 50 % in a shorter run. The
        finding is grave from 50 %.
    dropped-filtered (learning.md#from-rewards-to-advantages): Groups are dropped because their rewards are equal: At least 90 %
        of the sequences are dropped for this reason. The finding is grave if no step has changed weights.
    run-failed (errors.md): The run failed: Its summary has an error. Or the run ended without an optimizer step and was not
        stopped by hand. A run without an error that is younger than 10 minutes is not reported, as it may still be running.
    steps-lost (reliability.md#the-trainer): A restart undid optimizer steps: metrics-undone.jsonl lists them. This is a note.
    disk-fills (run-directory.md): The disk will be full before the end of the run: Free space is less than one more checkpoint
        plus the expected growth of the run's files.
    """
    steps, recipe, lag = run.steps, run.recipe, run.recipe.algorithm.max_lag
    for id_, prefixes, field, fix in _LOST:
        share, reason = run.share_of("failed", prefixes)
        if share >= (1e-9 if id_ == "actor-differs" else 0.05):
            told = f"{percent(share)} of the sequences, mostly {reason}: {MEANINGS.get(reason, 'the logs say more')}"
            yield id_, share >= 0.5, told, *_FIXES.get(reason, (field, fix))
    skipped = [step["step"] for step in steps if step.get("skipped")]
    late = sum(bool(step.get("skipped")) for step in steps[-20:]) / max(1, len(steps[-20:]))
    (stale, _), (filtered, _) = run.share_of("dropped_stale"), run.share_of("dropped_filtered")
    needed = max([int(value) for value in run.values("largest_lag")] + [(lag or 0) + 1])
    error = str(run.summary.get("error") or "").strip().partition("\n")[0]
    is_over = not (steps or run.is_running or run.is_young or run.summary.get("interrupted"))
    left = counted(recipe.trainer.steps - len(steps), "more step")
    yield from (
        ("steps-skipped", late >= 0.5,
         skipped and f"{len(skipped)} of {counted(len(steps), 'step')}, the first at step {min(skipped)}",
         "trainer.learning_rate", "lower it tenfold; look at loss and grad_norm before the first skipped step"),
        ("dropped-stale", stale >= 0.5,
         lag is not None and stale > (0.02 if run.is_long else 0.5) and f"{percent(stale)} of the sequences",
         "algorithm.max_lag", f"use at least {needed}, or lower actor.count or actor.sequences_in_progress"),
        ("dropped-filtered", not run.trained, filtered >= 0.9 and f"{percent(filtered)} of sequences", "task",
         "take problems that the model solves sometimes, or larger groups"),
        ("run-failed", True, error[:400] or (is_over and (run.last_error or "no error in the logs")), "logs",
         "remove the cause, then pipelinerl run --resume"),
        ("steps-lost", "note", run.undone and counted(run.undone, "step"), "checkpoint.every_steps",
         "lower it to repeat fewer steps after a restart"),
        ("disk-fills", False, run.is_running and len(steps) >= 3 and run.needed_bytes > run.free_bytes
         and f"{run.free_bytes / 1e9:.3g} GB free, {run.needed_bytes / 1e9:.3g} GB needed for {left}", "checkpoint.keep",
         "free space, or keep fewer checkpoints"),
    )  # fmt: skip


def numerics(run: RunRecords) -> Rows:
    """Examine probabilities, importance weights and gradients.

    engine-differs (weight-updates.md#the-parity-probe): Actors and trainer compute different probabilities of the same policy:
        An actor's answer fails the parity probe; this is grave from 3 answers. Or the median mismatch_kl of the last steps
        reaches 0.001 nats in float32, or 0.05 nats in bfloat16; this is grave from ten times as much. The median leaves out
        steps with sequences that several versions sampled.
    ess-low (learning.md#lag-and-ess): Importance weights vary so much that few tokens count: The ESS of the last steps is below
        0.5. If the ESS of the tokens with the smallest lag is above 0.8, the finding names lag as the cause.
    tokens-cut (learning.md#masks): The loss leaves many tokens out: A mask removes at least half of the tokens (grave from
        95 %), or the loss clips over a quarter of them in the last steps (grave from 75 %).
    gradient-clipped (learning.md#the-optimizer): Gradients are clipped, so that steps differ only in direction: At least 90 %
        of the steps are clipped, and the mean norm of the gradient exceeds five times the bound.
    policy-unmoved (learning.md#learning-rate): Steps hardly change the policy: In float32, no |log w| of an importance weight w
        reaches 0.002 although the lag is above 0, while a learning policy exceeds 0.01. Or all gradient norms are under 1e-6.
    """
    algorithm, trainer, rate = run.recipe.algorithm, run.recipe.trainer, run.recipe.trainer.learning_rate
    alike = [step for step in run.trained if not step.get("multi_version_fraction")]
    kl, most = median(numbers_in(alike[-run.window :], "mismatch_kl") or [0.0]), _MOST_KL[run.recipe.model.dtype]
    failures, difference = sum(run.values("parity_failures")), max(run.values("logprob_mismatch"), default=0)
    ess, by_lag = run.late("ess"), {lag: value for lag in LAG_BUCKETS if (value := run.late(f"ess_by_lag.{lag}")) == value}
    field, fix = "trainer.learning_rate", "lower it tenfold, or compare engine and trainer"
    if len(by_lag) > 1 and next(iter(by_lag.values())) > 0.8:
        field, fix = "algorithm.max_lag", f"lower it, or trainer.learning_rate ({rate:g})"
    masked, clipped = run.mean("mask_fraction") * (algorithm.mask != "none"), run.late("clip_fraction")
    share, norm, usual = run.mean("clipped"), run.mean("grad_norm"), run.mean("completion_tokens_mean")
    bound = trainer.max_grad_norm or (usual if algorithm.normalization == "batch" else 1.0)
    after = [step for step in run.trained[max(trainer.warmup_steps, 3) :] if (number_at(step, "lag.max") or 0) > 0]
    moved = numbers_in(after, "log_weight_abs_max") if run.recipe.model.dtype == "float32" else []
    is_still = (len(moved) >= 3 and max(moved) < 2e-3) or max(run.values("grad_norm"), default=1) < 1e-6
    yield from (
        ("engine-differs", failures >= 3, failures and f"{failures:.0f} probe answers fail, differences up to {difference:.2g}",
         "weights.probe_tolerance", "compare versions and dtypes of actors and trainer; raise it if rounding is the cause"),
        ("engine-differs", kl >= 10 * most, kl >= most and f"mismatch_kl {kl:.2g} nats", "algorithm.mask",
         "use icepop; also set model.head_dtype: float32, or leave out actor.engine.quantization"),
        ("ess-low", False,
         ess < 0.5 and ", ".join([f"{ess:.2g}", *(f"{value:.2g} at lag {at}" for at, value in by_lag.items())]), field, fix),
        ("tokens-cut", masked >= 0.95, masked >= 0.5 and f"the mask removes {percent(masked)}", "algorithm.mask_low",
         f"lower it, or raise mask_high ({algorithm.mask_high:g}) or mask_kl ({algorithm.mask_kl:g})"),
        ("tokens-cut", clipped >= 0.75, clipped > MOST_CUT and algorithm.loss in CUTTING and f"{percent(clipped)} are clipped",
         "algorithm.clip_low", f"raise it and clip_high ({algorithm.clip_high:g}), or lower max_lag or the learning rate"),
        ("gradient-clipped", False, share >= 0.9 and norm > 5 * bound and f"{percent(share)} of steps, to norm {bound:.3g}",
         "trainer.max_grad_norm", f"raise it to about the mean norm, {norm:.3g}"),
        ("policy-unmoved", True, is_still and run.has_signal
         and f"largest |log weight| {max(moved, default=0):.1g}, mean gradient norm {norm:.1g}", "trainer.learning_rate",
         "raise it tenfold until log_weight_abs_max exceeds 0.01"),
    )  # fmt: skip


def policy(run: RunRecords) -> Rows:
    """Examine whether the policy becomes worse.

    kl-grows (learning.md#losses): The policy has moved far from the initial one without learning: The KL per token in the last
        steps exceeds 1 nat and ten times its value in the first steps.
    entropy-explodes (learning.md#losses): The policy becomes random without learning: The entropy in the last steps exceeds 1
        nat and twice its value in the first steps. The finding is grave if policy-collapsed also applies.
    policy-collapsed (learning.md#learning-rate): The reward has fallen far below its start: It is under half of its first
        value, and lower by more than 3 standard errors.
    entropy-collapsed (learning.md#losses): The policy has become certain without having learned: The entropy is below a
        twentieth of its first value, and the mean reward is below 90 % of reward.correct.
    heldout-apart (recipes.md#evaluation): Held-out accuracy falls, or is far below the accuracy in training: The last 95 %
        interval of the held-out accuracy lies below the first one. Or it lies below a third of the share of right answers in
        training, and held-out answers also earn less than a third of what answers earn in training.
    heldout-unanswered (recipes.md#evaluation): Held-out problems stay unanswered: At least half of the answers of an evaluation
        are missing, or no evaluation has ended.
    """
    algorithm, rate, best = run.recipe.algorithm, run.recipe.trainer.learning_rate, run.first_task.reward.correct
    kls, entropies, rewards = ((run.early(key), run.late(key)) for key in ("reference_kl", "entropy", "reward_mean"))
    early, late = entropies
    told, is_useless = f"{early:.2g} -> {late:.2g} nats", run.is_long and not run.has_learned
    lows, highs = run.heldout("low"), run.heldout("high")
    name = run.first_task.name
    trained, held = run.late(f"reported.{name}.answer"), numbers_in(run.evaluations, f"sets.{name}.reported.answer")
    right = trained / best if min(held[-1:], default=0.0) < trained / 3 else 0.0  # a function may pay what is not right
    is_apart = run.is_long and highs and highs[-1] < max(lows[0], right / 3) and not run.has_collapsed
    is_blind = run.is_long and run.summary.get("heldout") == []
    asked = run.recipe.evaluation.samples * sum(one.task.heldout_problems for one in run.recipe.sets_by_place.values())
    missing = max(numbers_in((one for one in run.evaluations if _lacks_half(one, asked)), "unanswered"), default=0)
    yield from (
        ("kl-grows", False, kls[1] > max(1, 10 * kls[0]) and not run.has_learned and f"{kls[0]:.2g} -> {kls[1]:.2g} nats",
         "algorithm.kl_coefficient", f"raise it, or lower trainer.learning_rate ({rate:g})"),
        ("entropy-explodes", run.has_collapsed, is_useless and late > max(1, 2 * early) and told,
         "algorithm.entropy_coefficient" if algorithm.entropy_coefficient else "trainer.learning_rate", "lower it tenfold"),
        ("policy-collapsed", True, run.has_collapsed and f"reward {rewards[0]:.3g} -> {rewards[1]:.3g}",
         "trainer.learning_rate", "lower it tenfold, and continue from an earlier checkpoint"),
        ("entropy-collapsed", False, is_useless and early > 0.01 and late < early / 20 and rewards[1] < 0.9 * best and told,
         "algorithm.entropy_coefficient", "use 0.001, a lower trainer.learning_rate, or a higher algorithm.clip_high"),
        ("heldout-apart", False, is_apart and f"held-out at most {highs[-1]:.2g}, training {right:.2g}",
         "evaluation", "compare held-out with other samples (prompt, reward, length); if alike, stop earlier or add problems"),
        ("heldout-unanswered", False, "no answer came in time" if is_blind
         else missing > 0 and f"{missing:g} answers, half or more of them, are missing in an evaluation",
         "evaluation.timeout_s", "raise it, or hold out fewer problems"),
    )  # fmt: skip


def _lacks_half(evaluation: Mapping[str, Any], asked: int) -> bool:
    """Return whether at least half of the `asked` answers of an evaluation are missing."""
    missing, accuracy, bound = (number_at(evaluation, key) or 0.0 for key in ("unanswered", "accuracy", "lower_bound"))
    return missing >= asked / 2 or bool(missing and accuracy and bound <= accuracy / 2)  # bound / accuracy: the answered share


def speed(run: RunRecords) -> Rows:
    """Examine which part of the run keeps the others waiting.

    bottleneck (training.md#reading-the-figures): One part of the run keeps the others waiting: max_lag_too_small is true in at
        least half of the last steps. Or their mean lag exceeds both 4 and the predicted largest lag. Or weight updates take
        20 % of the trainer's time. Or the trainer waits for half of its time. Or it computes for 90 % of its time, while actors
        are busy for less than half of theirs. The finding is a note.
    """
    actor, busy, lag, predicted = run.recipe.actor, *map(run.late, ("actor_busy_fraction", "lag.mean", "largest_lag"))
    total, *seconds = (run.late(f"step_s.{one}") for one in ("total", "wait", "compute", "send", "snapshot"))
    waits, computes, sends, copies = (one / (total or math.nan) for one in seconds)
    more = max(actor.number + 1, round(actor.number / max(0.1, 1 - waits)))
    slow = ("trainer.nproc", "give the trainer more GPUs, and actors fewer")
    if run.recipe.model.dtype == "float32":  # such runs use CPUs, which actors and trainer share
        slow = ("sampling.max_tokens", "on a CPU, lower it, or use a smaller model.name")
    causes = (
        (run.late("max_lag_too_small") >= 0.5, "The lag limit keeps the trainer waiting", "bound by lag", "algorithm.max_lag",
         f"use {predicted:.0f} or more"),
        (lag > max(4, predicted), "The trainer is behind the actors", f"mean lag {lag:.3g}, predicted at most {predicted:.3g}",
         "actor.sequences_in_progress", "lower it, or use fewer actors"),
        (sends + copies >= 0.2, "Weight updates keep the trainer waiting", "commit-bound", "weights.backend",
         "use nccl if possible, a larger weights.chunk_mib, and fewer evaluations"),
        (waits >= 0.5 and busy >= 0.5, "The actors keep the trainer waiting", "actor-bound", "actor.count",
         f"{more} would keep the trainer busy"),
        (waits >= 0.5 and busy < 0.5 and not run.late("held_by_max_lag"), "The verifier keeps the trainer waiting",
         "verifier-bound", "reward.scorer", "add verifier workers or make the reward faster; pipelinerl validate times a call"),
        (computes >= 0.9 and busy < 0.5, "The trainer keeps the actors waiting", "trainer-bound", *slow),
    )  # fmt: skip
    told = f"trainer waits {percent(waits)}, computes {percent(computes)}, sends {percent(sends)}; actors busy {percent(busy)}"
    for is_cause, meaning, kind, field, fix in causes:
        is_cause = is_cause and run.is_long and run.recipe.mode == "pipeline"
        yield "bottleneck", "note", is_cause and f"{kind}: {told}", field, fix, None, meaning


FIGURE_RULES = (numerics, policy, speed)
RUN_RULES = (losses, *lessons.RULES, *FIGURE_RULES)
"""Families of rules. What an earlier rule finds may explain what a later rule finds."""


def examine_run(
    folder: Path, recipe: Recipe | None = None, reasons: Reasons | None = None, *, is_running: bool = False
) -> list[Finding]:
    """Return the findings about the run in `folder`, ranked. `recipe` and `reasons` (numbers of sequences by outcome and
    reason) are read from the folder if they are None. Raises `FieldError` if the folder is not a run's."""
    recipe = recipe or recipe_of_run(RunDir(folder, "").recipe)
    return findings_about(records_in(folder, recipe, reasons, is_running=is_running))


def findings_about(run: RunRecords) -> list[Finding]:
    """Return the findings about a run, ranked. If the run has learned, findings about its settings get the gravity `note`."""
    parameters = 0
    with suppress(UserError, OSError):  # the model may be on another machine
        parameters = known_parameters(run.recipe.model)
    settings = apply(SETTINGS_RULES, Settings(run.recipe, parameters))
    settings = [replace(one, gravity="note") for one in settings] if run.has_learned else settings
    return ranked([*settings, *apply(RUN_RULES, run)])
