"""Names and layout of run directories."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.bus.protocol import check_run_name
from pipelinerl.errors import FieldError
from pipelinerl.run_dir import RunDir, create_run_dir, new_place
from tests.unit.builders import checkpoint

NOW = datetime(2026, 3, 4, 5, 6, 7)


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(said: str, *given: Any, **named: Any) -> None:
    with pytest.raises(FieldError, match=said):
        create_run_dir("arithmetic", NOW, *given, **named)


def test_default_names_are_recipe_and_time_and_differ_within_a_second_and_are_valid_for_long_recipe_names() -> None:
    stamped = "arithmetic-20260304-050607"
    runs = [create_run_dir("arithmetic", NOW) for _ in range(3)]
    assert runs == [RunDir(Path("runs") / name, name) for name in (stamped, f"{stamped}-2", f"{stamped}-3")]
    assert runs[0].path.is_dir()
    name = new_place("a" * 20 + "-" + "b" * 19, NOW, None, Path("folder")).name
    assert check_run_name(f"{name}-99") == f"{'a' * 20}-20260304-050607-99"


def test_given_name_and_given_folder_which_may_be_there_and_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "y").mkdir()
    assert create_run_dir("arithmetic", NOW, name="mine") == RunDir(Path("runs/mine"), "mine")
    elsewhere = create_run_dir("arithmetic", NOW, path=tmp_path / "deep" / "here")
    assert elsewhere == RunDir(tmp_path / "deep" / "here", "arithmetic-20260304-050607")
    run = create_run_dir("arithmetic", NOW, name="x", path=tmp_path / "y")
    assert run == RunDir(tmp_path / "y", "x")
    assert json.loads(run.identity.read_text()).items() >= {"run": "x", "recipe": "arithmetic"}.items()
    assert elsewhere.open_to_others() is None
    run.path.chmod(0o750)
    assert "/y': other users can open it and read prompts, completions and logs; chmod 700" in str(run.open_to_others())
    monkeypatch.setattr("os.geteuid", lambda: run.path.stat().st_uid + 1)
    assert "/y': belongs to another user" in str(run.open_to_others())


@pytest.mark.parametrize(
    ("made", "given", "said"),
    [
        (["here/recipe.yaml"], {"path": "here"}, r"--run-dir = 'here': holds another run; resume it \(pipelinerl"),
        (["runs/mine/recipe.yaml"], {"name": "mine"}, r"--name = 'runs/mine': holds another run"),
        ([f"here/{name}" for name in "dbca"], {"path": "here"}, r"files \(a, b, c, \.\.\.\)"),
        (["file"], {"path": "file"}, "is a file"),
        (["file"], {"path": "file/below"}, "cannot be made: Not a directory"),
        ([], {"name": "bad name/x", "path": "new"}, "--name = 'bad name/x': use 1-40"),
    ],
)  # fmt: skip
def test_an_unusable_folder_or_name_is_refused_with_the_fix(made: list[str], given: dict[str, str], said: str) -> None:
    for name in made:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    path = Path(given["path"]) if "path" in given else None
    refused(said, given.get("name"), path)
    assert not Path("new").exists()


def test_a_disk_without_room_is_refused_before_a_folder_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    run = create_run_dir("arithmetic", NOW, name="mine")
    (checkpoint(run.path, 3) / "weights").write_bytes(bytes(5000))
    assert (run.checkpoint_bytes(), run.next_checkpoint_bytes(keep=1), run.next_checkpoint_bytes(keep=0)) == (5002, 5002, 0)
    assert RunDir(Path("runs/unsaved"), "unsaved").next_checkpoint_bytes(keep=1, first_bytes=9) == 9
    (partial := run.checkpoints / ".step-4.partial-7").mkdir()
    assert run.next_checkpoint_bytes(keep=1) == 0, "its room is taken from what is free"
    partial.rmdir()
    refused("but a run needs at least 1,000,000,000,268 MB", first_checkpoint_bytes=10**18)
    monkeypatch.setattr("pipelinerl.run_dir.LEAST_FREE_BYTES", 10**18)
    for given in ({}, {"name": "new"}, {"path": Path("deep/new")}):
        refused(r"--run-dir = .*: its disk has [0-9,]+ MB free, but a run needs at least 1,000,", **given)
    made = [path.name for path in Path().rglob("*") if path.is_dir() and path.parent.name != "mine"]
    assert sorted(made) == ["mine", "resume", "runs", "step-3"]


def test_what_never_came_to_training_does_not_block_its_name_unless_it_goes_on() -> None:
    failed = create_run_dir("arithmetic", NOW, name="mine")
    (failed.log("verifier")).write_text("no port")
    (elsewhere := Path("elsewhere")).mkdir()
    (elsewhere / "kept").touch()
    (failed.path / "models").symlink_to(elsewhere.resolve())
    with failed.locked():
        refused("--name = 'runs/mine': another command is using it", name="mine")
    assert (failed.path / ".running").stat().st_mode & 0o777 == 0o600
    again = create_run_dir("arithmetic", NOW, name="mine")
    there = again.log("verifier"), again.path / "models", elsewhere / "kept"
    assert [one.exists() for one in there] == [False, False, True]
    (again.path / "lineage.json").touch()
    refused("holds other files", name="mine")
    (elsewhere / "kept").rename(elsewhere / "run.json")
    refused("holds other files", path=elsewhere)
