"""Name why a run does not learn, from its records."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipelinerl.doctor import failures, learning, lessons
from pipelinerl.doctor.findings import Finding, apply, ranked
from pipelinerl.doctor.run_records import Reasons, RunRecords, records_in
from pipelinerl.doctor.settings import SETTINGS_RULES, Settings
from pipelinerl.errors import UserError
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import recipe_of_run
from pipelinerl.recipe.model_folder import known_parameters
from pipelinerl.run_dir import RunDir

RUN_RULES = (*failures.RULES, *lessons.RULES, *learning.RULES)
"""In the order of causes: what an earlier rule finds may explain what a later one finds."""


def examine_run(
    folder: Path, recipe: Recipe | None = None, reasons: Reasons | None = None, *, is_running: bool = False
) -> list[Finding]:
    """Return the findings about the run in `folder`, the cause first. `recipe` and `reasons` (numbers of sequences by outcome
    and reason) are read there if they are None. Raises `FieldError` if the folder is not a run's."""
    recipe = recipe or recipe_of_run(RunDir(folder, "").recipe)
    return findings_about(records_in(folder, recipe, reasons, is_running=is_running))


def findings_about(run: RunRecords) -> list[Finding]:
    """Return the findings about a run. Those about the settings of a run that has learned are only notes."""
    parameters = 0
    with suppress(UserError, OSError):  # the model may be on another machine
        parameters = known_parameters(run.recipe.model)
    settings = apply(SETTINGS_RULES, Settings(run.recipe, parameters))
    settings = [replace(one, gravity="note") for one in settings] if run.has_learned else settings
    return ranked([*settings, *apply(RUN_RULES, run)])
