"""Rules about what stops a run or takes its data away, in the order of causes. Pure."""

from __future__ import annotations

from pipelinerl.doctor.findings import Found, Rule, Verdict, add_to, percent, worse
from pipelinerl.doctor.run_records import RunRecords
from pipelinerl.errors import counted
from pipelinerl.rl.ledger import MEANINGS

RULES: list[Rule] = []
rule = add_to(RULES)
_EPISODES = ("episode_", "turn_timeout", "no_turns", "verifier_refused")
_OTHERS = tuple(name for name in MEANINGS if not name.startswith(("reward_", *_EPISODES, "actor_", "step skipped")))
_LONG = ("model.max_context", "raise it, or drop long problems")
_FIXES = {
    "reward_timeout": ("reward.timeout_s", "raise it above the slowest call that pipelinerl validate shows"),
    "reward_out_of_memory": ("reward.memory_mib", "raise it, or let the reward need less"),
    "reward_bad_reference": ("task.answer_field", "name the field of the answer, and leave out rows without one"),
    "episode_timeout": ("task.episode_timeout_s", "raise it, or task.answer_timeout_s, or speed the environment up"),
    **dict.fromkeys(("prompt_too_long", "prompt too long", "longer than the context"), _LONG),
    "turn_timeout": ("task.turn_timeout_s", "raise it, or lower actor.episodes_in_progress"),
}


def _lost(run: RunRecords, prefixes: tuple[str, ...], field: str, fix: str, least: float = 0.05) -> Verdict:
    share, reason = run.share_of("failed", prefixes)
    told = f"{percent(share)} of the sequences, mostly {reason}: {MEANINGS.get(reason, 'the logs say more')}"
    return share >= least and Found(worse(share, 0.5), told, *_FIXES.get(reason, (field, fix)))


@rule("errors.md#reasons")
def rewards_fail(run: RunRecords) -> Verdict:
    """The reward fails instead of giving a number: for 5 % of the sequences; grave from 50 %."""
    return _lost(run, ("reward_",), "reward.scorer", "correct the function; pipelinerl validate RECIPE shows its error")


@rule("episodes.md#how-long-it-may-take-and-what-fails-how")
def episodes_fail(run: RunRecords) -> Verdict:
    """Episodes end by a fault of the environment, not of the policy: 5 % of them; grave from 50 %."""
    return _lost(run, _EPISODES, "task.name", "correct the environment; logs/verifier.log has its error")


@rule("weight-updates.md#the-parity-probe")
def actor_differs(run: RunRecords) -> Verdict:
    """An actor samples with other probabilities than its policy's: any quarantined sequence."""
    return _lost(run, ("actor_quarantined",), "actor.engine", "compare that actor's GPU and versions with the others'", 1e-9)


@rule("errors.md#reasons")
def sequences_lost(run: RunRecords) -> Verdict:
    """Sequences are lost on their way to the trainer: 5 % of them; grave from 50 %."""
    return _lost(run, _OTHERS, "logs", "docs/errors.md lists causes by reason; the logs have the first error")


@rule("learning.md#the-optimizer")
def steps_skipped(run: RunRecords) -> Verdict:
    """Steps change no weight, as the loss or gradient is not finite: any step; grave if it is half of the last 20."""
    skipped = [step["step"] for step in run.steps if step.get("skipped")]
    late = sum(bool(step.get("skipped")) for step in run.steps[-20:]) / max(1, len(run.steps[-20:]))
    told = f"{len(skipped)} of {counted(len(run.steps), 'step')}, the first at step {next(iter(skipped), 0)}"
    fix = f"is {run.recipe.trainer.learning_rate:g}; lower it tenfold, and see whether model.dtype overflows"
    return bool(skipped) and Found(worse(late, 0.5), told, "trainer.learning_rate", fix)


@rule("architecture.md#staleness")
def dropped_stale(run: RunRecords) -> Verdict:
    """Sequences are too old when their step comes: 2 % after 12 steps, twice what plans accept; grave from 50 %."""
    (share, _), lag = run.share_of("dropped_stale"), run.recipe.algorithm.max_lag
    needed = max([int(value) for value in run.values("largest_lag")] + [(lag or 0) + 1])
    fix = f"is {lag}; use at least {needed}, or fewer actors or actor.sequences_in_progress"
    is_bad = lag is not None and share > (0.02 if run.is_long else 0.5)
    return is_bad and Found(worse(share, 0.5), f"{percent(share)} of the sequences", "algorithm.max_lag", fix)


@rule("learning.md#from-rewards-to-advantages")
def dropped_filtered(run: RunRecords) -> Verdict:
    """Groups are dropped because their answers are equally right: 90 % of the sequences; grave without any step."""
    share, _ = run.share_of("dropped_filtered")
    fix = "take problems that the model solves sometimes, or larger groups"
    return share >= 0.9 and Found("warning" if run.trained else "grave", f"{percent(share)} of them", "task", fix)


@rule("errors.md")
def run_failed(run: RunRecords) -> Verdict:
    """The run failed: its summary has an error, or it ended without an optimizer step and was not stopped by hand. Runs younger
    than 10 minutes may still go on."""
    error = str(run.summary.get("error") or "").strip().partition("\n")[0]
    is_dead = not run.steps and not (run.is_running or run.is_young) and not run.summary.get("interrupted")
    told = error[:400] or run.last_error or "no error in the logs"
    return bool(error or is_dead) and Found("grave", told, "logs", "remove the cause, then pipelinerl run --resume")


@rule("reliability.md#the-trainer")
def steps_lost(run: RunRecords) -> Verdict:
    """A restart undid optimizer steps: metrics-undone.jsonl has at least one."""
    fix = f"is {run.recipe.checkpoint.every_steps}; lower it to repeat fewer steps after a restart"
    return run.undone > 0 and Found("note", counted(run.undone, "step"), "checkpoint.every_steps", fix)


@rule("run-directory.md")
def disk_fills(run: RunRecords) -> Verdict:
    """The disk will be full before the end: free space is below the files' growth and one more checkpoint."""
    left = run.recipe.trainer.steps - len(run.steps)
    needed = left * run.bytes_per_step + run.checkpoint_bytes
    told = f"{run.free_bytes / 1e9:.3g} GB free, {needed / 1e9:.3g} GB needed for {counted(left, 'more step')}"
    is_short = run.is_running and len(run.steps) >= 3 and needed > run.free_bytes
    return is_short and Found("warning", told, "checkpoint.keep", "free space, or keep fewer checkpoints")
