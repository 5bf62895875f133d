"""Name why a run does not learn, from its records."""

from __future__ import annotations

from pathlib import Path

from pipelinerl.doctor import failures, learning, lessons
from pipelinerl.doctor.findings import Finding, apply
from pipelinerl.doctor.run_records import read_run

RUN_RULES = (*failures.RULES, *lessons.RULES, *learning.RULES)
"""In the order of causes: what an earlier rule finds may explain what a later one finds."""


def examine_run(folder: Path) -> list[Finding]:
    """Return the findings about the run in `folder`, the cause first. Raises `FieldError` if the folder is not a run's."""
    return apply(RUN_RULES, read_run(folder))
