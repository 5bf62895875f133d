"""Add up the steps of a run, which are the lines of metrics.jsonl, for its summary.json (docs/run-directory.md).

The trainer adds up each step and writes the summary when it ends. If it wrote none, the runner adds up metrics.jsonl.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from pipelinerl.figures import Reduced, reduce_step, run_figures
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.groups import answer_reward
from pipelinerl.rl.ledger import STATES
from pipelinerl.run_dir import write_json

Record = Mapping[str, Any]
StepRecord = dict[str, Any]
"""One optimizer step, as metrics.jsonl holds it. Keys: docs/run-directory.md."""


@dataclass
class RunTotals:
    """Totals over the whole run that the summary needs."""

    reduced: Reduced = field(default_factory=dict)
    heldout: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # mean of each step
    tokens_generated: int = 0
    lag_histogram: dict[int, int] = field(default_factory=dict)  # trained tokens by their lag in optimizer steps
    ended_by_length: dict[str, list[int]] = field(default_factory=dict)  # [trained, dropped as stale] by length bucket
    update_bytes: int = 0
    transfer_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    join_s: list[float] = field(default_factory=list)  # seconds until an actor joined and served the version
    compute_s: float = 0.0
    steps: int = 0
    steps_skipped: int = 0

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RunTotals:
        """Restore totals that `asdict` has turned into a mapping. JSON may have turned its integer keys into strings."""
        return TypeAdapter(cls).validate_python(state)

    def add_step(self, record: Record) -> None:
        """Add a step's figures, except those that `add_events` adds. A key that the record lacks adds nothing."""
        self.steps += 1
        self.steps_skipped += bool(record.get("skipped"))
        self.tokens_generated = record.get("tokens_generated") or self.tokens_generated
        self.compute_s += (record.get("step_s") or {}).get("compute") or 0.0
        add_ended(self.ended_by_length, record)
        self.rewards += [reward for reward in (record.get("reward_mean"),) if reward is not None and math.isfinite(reward)]
        for lag, tokens in (record.get("lag_histogram") or {}).items():
            self.lag_histogram[int(lag)] = self.lag_histogram.get(int(lag), 0) + tokens
        reduce_step(self.reduced, record, events=False)

    def add_events(self, record: Record) -> None:
        """Add the figures of events, such as evaluations. `record`: the record of a step, or of one event."""
        reduce_step(self.reduced, record, events=True)
        if evaluation := evaluation_of(record):
            self.heldout.append(evaluation)
        if update := record.get("weight_update"):
            stall_s = update.get("stall_s")
            self.add_update(update.get("bytes") or 0, update["transfer_s"], [] if stall_s is None else [stall_s])
        self.join_s += [join["join_s"] for join in record.get("joins") or []]

    def add_update(self, num_bytes: int, transfer_s: float, stalls_s: Iterable[float]) -> None:
        """Add one weight update. `stalls_s`: seconds for which it stopped each actor, or only the longest of them."""
        self.update_bytes += num_bytes
        self.transfer_s.append(transfer_s)
        self.stall_s.extend(stalls_s)

    def summary(self, recipe: Recipe, sequences: Mapping[str, int]) -> dict[str, Any]:
        """Return every key of summary.json that the trainer writes. Values that these totals do not give are None."""
        reduced = run_figures(self.reduced)
        if recipe.algorithm.advantage == "value":
            reduced["steps_equal_rewards"] = None
        return {
            "recipe": recipe.name,
            "mode": recipe.mode,
            "seed": recipe.seed,
            "steps": self.steps,
            "steps_skipped": self.steps_skipped,
            "policy_version": None,
            "interrupted": False,
            "wall_s": None,
            "reward_first": fmean(self.rewards[:5]) if self.rewards else None,
            "reward_last": fmean(self.rewards[-5:]) if self.rewards else None,
            "heldout_accuracy_first": self.heldout[0]["accuracy"] if self.heldout else None,
            "heldout_accuracy_last": self.heldout[-1]["accuracy"] if self.heldout else None,
            "heldout_reward_first": heldout_reward(*self.heldout[:1]),
            "heldout_reward_last": heldout_reward(*self.heldout[-1:]),
            "heldout": self.heldout,
            "tokens_generated": self.tokens_generated,
            "sequences": {name: sequences.get(name, 0) for name in STATES},
            "sequence_reasons": None,
            "lag": lag_summary(self.lag_histogram),
            "stale_share_by_length": stale_shares(self.ended_by_length),
            "weight_updates": {
                "count": len(self.transfer_s),
                "bytes": self.update_bytes,
                "transfer_s_p50": _percentile(self.transfer_s, 50),
                "stall_s_p50": _percentile(self.stall_s, 50),
                "stall_s_p99": _percentile(self.stall_s, 99),
            },
            "membership": {"joins": len(self.join_s), "join_s_p50": _percentile(self.join_s, 50), "evictions": None},
            "actor_busy_fraction": None,
            "trainer_busy_fraction": None,
            **reduced,
        }


def heldout_reward(evaluation: Record | None = None) -> float | None:
    """Return the answers' reward without format and length terms, averaged over an evaluation's sets; None if it is unknown."""
    try:
        return fmean(answer_reward(one["reported"]) or 0.0 for one in (evaluation or {})["sets"].values())
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # a damaged or older record
        return None


def totals_of(records: Iterable[Record]) -> RunTotals:
    totals = RunTotals()
    for record in records:
        totals.add_step(record)
        totals.add_events(record)
    return totals


def summary_from_metrics(recipe: Recipe, records: list[dict[str, Any]]) -> dict[str, Any]:
    totals, last = totals_of(records), records[-1] if records else dict[str, Any]()
    return totals.summary(recipe, last.get("sequences") or {}) | {
        key: last.get(key) for key in ("policy_version", "actor_busy_fraction", "trainer_busy_fraction")
    }


HELDOUT_KEYS = {"accuracy": "accuracy", "unanswered": "unanswered", "lower_bound": "accuracy_lower_bound", "sets": "sets"}
"""For each key of an evaluation in summary.json, the key in metrics.jsonl without its prefix `heldout_`."""


def evaluation_of(record: Record) -> dict[str, Any] | None:
    """Return a record's evaluation in the form of summary.json, or None without one."""
    if record.get("heldout_accuracy") is None:
        return None
    version = record.get("heldout_version", record.get("step"))
    return {"version": version, **{name: record.get(f"heldout_{key}") for name, key in HELDOUT_KEYS.items()}}


def add_ended(ended: dict[str, list[int]], record: Record) -> None:
    """Add a record's sequence counts [trained, dropped as stale] to `ended`. Its keys are the upper ends of length buckets."""
    for longest, counts in (record.get("ended_by_length") or {}).items():
        ended[longest] = [known + more for known, more in zip(ended.get(longest, (0, 0)), counts, strict=True)]


def stale_shares(ended: Mapping[str, list[int]]) -> dict[str, float]:
    """Return the share of sequences dropped as stale, by length bucket, shortest first. If the share grows with the length,
    training sees too few long sequences."""
    return {longest: ended[longest][1] / sum(ended[longest]) for longest in sorted(ended, key=int)}


def lag_summary(histogram: Mapping[int, int]) -> dict[str, float | None]:
    """Return mean, 95th percentile (the smallest lag that 95 % of the tokens do not exceed) and maximum over all tokens."""
    if not sum(histogram.values()):
        return {"mean": None, "p95": None, "max": None}
    lags, tokens = np.array(sorted(histogram.items())).T
    p95 = lags[np.searchsorted(tokens.cumsum(), 0.95 * tokens.sum())]
    return {"mean": float(np.average(lags, weights=tokens)), "p95": float(p95), "max": float(lags[-1])}


def leaves(value: Any, separator: str = ".", path: str = "", *, in_lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for each value in nested mappings that is not itself a mapping, or is an empty one. `in_lists`: enter
    lists of mappings, too, instead of yielding them."""
    is_node = in_lists and isinstance(value, list) and any(isinstance(one, Mapping) for one in value)
    inner = dict(enumerate(value)) if is_node else value
    if not isinstance(inner, Mapping) or not inner:
        yield path, value
        return
    for key, one in inner.items():
        yield from leaves(one, separator, f"{path}{separator}{key}" if path else str(key), in_lists=in_lists)


def _percentile(values: list[float], percent: int) -> float | None:
    return float(np.percentile(values, percent)) if values else None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a .jsonl file, without a line that a crash cut short; empty if the file does not exist."""
    if not path.is_file():
        return []
    return list(_objects(path.read_text(encoding="utf-8", errors="replace").splitlines()))


_END_BYTES = 1 << 20


def jsonl_ends(path: Path, each: int) -> list[dict[str, Any]]:
    """Return the objects in the first `each` and the last `each` lines of a .jsonl file, as far as they are in its first and
    last MiB; empty if the file does not exist."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        first = list(takewhile(lambda _: file.tell() <= _END_BYTES, islice(file, each)))
        read = sum(map(len, first))
        file.seek(max(read, path.stat().st_size - _END_BYTES))
        if file.tell() > read:
            file.readline()  # skip the rest of a partial line
        last = deque(file, maxlen=each)
    return list(_objects(line.decode(errors="replace") for line in (*first, *last)))


def _objects(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            value = json.loads(line, parse_constant=lambda _: None)  # some writers write NaN and infinities
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def is_finished(summary: Record) -> bool:
    """Return whether the summary is that of a run that was neither stopped nor failed; False if it is empty."""
    return summary.get("interrupted") is False and "error" not in summary


def to_json(value: Mapping[str, Any]) -> str:
    """Return one line of strict JSON, with null for NaN and infinities."""
    return json.dumps(_finite(value), separators=(",", ":"))


_finite = partial(to_jsonable_python, inf_nan_mode="null", fallback=np.generic.item)


METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"


class RunFiles(ExitStack):
    """Append to the run directory's files, as a context manager. Each line is flushed, so the files of a killed run have all
    steps. `keep_steps`: last step to keep in a resumed run; later lines move to `<name>-undone.jsonl`. None = a new run."""

    def __init__(self, run_dir: Path, keep_steps: int | None = None) -> None:
        super().__init__()
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, SAMPLES) if keep_steps is not None else ():
            cut(run_dir / name, keep_steps or 0)
        self.kept: list[StepRecord] = [] if keep_steps is None else read_jsonl(run_dir / METRICS)
        """In a resumed run, the records of the steps up to `keep_steps`; else empty."""
        opened = {name: (run_dir / name).open("a", encoding="utf-8") for name in (METRICS, SAMPLES)}
        self._open = {name: self.enter_context(file) for name, file in opened.items()}

    def append(self, name: str, value: Mapping[str, Any]) -> None:
        """Append one line to `METRICS` or `SAMPLES`."""
        self._open[name].write(to_json(value) + "\n")
        self._open[name].flush()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace the summary atomically."""
        write_json(self.run_dir / "summary.json", _finite(summary))


def cut(path: Path, keep_steps: int) -> None:
    """Keep the lines of steps up to `keep_steps`, and move the others to `<name>-undone.jsonl`. Drop a truncated last line."""
    if not path.is_file():
        return
    partial, undone = path.with_name(f"{path.name}.partial"), list[str]()
    with path.open(encoding="utf-8") as lines, partial.open("w", encoding="utf-8") as kept:
        for line in (line for line in lines if line.endswith("\n")):
            with suppress(ValueError, KeyError, TypeError):  # a line without a step is dropped, too
                (kept.write if int(json.loads(line)["step"]) <= keep_steps else undone.append)(line)
    if undone:
        with path.with_name(f"{path.stem}-undone.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(undone)
    os.replace(partial, path)
