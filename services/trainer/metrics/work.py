"""Where the time of an optimizer step goes, and how much work it is."""

from __future__ import annotations

from pipelinerl.service.metric_set import MetricSet
from services.trainer.report.records import StepRecord

GIB = 1024**3
STEP_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900, 3600)
"""From a model of a million parameters on a CPU to an hour, in which no alert would wait for the next bucket."""
PHASE_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900)
"""A part of a step: from copying little to waiting long."""
STEP_PHASES = ("wait", "compute", "snapshot", "send", "checkpoint")
COMPUTE_PHASES = ("plan", "build", "to_device", "forward_backward", "totals", "optimizer")


class WorkMetrics:
    """Of each step's record."""

    def __init__(self, metrics: MetricSet) -> None:
        self._step = metrics.histogram("step_seconds", "One optimizer step, waiting included.", STEP_SECONDS)
        self._phases = metrics.histogram(
            "step_phase_seconds", "Parts of a step, one after the other.", PHASE_SECONDS, {"phase": STEP_PHASES}
        )
        self._compute = metrics.histogram(
            "compute_phase_seconds",
            "Parts of a step's compute; plan and build are beside the step before.",
            PHASE_SECONDS,
            {"phase": COMPUTE_PHASES},
        )
        self._idle = metrics.histogram(
            "update_idle_seconds", "Time of a step in which sending weights kept compute waiting.", PHASE_SECONDS
        )
        self._rate = metrics.reading(
            "tokens_per_second",
            "Tokens over compute time of the last step: trained completion tokens, or all that were computed.",
            {"tokens": ("trained", "computed")},
        )
        self._fill = metrics.reading("packing_fill_ratio", "Tokens over token budget of the step's micro-batches.")
        self._mfu = metrics.reading("mfu_ratio", "Model FLOPs utilization of the step; of known devices only.")
        self._imbalance = metrics.reading(
            "imbalance_ratio", "Share of the ranks' compute time spent waiting for each other."
        )
        self._memory = metrics.reading(
            "memory_peak_bytes",
            "Most memory: tensors on a GPU since the step before, else the process since its start.",
        )
        self._actors_busy = metrics.reading(
            "actor_busy_ratio", "Share of all actors' time, since their engines were up, in which they generated."
        )
        self._trainer_busy = metrics.reading("trainer_busy_ratio", "Share of the trainer's time spent on steps.")

    def observe(self, record: StepRecord) -> None:
        """Takes one step's record."""
        seconds = record["step_s"]
        if "total" in seconds:
            self._step.observe(seconds["total"])
        for phase in STEP_PHASES:
            if phase in seconds:
                self._phases.labels(phase).observe(seconds[phase])
        for phase, spent_s in record.get("compute_s", {}).items():
            self._compute.labels(phase).observe(spent_s)
        if "idle_s" in record:
            self._idle.observe(record["idle_s"])
        self._rate.set_each(record.get("tokens_per_s", {}))
        self._fill.set(record.get("packing_fill"))
        self._mfu.set(record.get("mfu"))
        self._imbalance.set(record.get("imbalance"))
        gib = record.get("memory_peak_gib")
        self._memory.set(None if gib is None else gib * GIB)
        self._actors_busy.set(record["actor_busy_fraction"])
        self._trainer_busy.set(record["trainer_busy_fraction"])
