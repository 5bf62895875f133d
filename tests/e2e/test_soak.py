"""Long runs with vLLM engines: every service, every signal, every point of a run, and recipes that still learn."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from tests.faults.matrix import POINTS, SERVICES, SIGNALS, Fault, Survived, run_under_fire, write_recipe
from tests.support.runs import PARITY_NATS, audit, ledger_adds_up, settings, started_run

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(1800)]

VICTIM = "actor-1"


def test_the_recipe_of_programs_learns(tmp_path: Path) -> None:
    with started_run("code", tmp_path / "run") as run:
        assert run.process.wait(1500) == 0, run.said
        summary = run.summary()
    assert summary["heldout_accuracy_first"] <= 0.8
    assert summary["heldout_accuracy_last"] >= 0.9


async def test_the_default_recipe_learns_with_one_actor_then_three_then_one(tmp_path: Path) -> None:
    """One of the three is killed on the way. Steps enough for engines that start slowly; the accuracy is the recipe's."""
    with started_run("arithmetic", tmp_path / "run", *settings(trainer__steps=400)) as run:
        await run.more_steps()
        await run.scale(3)
        await run.until_members(3)
        run.kill(VICTIM)
        await run.more_steps()
        await run.until_members(3)
        await run.scale(1)
        await run.until_members(1)
        assert await asyncio.to_thread(run.process.wait, 1500) == 0, run.said
        summary = run.summary()
    assert summary["heldout_accuracy_first"] <= 0.5
    assert summary["heldout_accuracy_last"] >= 0.9
    assert summary["restarts"] == {VICTIM: 1}
    assert ledger_adds_up(summary["sequences"])
    assert 0 <= summary["logprob_mismatch_max"] <= PARITY_NATS
    audit(run.run_dir)


@pytest.mark.parametrize("kind", SIGNALS)
@pytest.mark.parametrize("service", SERVICES)
async def test_a_run_survives_this_at_every_point(
    service: str, kind: str, tmp_path: Path, tiny_model: Path, request: pytest.FixtureRequest
) -> None:
    """It goes on, ends, and its ledger adds up. The idle point comes first: it is only at the start."""
    faults = [Fault(service, kind, point) for point in POINTS]
    run_dir, survived = await run_under_fire(tmp_path, write_recipe(tmp_path, tiny_model, len(faults)), faults)
    audit(run_dir.path)
    if table := request.config.getoption("--fault-table"):
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
