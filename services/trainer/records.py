"""The files that a run writes: metrics.jsonl, samples.jsonl, summary.json.

Consumes one record per optimizer step; produces lines and, at the end, the summary. Each line is flushed, so that a killed run
is complete up to its last step. Opens no socket and imports no torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipelinerl.run_dir import write_json

StepRecord = dict[str, Any]
"""One optimizer step, as metrics.jsonl holds it. Keys: docs/run-directory.md."""


def to_json(value: Mapping[str, Any]) -> str:
    """Return one line of strict JSON: NaN and infinities, which JSON lacks, become null."""
    return json.dumps(_finite(value), separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, np.generic):
        return _finite(value.item())
    return value


METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"


class RunFiles:
    """Append to the run directory's files. Use it as a context manager. `keep_steps`: last step that counts in a resumed run;
    lines of later steps move to `<name>-undone.jsonl`."""

    def __init__(self, run_dir: Path, keep_steps: int | None = None) -> None:
        self.run_dir = run_dir
        self.kept: list[StepRecord] = []
        """Records of all earlier steps that count."""
        run_dir.mkdir(parents=True, exist_ok=True)
        if keep_steps is not None:
            for name in (METRICS, SAMPLES):
                cut(run_dir / name, keep_steps)
            if (run_dir / METRICS).is_file():
                self.kept = [json.loads(line) for line in (run_dir / METRICS).read_text(encoding="utf-8").splitlines()]
        self._open = {name: (run_dir / name).open("a", encoding="utf-8") for name in (METRICS, SAMPLES)}

    def __enter__(self) -> RunFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._open.values():
            file.close()

    def append(self, name: str, value: Mapping[str, Any]) -> None:
        """Append one line to `METRICS` or `SAMPLES`."""
        self._open[name].write(to_json(value) + "\n")
        self._open[name].flush()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace the summary atomically: after a crash the previous one is left, or none."""
        write_json(self.run_dir / "summary.json", _finite(summary))


def cut(path: Path, keep_steps: int) -> None:
    """Keep the lines of steps up to `keep_steps` in `path`, and append the others to the file beside it whose name ends in
    -undone. A truncated last line is dropped."""
    if not path.is_file():
        return
    partial, undone = path.with_name(f"{path.name}.partial"), path.with_name(f"{path.stem}-undone.jsonl")
    with path.open(encoding="utf-8") as lines, partial.open("w", encoding="utf-8") as kept:
        for line in lines:
            step = _step_of(line)
            if step is not None and step <= keep_steps:
                kept.write(line)
            elif step is not None:
                with undone.open("a", encoding="utf-8") as file:
                    file.write(line)
    os.replace(partial, path)


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None
