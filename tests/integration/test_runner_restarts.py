"""A local run whose trainer or nats-server ends early: what is started again, from where, how often, and what is told."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import nats
import pytest

from pipelinerl.local.ending import finish
from pipelinerl.local.processes import ServiceDied
from pipelinerl.local.progress import PlainDisplay, RunState
from pipelinerl.service.address import ServiceAddress, read_address
from tests.integration.fake_run import Run, recipe, running, until_pid_changes


def steps_in(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.dir.metrics.read_text().splitlines()]


async def test_a_killed_trainer_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=40), {"FAKE_CHECKPOINT_EVERY": "10", "FAKE_STEP_S": "0.1"})
    async with running(run) as task:
        pids = await run.until_step(13)
        os.kill(pids["trainer"], signal.SIGKILL)
        assert await until_pid_changes(run, "trainer", pids["trainer"]) != pids["trainer"]
        assert {name: pid for name, pid in run.pids().items() if name != "trainer"} == {
            name: pid for name, pid in pids.items() if name != "trainer"
        }, "the others go on"
        ending = await task
    assert (ending.error, dict(ending.restarts), ending.exit_code) == (None, {"trainer": 1}, 0)
    assert [step["step"] for step in steps_in(run)] == list(range(1, 41))
    assert [step["from"] for step in steps_in(run)] == [0] * 10 + [10] * 30
    assert json.loads((run.dir.path / "lineage.json").read_text())["starts"] == [0, 10]
    assert "trainer was killed by SIGKILL" in run.printed.getvalue()
    assert finish(run.recipe, run.dir, ending, io.StringIO()) == 0
    summary = json.loads(run.dir.summary.read_text())
    assert (summary["restarts"], summary["steps"], summary["begun"]) == ({"trainer": 1}, 40, 10)
    links = re.findall("Live page: (http://127[0-9.:]+/)", run.printed.getvalue())
    assert links == [f"http://{read_address(run.dir.address('trainer')).http}/"], (
        "the new trainer is where the old one was"
    )


def test_where_the_page_is_is_said_again_only_when_it_moves(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(), {})
    for port in (4711, 4711, 4712):
        run.local._trainer_up(ServiceAddress("127.0.0.1:1", f"127.0.0.1:{port}", 1))
    assert re.findall("Live page: http://127.0.0.1:([0-9]+)/", run.printed.getvalue()) == ["4711", "4712"]


class Watched(PlainDisplay):
    """Keeps the steps that were shown, each change once."""

    def __init__(self) -> None:
        super().__init__(io.StringIO(), every_s=0)
        self.steps = [0]
        self.restarted = False

    def show(self, state: RunState, elapsed_s: float) -> None:
        if state.step != self.steps[-1]:
            self.steps.append(state.step)
        self.restarted = self.restarted or "trainer" in state.restarts
        super().show(state, elapsed_s)


async def test_the_display_follows_the_new_trainer_from_the_checkpoint_on(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=80), {"FAKE_CHECKPOINT_EVERY": "10", "FAKE_STEP_S": "0.1"})
    run.local.display = watched = Watched()
    async with running(run) as task:
        pids = await run.until_step(27)
        os.kill(pids["trainer"], signal.SIGKILL)
        await task
    fell = next(index for index, (a, b) in enumerate(zip(watched.steps, watched.steps[1:], strict=False)) if b < a) + 1
    assert watched.steps[fell] == 20, "what came after the checkpoint never was"
    assert watched.steps[fell:] == sorted(watched.steps[fell:])
    assert any(20 < step < 80 for step in watched.steps[fell:]), "heard from the new trainer, not read at the end"
    assert watched.steps[-1] == 80
    assert watched.restarted


async def test_a_trainer_that_is_told_to_stop_by_somebody_else_is_started_again(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=30), {})
    async with running(run) as task:
        pids = await run.until_step(5)
        os.kill(pids["trainer"], signal.SIGTERM)
        await until_pid_changes(run, "trainer", pids["trainer"])
        ending = await task
    assert (ending.error, dict(ending.restarts)) == (None, {"trainer": 1})
    assert "trainer exited with code 0" in run.printed.getvalue()
    assert [step["step"] for step in steps_in(run)] == list(range(1, 31))
    summary = json.loads(run.dir.summary.read_text())
    assert (summary["begun"] >= 5, summary["interrupted"]) == (True, False)


async def test_a_trainer_that_dies_at_ever_the_same_step_fails_the_run_with_the_end_of_its_log(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=9), {"FAKE_CRASH_AT_STEP": "4"})
    ending = await run.end()
    assert isinstance(ending.error, ServiceDied)
    assert (ending.error.name, ending.error.returncode, ending.exit_code) == ("trainer", 1, 1)
    assert dict(ending.restarts) == {"trainer": 2}
    assert "ZeroDivisionError: in the loss" in str(ending.error)
    err = io.StringIO()
    out = io.StringIO()
    assert finish(run.recipe, run.dir, ending, out, err) == 1
    assert "ZeroDivisionError" in err.getvalue()
    assert f"pipelinerl run --resume {run.dir.path}" in out.getvalue()
    summary = json.loads(run.dir.summary.read_text())
    assert (summary["steps"], summary["policy_version"]) == (3, 3)
    assert "trainer exited with code 1" in summary["error"]


async def test_a_trainer_that_gets_further_each_time_is_not_given_up(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=60), {"FAKE_CHECKPOINT_EVERY": "1", "FAKE_STEP_S": "0.1"})
    async with running(run) as task:
        pid = -1
        for step in (5, 15, 25, 35):
            pids = await run.until_step(step)
            assert pids["trainer"] != pid
            pid = pids["trainer"]
            os.kill(pid, signal.SIGKILL)
            await until_pid_changes(run, "trainer", pid)
        ending = await task
    assert (ending.error, dict(ending.restarts)) == (None, {"trainer": 4}), "the limit in a row is 2 here"


async def test_what_the_trainer_calls_a_users_mistake_is_not_tried_again(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=9), {"FAKE_CRASH_AT_STEP": "4", "FAKE_EXIT_CODE": "2"})
    ending = await run.end()
    assert (dict(ending.restarts), ending.exit_code) == ({}, 2)
    out = io.StringIO()
    finish(run.recipe, run.dir, ending, out, io.StringIO())
    assert "--resume" not in out.getvalue(), "it would end so again"


async def test_the_trainer_waits_for_as_many_actors_as_there_are(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=30), {})
    (run.dir.scale).write_text('{"actors": 2}')
    await run.end()
    assert json.loads(run.dir.summary.read_text())["expected_actors"] == 2
    assert {name for name in run.pids() if name.startswith("actor")} == {"actor-0", "actor-1"}


async def address_of_nats(run: Run) -> str:
    async with asyncio.timeout(30):
        while not run.dir.address("nats").is_file():
            await asyncio.sleep(0.02)
    return str(json.loads(run.dir.address("nats").read_text())["url"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_dead_nats_server_comes_back_on_its_port_with_its_streams(
    tmp_path: Path, number: signal.Signals
) -> None:
    run = Run(tmp_path / "run", recipe(steps=60), {"FAKE_STEP_S": "0.1"})
    async with running(run) as task:
        pids = await run.until_step(3)
        url = await address_of_nats(run)
        async with await nats.connect(url) as client:
            await client.jetstream().add_stream(name="KEPT", subjects=["kept"])
            await client.jetstream().publish("kept", b"one")
        os.kill(pids["nats"], number)
        await until_pid_changes(run, "nats", pids["nats"])
        assert await address_of_nats(run) == url
        async with await nats.connect(url) as client:
            assert (await client.jetstream().stream_info("KEPT")).state.messages == 1
        ending = await task
    assert (ending.error, dict(ending.restarts)) == (None, {"nats": 1})
    assert not run.dir.address("nats").exists(), "only for as long as it runs"


async def test_a_nats_server_that_does_not_stay_ends_the_run_and_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=10_000), {"FAKE_STEP_S": "30"})
    async with running(run) as task:
        pid = (await run.until_step(1))["nats"]
        while not task.done():
            os.kill(pid, signal.SIGKILL)
            again = asyncio.create_task(until_pid_changes(run, "nats", pid))
            await asyncio.wait({task, again}, return_when=asyncio.FIRST_COMPLETED)
            pid = again.result() if again.done() else pid
            again.cancel()
        ending = await task
    assert "nats was killed by SIGKILL after 2 restarts in a row; end of" in str(ending.error)
    assert ending.restarts["nats"] in (2, 3), "the first may have been before the first step was heard of"
    assert ending.exit_code == 1
