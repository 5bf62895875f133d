"""Write the results of a run that has ended: summary.json, report.html and the last lines on the terminal."""

from __future__ import annotations

import contextlib
import html
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from pipelinerl.doctor.findings import Finding
from pipelinerl.doctor.runs import examine_run
from pipelinerl.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_UNREAD,
    EXIT_USER_ERROR,
    FieldError,
    PipelineRLError,
    counted,
)
from pipelinerl.local.processes import ServiceDied, living_names
from pipelinerl.local.progress import duration, number, percent
from pipelinerl.page.data import REPORT_SCRIPTS, asset, report_data
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import recipe_of_run
from pipelinerl.rl.ledger import MEANINGS
from pipelinerl.run_dir import RunDir, newest_checkpoint, read_json, recipe_changes_of, trainer_starts, write_json, write_whole
from pipelinerl.run_summary import jsonl_ends, read_jsonl, summary_from_metrics, to_json

SAMPLES_READ = 64
"""Number of samples read from each end of samples.jsonl. The report shows at most eight from each end."""


def write_report(run_dir: Path, findings: Sequence[Finding] | None = None) -> Path:
    """Write `run_dir`/report.html and return its path. `findings` and errors are as in `report_of`."""
    report = run_dir / "report.html"
    write_whole(report, report_of(run_dir, findings=findings))
    return report


def report_of(run_dir: Path, samples_read: int = SAMPLES_READ, findings: Sequence[Finding] | None = None) -> str:
    """Return the report as an HTML page that needs no network, with samples from the first and last `samples_read` lines of
    samples.jsonl. `findings`: results of `examine_run`; None = call it. Raises `FieldError` if the folder is not a run's, or if
    a value in its records has a wrong type."""
    recipe = recipe_of_run(recipe_file := run_dir / "recipe.yaml", "RUN_DIR")
    records, samples = read_jsonl(run_dir / "metrics.jsonl"), jsonl_ends(run_dir / "samples.jsonl", samples_read)
    text = recipe_file.read_text(encoding="utf-8")
    try:
        summary = read_json(run_dir / "summary.json") or summary_from_metrics(recipe, records)
        data = report_data(run_dir.resolve().name, recipe.description, summary, records, samples, text)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        fix = f"metrics.jsonl, samples.jsonl or summary.json has a value of a wrong type ({error!r}); restore these files"
        raise FieldError("RUN_DIR", str(run_dir), fix) from error
    if findings is None:
        findings = examine_run(run_dir, recipe, is_running=bool(living_names(RunDir(run_dir, ""))))
    found = [one.to_json() for one in findings]
    changes = recipe_changes_of(run_dir)
    return report_html({**data, "starts": trainer_starts(run_dir), "changes": changes, "findings": found})


def report_html(data: Mapping[str, Any], draw: str = "PrlReport.report", scripts: Sequence[str] = REPORT_SCRIPTS) -> str:
    """Return an HTML page that needs no network. `draw` is the JavaScript function in `scripts` that draws `data`."""
    return Template(asset("report.html")).substitute(
        title=html.escape(f"{data['run']} - PipelineRL"),
        css=asset("page.css"),
        # Without `<`, model output can neither end the <script> element nor add one.
        data=to_json(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"),
        scripts="".join(asset(name) for name in scripts),
        draw=draw,
    )


@dataclass(frozen=True)
class Ending:
    """Outcome of a run."""

    wall_s: float
    """Seconds since the run was started or resumed."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Number of restarts of each restarted process, by its name."""
    interrupted: bool = False
    error: PipelineRLError | None = None
    begun: int = 0
    """Policy version from which the run was started or resumed."""
    unread: bool = False
    """True if the run was interrupted because its standard output was closed, as by `| head`."""

    @property
    def how(self) -> str:
        return "interrupted" if self.interrupted else "failed" if self.error else "done"

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return EXIT_UNREAD if self.unread else EXIT_INTERRUPTED
        if isinstance(self.error, ServiceDied) and self.error.returncode == EXIT_USER_ERROR:
            return EXIT_USER_ERROR
        return EXIT_FAILURE if self.error else EXIT_OK


def finish(recipe: Recipe, run_dir: RunDir, ending: Ending) -> int:
    """Write the summary and the report, print the run's result, and return the exit code."""
    if ending.error is not None:
        print(f"pipelinerl: the run failed: {ending.error}", file=sys.stderr, flush=True)
    summary = complete_summary(recipe, run_dir, ending)
    findings: list[Finding] = []
    try:
        write_json(run_dir.summary, summary)
        findings = examine_run(run_dir.path, recipe)
        write_report(run_dir.path, findings)
    except OSError as error:
        fix = "free some space, and run pipelinerl report on the folder"
        print(f"pipelinerl: cannot write summary and report in {run_dir.path} ({error.strerror}): {fix}", file=sys.stderr)
    with contextlib.suppress(OSError):  # The output may be closed.
        print("\n".join(closing_lines(summary, run_dir, ending, findings)), flush=True)
    return ending.exit_code


def complete_summary(recipe: Recipe, run_dir: RunDir, ending: Ending) -> dict[str, Any]:
    """Return the trainer's summary, or one computed from metrics.jsonl, with time, restarts and error from the runner."""
    summary = read_json(run_dir.summary) or summary_from_metrics(recipe, read_jsonl(run_dir.metrics))
    interrupted = ending.interrupted or bool(summary.get("interrupted"))
    own = {"wall_s": round(ending.wall_s, 3), "restarts": dict(ending.restarts), "interrupted": interrupted}
    return {**summary, **own, **({"error": str(ending.error)} if ending.error else {})}


def closing_lines(summary: Mapping[str, Any], run_dir: RunDir, ending: Ending, findings: Sequence[Finding] = ()) -> list[str]:
    since = f" since it continued from step {number(ending.begun)}" if ending.begun else ""
    lines = [
        "",
        f"{ending.how} after {duration(ending.wall_s)}{since}: {number(summary.get('steps'))} optimizer steps",
        *_figures(summary),
        *_losses(summary),
    ]
    # Findings of gravity `note` are left to the report. The finding `run-failed` repeats the error that `finish` has printed.
    if told := [one for one in findings if one.gravity != "note" and one.id != "run-failed"]:
        lines.append(f"  {told[0].gravity.upper():<17}  {told[0].brief}")
        lines.append(f"  more               pipelinerl doctor {shlex.quote(str(run_dir.path))}")
    if run_dir.report.is_file():
        lines.append(f"  report             {run_dir.report}")
    if run_dir.checkpoint.is_dir():
        lines.append(f"  checkpoint         {run_dir.checkpoint}")
    # Until the user corrects a mistake, the run cannot continue, so no line suggests resuming.
    if ending.exit_code in (EXIT_INTERRUPTED, EXIT_FAILURE) and run_dir.identity.is_file():
        lines.append(f"  continue with      pipelinerl run --resume {shlex.quote(str(run_dir.path))}")
        version, steps = newest_checkpoint(run_dir.path), summary.get("steps") or 0
        if version is None:
            lines.append("  no checkpoint was written: --resume begins at version 0")
        else:
            again = f"; {counted(steps - version, 'later step')} will be repeated" if steps > version else ""
            lines.append(f"  --resume continues from the checkpoint of version {version}{again}")
    return lines


def _losses(summary: Mapping[str, Any]) -> Iterator[str]:
    for outcome, reasons in (summary.get("sequence_reasons") or {}).items():
        for reason, count in sorted(reasons.items(), key=lambda one: -one[1])[:3]:
            meaning = MEANINGS.get(reason, "the trainer's log says more")
            yield f"  {outcome.replace('_', ' '):<17}  {number(count)}: {reason} ({meaning})"


def reward_ends(summary: Mapping[str, Any], key: str) -> str:
    """Return the first and last value of `key` (`reward` or `heldout_reward`) as text; "" if they are unknown."""
    first, last = summary.get(f"{key}_first"), summary.get(f"{key}_last")
    return "" if last is None else f"{number(first, 3)} -> {number(last, 3)}"


def _figures(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each metric of the summary that is known."""
    lag, ess = summary.get("lag") or {}, summary.get("ess") or {}
    first, last = summary.get("heldout_accuracy_first"), summary.get("heldout_accuracy_last")
    multi, truncated = summary.get("sequences_multi_version_fraction"), summary.get("sequences_truncated_fraction")
    newest = (summary.get("heldout") or [{}])[-1]
    if reward := reward_ends(summary, "reward"):
        yield f"  train reward       {reward}"
    if last is not None:
        bound = f"; {percent(newest.get('lower_bound'))} if unanswered problems count as wrong"
        version = newest.get("version")
        of = "" if version in (None, summary.get("policy_version")) else f" (version {version})"
        is_graded = last == 0 and summary.get("heldout_reward_last")
        graded = f"; mean reward {reward_ends(summary, 'heldout_reward')}" if is_graded else ""
        yield f"  held-out accuracy  {percent(first)} -> {percent(last)}{of}{graded}{bound if newest.get('unanswered') else ''}"
        if len(sets := newest.get("sets") or {}) > 1:
            yield from (f"    {name:<17}{percent(of['accuracy']['value'])}" for name, of in sets.items())
    if lag.get("mean") is not None:
        span = "" if multi is None else f"; {percent(multi)} of the sequences span several policy versions"
        formula = "" if summary.get("largest_lag") is None else f", predicted max {summary['largest_lag']}"
        figures = f"mean {number(lag['mean'], 2)}, p95 {number(lag['p95'])}, max {number(lag['max'])}{formula}"
        yield f"  token lag          {figures}{span}"
    if ess.get("mean") is not None:
        yield f"  ESS                mean {number(ess['mean'], 3)}, min {number(ess['min'], 3)}"
    if (rate := (summary.get("tokens_per_s") or {}).get("computed")) is not None:
        mfu = "" if summary.get("mfu_mean") is None else f", MFU {percent(summary['mfu_mean'])}"
        yield f"  trainer            {number(rate)} tokens/s while it computes{mfu}"
    if truncated:
        yield f"  cut short          {percent(truncated)} of the sequences, at sampling.max_tokens or model.max_context"
