"""Every service, every signal, every point: whole runs that are shot at, go on, end, and whose books add up.

`make test` does a few, chosen by seed; `make soak` all of them, and keeps how long each took (`--fault-table FILE`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.e2e.conftest import tiny_model
from tests.faults.matrix import (
    SERVICES,
    SIGNALS,
    Fault,
    Survived,
    audit,
    row,
    run_under_fire,
    some_faults,
    write_recipe,
)
from tests.faults.points import POINTS

__all__ = ["tiny_model"]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("seed", [0])
async def test_a_run_survives_a_fault_of_each_service(seed: int, tmp_path: Path, tiny_model: Path) -> None:
    await survive(some_faults(seed), tmp_path, tiny_model)


@pytest.mark.soak
@pytest.mark.parametrize("kind", SIGNALS)
@pytest.mark.parametrize("service", SERVICES)
async def test_a_run_survives_this_at_every_point(
    service: str, kind: str, tmp_path: Path, tiny_model: Path, request: pytest.FixtureRequest
) -> None:
    survived = await survive(row(service, kind), tmp_path, tiny_model)
    table = request.config.getoption("--fault-table")
    if table:
        keep(Path(table), survived)


def test_the_seeds_choose_every_service_once_and_reach_everything() -> None:
    assert some_faults(3) == some_faults(3)
    chosen = [some_faults(seed) for seed in range(40)]
    assert all(sorted(fault.service for fault in faults) == sorted(SERVICES) for faults in chosen)
    assert {fault.signal for faults in chosen for fault in faults} == set(SIGNALS)
    assert {fault.point for faults in chosen for fault in faults} == set(POINTS[1:])
    assert [fault.point for fault in row("nats", "SIGKILL")] == list(POINTS)


async def survive(faults: list[Fault], folder: Path, model: Path) -> list[Survived]:
    run_dir, survived = await run_under_fire(folder, write_recipe(folder, model, len(faults)), faults)
    audit(run_dir)
    for one in survived:
        print(
            f"{one.fault.service:9} {one.fault.signal:8} {one.fault.point:17} step {one.step:3}  {one.seconds:5.1f} s"
        )
    return survived


def keep(path: Path, survived: list[Survived]) -> None:
    """Adds to the table of recovery times, or replaces what it has of the same fault."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    fault = survived[0].fault
    name = {"service": fault.service, "signal": fault.signal}
    others = [row for row in rows if not name.items() <= row.items()]
    new = {**name, **{one.fault.point: round(one.seconds, 1) for one in survived}}
    data = {"benchmark": "fault_matrix", "unit": "s", "cpus": os.cpu_count(), "rows": [*others, new]}
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
