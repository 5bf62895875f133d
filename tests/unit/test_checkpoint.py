"""Checkpoints on disk: whole or absent, whatever happens while one is written."""

from pathlib import Path

from pipelinerl.recipe.fields import ModelConfig
from services.trainer.checkpoint.files import replacing, tidy
from services.trainer.learn.model import hub_arguments


def replace_by(folder: Path, text: str) -> None:
    with replacing(folder) as partial:
        partial.mkdir()
        (partial / "model").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_trainer_left_is_removed(tmp_path: Path) -> None:
    replace_by(tmp_path / "checkpoint", "whole")
    for name in (".checkpoint.partial-17", ".checkpoint.old-17"):
        (tmp_path / name).mkdir()
    (tmp_path / "summary.json.partial").touch()
    tidy(tmp_path)
    assert names(tmp_path) == ["checkpoint", "summary.json.partial"]
    tidy(tmp_path / "checkpoints")


def test_a_checkpoint_replaces_the_one_before_which_comes_back_after_a_kill_between_the_two_renames(tmp_path: Path) -> None:
    for text in ("old", "whole"):
        replace_by(tmp_path / "checkpoint", text)
    assert (names(tmp_path), names(tmp_path / "checkpoint")) == (["checkpoint"], ["model"])
    (tmp_path / "checkpoint").rename(tmp_path / ".checkpoint.old-17")
    (tmp_path / ".checkpoint.partial-17").mkdir()
    tidy(tmp_path)
    assert names(tmp_path) == ["checkpoint"]
    assert (tmp_path / "checkpoint/model").read_text() == "whole"


def test_what_is_loaded_from_a_hub_is_of_the_recipes_revision(tmp_path: Path) -> None:
    for source, revision, asked in (
        ("org/model", "abc123", {"revision": "abc123"}),
        ("org/model", "", {}),
        (str(tmp_path), "abc123", {}),
    ):
        config = ModelConfig(source="hub", name="org/model", revision=revision, max_context=64)
        assert hub_arguments(source, config) == {"trust_remote_code": False, **asked}
