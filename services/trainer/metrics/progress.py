"""How far the run is: versions, phase, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipelinerl.service.metric_set import MetricSet
from pipelinerl.v1 import trainer_pb2
from services.trainer.resume.writer import WrittenCheckpoint

CHECKPOINT_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)
"""From megabytes to a slow disk that takes a large model."""


def phase_name(phase: int) -> str:
    """A `TrainerPhase` without its prefix, lower case. Pure."""
    return trainer_pb2.TrainerPhase.Name(phase).removeprefix("TRAINER_PHASE_").lower()


PHASES = tuple(phase_name(phase) for phase in trainer_pb2.TrainerPhase.values() if phase)
LOADING = phase_name(trainer_pb2.TRAINER_PHASE_LOADING)


class ProgressMetrics:
    """In phase `loading` until `watch`."""

    def __init__(self, metrics: MetricSet, clock_s: Callable[[], float] = time.time) -> None:
        self._clock_s = clock_s
        self._version = metrics.reading("policy_version", "Optimizer steps taken.")
        self._served = metrics.reading(
            "served_version", "Newest version that every member serves; none before the first."
        )
        self._planned = metrics.reading("planned_steps", "Optimizer steps of the whole run: trainer.steps.")
        self._phase = metrics.reading(
            "phase", "1 for the trainer's phase, 0 for the others.", {"phase": PHASES}, unit="1 or 0"
        )
        self._phase.read_state(PHASES, lambda: LOADING)
        self._checkpoint = metrics.reading("checkpoint_version", "Of the newest checkpoint; none before the first.")
        self._checkpoint_at = metrics.reading(
            "checkpoint_timestamp_seconds",
            "When the newest checkpoint was written, by this trainer or one before it; before the first, when training began.",
        )
        self._has_begun = False
        self._checkpoint_seconds = metrics.histogram(
            "checkpoint_seconds", "Writing one checkpoint, beside training.", CHECKPOINT_SECONDS
        )

    def watch(self, phase: Callable[[], int], version: Callable[[], int], served: Callable[[], int]) -> None:
        """Where to read. `served` is below 0 before a version is served."""
        self._phase.read_state(PHASES, lambda: phase_name(phase()))
        self._version.read(version)
        self._served.read(lambda: number if (number := served()) >= 0 else None)

    def begin(self, planned_steps: int, checkpoint: int | None, since_s: float | None = None) -> None:
        """`checkpoint`: the version of the one that this trainer goes on from; `since_s`: when that was written, or when a
        run that has none yet first started. None: this trainer is the first, and its work begins with `training_begins`."""
        self._planned.set(planned_steps)
        self._checkpoint.set(checkpoint)
        if since_s is not None:
            self._checkpoint_at.set(since_s)
            self._has_begun = True

    def training_begins(self) -> None:
        """From here on there is work to lose."""
        if not self._has_begun:
            self._checkpoint_at.set(self._clock_s())
            self._has_begun = True

    def checkpoint_written(self, written: WrittenCheckpoint) -> None:
        self._checkpoint.set(written.version)
        self._has_begun = True
        self._checkpoint_at.set(self._clock_s())
        self._checkpoint_seconds.observe(written.seconds)
