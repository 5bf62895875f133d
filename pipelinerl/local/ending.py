"""What remains of a run when its processes are gone: summary.json, report.html, the last lines on the terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from pipelinerl.config.recipe import Recipe
from pipelinerl.errors import PipelineRLError
from pipelinerl.local.process import ServiceDied
from pipelinerl.local.report import write_report
from pipelinerl.local.run_dir import RunDir, write_json
from pipelinerl.local.summary import kept_records, read_jsonl, read_summary, summary_from_metrics
from pipelinerl.local.text import duration, number, percent
from pipelinerl.service.lifecycle import EXIT_USER_ERROR

EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130
"""Beside `EXIT_USER_ERROR`: a service ended with that, and so does the run."""


@dataclass(frozen=True)
class Ending:
    """How a run ended. `restarts`: by service, those that had any; `error`: what it failed of."""

    wall_s: float
    restarts: Mapping[str, int] = field(default_factory=dict)
    interrupted: bool = False
    error: PipelineRLError | None = None

    @property
    def how(self) -> str:
        return "interrupted" if self.interrupted else "failed" if self.error else "done"

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return EXIT_INTERRUPTED
        if isinstance(self.error, ServiceDied) and self.error.returncode == EXIT_USER_ERROR:
            return EXIT_USER_ERROR
        return EXIT_FAILED if self.error else EXIT_DONE

    @property
    def can_go_on(self) -> bool:
        """It ended early, and of nothing that has to be put right first."""
        return self.exit_code in (EXIT_INTERRUPTED, EXIT_FAILED)


def finish(recipe: Recipe, run_dir: RunDir, ending: Ending, out: TextIO = sys.stdout, err: TextIO = sys.stderr) -> int:
    """Completes the run directory, says what came of the run, returns the exit code."""
    summary = complete_summary(recipe, run_dir, ending)
    write_json(run_dir.summary, summary)
    write_report(run_dir.path)
    for line in closing_lines(summary, run_dir, ending):
        print(line, file=out, flush=True)
    if ending.error is not None:
        print(f"pipelinerl: the run failed: {ending.error}", file=err, flush=True)
    return ending.exit_code


def complete_summary(recipe: Recipe, run_dir: RunDir, ending: Ending) -> dict[str, Any]:
    """The trainer's summary, or one out of metrics.jsonl where it left none, and what only the runner knows."""
    summary = read_summary(run_dir.summary) or {
        **summary_from_metrics(recipe, kept_records(read_jsonl(run_dir.metrics)))
    }
    interrupted = ending.interrupted or bool(summary.get("interrupted"))
    own = {"wall_s": round(ending.wall_s, 3), "restarts": dict(ending.restarts), "interrupted": interrupted}
    return {**summary, **own, **({"error": str(ending.error)} if ending.error else {})}


def closing_lines(summary: Mapping[str, Any], run_dir: RunDir, ending: Ending) -> list[str]:
    """The summary for a person. Pure."""
    return [
        "",
        f"{ending.how} after {duration(ending.wall_s)}: {number(summary.get('steps'))} optimizer steps",
        *_figures(summary),
        f"  report             {run_dir.report}",
        *([f"  checkpoint         {run_dir.checkpoint}"] if run_dir.checkpoint.is_dir() else []),
        *(
            [f"  go on with         {resume_command(run_dir)}"]
            if ending.can_go_on and run_dir.identity.is_file()
            else []
        ),
    ]


def resume_command(run_dir: RunDir) -> str:
    """What to type to go on with the run."""
    return f"pipelinerl run --resume {shlex.quote(str(run_dir.path))}"


def _figures(summary: Mapping[str, Any]) -> Iterator[str]:
    """A line for each thing that there is something to say of: a run may end before its first step."""
    lag, ess = summary.get("lag") or {}, summary.get("ess") or {}
    first, last = summary.get("heldout_accuracy_first"), summary.get("heldout_accuracy_last")
    multi, broken = summary.get("sequences_multi_version_fraction"), summary.get("parity_failures")
    if last is not None:
        yield f"  held-out accuracy  {percent(first)} -> {percent(last)}"
    if lag.get("mean") is not None:
        span = "" if multi is None else f"; {percent(multi)} of the sequences span several policy versions"
        yield f"  token lag          mean {number(lag['mean'], 2)}, p95 {number(lag['p95'])}, max {number(lag['max'])}{span}"
    if ess.get("mean") is not None:
        yield f"  ESS                mean {number(ess['mean'], 3)}, min {number(ess['min'], 3)}"
    if (rate := (summary.get("tokens_per_s") or {}).get("computed")) is not None:
        mfu = "" if summary.get("mfu_mean") is None else f", MFU {percent(summary['mfu_mean'])}"
        yield f"  trainer            {number(rate)} tokens/s while it computes{mfu}"
    if broken:
        yield f"  PARITY             {broken} probes of served against trained policy failed: see logs"
