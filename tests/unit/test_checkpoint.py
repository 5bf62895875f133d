"""Checkpoints on disk: whole or absent, whatever happens while one is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.trainer.checkpoint.files import (
    partial_folder,
    prune,
    put_in_place,
    tidy,
)
from services.trainer.policy_trainer import load_tokenizer
from tests.unit.builders import make_recipe


def replace_by(folder: Path, text: str) -> None:
    """With a folder of one file."""
    partial = partial_folder(folder)
    partial.mkdir()
    (partial / "model").write_text(text)
    put_in_place(partial, folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_replaces_the_one_before(tmp_path: Path) -> None:
    replace_by(tmp_path / "checkpoint", "old")
    replace_by(tmp_path / "checkpoint", "new")
    assert names(tmp_path) == ["checkpoint"]
    assert names(tmp_path / "checkpoint") == ["model"]
    assert (tmp_path / "checkpoint/model").read_text() == "new"


def test_what_a_killed_trainer_left_is_removed(tmp_path: Path) -> None:
    replace_by(tmp_path / "checkpoint", "whole")
    for name in (".checkpoint.partial-17", ".checkpoint.old-17"):
        (tmp_path / name).mkdir()
    (tmp_path / "summary.json.partial").touch()
    tidy(tmp_path)
    assert names(tmp_path) == ["checkpoint", "summary.json.partial"]
    tidy(tmp_path / "checkpoints")


def test_killed_between_the_two_renames_the_one_before_comes_back(tmp_path: Path) -> None:
    replace_by(tmp_path / "checkpoint", "whole")
    (tmp_path / "checkpoint").rename(tmp_path / ".checkpoint.old-17")
    (tmp_path / ".checkpoint.partial-17").mkdir()
    tidy(tmp_path)
    assert names(tmp_path) == ["checkpoint"]
    assert (tmp_path / "checkpoint/model").read_text() == "whole"


def test_the_newest_stay(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        (tmp_path / f"step-{step}").mkdir()
    prune(tmp_path, keep=2)
    assert names(tmp_path) == ["step-10", "step-100"]


@pytest.mark.parametrize(("revision", "hub"), [("abc123", True), ("", True), ("abc123", False)])
def test_a_hub_tokenizer_is_of_the_recipes_revision(
    revision: str, hub: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    asked: dict[str, Any] = {}

    def from_pretrained(source: str, **arguments: Any) -> str:
        asked.update(arguments)
        return source

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    source = "org/model" if hub else str(tmp_path)
    model = {"source": "hub", "name": "org/model", "revision": revision, "max_context": 64}
    assert load_tokenizer(source, make_recipe(model=model)) == source
    assert asked.get("revision", "") == (revision if hub else "")
