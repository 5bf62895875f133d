"""Experiment trackers (Weights & Biases, MLflow, TensorBoard), each with a bounded queue and its own thread (docs/trackers.md).

The trainer queues points (figures or samples of one step) and never waits for a tracker's import, server or uploads. When a
queue is full, its oldest point is lost. A tracker's first failure is logged as a warning. Only the end of the run waits for
trackers, and for a bounded time.

The libraries' logs and output are silenced, since they may contain secrets. Completions are sent only in a few tables.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import queue
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipelinerl.errors import MissingPackage
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.groups import LAG_BUCKETS, lag_bucket
from pipelinerl.run_dir import write_json
from pipelinerl.run_summary import StepRecord, leaves
from pipelinerl.service.logs import without_secrets
from pipelinerl.service.settings import TrainerSettings, host_port
from services.trainer.checkpoint.run_state import Start
from services.trainer.reporting.samples import Sample

log = logging.getLogger(__name__)

BACKLOG = 1000
"""Maximum number of points in the queue. Most points are records of steps, of about 3 KB each."""
RETRY_OPEN_S = 30.0
"""Seconds between attempts to open the run while the tracker's server cannot be reached."""
FLUSH_S, FLUSH_STOPPED_S = 20.0, 1.5
"""Seconds to wait for trackers after a finished run, and after a run that was stopped early, before abandoning them."""

PROJECT = "pipelinerl"
"""Default name of MLflow's experiment and W&B's project; environment variables override it."""
STEP, HELDOUT_VERSION = "step", "heldout/version"
TABLES = {STEP: "samples", HELDOUT_VERSION: "heldout/samples"}
MOST_TABLES, MOST_ROWS, MOST_CHARACTERS = 40, 8, 2000
"""Limits of sample tables: approximate number per run and axis, samples per table (the newest), and characters per cell."""
_UNFIT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

THREAD = "tracker "
"""Name prefix of the trackers' threads."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers see it. `params`: the recipe's fields by dotted path. `version`: policy version at which this trainer
    starts. `incarnation`: number of this trainer's start, from 1. `page`: the live page's address without its key, or empty."""

    name: str
    description: str
    run_dir: Path
    params: Mapping[str, str | int | float | bool]
    incarnation: int
    version: int
    page: str = ""


Row = dict[str, str | int | float | None]
"""A row of a table of samples, by column. docs/trackers.md documents the columns."""


class Tracker(Protocol):
    """Interface of a tracker. Making one opens the run, or continues the run that an earlier trainer opened. One thread makes
    all calls. They may wait for the network, and raise errors of the tracker's library."""

    def log(self, axis: str, position: int, time_s: float, figures: Mapping[str, float]) -> None:
        """Log figures at `position`: a step if `axis` is `STEP`, or the evaluated version if it is `HELDOUT_VERSION`."""

    def log_samples(self, axis: str, position: int, rows: list[Row]) -> None:
        """Log a table of samples at `position` on `axis`: training samples on `STEP`, held-out ones on `HELDOUT_VERSION`."""

    def end(self, step: int, figures: Mapping[str, float], *, finished: bool) -> None:
        """Log the run's summary at its last step, and send unsent points. `finished`: the run was not stopped early."""


Call = Callable[[Tracker], None]


class TrackerThread:
    """Makes the queued calls in order. `lost`: number of queued points that the tracker has not accepted so far."""

    def __init__(self, name: str, open_this: Callable[[], Tracker]) -> None:
        """`open_this`: imports the tracker's library, which may be missing, and opens the run. It is retried after an error."""
        self.name, self._open = name, open_this
        self._calls = queue.SimpleQueue[tuple[Call, bool]]()  # the flag is True for the last call
        self._tracker: Tracker | None = None
        self._retry_at_s = -math.inf
        self._sent = self._taken = 0
        self._warned = self._is_abandoned = False
        self._thread = threading.Thread(target=self._work, name=f"{THREAD}{name}", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        return self._sent - self._taken

    def send(self, point: Call) -> None:
        """Queue a point and return at once. If the queue is full, the oldest point is dropped."""
        self._sent += 1
        if self._calls.qsize() >= BACKLOG:
            self._warn(f"does not keep up: {BACKLOG} points wait for it, and older ones are dropped")
            with suppress(queue.Empty):
                self._calls.get_nowait()
        self._calls.put((point, False))

    def end(self, call: Call) -> None:
        self._calls.put((call, True))

    def close(self, within_s: float) -> None:
        """Wait at most `within_s` for the last call to return, then log how many points were lost."""
        self._thread.join(within_s)
        if self._thread.is_alive():
            self._warn("did not finish in time at the run's end, and is abandoned")
            self._is_abandoned = True
        if self.lost:
            log.warning("tracker %s: %d of %d points did not reach it", self.name, self.lost, self._sent)

    def _work(self) -> None:
        self._try(lambda tracker: None)  # opens the run before its first step
        is_last = False
        while not is_last:
            call, is_last = self._calls.get()
            if is_last or not self._is_abandoned:
                self._taken += self._try(call) and not is_last

    def _try(self, call: Call) -> bool:
        """Make one call, and return whether it succeeded."""
        try:
            if self._tracker is None:
                if time.monotonic() < self._retry_at_s:
                    return False
                self._retry_at_s = time.monotonic() + RETRY_OPEN_S
                self._tracker = self._open()
            call(self._tracker)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary to a tracker's library
            self._warn(f"failed: {without_secrets(f'{type(error).__name__}: {error}', os.environ)}")
            return False
        return True

    def _warn(self, what: str) -> None:
        """Log only the first warning, since an unreachable tracker would fill the log."""
        if not self._warned:
            self._warned = True
            log.warning("tracker %s %s; training goes on without waiting for it", self.name, what)


class RunTrackers:
    def __init__(self, trackers: list[TrackerThread] | None = None, version: int = 0, steps: int = 1) -> None:
        """`steps`: number of optimizer steps of the whole run."""
        self._trackers, self._last_step, self._steps = trackers or [], version, steps
        self._samples = {axis: deque[Sample](maxlen=MOST_ROWS) for axis in (STEP, HELDOUT_VERSION)}
        self._table_due_at = dict.fromkeys(self._samples, 0)
        self._abandon_at_s: float | None = None

    def sample(self, sample: Sample) -> None:
        """Keep a sample for the next table."""
        self._samples[HELDOUT_VERSION if sample["heldout"] else STEP].append(sample)

    def step(self, record: StepRecord) -> None:
        self._last_step, time_s = record["step"], time.time()
        for tracker in self._trackers:
            tracker.send(lambda to: to.log(STEP, record["step"], time_s, step_figures(record)))
        self._send_samples(STEP, record["step"])

    def heldout(self, evaluation: StepRecord) -> None:
        """Queue the figures of an evaluation, which are named as in metrics.jsonl."""
        version, time_s = evaluation["heldout_version"], time.time()
        overall = {name: evaluation[f"heldout_{name}"] for name in ("accuracy", "accuracy_lower_bound", "unanswered")}
        figures = flat({"heldout": overall}) | flat({"heldout": evaluation["heldout_sets"]})
        for tracker in self._trackers:
            tracker.send(lambda to: to.log(HELDOUT_VERSION, version, time_s, figures))
        self._send_samples(HELDOUT_VERSION, version)

    def _send_samples(self, axis: str, position: int) -> None:
        """Queue the next table if one is due: at the first and the last position, and about `MOST_TABLES` times in between."""
        if self._samples[axis] and (position >= self._table_due_at[axis] or position == self._steps):
            self._table_due_at[axis] = position + -(-self._steps // MOST_TABLES)
            rows = [sample_row(sample) for sample in self._samples[axis]]
            self._samples[axis].clear()
            for tracker in self._trackers:
                tracker.send(lambda to: to.log_samples(axis, position, rows))

    def end(self, summary: Mapping[str, Any], *, finished: bool) -> None:
        """Queue every tracker's call of `end`. Points that are queued later are lost."""
        if self._abandon_at_s is None:
            self._abandon_at_s = time.monotonic() + (FLUSH_S if finished else FLUSH_STOPPED_S)
            last_step = self._last_step
            for tracker in self._trackers:
                tracker.end(lambda to: to.end(last_step, flat({"summary": summary}), finished=finished))

    async def close(self) -> None:
        """Wait for unsent points, for a limited time. Without an earlier `end`, the run counts as stopped early."""
        self.end({}, finished=False)
        assert self._abandon_at_s is not None
        within_s = max(0.0, self._abandon_at_s - time.monotonic())
        await asyncio.gather(*(asyncio.to_thread(tracker.close, within_s) for tracker in self._trackers))


@asynccontextmanager
async def run_trackers(recipe: Recipe, settings: TrainerSettings, start: Start, http_port: int) -> AsyncIterator[RunTrackers]:
    run = TrackedRun(
        name=settings.run,
        description=recipe.description,
        run_dir=settings.run_dir.absolute(),
        params=recipe_params(recipe),
        incarnation=start.lineage.incarnation,
        version=start.version,
        page=f"http://{host_port(settings.advertise_host, http_port)}/" if settings.page else "",
    )
    for handler in logging.root.handlers:
        handler.addFilter(is_not_of_a_library)
    threads = [TrackerThread(name, partial(open_tracker, name, run)) for name in recipe.trackers]
    trackers = RunTrackers(threads, start.version, recipe.trainer.steps)
    try:
        yield trackers
    finally:
        await trackers.close()


def is_not_of_a_library(record: logging.LogRecord) -> bool:
    """Return False for records of libraries (urllib3, requests) on a tracker's thread, which may contain secrets."""
    return not (record.threadName or "").startswith(THREAD) or record.name.startswith(("services.", "pipelinerl."))


_NOT_LOGGED = frozenset({"step", "lag_histogram", "skipped", "joins"})
"""Keys of a step's record that are not logged as they are: `step` is the axis, and the others are converted to numbers."""


def step_figures(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a step's figures by path, such as `lag/mean`, without those of evaluations, which have their own axis. Pure."""
    plain = {key: value for key, value in record.items() if key not in _NOT_LOGGED and not key.startswith("heldout_")}
    tokens: dict[str, int] = {}  # by lag bucket
    for lag, count in record.get("lag_histogram", {}).items():
        bucket = LAG_BUCKETS[int(lag_bucket(np.array([int(lag)]))[0])]
        tokens[bucket] = tokens.get(bucket, 0) + count
    skipped, joins = bool(record.get("skipped")), len(record.get("joins", ()))
    return flat({**plain, "skipped": skipped, "joins": joins, "tokens_by_lag": tokens})


def flat(values: Mapping[str, Any]) -> dict[str, float]:
    """Return every finite number in `values` by its path. `17+` becomes `17-up`, since some trackers reject a plus. Pure."""
    return {
        path.replace("+", "-up"): float(value)
        for path, value in leaves(values, "/")
        if isinstance(value, bool | int | float | np.bool_ | np.number) and math.isfinite(float(value))
    }


def sample_row(sample: Sample) -> Row:
    """Return the row of a sample. Pure. `lag` is that of its oldest token; `length` counts the tokens of all branches,
    including an episode's observations."""
    spans = [branch["spans"] for branch in sample.get("branches") or [sample]]
    oldest = min((version for of in spans for version, _, _ in of), default=sample["version"])
    return {
        "step": sample["step"],
        "version": sample["version"],
        "problem": _cell(sample["prompt"]),
        "completion": _cell(sample["completion"]),
        "reward": sample["reward"],
        "reward_terms": _cell(json.dumps(sample["terms"], ensure_ascii=False)),
        "lag": max(0, sample["version"] - oldest),
        "length": sum(of[-1][2] for of in spans if of),
    }


def _cell(text: str) -> str:
    """Return a text that every library accepts: replace control characters and lone surrogates, and shorten long texts."""
    half = MOST_CHARACTERS // 2
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:half]} … {len(text) - 2 * half:,} characters left out … {text[-half:]}"
    return _UNFIT.sub("\ufffd", text)


def recipe_params(recipe: Recipe) -> dict[str, str | int | float | bool]:
    """Return each field of the recipe by its dotted path. Lists, null and empty mappings become JSON. Pure."""
    return {
        path: value if isinstance(value, str | bool | int | float) else json.dumps(value, ensure_ascii=False)
        for path, value in leaves(recipe.model_dump(mode="json"))
    }


# Clients


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """Open the run at the tracker `name`, as the recipe names it. Raises `MissingPackage` if its library cannot be imported."""
    clients: dict[str, Callable[[TrackedRun], Tracker]]
    clients = {"tensorboard": TensorBoardTracker, "mlflow": MlflowTracker, "wandb": WandbTracker}
    try:
        return clients[name](run)
    except ImportError as error:
        raise MissingPackage(f"{error}; pip install 'pipelinerl[{name}]', or remove {name} from trackers") from error


def kept_id(run_dir: Path, tracker: str, make: Callable[[], str]) -> str:
    """Return the run's id at a tracker. The id is kept in the run directory, so a later trainer continues the same run. If
    there is none yet, store and return the result of `make`. Raises `ValueError` or `KeyError` if the file is malformed."""
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
    """Writes event files to `<run dir>/tensorboard` with torch's own writer."""

    def __init__(self, run: TrackedRun) -> None:
        """Hide an earlier trainer's points after `run.version`, since the restart undid those steps."""
        from torch.utils.tensorboard import SummaryWriter

        _silence("tensorboard")
        purged = run.version + 1 if run.incarnation > 1 else None
        self._writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=purged)
        shown = {**run.params, "live_page": run.page}
        rows = [f"| `{name}` | {json.dumps(value, ensure_ascii=False)} |" for name, value in shown.items()]
        self._writer.add_text("recipe", "\n".join(["| field | value |", "|---|---|", *rows]), run.version)
        self._writer.flush()

    def log(self, axis: str, position: int, time_s: float, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, position, walltime=time_s)
        self._writer.flush()

    def log_samples(self, axis: str, position: int, rows: list[Row]) -> None:
        """Write the rows as indented text, which Markdown leaves unchanged."""
        lines = (line for row in rows for name, value in row.items() for line in [f"{name}:", *f"    {value}".splitlines()])
        self._writer.add_text(TABLES[axis], "\n".join(f"    {line}" for line in lines), position)
        self._writer.flush()

    def end(self, step: int, figures: Mapping[str, float], *, finished: bool) -> None:
        self.log(STEP, step, time.time(), figures)
        self._writer.close()


class MlflowTracker:
    """Logs to `MLFLOW_TRACKING_URI`; if that is unset, to the SQLite file `<run dir>/mlflow.db`."""

    _PARAMS_PER_CALL, _LONGEST_VALUE = 100, 6000
    """Limits of MLflow: parameters per call, and characters of a parameter's value."""

    def __init__(self, run: TrackedRun) -> None:
        # Otherwise MLflow prints the run's address at its end, with any login in the tracking URI.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import entities
        from mlflow.tracking import MlflowClient

        _silence("mlflow", "alembic", "sqlalchemy", "sqlalchemy.engine", "huey")
        self._entities, self._incarnation = entities, run.incarnation
        server = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(server or f"sqlite:///{run.run_dir}/mlflow.db")

        def create() -> str:
            tags = {"mlflow.note.content": run.description} if run.description else {}
            experiment = self._experiment(None if server else f"{run.run_dir}/mlflow-artifacts")
            return str(self._client.create_run(experiment, run_name=run.name, tags=tags).info.run_id)

        self._run_id = kept_id(run.run_dir, "mlflow", create)
        self._client.update_run(self._run_id, status="RUNNING")  # an earlier trainer may have ended it
        self._client.set_tag(self._run_id, "live_page", run.page)
        self._log_params(run)

    def log(self, axis: str, position: int, time_s: float, figures: Mapping[str, float]) -> None:
        at_ms = round(time_s * 1000)
        metrics = [self._entities.Metric(name, value, at_ms, position) for name, value in figures.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def log_samples(self, axis: str, position: int, rows: list[Row]) -> None:
        """Write each table to a new file. To append, MLflow would read a file with pandas, which turns texts into numbers."""
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        self._client.log_table(self._run_id, columns, f"{TABLES[axis]}/{self._incarnation}-{position:06}.json")

    def end(self, step: int, figures: Mapping[str, float], *, finished: bool) -> None:
        self.log(STEP, step, time.time(), figures)
        self._client.set_terminated(self._run_id, "FINISHED" if finished else "KILLED")

    def _experiment(self, artifacts: str | None) -> str:
        """Return the experiment's id. A new one keeps its files in the folder `artifacts`; None = the server's default."""
        if os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return os.environ["MLFLOW_EXPERIMENT_ID"]
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name, artifacts))

    def _log_params(self, run: TrackedRun) -> None:
        """Log the recipe; values that changed since an earlier trainer become tags, because MLflow cannot change parameters."""
        known = self._client.get_run(self._run_id).data.params
        values = {name: str(value)[: self._LONGEST_VALUE] for name, value in run.params.items()}
        fresh = [self._entities.Param(name, value) for name, value in values.items() if name not in known]
        for first in range(0, len(fresh), self._PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=fresh[first : first + self._PARAMS_PER_CALL])
        for name, value in values.items():
            if known.get(name, value) != value:
                self._client.set_tag(self._run_id, f"{name} of incarnation {run.incarnation}", value)


class WandbTracker:
    """Logs to W&B, configured by its own variables (`WANDB_PROJECT`, `WANDB_API_KEY`, `WANDB_MODE`, ...). Its files are in
    `<run dir>/wandb`; `wandb sync` can upload them later."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        _silence("wandb")
        self._wandb, self._incarnation = wandb, run.incarnation
        quiet = {"console": "off", "silent": True}
        # By default "Stop run" on W&B's page sends SIGINT to this process, but a tracker must not stop a run.
        unstoppable = {"stop_fn": lambda: None}
        figures_only = {"disable_git": True, "disable_code": True, "x_disable_stats": True}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            # The id has a random part, since a name may be used again in another folder.
            id=kept_id(run.run_dir, "wandb", lambda: f"{run.name}-{secrets.token_hex(4)}"),
            resume="allow",
            name=run.name,
            notes=run.description or None,
            dir=str(run.run_dir),
            config={**run.params, "live_page": run.page},
            allow_val_change=True,
            settings=wandb.Settings(**quiet, **figures_only, **unstoppable),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        self._run.define_metric("heldout/*", step_metric=HELDOUT_VERSION)

    def log(self, axis: str, position: int, time_s: float, figures: Mapping[str, float]) -> None:
        """Log the position as a figure: W&B's own step can only grow, but a restarted trainer repeats steps."""
        incarnation = {"incarnation": self._incarnation} if axis == STEP else {}
        self._run.log({axis: position, **incarnation, **figures})

    def log_samples(self, axis: str, position: int, rows: list[Row]) -> None:
        table = self._wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({axis: position, TABLES[axis]: table})

    def end(self, step: int, figures: Mapping[str, float], *, finished: bool) -> None:
        self._run.summary.update(dict(figures))
        self._run.finish(exit_code=0 if finished else 1)
