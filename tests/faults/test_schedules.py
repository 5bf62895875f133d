"""Random histories of starts, breaks, kills, freezes, thaws and departures, with real processes.

`make test` plays a few with fixed seeds; `make soak` many more (`--histories N --first-seed S`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.schedule import Step, play, random_history
from tests.faults.stage import fault_stage


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("--first-seed")
        metafunc.parametrize("seed", range(first, first + metafunc.config.getoption("--histories")))


async def test_after_any_history_one_more_update_reaches_everybody_alive(tmp_path: Path, seed: int) -> None:
    async with fault_stage(tmp_path) as stage:
        await play(stage, random_history(seed))


def test_histories_come_from_their_seed_alone_and_contain_everything() -> None:
    assert random_history(7) == random_history(7)
    steps = [step for seed in range(20) for step in random_history(seed)]
    assert {step.what for step in steps} == {"start", "kill", "freeze", "thaw", "leave", "offer"}
    broken = {(step.breaks.phase, step.breaks.how) for step in steps if step.breaks}
    assert len(broken) >= 10, "many different breaks"
    assert all(isinstance(step, Step) and (step.member or step.what == "offer") for step in steps)
