"""A whole local run with real processes, a real nats-server and services that keep to the contract but train nothing:
order, restarts, failures, Ctrl-C, and that nothing is ever left behind.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pipelinerl.local.ending import finish
from pipelinerl.local.processes import ServiceDied, session_pids
from pipelinerl.local.progress import PlainDisplay, RunState, rows
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.service.address import read_address
from tests.integration.fake_run import FAKES, SERVICES, Run, recipe, running, until_pid_changes


async def test_a_run_starts_everything_follows_it_and_leaves_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=5), {})
    ending = await run.end()
    assert (ending.error, ending.interrupted, ending.exit_code) == (None, False, 0)
    assert tuple(run.pids()) == SERVICES
    assert load_recipe(run.dir.recipe) == run.recipe
    assert "step 5/5 | version 5 | reward 1.000" in run.printed.getvalue()
    assert finish(run.recipe, run.dir, ending, io.StringIO()) == 0
    summary = json.loads(run.dir.summary.read_text())
    assert summary["by"] == "trainer"
    assert (summary["restarts"], summary["interrupted"], summary["steps"]) == ({}, False, 5)
    assert 0 < summary["wall_s"] < 60
    assert "tiny" in run.dir.report.read_text()
    assert {path.stem for path in (run.dir.path / "logs").iterdir()} == set(SERVICES)


class Recorder(PlainDisplay):
    """Keeps what was shown."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.shown: list[dict[str, str]] = []

    def show(self, state: RunState, elapsed_s: float) -> None:
        self.shown.append(dict(rows(state, elapsed_s)))


async def test_progress_is_followed_while_the_run_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=80), {})
    run.local.display = recorder = Recorder()
    await run.end()
    steps = [int(shown["step"].split()[0]) for shown in recorder.shown]
    assert steps == sorted(steps)
    assert any(0 < step < 80 for step in steps), "heard over gRPC, not read from the file at the end"
    assert any("left" in shown["step"] for shown in recorder.shown)
    assert {"starting the verifier", "training", "done"} <= {shown["now"] for shown in recorder.shown}
    assert "actor-0 serving v3, 64 in progress" in {shown["actors"] for shown in recorder.shown}
    assert recorder.shown[-1]["step"].startswith("80 of 80 (100.0%)")
    assert "left" not in recorder.shown[-1]["step"]


async def test_a_killed_actor_is_started_again(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=60), {})
    async with running(run) as task:
        pids = await run.until_step(5)
        os.kill(pids["actor-0"], signal.SIGKILL)
        await until_pid_changes(run, "actor-0", pids["actor-0"])
        assert session_pids(pids["actor-0"]) == [], "its engine core is gone too"
        ending = await task
    assert (ending.error, dict(ending.restarts)) == (None, {"actor-0": 1})
    assert "actor-0 was killed by SIGKILL" in run.printed.getvalue()


async def test_a_killed_verifier_comes_back_under_its_address(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=60), {})
    async with running(run) as task:
        pids = await run.until_step(5)
        before = read_address(run.dir.address("verifier"))
        os.kill(pids["verifier"], signal.SIGKILL)
        new = await until_pid_changes(run, "verifier", pids["verifier"])
        ending = await task
    after = read_address(run.dir.address("verifier"))
    assert (after.grpc, after.http, after.pid) == (before.grpc, before.http, new)
    assert (ending.error, dict(ending.restarts)) == (None, {"verifier": 1})


async def test_an_actor_that_cannot_be_is_not_tried_for_long(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=1000), {"FAKE_ACTOR_EXIT": "2"})
    ending = await run.end()
    assert isinstance(ending.error, ServiceDied)
    assert ending.error.name == "actor-0"
    assert "error: no such model" in str(ending.error)
    assert (dict(ending.restarts), ending.exit_code) == ({}, 2)


async def test_an_actor_that_keeps_dying_before_it_serves_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=1000), {"FAKE_ACTOR_EXIT": "1"})
    ending = await run.end()
    assert isinstance(ending.error, ServiceDied)
    assert dict(ending.restarts) == {"actor-0": 1}


async def test_the_initial_model_is_built_once(tmp_path: Path) -> None:
    small = recipe(steps=2, source="smollm2")
    first = Run(tmp_path / "one", small, {})
    assert (await first.end()).error is None
    assert tuple(first.pids()) == SERVICES
    assert "initial model: warm-start step 1 of 2" in first.printed.getvalue()
    model_dir = Path(json.loads(first.dir.summary.read_text())["model_dir"])
    assert json.loads((model_dir / "config.json").read_text())["model"]["source"] == "smollm2"
    second = Run(tmp_path / "two", small, {})
    assert (await second.end()).error is None
    assert "warmstart" not in second.pids()
    assert json.loads(second.dir.summary.read_text())["model_dir"] == str(model_dir)
    assert [path.name for path in model_dir.parent.iterdir()] == [model_dir.name]


async def test_what_the_builder_of_the_initial_model_complains_of_is_said_once(tmp_path: Path) -> None:
    run = Run(
        tmp_path / "run", recipe(steps=2, source="smollm2"), {"FAKE_MODEL_ERROR": "error: model.source = 'x': no"}
    )
    ending = await run.end()
    err = io.StringIO()
    assert finish(run.recipe, run.dir, ending, run.printed, err) == 2
    assert "initial model: warm-start step 1 of 2" in run.printed.getvalue()
    assert (run.printed.getvalue() + err.getvalue()).count("error: model.source = 'x': no") == 1


# Ctrl-C: a runner of its own, as a user has it in a terminal.

RUNNER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.integration.fake_run import Run, recipe
from pipelinerl.local.ending import finish
run = Run(Path(sys.argv[2]), recipe(steps=10000), {})
ending = asyncio.run(run.local.run())
print("ended", flush=True)
sys.exit(finish(run.recipe, run.dir, ending))
"""


@asynccontextmanager
async def runner_process(folder: Path, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUNNER, str(FAKES.parents[2]), str(folder), env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def started(folder: Path) -> dict[str, int]:
    pids, metrics = folder / "pids.json", folder / "metrics.jsonl"
    async with asyncio.timeout(60):
        while not (metrics.is_file() and metrics.stat().st_size and len(json.loads(pids.read_text())) == 4):
            await asyncio.sleep(0.02)
    return json.loads(pids.read_text())


def alive(pids: Mapping[str, int]) -> dict[str, list[int]]:
    return {name: found for name, session in pids.items() if (found := session_pids(session))}


@pytest.mark.parametrize(
    ("number", "deaf"), [(signal.SIGINT, ""), (signal.SIGTERM, ""), (signal.SIGINT, "trainer,actor,verifier")]
)
async def test_an_interrupt_stops_everything_in_time_and_completes_the_folder(
    tmp_path: Path, number: signal.Signals, deaf: str
) -> None:
    folder = tmp_path / "run"
    async with runner_process(folder, FAKE_DEAF=deaf) as process:
        pids = await started(folder)
        at = time.monotonic()
        process.send_signal(number)
        async with asyncio.timeout(15):
            assert await process.wait() == 130
    print(f"stopped after {time.monotonic() - at:.1f} s")
    assert alive(pids) == {}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["steps"] >= 1
    assert ("by" in summary) is not bool(deaf), "the trainer's own summary, unless it had to be killed"
    assert (folder / "report.html").is_file()


async def test_ctrl_c_in_a_terminal_reaches_the_services_only_through_the_runner(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    async with runner_process(folder) as process:
        pids = await started(folder)
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does: the whole foreground group
        assert await process.wait() == 130
    assert alive(pids) == {}
    assert json.loads((folder / "summary.json").read_text())["by"] == "trainer"


async def test_a_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    async with runner_process(folder, FAKE_DEAF="trainer,actor,verifier") as process:
        pids = await started(folder)
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(10):
            while "ignored" not in (folder / "logs" / "trainer.log").read_text():
                await asyncio.sleep(0.02)
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(4):
            assert await process.wait() == 130
    assert alive(pids) == {}


async def test_an_interrupt_while_the_initial_model_is_built(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=2, source="smollm2"), {})
    async with running(run) as task:
        async with asyncio.timeout(30):
            while "warmstart" not in run.pids():
                await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        ending = await task
    assert (ending.interrupted, ending.exit_code) == (True, 130)
    assert not any((tmp_path / "cache" / "models").iterdir())


async def test_services_of_a_killed_runner_end_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    async with runner_process(folder) as process:
        pids = await started(folder)
        process.kill()
        await process.wait()
    async with asyncio.timeout(15):
        while any(pid in session_pids(pid) for pid in pids.values()):
            await asyncio.sleep(0.05)
    for pid in session_pids(pids["actor-0"]):  # the fake's sleeping child; vLLM's engine core watches its parent itself
        os.kill(pid, signal.SIGKILL)


async def scale(run: Run, count: int) -> asyncio.subprocess.Process:
    command = ("-m", "pipelinerl.cli", "scale", "actors", str(count), "--run-dir", str(run.dir.path), "--timeout", "30")
    return await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)


async def test_actors_are_added_and_taken_away_while_the_run_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", recipe(steps=100_000), {})
    async with running(run) as ending:
        first = (await run.until_step(1))["actor-0"]
        for count in (3, 1, 0, 2):
            command = await scale(run, count)
            _, said = await command.communicate()
            assert command.returncode == 0, said
            assert sum(name.startswith("actor-") for name in run.pids()) == count
            if count:
                assert (run.pids()["actor-0"] == first) == (count != 2), "the longest-serving one stays"
        assert not ending.done()
        os.kill(os.getpid(), signal.SIGINT)
        assert (await ending).interrupted


@pytest.mark.parametrize(("count", "said"), [("-1", "0 to 64 actors"), ("2", "has ended")])
async def test_scaling_names_what_is_wrong(tmp_path: Path, count: str, said: str) -> None:
    run = Run(tmp_path / "run", recipe(steps=1), {})
    await run.end()
    command = await scale(run, int(count))
    _, errors = await command.communicate()
    assert command.returncode == 2
    assert said in errors.decode()
