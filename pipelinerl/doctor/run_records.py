"""Read the records of a run (steps, samples, summary and counts) into one object, which the rules examine."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

from pipelinerl.audit.journal import JOURNAL, parse_event, read_lines
from pipelinerl.recipe.fields import ProblemSet, Recipe
from pipelinerl.run_dir import RunDir, free_bytes, read_json
from pipelinerl.run_summary import evaluation_of, jsonl_ends, read_jsonl

Record = Mapping[str, Any]
Reasons = Mapping[str, Mapping[str, int]]
_SAMPLES_READ = 200
_WIDEST, _NARROWEST = 20, 3
YOUNG_S = 600.0
"""If a run without a summary began less than this many seconds ago, it may be in progress, perhaps on another machine."""


@dataclass(frozen=True)
class RunRecords:
    """The records of a run. If its steps lack a figure, the figure's mean is NaN, and every comparison with it is false."""

    recipe: Recipe
    steps: Sequence[Record]
    samples: Sequence[Record] = ()
    summary: Record = field(default_factory=dict)
    reasons: Reasons = field(default_factory=dict)
    """Number of sequences by outcome and reason."""
    undone: int = 0
    """Number of optimizer steps that a restart undid."""
    is_running: bool = False
    is_young: bool = False
    free_bytes: float = math.inf
    needed_bytes: float = 0.0
    """Expected growth of the run's files until its end, plus the size of one more checkpoint."""
    last_error: str = ""
    """Last line with an error in the logs of a run that is not running and has no step; otherwise empty."""

    @cached_property
    def trained(self) -> list[Record]:
        """The steps that changed weights."""
        return [step for step in self.steps if not step.get("skipped")]

    @property
    def window(self) -> int:
        """Number of steps that `early` and `late` average: a quarter of the trained steps, but at least 3 and at most 20."""
        return max(_NARROWEST, min(_WIDEST, len(self.trained) // 4))

    @property
    def is_long(self) -> bool:
        return len(self.trained) >= 4 * _NARROWEST

    def values(self, key: str, steps: slice = slice(None)) -> list[float]:
        """Return a figure's finite values in a slice of the trained steps. `a.b` is key b of object a; true counts as 1."""
        return numbers_in(self.trained[steps], key)

    def mean(self, key: str) -> float:
        """Return a figure's mean over the trained steps; NaN if fewer than 3 steps have the figure."""
        found = self.values(key)
        return fmean(found) if len(found) >= _NARROWEST else math.nan

    def early(self, key: str) -> float:
        return fmean(self.values(key, slice(self.window)) or [math.nan])

    def late(self, key: str) -> float:
        return fmean(self.values(key, slice(-self.window, None)) or [math.nan])

    def change(self, key: str) -> float:
        """Return by how many standard errors the late mean is above the early one; 0 if the run is too short."""
        before, after = self.values(key, slice(self.window)), self.values(key, slice(-self.window, None))
        if not self.is_long or min(len(before), len(after)) < _NARROWEST:
            return 0.0
        difference = fmean(after) - fmean(before)
        error = math.sqrt(pvariance(before) / len(before) + pvariance(after) / len(after))
        return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        known = self.summary.get("heldout")
        return known if known and isinstance(known, list) else [*filter(None, map(evaluation_of, self.steps))]

    @cached_property
    def trained_samples(self) -> list[Record]:
        return [one for one in self.samples if not one.get("heldout")]

    @property
    def first_task(self) -> ProblemSet:
        return next(iter(self.recipe.tasks_by_place.values()))

    def heldout(self, end: str) -> list[float]:
        """Return the `low` or `high` ends of the 95 % intervals of the first task's held-out accuracy, one per evaluation."""
        return numbers_in(self.evaluations, f"sets.{self.first_task.name}.accuracy.{end}")

    @cached_property
    def has_learned(self) -> bool:
        """Return whether the reward rose by 3 standard errors, or the last interval of held-out accuracy is above the first."""
        lows, highs = self.heldout("low"), self.heldout("high")
        return self.change("reward_mean") > 3 or (len(lows) > 1 and lows[-1] > min(highs[:1], default=math.inf))

    @property
    def has_collapsed(self) -> bool:
        """Return whether the late mean reward is below half of the early one, and lower by more than 3 standard errors."""
        early, late = self.early("reward_mean"), self.late("reward_mean")
        return early > 0 and late < early / 2 and self.change("reward_mean") < -3

    @property
    def is_stuck(self) -> bool:
        """Return whether the run has not learned, and its recipe has no learned baseline, so equal rewards teach nothing."""
        return not self.has_learned and self.recipe.algorithm.advantage != "value"

    @property
    def has_signal(self) -> bool:
        """Return whether more than 5 % of the groups had unequal rewards. With a learned baseline, always return True."""
        return self.recipe.algorithm.advantage == "value" or not self.mean("equal_reward_groups") >= 0.95

    def share_of(self, outcome: str, prefixes: tuple[str, ...] = ()) -> tuple[float, str]:
        """Return the share of ended sequences with this `outcome`, and the outcome's most frequent reason, or "" if unknown.
        With `prefixes`, count only reasons that begin with one of them. The divisor is at least the batch size."""
        counts = self.summary.get("sequences") or (self.steps[-1].get("sequences") if self.steps else None) or {}
        known = {name: n for name, n in (self.reasons.get(outcome) or {}).items() if not prefixes or name.startswith(prefixes)}
        num = sum(known.values()) if prefixes or known else counts.get(outcome) or 0
        ended = sum(counts.get(one) or 0 for one in ("trained", "dropped_stale", "dropped_filtered", "failed"))
        return num / max(ended, num, self.recipe.trainer.batch_size), max(known, key=lambda name: known[name], default="")


def numbers_in(records: Iterable[Record], key: str) -> list[float]:
    return [value for one in records if (value := number_at(one, key)) is not None]


def number_at(record: Record, key: str) -> float | None:
    value: Any = record
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


def records_in(folder: Path, recipe: Recipe, reasons: Reasons | None = None, *, is_running: bool = False) -> RunRecords:
    """Return the records of the run in `folder`. `reasons`: number of sequences by outcome and reason; None = read it from the
    summary or, if that lacks it, from the journal."""
    run_dir, journal = RunDir(folder, ""), folder / JOURNAL
    summary = {} if is_running else read_json(run_dir.summary)  # an earlier start may have left one
    steps = read_jsonl(run_dir.metrics)
    grown = [path.stat().st_size for path in (run_dir.metrics, run_dir.samples, journal) if path.is_file()]
    reasons = reasons if reasons is not None else summary.get("sequence_reasons")
    return RunRecords(
        recipe=recipe,
        steps=steps,
        samples=[one for one in jsonl_ends(run_dir.samples, _SAMPLES_READ) if isinstance(one.get("terms"), dict | None)],
        summary=summary,
        reasons=_reasons_in(journal) if reasons is None else reasons,
        undone=len({str(one.get("step")) for one in read_jsonl(folder / "metrics-undone.jsonl")}),
        is_running=is_running,
        is_young=not (summary or is_running) and time.time() - run_dir.recipe.stat().st_mtime < YOUNG_S,
        free_bytes=free_bytes(folder),
        needed_bytes=run_dir.checkpoint_bytes() + sum(grown) * (recipe.trainer.steps / max(1, len(steps)) - 1),
        last_error="" if is_running or steps else _last_error(folder / "logs"),
    )


def _reasons_in(journal: Path) -> dict[str, dict[str, int]]:
    """Return the number of sequences in a journal by outcome and reason."""
    counts: dict[str, Counter[str]] = {}
    for _, line in read_lines(journal):  # damaged lines, which `pipelinerl audit` reports, are left out
        if (event := parse_event(line) or {}).get("event") == "close" and event.get("reason"):
            counts.setdefault(str(event.get("outcome")), Counter())[str(event["reason"])] += len(event.get("ids") or ())
    return {outcome: dict(reasons) for outcome, reasons in counts.items()}


def _last_error(logs: Path) -> str:
    """Return `SERVICE: LINE`, the last line with an error in the first log that has one; empty if no log has an error."""
    for path in (logs / f"{name}.log" for name in ("trainer", "actor-0", "verifier", "model", "nats")):
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        if found := [line for line in lines if "error" in line.lower()]:
            return f"{path.stem}: {found[-1].strip()[:300]}"
    return ""
