"""Checkpoints on disk: whole or absent, whatever happens while one is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from services.trainer.checkpoint import export_policy, prune, tidy
from services.trainer.policy_trainer import load_tokenizer
from tests.unit.builders import make_recipe


class Saved:
    """Stands for model and tokenizer; `text` is its weights, `error` what saving raises."""

    def __init__(self, name: str, text: str = "", error: Exception | None = None) -> None:
        self.name, self.text, self.error = name, text, error

    def save_pretrained(self, folder: Path, **_: object) -> None:
        (folder / self.name).write_text(self.text)
        if self.error is not None:
            raise self.error


def export(folder: Path, text: str, error: Exception | None = None) -> Path:
    return export_policy(Saved("model", text), {}, Saved("tokenizer", error=error), folder, {"version": 1})  # type: ignore


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_replaces_the_one_before(tmp_path: Path) -> None:
    export(tmp_path / "checkpoint", "old")
    export(tmp_path / "checkpoint", "new")
    assert names(tmp_path) == ["checkpoint"]
    assert names(tmp_path / "checkpoint") == ["model", "pipelinerl.json", "tokenizer"]
    assert (tmp_path / "checkpoint/model").read_text() == "new"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_every_file_has_the_mode_that_the_umask_gives(tmp_path: Path, umask: int, mode: int) -> None:
    class Private(Saved):
        def save_pretrained(self, folder: Path, **_: object) -> None:
            (folder / "chat").mkdir()
            for file in (folder / "model.safetensors", folder / "chat" / "template"):
                file.touch(mode=0o600)

    before = os.umask(umask)
    try:
        export_policy(Private("model"), {}, Saved("tokenizer"), tmp_path / "checkpoint", {})  # type: ignore
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == dict.fromkeys(
        ("model.safetensors", "template", "tokenizer", "pipelinerl.json"), oct(mode)
    )


def test_one_that_cannot_be_written_leaves_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    export(tmp_path / "checkpoint", "old")
    with pytest.raises(OSError, match="no space left"):
        export(tmp_path / "checkpoint", "new", OSError("no space left"))
    assert names(tmp_path) == ["checkpoint"]
    assert (tmp_path / "checkpoint/model").read_text() == "old"


def test_what_a_killed_trainer_left_is_removed(tmp_path: Path) -> None:
    export(tmp_path / "checkpoint", "whole")
    for name in (".checkpoint.partial-17", ".checkpoint.old-17"):
        (tmp_path / name).mkdir()
    (tmp_path / "summary.json.partial").touch()
    tidy(tmp_path)
    assert names(tmp_path) == ["checkpoint", "summary.json.partial"]
    tidy(tmp_path / "checkpoints")


def test_killed_between_the_two_renames_the_one_before_comes_back(tmp_path: Path) -> None:
    export(tmp_path / "checkpoint", "whole")
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
