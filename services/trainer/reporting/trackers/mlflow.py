"""MLflow: where `MLFLOW_TRACKING_URI` says, or else an SQLite file `<run dir>/mlflow.db`.

The experiment is `MLFLOW_EXPERIMENT_NAME`'s, else `pipelinerl`. Logs no model and no artifact.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from services.trainer.reporting.trackers.tracker import RunId, TrackedRun

EXPERIMENT = "pipelinerl"
_AT_ONCE = 100
"""Parameters that MLflow takes in one call."""
_LONGEST_VALUE = 6000


class MlflowTracker:
    def __init__(self) -> None:
        self._client: MlflowClient | None = None
        self._run_id, self._step = "", 0

    def start(self, run: TrackedRun) -> None:
        self._client = MlflowClient(
            os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path(run.run_dir).absolute()}/mlflow.db"
        )
        self._step = run.version
        self._run_id = self._open(self._client, run)
        self._log_params(self._client, run)

    def step(self, step: int, time_s: float, figures: Mapping[str, float]) -> None:
        self._step = step
        self._log(step, time_s, figures)

    def heldout(self, version: int, time_s: float, figures: Mapping[str, float]) -> None:
        self._log(version, time_s, figures)

    def end(self, figures: Mapping[str, float], *, finished: bool) -> None:
        self._log(self._step, time.time(), figures)
        assert self._client is not None
        self._client.set_terminated(self._run_id, "FINISHED" if finished else "KILLED")

    def _open(self, client: MlflowClient, run: TrackedRun) -> str:
        """The run's id: that of an earlier trainer of it, or a new run's."""
        kept = RunId(run.run_dir, "mlflow")
        run_id = kept.read()
        if run_id is not None:
            client.update_run(run_id, status="RUNNING")
            return run_id
        tags = {"mlflow.note.content": run.description} if run.description else {}
        created = client.create_run(_experiment(client), run_name=run.name, tags=tags)
        kept.write(created.info.run_id)
        return str(created.info.run_id)

    def _log_params(self, client: MlflowClient, run: TrackedRun) -> None:
        """A parameter is for good: what a later trainer was started with instead becomes a tag."""
        known = client.get_run(self._run_id).data.params
        values = {name: str(value)[:_LONGEST_VALUE] for name, value in run.params.items()}
        fresh = [Param(name, value) for name, value in values.items() if name not in known]
        for first in range(0, len(fresh), _AT_ONCE):
            client.log_batch(self._run_id, params=fresh[first : first + _AT_ONCE])
        changed = {name: value for name, value in values.items() if known.get(name, value) != value}
        tags = [RunTag(f"{name} of incarnation {run.incarnation}", value) for name, value in changed.items()]
        if tags:
            client.log_batch(self._run_id, tags=tags)

    def _log(self, step: int, time_s: float, figures: Mapping[str, float]) -> None:
        assert self._client is not None, "start comes first"
        metrics = [Metric(name, value, round(time_s * 1000), step) for name, value in figures.items()]
        self._client.log_batch(self._run_id, metrics=metrics)


def _experiment(client: MlflowClient) -> str:
    """Its id; made where there is none of the name yet."""
    if os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return os.environ["MLFLOW_EXPERIMENT_ID"]
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found else client.create_experiment(name))
