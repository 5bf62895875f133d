"""`pipelinerl doctor RECIPE|RUN`: list the reasons why a recipe will not learn or a run does not learn, the cause first.

It calls rewards on trial, as `pipelinerl validate` does, and changes nothing.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipelinerl.commands.validate import gib_of, memory_of, model_of
from pipelinerl.doctor.findings import GRAVITIES, Finding
from pipelinerl.doctor.recipes import MISTAKE, adopted, findings_of
from pipelinerl.doctor.runs import examine_run
from pipelinerl.errors import FieldError, counted
from pipelinerl.local.processes import living_names
from pipelinerl.recipe.loading import RecipeError, find_recipe, load_recipe, modules_beside
from pipelinerl.recipe.preflight import examine
from pipelinerl.run_dir import NAMED_IN, RunDir
from pipelinerl.service.logs import printable

_SHOWN = ("step", "prompt", "completion", "reference", "answer", "reason", "reward", "tokens")
"""Keys of a sample that are shown."""


def doctor(args: argparse.Namespace) -> int:
    """Return the exit code: 0 without a grave finding, 1 with one. Raises `UserError` for wrong arguments."""
    folder = Path(args.subject)
    if is_run := any((folder / name).is_file() for name in NAMED_IN):
        for option, value in (("--set", args.overrides), ("--gpu-memory", args.gpu_memory)):
            if value:
                raise FieldError(option, value, "applies only to a recipe; leave it out for a run")
    findings = examine_run(folder, is_running=bool(living_names(RunDir(folder, "")))) if is_run else _of_recipe(args)
    told = [one.to_json() | {"sample": one.sample and {key: one.sample.get(key) for key in _SHOWN}} for one in findings]
    data = {"subject": args.subject, "kind": "run" if is_run else "recipe", "findings": told}
    print(json.dumps(data, indent=2, default=str) if args.json else printable("\n".join(_lines(args.subject, findings))))
    return 1 if any(one.gravity == "grave" for one in findings) else 0


def _of_recipe(args: argparse.Namespace) -> list[Finding]:
    """Return the findings about a recipe."""
    try:
        recipe = load_recipe(args.subject, args.overrides)
    except RecipeError as error:
        return [adopted(MISTAKE, problem) for problem in error.problems]
    problems: list[FieldError] = []
    if args.gpu_memory is not None:
        problems = memory_of(recipe, model_of(recipe, None), gib_of(args.gpu_memory))[1]
    return findings_of(recipe, examine(recipe, args.reward_rows, modules_beside(recipe, find_recipe(args.subject))), problems)


def _lines(subject: str, findings: Sequence[Finding]) -> Iterator[str]:
    """Yield a heading, and a paragraph for each finding. A sample is shown once."""
    counts = Counter(one.gravity for one in findings)
    told = [f"{counts[one]} grave" if one == "grave" else counted(counts[one], one) for one in GRAVITIES if counts[one]]
    yield f"{subject}: {', '.join(told) or 'nothing found'}"
    wrap = textwrap.TextWrapper(110, subsequent_indent=" " * 12, break_on_hyphens=False).wrap
    shown = list[object]()
    for one in findings:
        rows = [("evidence", one.evidence), ("set", f"{one.field}: {one.fix}"), ("see", one.docs)]
        if one.sample and one.sample not in shown:
            rows += [(key, f"{value!r}"[-200:]) for key in _SHOWN if (value := one.sample.get(key))]
        shown.append(one.sample)
        yield f"\n{one.gravity.upper()}  {one.id}: {one.meaning}"
        for name, text in rows:
            yield from wrap(f"  {name:<11}{text}")
