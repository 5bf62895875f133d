"""The command line as a user meets it: real processes, exit codes, what it imports."""

from __future__ import annotations

import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from pipelinerl.commands.run import chosen_ports, free_port
from pipelinerl.errors import FieldError
from pipelinerl.recipe.preflight import has_gpu

HEAVY = (
    "torch",
    "vllm",
    "transformers",
    "pydantic",
    "grpc",
    "nats",
    "rich",
    "numpy",
    "reasoning_gym",
    "asyncio",
    "yaml",
)
REPO = Path(__file__).parents[2]


def pipelinerl(*args: str, cwd: Path = REPO) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelinerl.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["validate", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom pipelinerl.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit as end: assert end.code == 0, end.code\n"
        "print('loaded', *sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stderr.split()
    assert loaded[0] == "loaded"
    assert [name for name in HEAVY if name in loaded] == []


def test_help_names_the_commands_and_version_the_version() -> None:
    shown = pipelinerl("--help")
    assert shown.returncode == 0
    assert all(command in shown.stdout for command in ("run", "validate", "report"))
    assert pipelinerl("--version").stdout == "pipelinerl 0.1.0\n"


@pytest.mark.parametrize("arguments", [[], ["fly"], ["run", "a", "--actors", "two"], ["validate", "a", "--fast"]])
def test_wrong_use_exits_2(arguments: list[str]) -> None:
    done = pipelinerl(*arguments)
    assert done.returncode == 2
    assert "usage: pipelinerl" in done.stderr


@pytest.mark.parametrize("recipe", ["gsm", "recipes/gsm.yaml", "smollm2", "arithmetic"])
def test_shipped_recipes_validate(recipe: str) -> None:
    done = pipelinerl("validate", recipe)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"{Path(recipe).stem}: valid"


def test_every_mistake_is_named_at_once() -> None:
    mistakes = ["trainer.batch_size=ten", "model.dtype=fp8", "sampling.temperature=-1"]
    done = pipelinerl("validate", "gsm", *(part for text in mistakes for part in ("--set", text)))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "recipes/gsm.yaml: 3 problems" in done.stderr
    assert "trainer.batch_size = 'ten': use an integer, at least 1" in done.stderr
    assert "model.dtype = 'fp8': use one of float32, bfloat16, float16" in done.stderr
    assert "sampling.temperature = -1: use a number, above 0 and at most 4" in done.stderr


def test_validate_tells_a_mistake_from_what_the_machine_lacks(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "q"\n')
    file = ["--set", "task.source=jsonl", "--set"]
    for arguments, said in [
        (["smollm2", *file, "task.path=p.jsonl"], "task.path = 'p.jsonl': p.jsonl, line 1: not JSON"),
        (["smollm2", *file, "task.path=none.jsonl"], "task.path = 'none.jsonl': there is no such file"),
        (["smollm2", "--set", "reward.scorer=json:dum"], "dum is not there in json; did you mean dump?"),
        (["arithmetic", "--set", "task.prompt_style=plain"], "task.prompt_style = 'plain': a warm-started model"),
        ([str(tmp_path)], f"recipe = '{tmp_path}': is a folder; give a recipe file"),
    ]:
        done = pipelinerl("validate", *arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
    done = pipelinerl("validate", "smollm2", "--set", "reward.scorer=no_such_package_here:score")
    assert done.returncode == 0
    assert "not runnable on this machine:" in done.stdout
    assert "No module named 'no_such_package_here'" in done.stdout


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_a_recipe_for_gpus_is_valid_here_and_not_run(tmp_path: Path) -> None:
    said = "model.dtype = 'bfloat16': no NVIDIA GPU is here"
    validated = pipelinerl("validate", "gsm")
    assert (validated.returncode, said in validated.stdout) == (0, True)
    refused = pipelinerl("run", "gsm", cwd=tmp_path)
    assert (refused.returncode, said in refused.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_run_refuses_before_anything_starts(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("name: mine\nmodel: {source: path, name: nowhere}\ntask: {}\n")
    for arguments, said in [
        (["run", "nope"], "recipe = 'nope': no such file"),
        (["run", "mine.yaml"], "model.name = 'nowhere': no such folder"),
        (["run", "mine.yaml", "--actors", "0"], "actor.count = 0"),
        (["run", "mine.yaml", "--actors", "-1"], "actor.count = -1"),
        (["run", "mine.yaml", "--set", "trainer.stepz=3"], "did you mean trainer.steps?"),
        (["run"], "RECIPE = '': name a recipe, or go on with a run by --resume DIR"),
        (["run", "--resume", "gone"], "--resume = 'gone': there is no such folder; give the folder of a run"),
        (["run", "--resume", "."], "--resume = '.': is not the folder of a run: it has no recipe.yaml and no run.json"),
        (["run", "--resume", ".", "--name", "other"], "--name = 'other': leave it out"),
        (["run", "--resume", ".", "--run-dir", "x"], "--run-dir = 'x': leave it out"),
    ]:
        done = pipelinerl(*arguments, cwd=tmp_path)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
        assert said in done.stderr
    assert not (tmp_path / "runs").exists()


def test_run_refuses_a_used_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "mine.yaml").write_text("name: mine\nmodel: {source: path, name: model}\ntask: {}\n")
    done = pipelinerl("run", "mine.yaml", "--run-dir", "model", cwd=tmp_path)
    assert done.returncode == 2
    assert "--run-dir = 'model': is not empty, and what it holds is no run (config.json)" in done.stderr
    done = pipelinerl("run", "mine.yaml", "--name", "bad name/x", cwd=tmp_path)
    assert (done.returncode, "--name = 'bad name/x': use 1-40" in done.stderr) == (2, True)


def test_report_of_what_is_not_a_run_exits_2(tmp_path: Path) -> None:
    done = pipelinerl("report", str(tmp_path))
    assert done.returncode == 2
    assert "has no recipe.yaml" in done.stderr
    done = pipelinerl("report", "nosuch")
    assert (done.returncode, "RUN_DIR = 'nosuch': there is no such folder" in done.stderr) == (2, True)


@pytest.mark.parametrize("option", ["--page-port", "--metrics-port"])
def test_a_port_that_is_taken_or_none_is_refused_before_anything_starts(option: str) -> None:
    assert free_port(option, 0) == 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(FieldError, match=f"{option} = {port}: cannot listen there .*; give another, or 0"):
            free_port(option, port)
    assert free_port(option, port) == port
    with pytest.raises(FieldError, match=f"{option} = 65536: give a port from 1 to 65535"):
        free_port(option, 65536)


def test_a_metrics_port_that_is_none_is_no_traceback() -> None:
    done = pipelinerl("run", "arithmetic", "--metrics-port", "70000")
    assert (done.returncode, "--metrics-port = 70000: give a port from 1 to 65535" in done.stderr) == (2, True)
    assert "Traceback" not in done.stderr


def test_page_and_metrics_cannot_have_the_same_port() -> None:
    def ports(page_port: int, metrics_port: int, no_page: bool = False) -> tuple[int | None, int]:
        return chosen_ports(Namespace(page_port=page_port, metrics_port=metrics_port, no_page=no_page))

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with pytest.raises(FieldError, match=f"--metrics-port = {port}: is the port of --page-port; give another"):
        ports(port, port)
    assert ports(port, 0) == (port, 0)
    assert ports(0, 0) == (0, 0)
    assert ports(0, port, no_page=True) == (None, port)
