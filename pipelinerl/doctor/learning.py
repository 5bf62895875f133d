"""Rules about the numbers of training, and about what a run waits for, in the order of causes. Pure."""

from __future__ import annotations

import math
from statistics import median

from pipelinerl.doctor.findings import Found, Rule, Verdict, add_to, percent, worse
from pipelinerl.doctor.run_records import RunRecords, number_at
from pipelinerl.rl.groups import CUTTING, LAG_BUCKETS, MOST_CUT

RULES: list[Rule] = []
rule = add_to(RULES)
_MOST_KL = {"float32": 1e-3, "bfloat16": 0.05}
"""Nats per token between actor and trainer at lag 0. Rounding gives 1e-9 in float32 and about 1e-3 in 16 bits."""


@rule("weight-updates.md#the-parity-probe")
def engine_differs(run: RunRecords) -> Verdict:
    """Actors and trainer compute different probabilities of the same policy: a failed parity probe (grave from 3), or a median
    KL of 0.001 nats, 0.05 in 16 bits (grave: ten times that) in steps whose sequences have no KV cache of an older policy."""
    failures, differences = sum(run.values("parity_failures")), run.values("logprob_mismatch")
    if failures > 0:
        told = f"{failures:.0f} probe answers, largest difference {max(differences, default=0):.2g} nats"
        fix = "compare versions and dtypes of actors and trainer; raise it if 16 bits explain the difference"
        return Found(worse(failures, 3), told, "weights.probe_tolerance", fix)
    alike = [value for step in run.trained if not step.get("multi_version_fraction")
             and (value := number_at(step, "mismatch_kl")) is not None]  # fmt: skip
    kl, most = median(alike or [0.0]), _MOST_KL[run.recipe.model.dtype]
    fix = "use icepop, and float32 for model.head_dtype, or no actor.engine.quantization"
    return kl >= most and Found(worse(kl, 10 * most), f"mismatch_kl {kl:.2g} nats", "algorithm.mask", fix)


@rule("learning.md#lag-and-ess")
def ess_low(run: RunRecords) -> Verdict:
    """Importance weights vary so much that few tokens count: an ESS below 0.5; by lag if above 0.8 at the smallest one."""
    ess, rate = run.late("ess"), run.recipe.trainer.learning_rate
    known = {lag: value for lag in LAG_BUCKETS if (value := run.late(f"ess_by_lag.{lag}")) == value}
    field, fix = "trainer.learning_rate", f"is {rate:g}; lower it tenfold, or compare engine and trainer"
    if len(known) > 1 and next(iter(known.values())) > 0.8:
        field, fix = "algorithm.max_lag", f"is {run.recipe.algorithm.max_lag}; lower it, or trainer.learning_rate ({rate:g})"
    told = ", ".join([f"ESS {ess:.2g}", *(f"{value:.2g} at lag {lag}" for lag, value in known.items())])
    return ess < 0.5 and Found("warning", told, field, fix)


@rule("learning.md#masks")
def tokens_cut(run: RunRecords) -> Verdict:
    """The loss leaves many tokens out: a mask half of them (grave: 95 %), or clipping a quarter of the last ones (75 %)."""
    algorithm, masked, clipped = run.recipe.algorithm, run.mean("mask_fraction"), run.late("clip_fraction")
    if masked >= 0.5 and algorithm.mask != "none":
        fix = f"is {algorithm.mask_low:g}, mask_high {algorithm.mask_high:g}, mask_kl {algorithm.mask_kl:g}; widen them"
        return Found(worse(masked, 0.95), f"the mask takes {percent(masked)}", "algorithm.mask_low", fix)
    fix = f"is {algorithm.clip_low:g}, clip_high {algorithm.clip_high:g}; widen both, or lower max_lag or the learning rate"
    is_cut = clipped > MOST_CUT and algorithm.loss in CUTTING
    return is_cut and Found(worse(clipped, 0.75), f"{percent(clipped)} are clipped", "algorithm.clip_low", fix)


@rule("learning.md#the-optimizer")
def gradient_clipped(run: RunRecords) -> Verdict:
    """Gradients are clipped, so that steps differ only in direction: 9 of 10, to less than a fifth of their norm."""
    share, norm, bound = run.mean("clipped"), run.mean("grad_norm"), run.recipe.trainer.max_grad_norm
    bound = bound or (run.mean("completion_tokens_mean") if run.recipe.algorithm.normalization == "batch" else 1.0)
    told, fix = f"{percent(share)} of the steps", f"is {bound:.3g}; raise it to about the mean norm, {norm:.3g}"
    return share >= 0.9 and norm > 5 * bound and Found("warning", told, "trainer.max_grad_norm", fix)


@rule("learning.md#learning-rate")
def policy_unmoved(run: RunRecords) -> Verdict:
    """Steps hardly change the policy: in float32, all log weights of steps with lag under 0.002; learning exceeds 0.01."""
    after = [step for step in run.trained[max(run.recipe.trainer.warmup_steps, 3) :] if (number_at(step, "lag.max") or 0) > 0]
    moved = [value for step in after if (value := number_at(step, "log_weight_abs_max")) is not None]
    fix = f"is {run.recipe.trainer.learning_rate:g}; raise it tenfold until log_weight_abs_max exceeds 0.01"
    is_still = len(moved) >= 3 and max(moved) < 2e-3 and run.recipe.model.dtype == "float32" and run.has_signal
    return is_still and Found("grave", f"largest |log weight| {max(moved):.1g}", "trainer.learning_rate", fix)


@rule("learning.md#losses")
def kl_grows(run: RunRecords) -> Verdict:
    """The policy has left the initial one far behind: a KL above 1 nat per token that has grown tenfold, without a gain."""
    early, late, weight = run.early("reference_kl"), run.late("reference_kl"), run.recipe.algorithm.kl_coefficient
    fix = f"is {weight:g}; raise it, or lower trainer.learning_rate ({run.recipe.trainer.learning_rate:g})"
    is_far = late > max(1, 10 * early) and not run.has_learned
    return is_far and Found("warning", f"{early:.2g} -> {late:.2g} nats", "algorithm.kl_coefficient", fix)


@rule("learning.md#losses")
def entropy_explodes(run: RunRecords) -> Verdict:
    """The policy becomes random: twice the first entropy and above 1 nat, without a gain; grave if the reward halves."""
    early, late, bonus = run.early("entropy"), run.late("entropy"), run.recipe.algorithm.entropy_coefficient
    rate = run.recipe.trainer.learning_rate
    field, value = ("algorithm.entropy_coefficient", bonus) if bonus else ("trainer.learning_rate", rate)
    is_wild = run.is_long and late > max(1, 2 * early) and not run.has_learned
    fix = f"is {value:g}; lower it tenfold"
    return is_wild and Found(worse(run.has_collapsed, 1), f"{early:.2g} -> {late:.2g} nats", field, fix)


@rule("learning.md#learning-rate")
def policy_collapsed(run: RunRecords) -> Verdict:
    """The reward has fallen far below its start: under half of it, by 3 standard errors."""
    told = f"reward {run.early('reward_mean'):.3g} -> {run.late('reward_mean'):.3g}"
    fix = f"is {run.recipe.trainer.learning_rate:g}; lower it tenfold, and start from an earlier checkpoint"
    return run.has_collapsed and Found("grave", told, "trainer.learning_rate", fix)


@rule("learning.md#losses")
def entropy_collapsed(run: RunRecords) -> Verdict:
    """The policy has become certain without having learned: a twentieth of the first entropy, without a gain."""
    early, late, best = run.early("entropy"), run.late("entropy"), run.first_task.reward.correct
    is_certain = run.is_long and early > 0.01 and late < early / 20 and run.late("reward_mean") < 0.9 * best
    told, fix = f"{early:.2g} -> {late:.2g} nats", "use 0.001, a lower trainer.learning_rate, or a higher algorithm.clip_high"
    return is_certain and not run.has_learned and Found("warning", told, "algorithm.entropy_coefficient", fix)


@rule("training.md#reading-the-figures")
def bottleneck(run: RunRecords) -> Verdict:
    """One part keeps the others waiting: the lag limit in half of the steps; a mean lag above 4 and above the largest predicted
    one; weight updates for 20 % of the time; the trainer waits for half, or computes for 90 % while actors are busy for less
    than half."""
    if not run.is_long or run.recipe.mode != "pipeline":
        return None
    total, busy, lag = run.late("step_s.total"), run.late("actor_busy_fraction"), run.late("lag.mean")
    waits, computes, sends, copies = (
        run.late(f"step_s.{one}") / (total or math.nan) for one in ("wait", "compute", "send", "snapshot")
    )
    actor, ranks, predicted = run.recipe.actor, run.recipe.trainer.ranks, run.late("largest_lag")
    more = max(actor.number + 1, round(actor.number / max(0.1, 1 - waits)))
    slow = ("trainer.nproc", f"is {ranks}; give the trainer more GPUs, and actors fewer")
    if run.recipe.model.dtype == "float32":  # on CPUs, which actors and trainer share
        slow = ("sampling.max_tokens", f"is {run.recipe.max_tokens}; on a CPU, lower it, or use a smaller model.name")
    causes = (
        (run.late("max_lag_too_small") >= 0.5, "The lag limit keeps the trainer waiting", "bound by lag", "algorithm.max_lag",
         f"is {run.recipe.algorithm.max_lag}; use {predicted:.0f} or more"),
        (lag > max(4, predicted), "The trainer is behind the actors", f"mean lag {lag:.3g}, predicted at most {predicted:.3g}",
         "actor.sequences_in_progress", f"is {actor.sequences_in_progress}; lower it, or use fewer actors"),
        (sends + copies >= 0.2, "Weight updates keep the trainer waiting", "commit-bound", "weights.backend",
         "use nccl if possible, a larger weights.chunk_mib, and fewer evaluations"),
        (waits >= 0.5 and busy >= 0.5, "The actors keep the trainer waiting", "actor-bound", "actor.count",
         f"is {actor.number}; {more} would keep the trainer busy"),
        (waits >= 0.5 and busy < 0.5 and not run.late("held_by_max_lag"), "The verifier keeps the trainer waiting",
         "verifier-bound", "reward.scorer", "add verifier workers or make the reward faster; pipelinerl validate times a call"),
        (computes >= 0.9 and busy < 0.5, "The trainer keeps the actors waiting", "trainer-bound", *slow),
    )  # fmt: skip
    told = f"waits {percent(waits)}, computes {percent(computes)}, sends {percent(sends)}; actors busy {percent(busy)}"
    return next((Found("note", f"{kind}: {told}", field, fix, None, it) for yes, it, kind, field, fix in causes if yes), None)
