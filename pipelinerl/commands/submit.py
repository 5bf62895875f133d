"""`pipelinerl submit` starts or watches a run in a cluster. `pipelinerl runs` lists the runs of a namespace.

Each run is a release of the Helm chart under the run's name. If the command is interrupted, the run goes on, and `--attach`
watches it again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pipelinerl
from pipelinerl.bus.protocol import check_run_name
from pipelinerl.commands.run_folder import table
from pipelinerl.errors import FieldError, MissingPackage, PipelineRLError, ServiceError
from pipelinerl.kube import submission
from pipelinerl.kube.client import LIST_SETS, Object, PersonClient
from pipelinerl.kube.submission import INSTANCE, RUNS, Release, labels_of
from pipelinerl.local.progress import duration, open_display
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe, understood
from pipelinerl.service.logs import printable

_COLUMNS = ("RELEASE", "RUN", "PHASE", "STEP", "ACCURACY", "LAG", "AGE")


def submit(args: argparse.Namespace) -> int:
    """Submit or watch a run, and return the exit code. Raises `UserError` for a mistake found before anything is installed."""
    if (args.recipe is None) == (args.attach is None):
        raise FieldError("RECIPE", args.recipe or "", "give either a recipe, or --attach RELEASE to watch a run in progress")
    recipe = load_recipe(args.recipe, args.overrides) if args.recipe is not None else None
    name = check_run_name(args.attach or args.release or (recipe.name if recipe else ""), "--release")
    folder = args.output or Path("runs", name)
    if recipe is not None:
        submission.check_folder(folder)
    for file in args.values:
        if not file.is_file() or "," in str(file):
            raise FieldError("--values", str(file), "is no file, or has a comma, at which Helm splits paths; give another file")
    release = Release(name, _client(args), args.output, recipe.trainer.steps if recipe else 0)
    release.left = release.left if recipe else release.goes_on
    try:
        return asyncio.run(_submit(args, recipe, release, folder))
    except KeyboardInterrupt:
        print(f"\npipelinerl: interrupted; {release.left}", file=sys.stderr)
        raise


def _client(args: argparse.Namespace) -> PersonClient:
    try:
        from kubernetes.aio.config import ConfigException, list_kube_config_contexts
    except ImportError as error:
        raise MissingPackage("the package kubernetes is missing: pip install 'pipelinerl[cluster]'") from error
    try:  # fixed from here on, since the kubeconfig's current context may change during a long run
        context = args.context or list_kube_config_contexts()[1]["name"]
    except (ConfigException, LookupError, TypeError) as error:
        raise FieldError("--context", "", f"no kubeconfig with a current context ({error}); set KUBECONFIG") from error
    return PersonClient(args.namespace, context)


async def _submit(args: argparse.Namespace, recipe: Recipe | None, release: Release, folder: Path) -> int:
    async with release.client:
        await submission.check_helm(release)
        with open_display() as release.display:
            if recipe is not None:
                await submission.check_absent(release)
                release.display.note(printable("\n".join([f"submitting {release.name}", *understood(args.overrides)])))
                release.left = f"part of the release may be installed; before you submit again, remove it: {release.removing}"
                await submission.install(release, _chart(args.chart), args.values, chart_values(recipe, release.name))
                release.left = release.goes_on
                if not args.watch:
                    told = f"submitted {release.name}; its pods stay until its results are fetched\n{release.goes_on}"
                    release.display.note(told)
                    return 0
            submission.check_folder(folder, (await submission.look(release)).uid)  # before hours of watching
            seen = await submission.watch(release)
            release.state.stopping = True  # from here on, every phase is shown
            try:
                report = await submission.fetch(release, seen, folder)
            except (PipelineRLError, OSError) as error:
                raise ServiceError(f"{error}\nnothing was removed; fetch the results again with: {release.watching}") from error
            keep = args.keep or not seen.was_submitted  # a release that somebody else installed may be meant to stay
            if not keep:
                release.show("removing the release")
                release.left = f"the results are in {folder}; remove the rest: {release.removing}"
                await submission.remove(release)
            release.state.on_end("done")
            removing = f"\n  remove      {release.removing}" if keep else ""
            results = f"\n  report      {report}\n  checkpoint  {folder / 'checkpoint'}"
            release.display.note(f"the run is finished{results}{removing}")
    return 0


def chart_values(recipe: Recipe, run: str) -> dict[str, Any]:
    """Return the chart's values for a run named `run`."""
    return {"recipe": {"inline": recipe.model_dump(mode="json", exclude_unset=True)}, "run": run}


def _chart(given: str | None) -> str:
    chart = Path(pipelinerl.__file__).resolve().parents[1] / "deploy" / "helm"
    if given is None and not (chart / "Chart.yaml").is_file():
        raise FieldError("--chart", "", "this installation has no chart; give a folder, or an address such as oci://HOST/CHART")
    return given or str(chart)


def runs(args: argparse.Namespace) -> int:
    """List the runs of a namespace. Raises `KubeError`, for example if a permission is missing."""

    async def listed() -> list[Object]:
        async with _client(args) as client:
            return [*await client.items(LIST_SETS, RUNS), *await submission.run_states(client)]

    rows = rows_of(asyncio.run(listed()), datetime.now(UTC))
    if args.json:
        print(json.dumps(rows, indent=2))
    elif rows:
        print(printable(table([_COLUMNS, *map(_cells, rows)])))
    else:
        print(f"no runs in namespace {args.namespace}", file=sys.stderr)
    return 0


def rows_of(found: list[Object], now: datetime) -> list[dict[str, Any]]:
    """Return one row per release, the newest first, with its name, its age and the data of its run's ConfigMap, if any.
    `found`: the trainers' StatefulSets, then the runs' ConfigMaps. If a release has both, its age is the ConfigMap's. Pure."""
    rows = []
    for release, item in {labels_of(item).get(INSTANCE, ""): item for item in found}.items():
        age = now - datetime.fromisoformat(item["metadata"]["creationTimestamp"])
        rows.append({**(item.get("data") or {}), "release": release, "age_s": round(age.total_seconds())})
    return sorted(rows, key=lambda row: row["age_s"])


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    step = f"{row.get('step', 0)} of {row['steps']}" if "steps" in row else "-"
    shown = [row.get(key) or "-" for key in ("heldoutAccuracy", "lag")]
    return row["release"], row.get("run") or "-", row.get("phase") or "Starting", step, *shown, duration(row["age_s"])
