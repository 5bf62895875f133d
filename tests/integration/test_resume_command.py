"""`pipelinerl run` and `pipelinerl run --resume`, as a user types them, with services that train nothing in place of ours."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.local.processes import kill_session, living
from pipelinerl.local.resume import find_run
from tests.integration.fake_run import FAKES

STAND_IN = "import runpy, sys; sys.argv = [{path!r}, {kind!r}]; runpy.run_path({path!r}, run_name='__main__')"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a recipe, and a package `services` of stand-ins."""
    for kind in ("verifier", "trainer", "actor"):
        package = tmp_path / "stand-ins" / "services" / kind
        package.mkdir(parents=True)
        for part in (package.parent, package):
            (part / "__init__.py").touch()
        (package / "__main__.py").write_text(STAND_IN.format(path=str(FAKES), kind=kind))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nmodel: {source: path, name: model}\ntask: {}\ntrainer: {steps: 40}\n"
    )
    return tmp_path


@asynccontextmanager
async def command(folder: Path, *arguments: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    paths = (str(folder / "stand-ins"), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    everything = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "FAKE_STEP_S": "0.1", **environment}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pipelinerl.cli", *arguments, cwd=folder, env=everything,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def outcome(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    async with asyncio.timeout(90), command(folder, *arguments, **environment) as process:
        said, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, said.decode()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


def steps(run: Path) -> list[int]:
    metrics = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.is_file() else []


def read(file: Path) -> Any:
    return json.loads(file.read_text())


async def test_a_run_is_interrupted_and_goes_on_in_its_folder(folder: Path) -> None:
    run = folder / "run"
    async with command(folder, "run", "mine.yaml", "--run-dir", "run", "--name", "my-run") as process:
        await until(lambda: len(steps(run)) >= 5)
        code, said = await outcome(folder, "run", "--resume", "run")
        assert (code, "--resume = 'run': another command runs in it" in said) == (2, True)
        process.send_signal(signal.SIGINT)
        printed, _ = await process.communicate()
        assert process.returncode == 130
    assert "go on with         pipelinerl run --resume run" in printed.decode()
    taken, before = len(steps(run)), read(run / "run.json")
    log = (run / "logs" / "trainer.log").read_text()

    code, said = await outcome(folder, "run", "mine.yaml", "--resume", "run", "--set", "trainer.batch_size=64")
    assert (code, "trainer.batch_size: 128 → 64" in said) == (2, True)
    assert read(run / "summary.json")["interrupted"] is True, "a refusal changes nothing"

    (run / "report.html").write_text("old")
    code, said = await outcome(folder, "run", "--resume", "run", "--set", "trainer.steps=50", "--actors", "2")
    assert code == 0, said
    assert f"my-run: goes on from the checkpoint of version {taken}" in said
    assert "recipe changed: trainer.steps: 40 → 50" in said
    assert steps(run) == list(range(1, 51))
    assert read(run / "lineage.json")["starts"] == [0, taken]
    assert read(run / "run.json") == before
    summary = read(run / "summary.json")
    assert (summary["begun"], summary["interrupted"], summary["expected_actors"]) == (taken, False, 2)
    assert {"actor-0", "actor-1"} <= set(read(run / "pids.json"))
    assert "steps: 50" in (run / "recipe.yaml").read_text()
    assert (run / "logs" / "trainer.log").read_text().startswith(log)
    assert (run / "report.html").read_text() != "old"

    code, said = await outcome(folder, "run", "--resume", "run")
    assert (code, "trainer.steps = 50: all of them are taken" in said) == (2, True)


async def test_a_run_whose_command_was_killed_goes_on_once_its_processes_are_gone(folder: Path) -> None:
    run = folder / "run"
    async with command(folder, "run", "mine.yaml", "--run-dir", "run", FAKE_CHECKPOINT_EVERY="1") as process:
        await until(lambda: len(steps(run)) >= 5)
        process.kill()
        await process.wait()
    found = find_run(run)
    await until(lambda: not living(found))
    kill_session(read(run / "pids.json")["actor-0"])  # the stand-in's sleeping child
    (run / "summary.json").write_text('{"steps": 3, "interrupted": true, "by": "the process before"}')
    (run / "addresses" / "nats.json").write_text('{"url": "nats://127.0.0.1:1"}')
    mistaken = {"FAKE_CRASH_AT_STEP": "19", "FAKE_EXIT_CODE": "2"}
    code, said = await outcome(folder, "run", "--resume", "run", "--set", "trainer.steps=20", **mistaken)
    assert code == 2, said
    summary = read(run / "summary.json")
    assert (summary["steps"], "by" in summary) == (18, False), "not the summary of the process before"
    code, said = await outcome(folder, "run", "--resume", "run")
    assert (code, steps(run)) == (0, list(range(1, 21)))


async def test_a_run_that_never_made_a_checkpoint_starts_again(folder: Path) -> None:
    code, _ = await outcome(folder, "run", "mine.yaml", "--run-dir", "run", FAKE_CRASH_AT_STEP="1", FAKE_EXIT_CODE="2")
    assert code == 2
    code, said = await outcome(folder, "run", "--resume", "run", "--set", "trainer.steps=3")
    assert code == 0
    assert "there is no checkpoint; the run starts again from version 0" in said
    assert steps(folder / "run") == [1, 2, 3]
