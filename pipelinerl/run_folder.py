"""Whether a run's folder holds all that going on with it needs. Something that is missing must not look like a run that is new.

The trainer asks before it starts, and `pipelinerl run --resume` before it starts anything. Reads files, changes none.

The keys of summary.json: the one place that says which there are, for both of its writers.

The trainer writes the whole at its end (`services/trainer/reporting/report.py`); where it could not, the runner writes what
metrics.jsonl tells (`pipelinerl/local/summary.py`), with None for what it does not. The type checker holds both to the same
keys. What each one means: docs/run-directory.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from pipelinerl.audit.journal import JOURNAL, read_events

LINEAGE, CHECKPOINTS = "lineage.json", "checkpoints"
RUN_STATE = Path("resume", "run.json")
"""Within a checkpoint: without it nothing can go on from there."""


def resumable(run_dir: Path) -> dict[int, Path]:
    """run.json of each checkpoint that a run can go on from, by version, the newest last."""
    names = {
        path.parent.parent.name.removeprefix("step-"): path
        for path in (run_dir / CHECKPOINTS).glob(f"step-*/{RUN_STATE}")
    }
    return dict(sorted((int(name), path) for name, path in names.items() if name.isdecimal()))


def newest_state(run_dir: Path) -> Mapping[str, Any] | None:
    """run.json of the newest of them. Raises `ValueError` for one that is no JSON."""
    found = resumable(run_dir)
    if not found:
        return None
    content: Mapping[str, Any] = json.loads(found[max(found)].read_text(encoding="utf-8"))
    return content


def trainer_starts(run_dir: Path) -> list[int]:
    """The policy version that each of the run's trainers began at, for people: empty where the folder does not say."""
    try:
        return [int(start) for start in json.loads((run_dir / LINEAGE).read_text(encoding="utf-8"))["starts"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def missing_from(run_dir: Path) -> str:
    """What is missing, and what to do about it; empty for a folder that is whole, or new. Raises `ValueError`."""
    state, journal = newest_state(run_dir), run_dir / JOURNAL
    size = journal.stat().st_size if journal.is_file() else 0
    if not (run_dir / LINEAGE).is_file():
        if state is None and not size:
            return ""
        return f"{LINEAGE} is missing: restore it (its starts are those in {JOURNAL}), or give the run another folder"
    if state is not None and state["journal_bytes"] > size:
        return (
            f"{JOURNAL} has {size:,} bytes, and the checkpoint of version {state['policy_version']} was written when it had "
            f"{state['journal_bytes']:,}: restore it; without it nobody knows which sequences are out"
        )
    written = [event["version"] for _, event in read_events(journal) if event["event"] == "checkpoint"]
    if state is None and written:
        return (
            f"a checkpoint of version {max(written)} was written, and {CHECKPOINTS}/ holds none to go on from: restore it, "
            "or start a new run from the policy in checkpoint/ (model.source: path)"
        )
    return ""


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
