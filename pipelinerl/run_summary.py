"""A run's figures out of its steps: the records of metrics.jsonl and the keys of summary.json (docs/run-directory.md).

The trainer writes the summary at its end; where it could not, the runner writes what metrics.jsonl tells, with None for the
rest. The type checker holds both to the same keys. Pure but for what reads files.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from pipelinerl.recipe.fields import Recipe
from pipelinerl.telemetry.throughput import ThroughputTotals

Record = Mapping[str, Any]
_SEQUENCES = ("issued", "trained", "dropped_stale", "dropped_filtered", "failed", "in_flight")


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


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file. A last line cut short by a crash is left out; no file is no objects."""
    if not path.is_file():
        return []
    return list(_objects(path.read_text(encoding="utf-8", errors="replace").splitlines()))


def jsonl_ends(path: Path, each: int) -> list[dict[str, Any]]:
    """The objects of the first and the last `each` lines of a .jsonl file of any length; no file is no objects."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace") as lines:
        first = list(islice(lines, each))
        return list(_objects([*first, *deque(lines, maxlen=each)]))


def _objects(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            value = json.loads(line, parse_constant=_null)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict):
            yield value


def _null(_constant: str) -> None:
    """NaN and infinities are not JSON; some writers write them."""


def read_summary(path: Path) -> dict[str, Any] | None:
    """The trainer's summary, None when it left none."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"), parse_constant=_null)
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return summary if isinstance(summary, dict) else None


def is_finished(summary: Mapping[str, Any] | None) -> bool:
    """Whether it is of a run that came to its own end."""
    return summary is not None and summary.get("interrupted") is False and "error" not in summary


def kept_records(records: Iterable[Record]) -> list[Record]:
    """Steps of one history: one that is not after the step before takes the place of those from it on, which a restart
    undid. `time_s` never goes back: what a new trainer counts from its own start continues the time before."""
    kept: list[Record] = []
    for record in records:
        step = record.get("step")
        while step is not None and kept and (kept[-1].get("step") or 0) >= step:
            kept.pop()
        kept.append(record)
    return _with_rising_time(kept)


def _with_rising_time(records: list[Record]) -> list[Record]:
    shift_s, before_s = 0.0, 0.0
    rising: list[Record] = []
    for record in records:
        time_s = record.get("time_s")
        if time_s is not None:
            shift_s = before_s if time_s + shift_s < before_s else shift_s
            before_s = time_s + shift_s
            record = {**record, "time_s": before_s} if shift_s else record
        rising.append(record)
    return rising


def summary_from_metrics(recipe: Recipe, records: Sequence[Record]) -> RunSummary:
    """What metrics.jsonl alone tells, under the summary's names; what it does not tell is None."""
    last: Record = records[-1] if records else {}
    heldout, ess = _heldout(records), _values(records, "ess")
    throughput = _throughput(records)
    return {
        "recipe": recipe.name,
        "mode": recipe.mode,
        "seed": recipe.seed,
        "steps": last.get("step", 0),
        "steps_skipped": _count(records, "skipped"),
        "policy_version": last.get("policy_version"),
        "interrupted": False,
        "wall_s": None,
        "heldout_accuracy_first": heldout[0]["accuracy"] if heldout else None,
        "heldout_accuracy_last": heldout[-1]["accuracy"] if heldout else None,
        "heldout": heldout,
        "tokens_generated": int(max(_values(records, "tokens_generated"), default=0)),
        "tokens_trained": int(sum(_values(records, "tokens_trained"))),
        "sequences": {name: (last.get("sequences") or {}).get(name, 0) for name in _SEQUENCES},
        "sequence_reasons": None,
        "lag": lag_summary(lag_totals(records)),
        "ess": {"mean": _mean(ess), "min": min(ess, default=None)},
        "sequences_multi_version_fraction": _mean(_values(records, "multi_version_fraction")),
        "weight_updates": _weight_updates(records),
        "membership": _membership(records),
        "logprob_mismatch_max": max(_values(records, "logprob_mismatch"), default=None),
        "parity_failures": _count(records, "parity_failures"),
        "mismatch_kl_mean": _mean(_values(records, "mismatch_kl")),
        "actor_busy_fraction": last.get("actor_busy_fraction"),
        "trainer_busy_fraction": last.get("trainer_busy_fraction"),
        "tokens_per_s": throughput.tokens_per_s,
        "mfu_mean": throughput.mfu_mean,
        "memory_peak_gib": throughput.memory_peak_gib,
        "idle_s_mean": throughput.idle_s_mean,
    }


def _throughput(records: Iterable[Record]) -> ThroughputTotals:
    totals = ThroughputTotals()
    for record in records:
        totals.add(record)
    return totals


def lag_totals(records: Iterable[Record]) -> dict[int, int]:
    """Trained tokens of the whole run by their lag in optimizer steps, in rising order."""
    totals: Counter[int] = Counter()
    for record in records:
        for lag, tokens in (record.get("lag_histogram") or {}).items():
            totals[int(lag)] += tokens
    return dict(sorted(totals.items()))


def lag_summary(totals: Mapping[int, int]) -> dict[str, float | None]:
    """Token-weighted mean, 95th percentile (the smallest lag that 95% of the tokens do not exceed) and maximum."""
    tokens = sum(totals.values())
    if tokens == 0:
        return {"mean": None, "p95": None, "max": None}
    passed, p95 = 0, 0
    for lag, count in sorted(totals.items()):
        if passed < 0.95 * tokens:
            p95 = lag
        passed += count
    return {"mean": sum(lag * n for lag, n in totals.items()) / tokens, "p95": float(p95), "max": float(max(totals))}


def weight_updates(records: Iterable[Record]) -> list[Record]:
    """The completed weight updates, each once."""
    by_version = {record["weight_update"].get("version"): record["weight_update"] for record in records
                  if record.get("weight_update")}  # fmt: skip
    return list(by_version.values())


def _weight_updates(records: Sequence[Record]) -> dict[str, Any]:
    updates = weight_updates(records)
    stalls = _values(updates, "stall_s")
    return {
        "count": len(updates),
        "bytes": int(sum(_values(updates, "bytes"))),
        "transfer_s_p50": _quantile(_values(updates, "transfer_s"), 50),
        "stall_s_p50": _quantile(stalls, 50),
        "stall_s_p99": _quantile(stalls, 99),
    }


def _heldout(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Each evaluation at the version that it measured."""
    return [
        {
            "version": record.get("heldout_version", record.get("step")),
            "accuracy": record["heldout_accuracy"],
            "unanswered": record.get("heldout_unanswered"),
        }
        for record in records
        if record.get("heldout_accuracy") is not None
    ]


def _membership(records: Iterable[Record]) -> dict[str, Any]:
    """Joins so far. The steps do not tell of evictions."""
    joins_s = _values([join for record in records for join in record.get("joins") or []], "join_s")
    return {"joins": len(joins_s), "join_s_p50": _quantile(joins_s, 50), "evictions": None}


def _count(records: Sequence[Record], key: str) -> int | None:
    """Sum over the steps, a text counting as 1 where it is not empty; None where a step does not tell."""
    if not all(key in record for record in records):
        return None
    return sum(bool(value) if isinstance(value, str) else value or 0 for value in (record[key] for record in records))


def _values(records: Iterable[Record], key: str) -> list[float]:
    return [record[key] for record in records if record.get(key) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _quantile(values: Sequence[float], q: int) -> float | None:
    """Linear between neighbours, as NumPy's percentile."""
    return float(np.percentile(values, q)) if values else None
