"""The run so far as the page's views draw it: step records and samples in, one plain object out.

Pure and bounded: records of a long run are thinned, of samples the first and the newest stay. Knows no thread and no network;
`board.py` publishes it. What the object's keys mean: `pipelinerl.page.data`, which makes the same one of a finished run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from pipelinerl.algorithms.lag_buckets import LAG_BUCKETS
from pipelinerl.page.data import MAX_RECORDS, NEWEST, SAMPLES_SHOWN, shown_record, shown_sample
from services.trainer.page.thinning import ThinnedSeries

Record = Mapping[str, Any]
NEWEST_OF_A_KIND = SAMPLES_SHOWN // 2
"""Held-out samples, and as many trained ones, that stay beside the first of the run."""
_TIMES_KEPT = 256


class RunHistory:
    """See the module. `limit`: records and evaluations after which the older ones are thinned."""

    def __init__(self, limit: int = MAX_RECORDS) -> None:
        self._records: ThinnedSeries[dict[str, Any]] = ThinnedSeries(limit, NEWEST)
        self._heldout: ThinnedSeries[dict[str, Any]] = ThinnedSeries(limit, 1)
        self._times_s: dict[int, float | None] = {0: 0.0}
        self._lags: Counter[int] = Counter()
        self._ess: dict[str, tuple[float, int]] = {}
        """Sum and number of steps, by lag bucket."""
        self._early: list[dict[str, Any]] = []
        self._late = {kind: deque[dict[str, Any]](maxlen=NEWEST_OF_A_KIND) for kind in (True, False)}

    def add(self, record: Record, samples: Iterable[Record] = ()) -> dict[str, Any]:
        """One more step and the samples since the one before. Returns what a page that has the rest needs to hear."""
        shown = shown_record(record)
        self._records.add(shown)
        self._remember_time(record)
        self._add_up(record)
        point = self._heldout_point(record)
        if point is not None:
            self._heldout.add(point)
        fresh = [self._add_sample(sample) for sample in samples]
        return {"record": shown, "heldout": point, "samples": fresh, **self._totals()}

    def add_samples(self, samples: Iterable[Record]) -> None:
        """Of before."""
        for sample in samples:
            self._add_sample(sample)

    def data(self) -> dict[str, Any]:
        """All of it; nothing in it changes any more."""
        late = [sample for kind in (True, False) for sample in self._late[kind]]
        return {
            "records": self._records.items(),
            "heldout": self._heldout.items(),
            "samples": {"early": list(self._early), "late": [one for one in late if one not in self._early]},
            **self._totals(),
        }

    def _totals(self) -> dict[str, Any]:
        return {
            "lag_totals": {str(lag): self._lags[lag] for lag in sorted(self._lags)},
            "ess_by_lag": {label: total / steps for label, (total, steps) in sorted(self._ess.items(), key=_by_lag)},
        }

    def _remember_time(self, record: Record) -> None:
        self._times_s[record["step"]] = record.get("time_s")
        while len(self._times_s) > _TIMES_KEPT:
            self._times_s.pop(next(iter(self._times_s)))

    def _add_up(self, record: Record) -> None:
        for lag, tokens in (record.get("lag_histogram") or {}).items():
            self._lags[int(lag)] += tokens
        for label, ess in (record.get("ess_by_lag") or {}).items():
            total, steps = self._ess.get(label, (0.0, 0))
            if ess is not None:
                self._ess[label] = (total + ess, steps + 1)

    def _heldout_point(self, record: Record) -> dict[str, Any] | None:
        """At the policy version that was measured, not at the step that it ended in."""
        if record.get("heldout_accuracy") is None:
            return None
        version = record.get("heldout_version", record["step"])
        time_s = self._times_s.get(version, record.get("time_s"))
        return {"step": version, "time_s": time_s, "accuracy": record["heldout_accuracy"]}

    def _add_sample(self, sample: Record) -> dict[str, Any]:
        shown = shown_sample(sample)
        if len(self._early) < SAMPLES_SHOWN and (not self._early or shown["step"] <= self._early[0]["step"] + 1):
            self._early.append(shown)
        self._late[bool(shown["heldout"])].append(shown)
        return shown


def _by_lag(item: tuple[str, Any]) -> int:
    """Place of a bucket's label among all of them."""
    return LAG_BUCKETS.index(item[0]) if item[0] in LAG_BUCKETS else len(LAG_BUCKETS)
