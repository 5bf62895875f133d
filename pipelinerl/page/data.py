"""Build the data that a run's pages show, as one object of bounded size. `pipelinerl.local.ending` builds it from a run's
files. During a run, `services.trainer.reporting.page` keeps it up to date. The pages load nothing from other hosts: the trainer
serves live.html and `LIVE_ASSETS`. A run's report contains page.css and `REPORT_SCRIPTS`, and a comparison of runs contains
page.css and `COMPARISON_SCRIPTS`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import accumulate
from typing import Any

from pipelinerl.figures import ON_PAGE
from pipelinerl.rl.groups import LAG_BUCKETS
from pipelinerl.rl.ledger import MEANINGS
from pipelinerl.run_summary import Record, add_ended, evaluation_of, stale_shares

LIVE_ASSETS = ("page.css", "charts.js", "flow.js", "samples.js", "views.js", "live.js")
"""Files that live.html loads, in this order."""
REPORT_SCRIPTS = ("charts.js", "flow.js", "samples.js", "views.js", "report.js")
"""Scripts inlined in report.html of a run."""
COMPARISON_SCRIPTS = ("charts.js", "samples.js", "views.js", "comparison.js")
MAX_RECORDS = 1500
"""The live page draws at least this many evenly spaced steps of a longer run, but fewer than twice as many. A report draws half
as many as the live page."""
NEWEST = 20
"""Number of newest steps that the pages always show."""
SAMPLES_SHOWN = 8
_MAX_TEXT = 4000
_MAX_BRANCHES, _MAX_PARTS, _MAX_PART = 4, 32, 1500
"""Limits for a shown episode: branches, parts (turns and observations) per branch, and characters per part."""
_DIGITS = 6


def asset(name: str) -> str:
    """Return the text of a file of this package, such as `charts.js`, `page.css` or `live.html`."""
    return (files("pipelinerl.page") / name).read_text(encoding="utf-8")


class ThinnedSeries:
    """Keeps fewer than 2 · `limit` evenly spaced items, and all of the last `newest` items."""

    def __init__(self, limit: int, newest: int) -> None:
        self._limit, self._stride, self._count = limit, 1, 0
        self._kept: list[Any] = []  # items number 0, stride, 2 · stride, …
        self._newest: deque[Any] = deque(maxlen=newest)

    def add(self, item: Any) -> None:
        if self._count % self._stride == 0:
            self._kept.append(item)
        self._count += 1
        self._newest.append(item)
        if len(self._kept) >= 2 * self._limit:
            self._kept = self._kept[::2]
            self._stride *= 2

    def items(self) -> list[Any]:
        """Return the kept items in order, as a new list."""
        before = self._count - len(self._newest)
        return self._kept[: -(-before // self._stride)] + list(self._newest)


NEWEST_OF_A_KIND = SAMPLES_SHOWN // 2
"""Number of newest held-out samples, and of newest trained samples, that are kept besides the run's first samples."""
_TIMES_KEPT = 256


class RunHistory:
    """The data of a run so far. If there are 2 · `limit` steps or more, some are left out. The same holds for evaluations."""

    def __init__(self, limit: int = MAX_RECORDS) -> None:
        self._records = ThinnedSeries(limit, NEWEST)
        self._heldout = ThinnedSeries(limit, 1)
        self._times_s: dict[int, float | None] = {0: 0.0}
        self._lags: Counter[int] = Counter()
        self._lengths: dict[str, list[int]] = {}
        self._mismatch: float | None = None  # nats, from the newest step with a probe that gave a difference
        self._parity_failures = 0  # in all probes
        self._ess: defaultdict[str, float] = defaultdict(float)  # sum over steps, by lag bucket
        self._ess_steps: Counter[str] = Counter()
        self._early: list[dict[str, Any]] = []
        self._late = {kind: deque[dict[str, Any]](maxlen=NEWEST_OF_A_KIND) for kind in (True, False)}

    def add(self, record: Record, samples: Iterable[Record] = ()) -> dict[str, Any]:
        """Add a step and the samples since the previous step. Return the update for pages that have all earlier data."""
        shown = {key: _short(record[key]) for key in ON_PAGE if key in record}
        self._records.add(shown)
        self._times_s[record.get("step", 0)] = record.get("time_s")
        if len(self._times_s) > _TIMES_KEPT:
            self._times_s.pop(next(iter(self._times_s)))
        for lag, tokens in (record.get("lag_histogram") or {}).items():
            self._lags[int(lag)] += tokens
        if record.get("logprob_mismatch") is not None:
            self._mismatch = record["logprob_mismatch"]
        self._parity_failures += record.get("parity_failures") or 0
        add_ended(self._lengths, record)
        for label, ess in (record.get("ess_by_lag") or {}).items():
            if ess is not None:
                self._ess[label] += ess
                self._ess_steps[label] += 1
        if (point := evaluation_of(record)) is not None:
            point = shown_evaluation(point, self._times_s.get(point["version"], record.get("time_s")))
            self._heldout.add(point)
        fresh = [self._add_sample(sample) for sample in samples]
        return {"record": shown, "heldout": point, "samples": fresh, **self._totals()}

    def add_samples(self, samples: Iterable[Record]) -> None:
        """Add samples from a file. Samples without a step, as in an edited file, are left out."""
        for sample in samples:
            if isinstance(sample.get("step"), int):
                self._add_sample(sample)

    def data(self) -> dict[str, Any]:
        """Return the data that the page shows, as a snapshot."""
        late = [sample for kind in (True, False) for sample in self._late[kind]]
        return {
            "records": self._records.items(),
            "heldout": self._heldout.items(),
            "samples": {"early": list(self._early), "late": [one for one in late if one not in self._early]},
            **self._totals(),
        }

    def _totals(self) -> dict[str, Any]:
        lags = LAG_BUCKETS[: max((i for i, one in enumerate(LAG_BUCKETS, 1) if self._ess_steps[one]), default=0)]
        return {
            "lag_totals": {str(lag): self._lags[lag] for lag in sorted(self._lags)},
            "stale_share_by_length": stale_shares(self._lengths),
            "parity": {"mismatch": self._mismatch, "failures": self._parity_failures},
            "ess_by_lag": {one: self._ess[one] / steps if (steps := self._ess_steps[one]) else None for one in lags},
        }

    def _add_sample(self, sample: Record) -> dict[str, Any]:
        shown = shown_sample(sample)
        first = self._early[0] if self._early else shown
        if len(self._early) < SAMPLES_SHOWN and (shown["step"] or 0) <= (first["step"] or 0) + 1:
            self._early.append(shown)
        self._late[bool(shown["heldout"])].append(shown)
        return shown


def shown_evaluation(one: Record, time_s: float | None) -> dict[str, Any]:
    """Return an evaluation of summary.json in the form that the charts draw. Its step is the evaluated policy version."""
    accuracy = {"accuracy": one["accuracy"], "lower_bound": one.get("lower_bound")}
    return {"step": one["version"], "time_s": time_s, **accuracy, "sets": one.get("sets") or {}}


def report_data(
    run: str, description: str, summary: Record, records: Sequence[Record], samples: Sequence[Record], recipe_text: str
) -> dict[str, Any]:
    """Return the object that views.js describes and draws. It includes the run's summary."""
    history = RunHistory(MAX_RECORDS // 2)
    history.add_samples(samples)
    for record in records:
        history.add(record)
    times_s = {0: 0.0, **{record["step"]: record.get("time_s") for record in records if "step" in record}}
    measured = summary.get("heldout") or []  # Records lack the last evaluation, which ends after the last step.
    heldout = [shown_evaluation(one, times_s.get(one["version"])) for one in measured]
    about = {"run": run, "description": description, "recipe": recipe_text, "meanings": MEANINGS}
    return {**about, "summary": dict(summary), **history.data(), "heldout": heldout}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _short(one) for key, one in value.items()}
    return value


def shown_sample(sample: Record) -> dict[str, Any]:
    """Return a line of samples.jsonl with clipped texts. `num_tokens` is the number of tokens before clipping."""
    text = {key: _clipped(str(sample.get(key) or "")) for key in ("prompt", "completion", "reference", "answer", "reason")}
    known = ("step", "version", "task", "reward", "terms", "metrics", "spans", "heldout")
    shown = _clipped_tokens(sample)
    shown["num_tokens"] = max((span[2] for span in sample.get("spans") or []), default=len(shown["tokens"] or ()))
    if sample.get("branches"):
        shown["branches"] = list(map(_shown_branch, sample["branches"][:_MAX_BRANCHES]))
    return {**{key: sample.get(key) for key in known}, **shown, **text}


def _shown_branch(branch: Record) -> dict[str, Any]:
    shown = branch["parts"][:_MAX_PARTS]
    parts = [{**part, "text": _clipped(part["text"], _MAX_PART), **_clipped_tokens(part, _MAX_PART)} for part in shown]
    return {**branch, "prompt": _clipped(branch["prompt"]), "parts": parts, "num_parts": len(branch["parts"])}


def _clipped_tokens(sample: Record, most: int = _MAX_TEXT) -> dict[str, Any]:
    tokens, weights = sample.get("tokens"), sample.get("weights")
    if tokens is None:
        return {"tokens": None, "weights": weights}
    whole = sum(end <= most for end in accumulate(map(len, tokens)))
    return {"tokens": tokens[:whole], "weights": weights and weights[:whole]}


def _clipped(text: str, most: int = _MAX_TEXT) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most} more characters)"
