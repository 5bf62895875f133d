"""Members that die, freeze, hang and fail in each phase of an update: real processes, real signals.

What must hold is checked by the stage at the end of each test; here: the survivors serve the version, the broken one is
left out, and it (or its successor) is brought back beside the others.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from benchmarks.light_members import PHASES, Break, How, Phase
from tests.faults.stage import UPDATE_WITHIN_S, fault_stage

BROKEN_AT = 1


@pytest.mark.parametrize("how", ["dies", "freezes", "hangs", "fails"])
@pytest.mark.parametrize("phase", PHASES)
async def test_survivors_serve_the_version_and_the_broken_one_comes_back(
    tmp_path: Path, phase: Phase, how: How
) -> None:
    async with fault_stage(tmp_path) as stage:
        breaks = {"b": Break(phase, how, BROKEN_AT)}
        a, b, c = await stage.start_all("a", "b", "c", breaks=breaks)
        await stage.update(0)
        await stage.update(BROKEN_AT)
        await stage.all_on(BROKEN_AT, [a, c])
        assert b.broke
        back = b
        if how == "freezes":
            b.send(signal.SIGCONT)
        elif how != "fails":
            b.process.kill()
            back = await stage.start("b")
        await stage.all_on(BROKEN_AT, [back])
        await stage.update(2)
        await stage.all_on(2, [a, back, c])


async def test_a_member_that_dies_between_two_updates_is_left_out_of_the_next(tmp_path: Path) -> None:
    async with fault_stage(tmp_path) as stage:
        a, b = await stage.start_all("a", "b")
        await stage.update(0)
        b.send(signal.SIGKILL)
        await stage.update(1)
        await stage.all_on(1, [a])
        assert list(stage.updater.members) == ["a"]


async def test_a_member_that_leaves_in_order_costs_nothing(tmp_path: Path) -> None:
    async with fault_stage(tmp_path) as stage:
        a, b = await stage.start_all("a", "b")
        await stage.update(0)
        b.send(signal.SIGTERM)
        await asyncio.to_thread(b.process.join, UPDATE_WITHIN_S)
        await stage.update(1)
        await stage.all_on(1, [a])


async def test_without_any_member_the_trainer_waits_for_the_next(tmp_path: Path) -> None:
    async with fault_stage(tmp_path) as stage:
        (only,) = await stage.start_all("a")
        await stage.update(0)
        only.send(signal.SIGKILL)
        await stage.offer(1)
        successor = await stage.start("b")
        await stage.all_on(1, [successor])
        await stage.update(2)
        await stage.all_on(2, [successor])


async def test_joiners_are_brought_up_to_date_together_without_an_update(tmp_path: Path) -> None:
    async with fault_stage(tmp_path) as stage:
        (first,) = await stage.start_all("a")
        await stage.update(0)
        joiners = [await stage.start(name) for name in "bcd"]
        await stage.all_on(0, joiners)
        await stage.until(lambda: sorted(stage.joins) == ["b", "c", "d"])
        assert [report.kind for report in first.reports] == ["joined", "serves"], "the others notice nothing"
        await stage.update(1)
        await stage.all_on(1, [first, *joiners])
