"""A run's metrics.jsonl as a learning curve, and what it took to reach an accuracy. Pure: records in, figures out.

Time zero is when the first policy version is served: starting processes and building the initial model are not learning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """Held-out accuracy of one policy version, and what that version was trained on. `time_s`: when it was known."""

    time_s: float
    version: int
    samples: int
    tokens: int
    accuracy: float


def served_at_s(records: Sequence[Record]) -> float:
    """The records' clock when the first version was served: the first step waits for sequences from then on."""
    return float(records[0]["time_s"] - records[0]["step_s"]["total"])


def evaluations(records: Sequence[Record]) -> list[Evaluation]:
    """In the order of the records."""
    started_s = served_at_s(records) if records else 0.0
    samples, tokens = {0: 0}, {0: 0}
    for record in records:
        version = record["policy_version"]
        samples[version] = record["sequences"]["trained"]
        tokens[version] = tokens[version - 1] + record["tokens_trained"]
    return [
        Evaluation(record["time_s"] - started_s, version, samples[version], tokens[version], record["heldout_accuracy"])
        for record in records
        if record.get("heldout_accuracy") is not None
        for version in (record["heldout_version"],)
    ]


def times_reached(records: Sequence[Record], threshold: float) -> int:
    return sum(evaluation.accuracy >= threshold for evaluation in evaluations(records))


def figures(records: Sequence[Record], threshold: float) -> dict[str, Any]:
    """What a run says for the comparison. `*_to_threshold` are None for a run that never got there.

    Lags and ESS are over the whole run, lags weighted by tokens (optimizer steps); busy fractions are shares of the time
    since the first version was served (trainer) and since the engines were up (actors).
    """
    curve = evaluations(records)
    reached = next((evaluation for evaluation in curve if evaluation.accuracy >= threshold), None)
    if not records:
        return {"steps": 0, "time_to_threshold_s": None, "curve": []}
    span_s = records[-1]["time_s"] - served_at_s(records)
    return {
        "time_to_threshold_s": round(reached.time_s, 1) if reached else None,
        "samples_to_threshold": reached.samples if reached else None,
        "tokens_to_threshold": reached.tokens if reached else None,
        "heldout_first": curve[0].accuracy if curve else None,
        "heldout_last": curve[-1].accuracy if curve else None,
        "heldout_best": max((evaluation.accuracy for evaluation in curve), default=None),
        "steps": records[-1]["step"],
        "step_s": round(span_s / len(records), 3),
        "samples_per_s": round(records[-1]["sequences"]["trained"] / span_s, 1),
        "lag_mean": mean_lag(records),
        "ess_mean": _mean([record["ess"] for record in records if record.get("ess") is not None]),
        "actor_busy": _rounded(records[-1].get("actor_busy_fraction")),
        "trainer_busy": _rounded(sum(record["step_s"]["compute"] for record in records) / span_s),
        "curve": [asdict(evaluation) for evaluation in curve],
    }


def mean_lag(records: Sequence[Record]) -> float | None:
    """Optimizer steps, over all trained tokens."""
    tokens = sum(sum(record["lag_histogram"].values()) for record in records)
    lags = sum(int(lag) * count for record in records for lag, count in record["lag_histogram"].items())
    return round(lags / tokens, 3) if tokens else None


def _mean(values: Sequence[float]) -> float | None:
    return _rounded(sum(values) / len(values)) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
