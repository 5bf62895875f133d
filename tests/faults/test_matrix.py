"""Every service, every signal, every point: whole runs that are shot at, go on, end, and whose ledgers add up.

`make soak` plays all of them with vLLM, and keeps how long each took (`--fault-table FILE`). `make test` plays a few, chosen by
the commit, on a light engine: tests/e2e/test_light_runs.py.
"""

import json
import os
from pathlib import Path

import pytest

from tests.faults.matrix import SERVICES, SIGNALS, Survived, row, run_under_fire, write_recipe
from tests.support.runs import audit


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", SIGNALS)
@pytest.mark.parametrize("service", SERVICES)
async def test_a_run_survives_this_at_every_point(
    service: str, kind: str, tmp_path: Path, tiny_model: Path, request: pytest.FixtureRequest
) -> None:
    faults = row(service, kind)
    run_dir, survived = await run_under_fire(tmp_path, write_recipe(tmp_path, tiny_model, len(faults)), faults)
    audit(run_dir.path)
    table = request.config.getoption("--fault-table")
    if table:
        keep(Path(table), survived)


def keep(path: Path, survived: list[Survived]) -> None:
    """Adds to the table of recovery times, or replaces what it has of the same fault."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    fault = survived[0].fault
    name = {"service": fault.service, "signal": fault.signal}
    others = [row for row in rows if not name.items() <= row.items()]
    new = {**name, **{one.fault.point: round(one.seconds, 1) for one in survived}}
    data = {"benchmark": "fault_matrix", "unit": "s", "cpus": os.cpu_count(), "rows": [*others, new]}
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
