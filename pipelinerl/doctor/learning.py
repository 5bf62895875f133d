"""Rules about a run's training figures, such as ESS and entropy, and about its waiting times. Pure."""

from __future__ import annotations

import math
from statistics import median

from pipelinerl.doctor.findings import Finding, Findings, percent, worse
from pipelinerl.doctor.run_records import RunRecords, number_at, numbers_in
from pipelinerl.rl.groups import CUTTING, LAG_BUCKETS, MOST_CUT

_MOST_KL = {"float32": 1e-3, "bfloat16": 0.05}
"""Nats per token between actor and trainer at lag 0. Rounding gives 1e-9 in float32 and about 1e-3 in 16 bits."""


def numerics(run: RunRecords) -> Findings:
    """Examine probabilities, importance weights and gradients.

    engine-differs (weight-updates.md#the-parity-probe): Actors and trainer compute different probabilities of the same policy:
        a parity probe failed (grave from 3), or the median KL is 0.001 nats, or 0.05 in 16 bits (grave from ten times that), in
        steps whose sequences have no KV cache of an older policy.
    ess-low (learning.md#lag-and-ess): Importance weights vary so much that few tokens count: the ESS is below 0.5. If it is
        above 0.8 at the smallest lag, lag is the cause.
    tokens-cut (learning.md#masks): The loss leaves many tokens out: a mask takes half of them (grave from 95 %), or clipping
        takes a quarter in the last steps (grave from 75 %).
    gradient-clipped (learning.md#the-optimizer): Gradients are clipped, so that steps differ only in direction: in 9 of 10
        steps, to less than a fifth of the mean norm.
    policy-unmoved (learning.md#learning-rate): Steps hardly change the policy: in float32, no |log weight| reaches 0.002
        although the lag is above 0. A policy that learns exceeds 0.01.
    """
    algorithm, trainer, rate = run.recipe.algorithm, run.recipe.trainer, run.recipe.trainer.learning_rate
    alike = [step for step in run.trained if not step.get("multi_version_fraction")]
    kl, most = median(numbers_in(alike, "mismatch_kl") or [0.0]), _MOST_KL[run.recipe.model.dtype]
    if (failures := sum(run.values("parity_failures"))) > 0:
        difference = max(run.values("logprob_mismatch"), default=0)
        told = f"{failures:.0f} probe answers, largest difference {difference:.2g} nats"
        fix = "compare versions and dtypes of actors and trainer; raise it if 16 bits explain the difference"
        yield Finding("engine-differs", worse(failures, 3), told, "weights.probe_tolerance", fix)
    elif kl >= most:
        fix = "use icepop, and float32 for model.head_dtype, or no actor.engine.quantization"
        yield Finding("engine-differs", worse(kl, 10 * most), f"mismatch_kl {kl:.2g} nats", "algorithm.mask", fix)
    if (ess := run.late("ess")) < 0.5:
        by_lag = {lag: value for lag in LAG_BUCKETS if (value := run.late(f"ess_by_lag.{lag}")) == value}
        told = ", ".join([f"ESS {ess:.2g}", *(f"{value:.2g} at lag {lag}" for lag, value in by_lag.items())])
        field, fix = "trainer.learning_rate", "lower it tenfold, or compare engine and trainer"
        if len(by_lag) > 1 and next(iter(by_lag.values())) > 0.8:
            field, fix = "algorithm.max_lag", f"lower it, or trainer.learning_rate ({rate:g})"
        yield Finding("ess-low", "warning", told, field, fix)
    masked, clipped = run.mean("mask_fraction"), run.late("clip_fraction")
    if masked >= 0.5 and algorithm.mask != "none":
        fix = f"widen it, mask_high ({algorithm.mask_high:g}) and mask_kl ({algorithm.mask_kl:g})"
        yield Finding("tokens-cut", worse(masked, 0.95), f"the mask takes {percent(masked)}", "algorithm.mask_low", fix)
    elif clipped > MOST_CUT and algorithm.loss in CUTTING:
        fix = f"widen it and clip_high ({algorithm.clip_high:g}), or lower max_lag or the learning rate"
        yield Finding("tokens-cut", worse(clipped, 0.75), f"{percent(clipped)} are clipped", "algorithm.clip_low", fix)
    share, norm, usual = run.mean("clipped"), run.mean("grad_norm"), run.mean("completion_tokens_mean")
    bound = trainer.max_grad_norm or (usual if algorithm.normalization == "batch" else 1.0)
    if share >= 0.9 and norm > 5 * bound:
        told, fix = f"{percent(share)} of the steps, to {bound:.3g}", f"raise it to about the mean norm, {norm:.3g}"
        yield Finding("gradient-clipped", "warning", told, "trainer.max_grad_norm", fix)
    after = [step for step in run.trained[max(trainer.warmup_steps, 3) :] if (number_at(step, "lag.max") or 0) > 0]
    moved = numbers_in(after, "log_weight_abs_max")
    if len(moved) >= 3 and max(moved) < 2e-3 and run.recipe.model.dtype == "float32" and run.has_signal:
        fix = "raise it tenfold until log_weight_abs_max exceeds 0.01"
        yield Finding("policy-unmoved", "grave", f"largest |log weight| {max(moved):.1g}", "trainer.learning_rate", fix)


def policy(run: RunRecords) -> Findings:
    """Examine whether the policy becomes worse.

    kl-grows (learning.md#losses): The policy has left the initial one far behind: the KL exceeds 1 nat per token and ten times
        its first value, without a gain.
    entropy-explodes (learning.md#losses): The policy becomes random: the entropy exceeds 1 nat and twice its first value,
        without a gain; grave if the reward has collapsed.
    policy-collapsed (learning.md#learning-rate): The reward has fallen far below its start: it is under half of its first
        value, by 3 standard errors.
    entropy-collapsed (learning.md#losses): The policy has become certain without having learned: the entropy is below a
        twentieth of its first value, without a gain.
    """
    algorithm, rate, is_useless = run.recipe.algorithm, run.recipe.trainer.learning_rate, run.is_long and not run.has_learned
    early, late = run.early("reference_kl"), run.late("reference_kl")
    if late > max(1, 10 * early) and not run.has_learned:
        fix = f"raise it, or lower trainer.learning_rate ({rate:g})"
        yield Finding("kl-grows", "warning", f"{early:.2g} -> {late:.2g} nats", "algorithm.kl_coefficient", fix)
    early, late, bonus = run.early("entropy"), run.late("entropy"), algorithm.entropy_coefficient
    told, reward = f"{early:.2g} -> {late:.2g} nats", run.late("reward_mean")
    if is_useless and late > max(1, 2 * early):
        field = "algorithm.entropy_coefficient" if bonus else "trainer.learning_rate"
        yield Finding("entropy-explodes", worse(run.has_collapsed, 1), told, field, "lower it tenfold")
    if run.has_collapsed:
        fallen, fix = f"reward {run.early('reward_mean'):.3g} -> {reward:.3g}", "lower it tenfold, from an earlier checkpoint"
        yield Finding("policy-collapsed", "grave", fallen, "trainer.learning_rate", fix)
    if is_useless and early > 0.01 and late < early / 20 and reward < 0.9 * run.first_task.reward.correct:
        fix = "use 0.001, a lower trainer.learning_rate, or a higher algorithm.clip_high"
        yield Finding("entropy-collapsed", "warning", told, "algorithm.entropy_coefficient", fix)


def speed(run: RunRecords) -> Findings:
    """Examine which part of the run keeps the others waiting.

    bottleneck (training.md#reading-the-figures): One part keeps the others waiting: the lag limit holds half of the steps; the
        mean lag is above 4 and above the largest predicted one; weight updates take 20 % of the time; or the trainer waits for
        half of it, or computes for 90 % while actors are busy for less than half.
    """
    actor, busy, lag, predicted = run.recipe.actor, *map(run.late, ("actor_busy_fraction", "lag.mean", "largest_lag"))
    total, *seconds = (run.late(f"step_s.{one}") for one in ("total", "wait", "compute", "send", "snapshot"))
    waits, computes, sends, copies = (one / (total or math.nan) for one in seconds)
    more = max(actor.number + 1, round(actor.number / max(0.1, 1 - waits)))
    slow = ("trainer.nproc", "give the trainer more GPUs, and actors fewer")
    if run.recipe.model.dtype == "float32":  # on CPUs, which actors and trainer share
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
    told = f"waits {percent(waits)}, computes {percent(computes)}, sends {percent(sends)}; actors busy {percent(busy)}"
    for is_cause, meaning, kind, field, fix in causes:
        if is_cause and run.is_long and run.recipe.mode == "pipeline":
            yield Finding("bottleneck", "note", f"{kind}: {told}", field, fix, meaning=meaning)


RULES = (numerics, policy, speed)
