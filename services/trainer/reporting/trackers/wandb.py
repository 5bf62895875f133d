"""Weights & Biases: project, team, key and mode are its own variables (`WANDB_PROJECT`, `WANDB_API_KEY`, `WANDB_MODE`, ...).

Its files are in `<run dir>/wandb`; what it could not send, `wandb sync` sends from there. Logs figures and the recipe: no code,
no console, no measurements of the machine.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

import wandb

from services.trainer.reporting.trackers.tracker import RunId, TrackedRun

PROJECT = "pipelinerl"


class WandbTracker:
    def __init__(self) -> None:
        self._run: wandb.Run | None = None
        self._incarnation = 1

    def start(self, run: TrackedRun) -> None:
        self._incarnation = run.incarnation
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=_run_id(run),
            resume="allow",
            name=run.name,
            notes=run.description or None,
            dir=run.run_dir,
            config=dict(run.params),
            allow_val_change=True,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
            ),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("heldout/*", step_metric="heldout/version")

    def step(self, step: int, time_s: float, figures: Mapping[str, float]) -> None:
        """W&B's own step only ever grows, so the run's is a figure: a trainer that starts again takes some of them twice."""
        self._log({"step": step, "incarnation": self._incarnation, **figures})

    def heldout(self, version: int, time_s: float, figures: Mapping[str, float]) -> None:
        self._log({"heldout/version": version, **figures})

    def end(self, figures: Mapping[str, float], *, finished: bool) -> None:
        assert self._run is not None
        self._run.summary.update(dict(figures))
        self._run.finish(exit_code=0 if finished else 1)

    def _log(self, figures: Mapping[str, float]) -> None:
        assert self._run is not None, "start comes first"
        self._run.log(dict(figures))


def _run_id(run: TrackedRun) -> str:
    """The run's name and a part by chance, since a name may be used again in another folder. The same one for all trainers."""
    kept = RunId(run.run_dir, "wandb")
    run_id = kept.read()
    if run_id is None:
        run_id = f"{run.name}-{secrets.token_hex(4)}"
        kept.write(run_id)
    return run_id
