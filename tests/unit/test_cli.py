"""The command line as a user meets it: what it says, its exit codes, what it imports."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from pipelinerl.cli import COMMANDS, build_parser
from pipelinerl.commands.run import chosen_ports
from pipelinerl.errors import FieldError
from pipelinerl.recipe.rehearsal import Preview
from tests.support.runs import Command
from tests.unit.builders import model_folder, write_weights

HEAVY = (
    "torch", "vllm", "transformers", "pydantic", "grpc", "nats", "rich", "numpy", "reasoning_gym", "asyncio", "yaml",
)  # fmt: skip
REPO = Path(__file__).parents[2]


def test_help_and_version_are_told_without_importing_anything_heavy() -> None:
    code = (
        "import sys\nfrom pipelinerl.cli import main\n"
        "for arguments in (['--help'], ['run', '--help'], ['validate', '--help'], ['chat', '--help'], ['--version']):\n"
        "    try: main(arguments)\n    except SystemExit as end: assert end.code == 0, end.code\n"
        "print('loaded', *sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\npipelinerl 0.1.0\n")
    loaded = done.stderr.split()
    assert loaded[0] == "loaded"
    assert [name for name in HEAVY if name in loaded] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_shows_an_example_that_it_accepts(name: str) -> None:
    examples = [shlex.split(re.split(r" \| | -- ", line)[0], comments=True) for line in COMMANDS[name][3:]]
    given = [build_parser().parse_args(words[1:]) for words in examples]  # exits if an example is wrong
    assert [words[0] for words in examples] == ["pipelinerl"] * len(examples)
    assert name in [one.command for one in given]


@pytest.mark.parametrize("recipe", ["recipes/gsm.yaml", *sorted(path.stem for path in (REPO / "recipes").glob("*.yaml"))])
def test_shipped_recipes_validate(pipelinerl: Command, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    code, said, errors = pipelinerl("validate", recipe)
    assert code == 0, errors
    assert said.splitlines()[0] == f"{Path(recipe).stem}: valid"


@pytest.fixture
def no_preview(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the preview of prompts, which takes seconds in a process of its own."""
    monkeypatch.setattr("pipelinerl.recipe.preflight.preview", lambda *args, **options: Preview())


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_preview: None) -> Path:
    """The current folder: two recipes, of which the model of `there` exists; prompts that are no JSON; a run that has ended."""
    monkeypatch.chdir(tmp_path)
    for name in ("nowhere", "there"):
        recipe = f"name: mine\nmodel: {{source: path, name: {name}}}\ntask: {{}}\n"
        (tmp_path / f"{name}.yaml").write_text(recipe)
    (tmp_path / "p.jsonl").write_text('{"prompt": "q"\n')
    (tmp_path / "esc.jsonl").write_text(r'{"\u001b[2J": "q"}')
    model_folder(tmp_path / "there")
    (tmp_path / "ended").mkdir()
    (tmp_path / "ended" / "pids.json").write_text('{"trainer": 4194304}')  # a pid above every other
    return tmp_path


PLAN = "plan there.yaml --accelerators 2 --parameters"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "usage: pipelinerl"),
        ("cache --clear nosuch", "--clear = 'nosuch': is not in "),
        ("validate gsm --fields-only --set trainer.batch_size=7", "trainer.batch_size = 7"),
        ("validate smollm2 --set task.source=jsonl --set task.path=esc.jsonl", r"name one of its fields: \x1b[2J"),
        ("validate arithmetic --reward-rows -1", "--reward-rows = -1: give 0 to try no reward, or a larger number"),
        ("validate gsm --fields-only --chart-values there.yaml", "--chart-values = 'there.yaml': cannot be read as chart val"),
        ("validate gsm --gpu-memory 80", "--gpu-memory = '80': give a number with GiB or GB"),
        ("validate gsm --parameters 7B", "--parameters = '7B': applies only with --gpu-memory"),
        ("validate gsm --gpu-memory 80GB --set model.name=a/Llama-4-17B-16E", "17B-16E, does not tell its size; give the size"),
        ("run nowhere.yaml", "model.name = 'nowhere': is not a folder"),
        ("run", "RECIPE = '': name a recipe, or continue a run with --resume DIR"),
        ("run --resume gone", "--resume = 'gone': there is no such folder; give the folder of a run"),
        ("run --resume .", "--resume = '.': is not the folder of a run: it has no recipe.yaml and no run.json"),
        ("run --resume . --name other", "--name = 'other': leave it out"),
        ("run there.yaml --set reward.scorer=json:loads", "gives no reward in 7 of 7 calls, first for the reference answer"),
        ("run there.yaml --run-dir there --set reward.scorer=json:loads --reward-rows 0", "= 'there': holds other files"),
        (f"{PLAN} 7 --lengths 1-64", "--parameters = '7': give a number with M, B or T"),
        (f"{PLAN} 7B --lengths 64-1", "--lengths = '64-1': give a FROM of at least 1, a TO of at least FROM"),
        (f"{PLAN} 7B --lengths nosuch", "--lengths = 'nosuch': is neither bars"),
        (f"{PLAN} 7B --lengths 1-65", "--lengths = '1-65': is longer than sampling.max_tokens (64)"),
        (f"{PLAN} 7B --lengths 64 --accelerator TPU", "--accelerator = 'TPU': is neither a file of measured speeds nor"),
        (f"{PLAN} 7B --lengths 64 --accelerator p.jsonl", "decode is missing: give a list (points [sequences in progress, tok"),
        (f"{PLAN} 7B --lengths 64 --active-parameters 8B", "--active-parameters = '8B': a token cannot use more than"),
        (f"{PLAN} 7B --lengths 64 --sequences-in-progress 0", "--sequences-in-progress = 0: give a number above 0"),
        (f"{PLAN} 900T --lengths 64", "do not fit accelerators of 75 GiB; even 64, the maximum, are too few"),
        (f"{PLAN} 70B --lengths 64", "actor.engine.tensor_parallel_size = 1: 261 GiB of weights"),
        (f"{PLAN} 7B --lengths 64", "--accelerators = 2: an actor needs 1 and the trainer needs 2; give at least 3"),
        ("report .", "has no recipe.yaml"),
        ("scale actors 65 --run-dir ended", "0 to 64 actors"),
        ("scale actors 2 --run-dir ended", "the run has ended"),
        ("scale actors 2 --run-dir gone", "--run-dir = 'gone': there is no such folder; give the folder of a run"),
        ("chat ended 1+2=", "RUN = 'ended': has no checkpoint yet; give a run that has one (checkpoint.every_steps)"),
        ("chat there 1+2= --max-tokens 0", "--max-tokens = 0: give 1 or more"),
        ("chat there 1+ 2=", "unrecognized arguments: 2="),
        ("chat there 1+2=", "RUN = 'there': transformers cannot load it: "),
        ("serve s3://bucket/first -- --port 1", "is in an object store; copy it to this machine, and give the folder of"),
    ],
)
def test_a_mistake_exits_2_and_names_its_fix(pipelinerl: Command, workplace: Path, arguments: str, said: str) -> None:
    before = sorted(workplace.rglob("*"))
    code, printed, errors = pipelinerl(*arguments.split())
    assert (code, printed) == (2, "")
    assert said in errors
    assert sorted(workplace.rglob("*")) == before


def test_a_recipe_is_told_what_its_gpus_have_to_hold(pipelinerl: Command) -> None:
    """By its name a 7B model has 7.7B parameters, of 14.3 GiB; by its own number 14.2."""
    gsm = ("validate", "gsm", "--gpu-memory", "80GiB")
    code, printed, _ = pipelinerl(*gsm)
    assert code == 0
    assert "60.0 GiB for vLLM: weights 14.3" in printed
    assert "20.0 outside vLLM, of which updates need 16.3" in printed
    assert "and 71.7 GiB of host memory for" in pipelinerl(*gsm, "--set", "weights.log=nats")[1], "two more for the weight log"
    for name, parameters in {"70B-team/a_7B": "7.7B", "a/0.5B-2B-v3": "2.2B"}.items():
        assert f"parameters   {parameters}," in pipelinerl(*gsm, "--set", f"model.name={name}", "--fields-only")[1], name
    code, printed, errors = pipelinerl(*gsm, "--parameters", "7.6B", "--set", "actor.engine.gpu_memory_utilization=0.85")
    assert (code, printed) == (2, "")
    assert "actor.engine.gpu_memory_utilization = 0.85: vLLM needs at least 0.23 for weights" in errors
    assert "and may have at most 0.79, because a weight update needs" in errors
    code, _, errors = pipelinerl(*gsm, "--set", "trainer.nproc=2")
    assert (code, "trainer.nproc = 2" in errors, "use at least 3 ranks" in errors) == (2, True, True)
    assert "43.0 GiB on each of 3 ranks;" in pipelinerl(*gsm, "--set", "trainer.nproc=auto")[1], "as many as are needed"


def test_a_folders_model_is_as_large_as_its_files_say(pipelinerl: Command, workplace: Path) -> None:
    """Two experts in two files, of 10 x 25 and 3 M parameters, whatever the name says."""
    write_weights(workplace / "there" / "0.safetensors", **{"0.w": (10_000_000, 25)})
    write_weights(workplace / "there" / "1.safetensors", **{"1.w": (3_000_000,)})
    assert "parameters   0.253B," in pipelinerl("validate", "there.yaml", "--gpu-memory", "80GiB")[1]


def test_validate_tells_of_the_users_data(pipelinerl: Command, workplace: Path) -> None:
    """The tokens are words and marks here; two of them are the instruction's."""
    rows = [{"prompt": prompt, "answer": "1"} for prompt in ("a b", "a b c", "some very-long-prompt", "a b")]
    (workplace / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    file = "task={source: jsonl, path: sums.jsonl, heldout_problems: 2, instruction: Answer shortly}"
    code, printed, _ = pipelinerl("validate", "there.yaml", "--set", file)
    assert code == 0
    assert "sums.jsonl: 3 problems, 2 held out; longest prompt 8 tokens\n" in printed
    assert "has 1 repeated prompt, the first in line 4 ('a b'); they are left out" in printed
    assert "reference    line 1: '1'\n" in printed
    assert "rewards      task: reference answers (1) earn 1; empty ones (1) earn 0; " in printed
    for pattern, found, earned in (("#(1)", "'1' in '#1'", 1), ("(?:#)(2)", "nothing in '1'", 0)):
        _, printed, _ = pipelinerl("validate", "there.yaml", "--set", file, "--set", f"reward.answer_pattern={pattern}")
        assert f"reference answers (1) earn {earned}; empty ones (1) earn 0; reward.answer_pattern finds {found}; " in printed
        doubt = r"reward.scorer = 'task': task sums: the reference answer of line \d, '1', in which .* finds nothing, earns 0"
        assert (re.search(doubt, printed) is not None) is not earned
    short = ("--set", "model.max_context=16", "--set", "sampling.max_tokens=4", "--set", "task.instruction=" + "a " * 12)
    _, printed, _ = pipelinerl("validate", "there.yaml", "--set", file, *short)
    assert "its longest prompt, 18 tokens, leaves no room for an answer in model.max_context (16)" in printed


def test_a_lag_limit_that_throttles_is_valid_and_warned_of(pipelinerl: Command, no_preview: None) -> None:
    overrides = ("--set", "algorithm.max_lag=0", "--set", "reward.answer_pattern=#(.*)$", "--set", "sampling.stop=#")
    code, printed, _ = pipelinerl("validate", "smollm2", *overrides)
    assert code == 0
    assert '  set: reward.answer_pattern = "#(.*)$"\n  set: sampling.stop = ["#"]\n' in printed
    assert "largest lag  1 for a mean length of 16, 4 for a mean length of 4 tokens" in printed  # H = B = 32
    assert "algorithm.max_lag = 0: is below the largest lag" in printed
    assert "below" not in pipelinerl("validate", "smollm2")[1]


def test_the_cache_is_listed_and_cleared(pipelinerl: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINERL_CACHE", str(tmp_path))
    for name in ("smollm2-2", "tiny-abc"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "model.safetensors").write_bytes(bytes(3 * 2**19))
    (under_way := tmp_path / "models" / ".tiny-abc.made").mkdir()
    (compiled := tmp_path / "inductor").mkdir()
    (compiled / "kernel.so").write_bytes(bytes(2**20))
    listed = pipelinerl("cache")[1].splitlines()
    assert [line.split()[0] + line.split()[-1] for line in listed[:3]] == ["1.5smollm2-2", "1.5tiny-abc", "1.0inductor"]
    assert listed[3] == f"4.0 MiB in 3 folders of {tmp_path}"
    assert "removed        1.5 MiB" in pipelinerl("cache", "--clear", "tiny-abc")[1]
    assert "2.5 MiB in 2 folders of" in pipelinerl("cache", "--clear")[1]
    assert pipelinerl("cache")[1] == f"0.0 MiB in 0 folders of {tmp_path}\n"
    assert [*(tmp_path / "models").iterdir()] == [under_way], "of a run that builds it now"
    assert not [*compiled.iterdir()], "the folder is there for a run that goes on"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as unread:
        command = [sys.executable, "-m", "pipelinerl", "validate", "gsm", "--fields-only"]
        done = subprocess.run(command, stdout=unread, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE)
    assert (closed.returncode, closed.stderr) == (0, b"")


def test_a_port_that_is_taken_or_none_or_asked_for_twice_is_refused_before_anything_starts() -> None:
    def ports(page_port: int = 0, metrics_port: int = 0, no_page: bool = False) -> tuple[int | None, int]:
        return chosen_ports(Namespace(page_port=page_port, metrics_port=metrics_port, no_page=no_page))

    for name in ("page_port", "metrics_port"):
        option = f"--{name.replace('_', '-')}"
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(FieldError, match=f"{option} = {port}: cannot listen there .*; give another port, or 0"):
                ports(**{name: port})
    with pytest.raises(FieldError, match="--page-port = 65536: give a port from 1 to 65535"):
        ports(65536)
    with pytest.raises(FieldError, match=f"--metrics-port = {port}: is the port of --page-port; give another"):
        ports(port, port)
    assert (ports(port, 0), ports(0, port)) == ((port, 0), (0, port))
    assert ports() == (0, 0)
    assert ports(0, port, no_page=True) == (None, port)
