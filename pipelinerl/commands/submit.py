"""`pipelinerl submit` and `pipelinerl runs`: one command for one run in a cluster, and the list of a namespace's runs.

A run is a release of the Helm chart under the run's name. Nothing of it depends on this process: if the command is interrupted,
the run goes on, and `--attach` watches it again.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pipelinerl
from pipelinerl.bus.protocol import check_run_name
from pipelinerl.errors import FieldError, MissingPackage, PipelineRLError, ServiceError
from pipelinerl.kube.person import LIST_SETS, PersonClient
from pipelinerl.kube.submission import (
    INSTANCE,
    RUNS,
    STATE,
    Object,
    Release,
    check_absent,
    check_helm,
    fetch,
    install,
    labels_of,
    name_of,
    remove,
    run_states,
    watch,
)
from pipelinerl.local.progress import Display, RunState, duration, open_display, percent
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe, understood
from pipelinerl.service.logs import printable

_COLUMNS = ("RELEASE", "RUN", "PHASE", "STEP", "ACCURACY", "LAG", "AGE")
_SHOWN_EVERY_S = 1.0


def submit(args: argparse.Namespace) -> int:
    """Return the exit code. Raises `UserError` for a mistake that is found before anything is installed."""
    if (args.recipe is None) == (args.attach is None):
        raise FieldError("RECIPE", args.recipe or "", "give either a recipe, or --attach RELEASE to watch what runs already")
    recipe = load_recipe(args.recipe, args.overrides) if args.recipe is not None else None
    name = check_run_name(args.attach or args.release or (recipe.name if recipe else ""), "--release")
    release = Release(name, args.namespace, args.context, _client(args))
    folder = args.output or Path("runs", name)
    if recipe is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FieldError("--output", str(folder), "is not empty; give another folder, or --release another name")
    try:
        return asyncio.run(_submit(args, recipe, release, folder))
    except KeyboardInterrupt:
        told = f"the run is not stopped\n  watch   {release.watching}\n  remove  {release.removing}"
        print(f"\npipelinerl: interrupted; {told}", file=sys.stderr)
        raise


def _client(args: argparse.Namespace) -> PersonClient:
    if importlib.util.find_spec("kubernetes") is None:
        raise MissingPackage("the package kubernetes is missing: pip install 'pipelinerl[cluster]'")
    return PersonClient(args.namespace, args.context)


async def _submit(args: argparse.Namespace, recipe: Recipe | None, release: Release, folder: Path) -> int:
    state, began_s = RunState(release.name, recipe.trainer.steps if recipe else 0), time.monotonic()
    async with _closing(release.client):
        await check_helm(release)
        with open_display() as display:
            show = _shower(state, display, began_s)
            if recipe is not None:
                await check_absent(release)
                for line in understood(args.overrides):
                    display.note(printable(line))
                files = [_readable(file) for file in args.values]
                await install(release, args.chart or _chart(), files, chart_values(recipe, release.name), show)
            if recipe is not None and not args.watch:
                display.note(
                    f"submitted {release.name}; its pods stay after the end of the run until its results are fetched\n"
                    f"  watch and fetch  {release.watching}\n  remove           {release.removing}"
                )
                return 0
            seen = await watch(release, state, display, began_s)
            state.stopping = True  # from here on, every phase is shown
            try:
                report = await fetch(release, seen, folder, show)
            except PipelineRLError as error:
                raise ServiceError(f"{error}\nnothing was removed; fetch the results again with: {release.watching}") from error
            if not args.keep:
                show("removing the release")
                await remove(release)
            state.on_end("done")
            lines = ["the run is finished", f"  report      {report}", f"  checkpoint  {folder / 'checkpoint'}"]
            display.note("\n".join([*lines, *([f"  remove      {release.removing}"] if args.keep else [])]))
    return 0


@asynccontextmanager
async def _closing(client: PersonClient) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await client.close()


def _shower(state: RunState, display: Display, began_s: float) -> Callable[[str], None]:
    """Return a function that shows a phase, at most once a second."""
    shown_s = 0.0

    def show(phase: str) -> None:
        nonlocal shown_s
        state.phase, now_s = printable(phase), time.monotonic()
        if now_s - shown_s >= _SHOWN_EVERY_S:
            shown_s = now_s
            display.show(state, now_s - began_s)

    return show


def chart_values(recipe: Recipe, run: str) -> dict[str, Any]:
    """Return the values of a release for one run. The trainer stays after the end, since its pod reads the volume."""
    inline = recipe.model_dump(mode="json", exclude_unset=True)
    return {"recipe": {"inline": inline}, "run": run, "trainer": {"onCompletion": "keep"}}


def _chart() -> str:
    chart = Path(pipelinerl.__file__).resolve().parents[1] / "deploy" / "helm"
    if not (chart / "Chart.yaml").is_file():
        raise FieldError(
            "--chart", "", "this installation has no chart; name its folder, or an address such as oci://HOST/CHART"
        )
    return str(chart)


def _readable(file: Path) -> Path:
    if not file.is_file():
        raise FieldError("--values", str(file), "no such file")
    return file


def runs(args: argparse.Namespace) -> int:
    """List the runs of a namespace. Raises `KubeError` with the right that is missing."""
    states, sets = asyncio.run(_listed(_client(args)))
    rows = rows_of(states, sets, datetime.now(UTC))
    if args.json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        print(f"no runs in namespace {args.namespace}", file=sys.stderr)
    else:
        table = [_COLUMNS, *map(_cells, rows)]
        widths = [max(len(line[column]) for line in table) for column in range(len(_COLUMNS))]
        for line in table:
            print(printable("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()))
    return 0


async def _listed(client: PersonClient) -> tuple[list[Object], list[Object]]:
    async with _closing(client):
        return await run_states(client), await client.items(LIST_SETS, RUNS)


def rows_of(states: list[Object], sets: list[Object], now: datetime) -> list[dict[str, Any]]:
    """Return one row for each release, the newest first. `states`: the ConfigMaps of runs. `sets`: the StatefulSets of
    trainers, which also exist for runs that publish no state. Unknown figures are None. Pure."""
    found = {labels_of(item).get(INSTANCE, ""): item for item in (*sets, *states)}
    return sorted((_row(release, item, now) for release, item in found.items()), key=lambda row: row["age_s"])


def _row(release: str, item: Object, now: datetime) -> dict[str, Any]:
    data: Mapping[str, str] = (item.get("data") or {}) if name_of(item).endswith(STATE) else {}
    created = datetime.fromisoformat(item["metadata"]["creationTimestamp"])
    figures = {name: _number(data.get(key)) for name, key in _FIGURES.items()}
    told = {"phase": data.get("phase") or "Starting", "reason": data.get("reason")}
    return {"release": release, "run": data.get("run"), **told, **figures, "age_s": round((now - created).total_seconds())}


_FIGURES = {"step": "step", "steps": "steps", "heldout_accuracy": "heldoutAccuracy", "lag": "lag"}


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    step = "-" if row["steps"] is None else f"{row['step'] or 0:.0f} of {row['steps']:.0f}"
    lag = "-" if row["lag"] is None else f"{row['lag']:.2f}"
    shown = (percent(row["heldout_accuracy"]), lag, duration(row["age_s"]))
    return (row["release"], row["run"] or "-", row["phase"], step, *shown)
