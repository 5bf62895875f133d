"""How fast and how well a step used its devices: the figures of one optimizer step from what was measured. Pure.

Not here: the measuring (`learn/meter.py`, `learn/phases.py`), sums over a run (`pipelinerl/throughput_totals.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.trainer.learn.flops import mfu

GIB = 1024**3


@dataclass(frozen=True)
class StepWork:
    """One optimizer step over all ranks."""

    tokens_trained: int
    """Completion tokens; 0 for a skipped step."""
    tokens_computed: int
    """Prompt and completion tokens that went through the model."""
    seconds: float
    """From the batch to the end of the step, on the host."""
    flops: float
    """Model FLOPs."""
    num_devices: int
    peak_flops: float | None
    """Of one device, FLOP/s; None where it is not known."""
    memory_peak_bytes: int
    """Of the rank that needed most."""
    imbalance: float
    phases_s: Mapping[str, float]


def throughput_figures(work: StepWork) -> dict[str, Any]:
    """Under the names of metrics.jsonl."""
    return {
        "tokens_per_s": {
            "trained": _rate(work.tokens_trained, work.seconds),
            "computed": _rate(work.tokens_computed, work.seconds),
        },
        "mfu": mfu(work.flops, work.seconds, work.num_devices, work.peak_flops),
        "memory_peak_gib": work.memory_peak_bytes / GIB,
        "imbalance": work.imbalance,
        "compute_s": dict(work.phases_s),
    }


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def update_idle_s(step_s: Mapping[str, float]) -> float:
    """Seconds of a step in which the trainer computed nothing because of the weight update, from its phases.

    The copy that is sent is made on the compute thread, and it is not made before the version before is served: both
    keep the next step waiting.
    """
    return step_s.get("snapshot", 0.0) + step_s.get("send", 0.0)
