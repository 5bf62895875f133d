"""How trainer and actors share the cores, by hand-counted cases."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.local.services import (
    ThreadPlan,
    available_cores,
    keep_to_quota,
    plan_threads,
)


@pytest.mark.parametrize(
    ("cores", "actors", "plan"),
    [
        (1, 1, ThreadPlan(trainer=1, engine=1)),
        (2, 1, ThreadPlan(trainer=1, engine=1)),
        (2, 2, ThreadPlan(trainer=1, engine=1)),
        (4, 1, ThreadPlan(trainer=2, engine=2)),
        (8, 2, ThreadPlan(trainer=4, engine=2)),
        (9, 3, ThreadPlan(trainer=4, engine=1)),
        (16, 0, ThreadPlan(trainer=8, engine=8)),
    ],
)
def test_half_of_the_cores_train_and_the_rest_is_shared(cores: int, actors: int, plan: ThreadPlan) -> None:
    assert plan_threads(cores, actors) == plan


def test_the_recipes_own_numbers_are_taken_and_the_rest_follows() -> None:
    assert plan_threads(8, 1, trainer_threads=6) == ThreadPlan(trainer=6, engine=2)
    assert plan_threads(8, 2, engine_threads=3) == ThreadPlan(trainer=2, engine=3)
    assert plan_threads(2, 1, trainer_threads=4, engine_threads=4) == ThreadPlan(trainer=4, engine=4)


@given(cores=st.integers(2, 256), actors=st.integers(1, 300))
def test_nobody_goes_without_and_cores_are_not_oversubscribed_needlessly(cores: int, actors: int) -> None:
    plan = plan_threads(cores, actors)
    assert plan.trainer >= 1
    assert plan.engine >= 1
    assert plan.trainer + actors * plan.engine <= max(cores, plan.trainer + actors)


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [("max 100000\n", 16), ("200000 100000\n", 2), ("150000 100000\n", 2), ("5000 100000\n", 1), ("100000", 1)],
)
def test_cgroup_quota_rounds_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpu_max: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(cpu_max)
    monkeypatch.setattr("pipelinerl.local.services._CGROUP_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert available_cores() == cores


@pytest.mark.parametrize(
    ("quota", "processes", "given", "threads"),
    [
        ("400000 100000", 1, {}, "4"),
        ("400000 100000", 3, {}, "1"),
        ("400000 100000", 8, {}, "1"),
        ("400000 100000", 1, {"OMP_NUM_THREADS": "9"}, "9"),
        ("1600000 100000", 1, {}, None),
        ("max 100000", 1, {}, None),
    ],
)
def test_a_container_keeps_to_its_quota(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    quota: str,
    processes: int,
    given: dict[str, str],
    threads: str | None,
) -> None:
    """On a machine of 16 cores."""
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr("pipelinerl.local.services._CGROUP_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    environment = dict(given)
    keep_to_quota(environment, processes)
    assert environment.get("OMP_NUM_THREADS") == threads
