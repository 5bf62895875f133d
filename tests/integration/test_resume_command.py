"""`pipelinerl run` and `pipelinerl run --resume`, as a user types them, with services that train nothing in place of ours."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.cli import main
from pipelinerl.commands.run import RESUME
from pipelinerl.local.processes import kill_session, living_names
from pipelinerl.run_dir import find_run
from tests.support.local_run import FAKES
from tests.support.machine import wait_until
from tests.unit.builders import model_folder

STAND_IN = "import runpy, sys; sys.argv = [{path!r}, {kind!r}]; runpy.run_path({path!r}, run_name='__main__')"
Outcome = tuple[int, str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a recipe, and a package `services` of stand-ins."""
    (tmp_path := tmp_path / "Läufe 数").mkdir()
    for kind in ("verifier", "trainer", "actor"):
        package = tmp_path / "stand-ins" / "services" / kind
        package.mkdir(parents=True)
        for part in (package.parent, package):
            (part / "__init__.py").touch()
        (package / "__main__.py").write_text(STAND_IN.format(path=str(FAKES), kind=kind))
    model_folder(tmp_path / "model")
    (tmp_path / "mine.yaml").write_text("name: mine\nmodel: {source: path, name: model}\ntask: {}\ntrainer: {steps: 40}\n")
    paths = (str(tmp_path / "stand-ins"), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("FAKE_STEP_S", "0.02")
    monkeypatch.setattr("pipelinerl.service.logs.configure_logging", lambda *_, **__: None)  # the logs are pytest's
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Exit code and output of `pipelinerl run ARGUMENTS...`, in this process; further variables are the services'."""

    def outcome(*arguments: str, **environment: str) -> Outcome:
        with monkeypatch.context() as patched:
            for name, value in environment.items():
                patched.setenv(name, value)
            code = main(["run", *arguments])
        return code, "".join(capsys.readouterr())

    return outcome


def steps(run: Path) -> list[int]:
    metrics = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.is_file() else []


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def test_a_run_is_interrupted_and_goes_on_in_its_folder(folder: Path, run: Callable[..., Outcome]) -> None:
    there, refused = folder / "run", []

    def interrupt() -> None:
        wait_until(lambda: len(steps(there)) >= 5)
        refused.append(main(["run", "--resume", "run"]))
        os.kill(os.getpid(), signal.SIGINT)

    meanwhile = threading.Thread(target=interrupt)
    meanwhile.start()
    code, said = run("mine.yaml", "--run-dir", "run", "--name", "my-run", FAKE_PAUSES="9")
    meanwhile.join()
    assert (code, refused) == (130, [2])
    assert "--resume = 'run': another command is using it" in said
    assert "continue with      pipelinerl run --resume run" in said
    taken, before = len(steps(there)), read(there / "run.json")
    log = (there / "logs" / "trainer.log").read_text()

    code, said = run("mine.yaml", "--resume", "run", "--set", "trainer.batch_size=64")
    assert (code, "trainer.batch_size: 128 → 64" in said) == (2, True)
    assert read(there / "summary.json")["interrupted"] is True, "a refusal changes nothing"

    (there / "report.html").write_text("old")
    code, said = run("--resume", "run", "--set", "trainer.steps=50", "--actors", "2")
    assert code == 0, said
    assert f"my-run: continues from the checkpoint of version {taken}" in said
    assert "recipe changed: trainer.steps: 40 → 50" in said
    assert f"since it continued from step {taken}: 50 optimizer steps" in said
    assert steps(there) == list(range(1, 51))
    assert read(there / "lineage.json")["starts"] == [0, taken]
    assert read(there / "run.json") == before
    summary = read(there / "summary.json")
    assert (summary["begun"], summary["interrupted"], summary["expected_actors"]) == (taken, False, 2)
    assert {"actor-0", "actor-1"} <= set(read(there / "pids.json"))
    assert "steps: 50" in (there / "recipe.yaml").read_text()
    assert (there / "logs" / "trainer.log").read_text().startswith(log)
    assert (there / "report.html").read_text() != "old"

    code, said = run("--resume", "run")
    assert (code, "trainer.steps = 50: all of them have been taken" in said) == (2, True)


def test_a_run_whose_command_was_killed_goes_on_once_its_processes_are_gone(folder: Path, run: Callable[..., Outcome]) -> None:
    there = folder / "run"
    command = [sys.executable, "-m", "pipelinerl.cli", "run", "mine.yaml", "--run-dir", "run"]
    environment = {**os.environ, "FAKE_CHECKPOINT_EVERY": "1", "FAKE_STEP_S": "0.5"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            wait_until(lambda: len(steps(there)) >= 2)
        finally:
            process.kill()
    found = find_run(there, RESUME)
    wait_until(lambda: not living_names(found))
    kill_session(read(there / "pids.json")["actor-0"])  # the stand-in's sleeping child
    (there / "summary.json").write_text('{"steps": 3, "interrupted": true, "by": "the process before"}')
    (there / "addresses" / "nats.json").write_text('{"url": "nats://127.0.0.1:1"}')
    mistaken = {"FAKE_CRASH_AT_STEP": "19", "FAKE_EXIT_CODE": "2"}
    code, said = run("--resume", "run", "--set", "trainer.steps=20", **mistaken)
    assert code == 2, said
    summary = read(there / "summary.json")
    assert (summary["steps"], "by" in summary) == (18, False), "not the summary of the process before"
    code, said = run("--resume", "run")
    assert (code, steps(there)) == (0, list(range(1, 21)))


def test_a_run_that_never_made_a_checkpoint_starts_again(folder: Path, run: Callable[..., Outcome]) -> None:
    code, _ = run("mine.yaml", "--run-dir", "run", FAKE_CRASH_AT_STEP="1", FAKE_EXIT_CODE="2")
    assert code == 2
    code, said = run("--resume", "run", "--set", "trainer.steps=3")
    assert code == 0
    assert "there is no checkpoint; the run starts again from version 0" in said
    assert steps(folder / "run") == [1, 2, 3]
