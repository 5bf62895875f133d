"""Names and layout of run directories."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from pipelinerl.bus.protocol import check_run_name
from pipelinerl.errors import FieldError
from pipelinerl.run_dir import RunDir, create_run_dir, stamped_name, write_json

NOW = datetime(2026, 3, 4, 5, 6, 7)


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_default_name_is_recipe_and_time() -> None:
    run = create_run_dir("arithmetic", NOW)
    assert run == RunDir(Path("runs/arithmetic-20260304-050607"), "arithmetic-20260304-050607")
    assert run.path.is_dir()


def test_two_runs_of_one_second_get_two_folders() -> None:
    names = [create_run_dir("arithmetic", NOW).name for _ in range(3)]
    assert names == [
        "arithmetic-20260304-050607",
        "arithmetic-20260304-050607-2",
        "arithmetic-20260304-050607-3",
    ]


def test_a_long_recipe_name_still_makes_a_valid_run_name() -> None:
    name = stamped_name("a" * 20 + "-" + "b" * 19, NOW)
    assert check_run_name(f"{name}-99") == f"{'a' * 20}-20260304-050607-99"


def test_given_name_and_given_folder(tmp_path: Path) -> None:
    assert create_run_dir("arithmetic", NOW, name="mine") == RunDir(Path("runs/mine"), "mine")
    elsewhere = create_run_dir("arithmetic", NOW, path=tmp_path / "deep" / "here")
    assert elsewhere == RunDir(tmp_path / "deep" / "here", "arithmetic-20260304-050607")
    assert create_run_dir("arithmetic", NOW, name="x", path=tmp_path / "y") == RunDir(tmp_path / "y", "x")


def test_a_new_folder_says_which_run_it_is_of() -> None:
    written = json.loads(create_run_dir("arithmetic", NOW, name="mine").identity.read_text())
    assert (written["run"], written["recipe"]) == ("mine", "arithmetic")
    started = datetime.fromisoformat(written["started"])
    assert started.tzinfo is not None
    assert started.replace(tzinfo=None) == NOW


def test_an_empty_folder_is_taken_a_used_one_refused_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    create_run_dir("arithmetic", NOW, path=tmp_path / "empty").recipe.touch()
    with pytest.raises(
        FieldError, match=r"holds another run; go on with it \(pipelinerl run --resume\), give a new folder or --name"
    ) as info:
        create_run_dir("arithmetic", NOW, path=tmp_path / "empty")
    assert info.value.field == "--run-dir"
    create_run_dir("arithmetic", NOW, name="mine").recipe.touch()
    with pytest.raises(FieldError, match=r"--name = 'runs/mine': holds another run"):
        create_run_dir("arithmetic", NOW, name="mine")


def test_a_folder_of_other_things_is_refused_as_what_it_is(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).touch()
    with pytest.raises(
        FieldError, match=r"is not empty, and what it holds is no run \(a, b\); give a new or empty folder"
    ):
        create_run_dir("arithmetic", NOW, path=tmp_path)
    (tmp_path / "c").touch()
    (tmp_path / "d").touch()
    with pytest.raises(FieldError, match=r"no run \(a, b, c, \.\.\.\)"):
        create_run_dir("arithmetic", NOW, path=tmp_path)


def test_a_file_in_the_way_and_a_bad_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FieldError, match="is a file"):
        create_run_dir("arithmetic", NOW, path=tmp_path / "file")
    with pytest.raises(FieldError, match=r"cannot be made: Not a directory"):
        create_run_dir("arithmetic", NOW, path=tmp_path / "file" / "below")
    with pytest.raises(FieldError, match=r"--name = '\.\./escape'"):
        create_run_dir("arithmetic", NOW, name="../escape")
    with pytest.raises(FieldError, match=r"--name = 'bad name/x': use 1-40"):
        create_run_dir("arithmetic", NOW, name="bad name/x", path=tmp_path / "new")
    assert not (tmp_path / "runs").exists()


def test_json_is_replaced_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "pids.json", {"trainer": 1})
    write_json(tmp_path / "pids.json", {"trainer": 2})
    assert json.loads((tmp_path / "pids.json").read_text()) == {"trainer": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["pids.json"]
