"""The clients of the experiment trackers. Each imports its library when it is made, so that unused libraries need not exist.

A client is configured by its library's own environment variables. The libraries' logs and output are silenced, since they may
hold secrets. No code, console output, artifact or measurement of the machine is sent.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipelinerl.errors import MissingPackage
from pipelinerl.run_dir import write_json

PROJECT = "pipelinerl"
"""MLflow's experiment and W&B's project, unless the environment names one."""
STEP, HELDOUT_VERSION = "step", "heldout/version"


@dataclass(frozen=True)
class TrackedRun:
    """A run for the trackers. `params`: the recipe's fields by dotted path. `version`: optimizer steps that count when the
    trainer starts, 0 for a new run. `incarnation`: how many times its trainer has started, from 1."""

    name: str
    description: str
    run_dir: Path
    params: Mapping[str, str | int | float | bool]
    incarnation: int
    version: int


class Tracker(Protocol):
    """Interface of a tracker. It is called on one thread; each call may wait for a network and raise its library's errors."""

    def start(self, run: TrackedRun) -> None:
        """Open the run, or continue it if an earlier trainer opened it. It is called again after an error."""

    def log(self, axis: str, position: int, time_s: float, figures: Mapping[str, float]) -> None:
        """Log figures at `position` of `axis`: `STEP`, or `HELDOUT_VERSION`, the version of an evaluation, which may be older
        than the last step. `time_s`: Unix time."""

    def end(self, step: int, figures: Mapping[str, float], *, finished: bool) -> None:
        """Log the run's summary at its last step, and send everything left. `finished`: the run was not stopped before its last
        step."""


def open_tracker(name: str) -> Tracker:
    """Return the tracker `name` of the recipe's field `trackers`. Raises `MissingPackage` if its library cannot be imported."""
    clients: dict[str, type[Tracker]]
    clients = {"tensorboard": TensorBoardTracker, "mlflow": MlflowTracker, "wandb": WandbTracker}
    try:
        return clients[name]()
    except ImportError as error:
        raise MissingPackage(f"{error}; pip install 'pipelinerl[{name}]', or leave it out of trackers") from error


def kept_id(run_dir: Path, tracker: str, make: Callable[[], str]) -> str:
    """Return the run's identity at a tracker, kept in the run directory so that a later trainer continues the same run. Without
    one, store and return the result of `make`. Raises `ValueError` or `KeyError` for a file that is not ours."""
    path = run_dir / "trackers" / f"{tracker}.json"
    if path.is_file():
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    made = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"id": made})
    return made


def _silence(*loggers: str) -> None:
    for name in loggers:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [logging.NullHandler()], False


class TensorBoardTracker:
    """Event files in `<run dir>/tensorboard`, by torch's own writer."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        _silence("tensorboard")
        self._open = SummaryWriter

    def start(self, run: TrackedRun) -> None:
        """Readers leave out the steps after `run.version`, which a restart undid."""
        purged = run.version + 1 if run.incarnation > 1 else None
        self._writer = self._open(str(run.run_dir / "tensorboard"), purge_step=purged)
        rows = [f"| `{name}` | {json.dumps(value, ensure_ascii=False)} |" for name, value in run.params.items()]
        self._writer.add_text("recipe", "\n".join(["| field | value |", "|---|---|", *rows]), run.version)
        self._writer.flush()

    def log(self, axis: str, position: int, time_s: float, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, position, walltime=time_s)
        self._writer.flush()

    def end(self, step: int, figures: Mapping[str, float], *, finished: bool) -> None:
        self.log(STEP, step, time.time(), figures)
        self._writer.close()


class MlflowTracker:
    """Logs to `MLFLOW_TRACKING_URI`, or else to an SQLite file `<run dir>/mlflow.db`."""

    _PARAMS_PER_CALL, _LONGEST_VALUE = 100, 6000
    """Limits of MLflow."""

    def __init__(self) -> None:
        # At a run's end it would print the run's address, with any login in the tracking URI.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import entities
        from mlflow.tracking import MlflowClient

        _silence("mlflow", "alembic", "sqlalchemy", "sqlalchemy.engine", "huey")
        self._entities, self._open = entities, MlflowClient
        self._run_id = ""

    def start(self, run: TrackedRun) -> None:
        self._client = self._open(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.run_dir}/mlflow.db")

        def create() -> str:
            tags = {"mlflow.note.content": run.description} if run.description else {}
            return str(self._client.create_run(self._experiment(), run_name=run.name, tags=tags).info.run_id)

        self._run_id = kept_id(run.run_dir, "mlflow", create)
        self._client.update_run(self._run_id, status="RUNNING")  # an earlier trainer may have ended it
        self._log_params(run)

    def log(self, axis: str, position: int, time_s: float, figures: Mapping[str, float]) -> None:
        at_ms = round(time_s * 1000)
        metrics = [self._entities.Metric(name, value, at_ms, position) for name, value in figures.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def end(self, step: int, figures: Mapping[str, float], *, finished: bool) -> None:
        self.log(STEP, step, time.time(), figures)
        self._client.set_terminated(self._run_id, "FINISHED" if finished else "KILLED")

    def _experiment(self) -> str:
        """Return the experiment's id; the experiment is made if there is none of its name."""
        if os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return os.environ["MLFLOW_EXPERIMENT_ID"]
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))

    def _log_params(self, run: TrackedRun) -> None:
        """Log the recipe. A parameter cannot be changed, so a changed value of a later trainer becomes a tag."""
        known = self._client.get_run(self._run_id).data.params
        values = {name: str(value)[: self._LONGEST_VALUE] for name, value in run.params.items()}
        fresh = [self._entities.Param(name, value) for name, value in values.items() if name not in known]
        for first in range(0, len(fresh), self._PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=fresh[first : first + self._PARAMS_PER_CALL])
        for name, value in values.items():
            if known.get(name, value) != value:
                self._client.set_tag(self._run_id, f"{name} of incarnation {run.incarnation}", value)


class WandbTracker:
    """Logs to W&B. Project, team, key and mode are W&B's own variables (`WANDB_PROJECT`, `WANDB_API_KEY`, `WANDB_MODE`, ...).
    Its files are in `<run dir>/wandb`, from which `wandb sync` sends the rest later."""

    def __init__(self) -> None:
        import wandb

        _silence("wandb")
        self._wandb = wandb
        self._incarnation = 1

    def start(self, run: TrackedRun) -> None:
        self._incarnation = run.incarnation
        quiet = {"console": "off", "silent": True}
        # By default "Stop run" on W&B's page sends SIGINT to this process, but a tracker must not stop a run.
        unstoppable = {"stop_fn": lambda: None}
        figures_only = {"disable_git": True, "disable_code": True, "x_disable_stats": True}
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            # The name and a random part, since a name may be used again in another folder.
            id=kept_id(run.run_dir, "wandb", lambda: f"{run.name}-{secrets.token_hex(4)}"),
            resume="allow",
            name=run.name,
            notes=run.description or None,
            dir=str(run.run_dir),
            config=dict(run.params),
            allow_val_change=True,
            settings=self._wandb.Settings(**quiet, **figures_only, **unstoppable),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        self._run.define_metric("heldout/*", step_metric=HELDOUT_VERSION)

    def log(self, axis: str, position: int, time_s: float, figures: Mapping[str, float]) -> None:
        """Log figures. The run's step is one of them: W&B's own step only grows, but a restarted trainer repeats some steps."""
        incarnation = {"incarnation": self._incarnation} if axis == STEP else {}
        self._run.log({axis: position, **incarnation, **figures})

    def end(self, step: int, figures: Mapping[str, float], *, finished: bool) -> None:
        self._run.summary.update(dict(figures))
        self._run.finish(exit_code=0 if finished else 1)
