"""The keys of summary.json: the one place that says which there are, for both of its writers.

The trainer writes the whole at its end (`services/trainer/report/run_report.py`); where it could not, the runner writes what
metrics.jsonl tells (`pipelinerl/local/summary.py`), with None for what it does not. The type checker holds both to the same
keys. What each one means: docs/run-directory.md.
"""

from __future__ import annotations

from typing import Any, TypedDict


class RunSummary(TypedDict):
    """Every key of a run's summary; None = not known."""

    recipe: str
    mode: str
    seed: int
    steps: int
    steps_skipped: int | None
    policy_version: int | None
    interrupted: bool
    wall_s: float | None
    heldout_accuracy_first: float | None
    heldout_accuracy_last: float | None
    heldout: list[dict[str, Any]]
    tokens_generated: int
    tokens_trained: int
    sequences: dict[str, int]
    sequence_reasons: dict[str, dict[str, int]] | None
    lag: dict[str, float | None]
    ess: dict[str, float | None]
    sequences_multi_version_fraction: float | None
    weight_updates: dict[str, Any]
    membership: dict[str, Any]
    logprob_mismatch_max: float | None
    parity_failures: int | None
    mismatch_kl_mean: float | None
    actor_busy_fraction: float | None
    trainer_busy_fraction: float | None
    tokens_per_s: dict[str, float | None]
    mfu_mean: float | None
    memory_peak_gib: float | None
    idle_s_mean: float | None


KEYS = tuple(RunSummary.__annotations__)
RUNNER_KEYS = ("restarts", "error")
"""What the runner adds to either; `error` only to a run that failed."""
