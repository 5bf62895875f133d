"""What the pages show of a run, as one plain object. Pure: records in, data out.

`pipelinerl.local.ending` reads a finished run's files; of a run that goes on, the trainer keeps the same object up to date
(`services.trainer.reporting.board`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any

Record = Mapping[str, Any]

MAX_RECORDS = 1500
"""Steps that are drawn at most, about; a longer run is thinned evenly."""
NEWEST = 20
"""Steps that are never thinned: what the views call the last ones."""
SAMPLES_SHOWN = 8
_MAX_TEXT = 4000
_DIGITS = 6
_SHOWN = (
    "step", "time_s", "reward_mean", "entropy", "grad_norm", "ess", "lag", "lag_histogram",
    "mismatch_kl", "tokens_generated_per_s", "tokens_trained_per_s", "weight_update", "stall_s",
    "actor_busy_fraction", "trainer_busy_fraction", "completion_tokens_mean", "step_s",
)  # fmt: skip


def report_data(
    run: str,
    description: str,
    summary: Record,
    records: Sequence[Record],
    samples: Sequence[Record],
    recipe_text: str,
) -> dict[str, Any]:
    """The object that pipelinerl/page/views.js draws; its keys are described there."""
    early, late = early_and_late(samples)
    return {
        "run": run,
        "description": description,
        "summary": dict(summary),
        "records": [shown_record(record) for record in thinned(records)],
        "heldout": heldout_points(summary.get("heldout") or [], records),
        "lag_totals": {str(lag): tokens for lag, tokens in lag_totals(records).items()},
        "ess_by_lag": mean_by_bucket([record.get("ess_by_lag") or {} for record in records]),
        "samples": {"early": [shown_sample(one) for one in early], "late": [shown_sample(one) for one in late]},
        "recipe": recipe_text,
    }


def heldout_points(evaluations: Sequence[Record], records: Sequence[Record]) -> list[dict[str, float | None]]:
    """Each of the summary's evaluations as {step, time_s, accuracy}: at the policy version it measured, not at the step it
    ended in."""
    times_s = {0: 0.0, **{record["step"]: record.get("time_s") for record in records if "step" in record}}
    return [
        {"step": one["version"], "time_s": times_s.get(one["version"]), "accuracy": one["accuracy"]}
        for one in evaluations
    ]


def lag_totals(records: Sequence[Record]) -> dict[int, int]:
    """Trained tokens of the whole run by their lag in optimizer steps, in rising order."""
    totals: Counter[int] = Counter()
    for record in records:
        totals.update({int(lag): tokens for lag, tokens in (record.get("lag_histogram") or {}).items()})
    return dict(sorted(totals.items()))


def thinned(records: Sequence[Record], limit: int = MAX_RECORDS) -> list[Record]:
    """At most about `limit` records, evenly spaced from the first on, and all of the newest `NEWEST`."""
    stride = max(1, -(-len(records) // limit))
    newest = len(records) - NEWEST
    return [record for index, record in enumerate(records) if index % stride == 0 or index >= newest]


def mean_by_bucket(buckets: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Mean of each bucket over the steps that have it, in rising order of the lag a bucket starts with."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for one in buckets:
        for name, value in one.items():
            if value is not None:
                values[name].append(value)
    return {name: sum(values[name]) / len(values[name]) for name in sorted(values, key=_first_number)}


def _first_number(bucket: str) -> tuple[int, str]:
    digits = "".join(char if char.isdigit() else " " for char in bucket).split()
    return (int(digits[0]) if digits else 0, bucket)


def early_and_late(samples: Sequence[Record], count: int = SAMPLES_SHOWN) -> tuple[list[Record], list[Record]]:
    """The first and the last `count` samples by step, without overlap; of one step, held-out ones first."""
    ordered = sorted(samples, key=lambda one: one.get("step") or 0)
    each = min(count, len(ordered) // 2) if len(ordered) > 1 else len(ordered)
    first_step = ordered[0].get("step") if ordered else None
    last_step = ordered[-1].get("step") if ordered else None
    early = _preferred([one for one in ordered if one.get("step") == first_step], ordered[:each], each)
    late = _preferred([one for one in ordered if one.get("step") == last_step], ordered[len(ordered) - each :], each)
    return (early, late) if first_step != last_step else (early, [])


def _preferred(same_step: list[Record], fallback: list[Record], count: int) -> list[Record]:
    chosen = same_step if len(same_step) >= count else fallback
    return sorted(chosen, key=lambda one: not one.get("heldout"))[:count]


def shown_record(record: Record) -> dict[str, Any]:
    """What the charts need of one step, in numbers of six digits."""
    return {key: _short(record[key]) for key in _SHOWN if key in record}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _short(one) for key, one in value.items()}
    return value


def shown_sample(sample: Record) -> dict[str, Any]:
    """One line of samples.jsonl, its texts clipped and with them its tokens, of which `num_tokens` says how many there were.
    Older lines lack `tokens` and `weights`."""
    text = {key: _clipped(str(sample.get(key) or "")) for key in ("prompt", "completion")}
    known = ("step", "version", "reward", "spans", "heldout")
    tokens, weights = sample.get("tokens"), sample.get("weights")
    if tokens is not None:
        tokens = tokens[: _num_in_text(tokens)]
        weights = weights and weights[: len(tokens)]
    spans = sample.get("spans") or []
    num_tokens = max((span[2] for span in spans), default=len(tokens or ()))
    shown = {"tokens": tokens, "weights": weights, "num_tokens": num_tokens}
    return {**{key: sample.get(key) for key in known}, **shown, **text}


def _num_in_text(tokens: Sequence[str]) -> int:
    """How many of the first tokens a clipped text has as a whole."""
    ends = accumulate(len(token) for token in tokens)
    return sum(1 for _ in takewhile(lambda end: end <= _MAX_TEXT, ends))


def _clipped(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} … ({len(text) - _MAX_TEXT} more characters)"
