"""Find out why a run does not learn, from its records. The rules in this file are about lost sequences, steps and runs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipelinerl.doctor import learning, lessons
from pipelinerl.doctor.findings import Finding, Rows, apply, percent, ranked
from pipelinerl.doctor.run_records import Reasons, RunRecords, records_in
from pipelinerl.doctor.settings import SETTINGS_RULES, Settings
from pipelinerl.errors import UserError, counted
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import recipe_of_run
from pipelinerl.recipe.model_folder import known_parameters
from pipelinerl.rl.ledger import MEANINGS
from pipelinerl.run_dir import RunDir

_EPISODES = ("episode_", "turn_timeout", "no_turns", "verifier_refused")
_OTHERS = tuple(name for name in MEANINGS if not name.startswith(("reward_", *_EPISODES, "actor_", "step skipped")))
_LOST = (
    ("rewards-fail", ("reward_",), "reward.scorer", "correct the function; pipelinerl validate RECIPE shows its error"),
    ("episodes-fail", _EPISODES, "task.name", "correct the environment; logs/verifier.log has its error"),
    ("actor-differs", ("actor_quarantined",), "actor.engine", "compare its GPU and software versions with other actors"),
    ("sequences-lost", _OTHERS, "logs", "docs/errors.md lists causes by reason; the logs have the first error"),
)
"""Rules about failed sequences: id, beginnings of the reasons, and the field and fix for reasons that `_FIXES` lacks."""
_LONG = ("model.max_context", "raise it, or drop long problems")
_FIXES = {
    "reward_timeout": ("reward.timeout_s", "raise it above the slowest call that pipelinerl validate shows"),
    "reward_out_of_memory": ("reward.memory_mib", "raise it, or make the reward need less"),
    "reward_bad_reference": ("task.answer_field", "name the field of the answer, and leave out rows without one"),
    "episode_timeout": ("task.episode_timeout_s", "raise it, or task.answer_timeout_s, or speed the environment up"),
    **dict.fromkeys(("prompt_too_long", "prompt too long", "longer than the context"), _LONG),
    "turn_timeout": ("task.turn_timeout_s", "raise it, or lower actor.episodes_in_progress"),
}


def losses(run: RunRecords) -> Rows:
    """Examine what becomes of sequences and steps.

    rewards-fail (errors.md#reasons): The reward fails instead of giving a number: for 5 % of the sequences; grave from 50 %.
    episodes-fail (episodes.md#how-long-it-may-take-and-what-fails-how): Episodes fail because of the environment, not of the
        policy: 5 % of the episodes; grave from 50 %.
    actor-differs (weight-updates.md#the-parity-probe): An actor's probabilities differ from those of its policy: a sequence of
        a quarantined actor arrived.
    sequences-lost (errors.md#reasons): Sequences are lost on their way to the trainer: 5 % of the sequences; grave from 50 %.
    steps-skipped (learning.md#the-optimizer): Steps change no weight, as the loss or gradient is not finite: at least one step;
        grave if half of the last 20 were skipped.
    dropped-stale (architecture.md#staleness): Sequences are too old when their step comes: from step 12 on, 2 % of the
        sequences, which is twice what plans accept; grave from 50 %, at any time.
    dropped-filtered (learning.md#from-rewards-to-advantages): Groups are dropped because their rewards are equal: 90 % of the
        sequences; grave if no step was made.
    run-failed (errors.md): The run failed: its summary has an error, or it ended without an optimizer step and was not stopped
        by hand. Without an error, runs younger than 10 minutes may still be running, and are not reported.
    steps-lost (reliability.md#the-trainer): A restart undid optimizer steps: metrics-undone.jsonl has at least one.
    disk-fills (run-directory.md): The disk will be full before the end: free space is less than one more checkpoint plus the
        expected growth of the other files.
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
         "trainer.learning_rate", "lower it tenfold, and see whether model.dtype overflows"),
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


RUN_RULES = (losses, *lessons.RULES, *learning.RULES)
"""Rules in the order of causes: what an earlier rule finds may explain what a later one finds."""


def examine_run(
    folder: Path, recipe: Recipe | None = None, reasons: Reasons | None = None, *, is_running: bool = False
) -> list[Finding]:
    """Return the findings about the run in `folder`, the cause first. `recipe` and `reasons` (numbers of sequences by outcome
    and reason) are read there if they are None. Raises `FieldError` if the folder is not a run's."""
    recipe = recipe or recipe_of_run(RunDir(folder, "").recipe)
    return findings_about(records_in(folder, recipe, reasons, is_running=is_running))


def findings_about(run: RunRecords) -> list[Finding]:
    """Return the findings about a run. Those about the settings of a run that has learned are only notes."""
    parameters = 0
    with suppress(UserError, OSError):  # the model may be on another machine
        parameters = known_parameters(run.recipe.model)
    settings = apply(SETTINGS_RULES, Settings(run.recipe, parameters))
    settings = [replace(one, gravity="note") for one in settings] if run.has_learned else settings
    return ranked([*settings, *apply(RUN_RULES, run)])
