"""Building on a thread: the loop goes on, and a stop ends what was begun."""

from __future__ import annotations

import asyncio
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from pipelinerl.service.lifecycle import StartStopped
from services.actor.vllm_engine import build_off_loop, use_known_model_infos


class Child:
    """A process that the builder waits for."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def terminate(self) -> None:
        self.ended.set()


def fails(*_: object) -> None:
    raise RuntimeError("no such model")


async def test_the_loop_goes_on_meanwhile_and_hears_of_a_failure() -> None:
    go = threading.Event()
    asyncio.get_running_loop().call_later(0.05, go.set)
    assert await build_off_loop(lambda: go.wait(10), asyncio.Event()) is True
    with pytest.raises(RuntimeError, match="no such model"):
        await build_off_loop(fails, asyncio.Event())


@pytest.mark.parametrize("fails_then", [True, False])
async def test_a_stop_ends_the_children_and_waits_for_the_thread(fails_then: bool) -> None:
    """What was built in spite of it is not lost."""
    stop, child, ended = asyncio.Event(), Child(), []

    def build() -> int:
        child.ended.wait(10)
        ended.append(True)
        if fails_then:
            raise RuntimeError("engine core initialization failed")
        return 7

    asyncio.get_running_loop().call_later(0.05, stop.set)
    async with asyncio.timeout(5):
        with pytest.raises(StartStopped) if fails_then else nullcontext():
            assert await build_off_loop(build, stop, lambda: [child]) == 7  # type: ignore[list-item]
    assert ended == [True]


def test_a_new_cache_begins_with_the_images_model_infos_and_another_stays_as_it_is(tmp_path: Path) -> None:
    image, cache = tmp_path / "image", tmp_path / "cache"
    use_known_model_infos(image, cache)  # an installation without any
    assert not cache.exists()
    (image / "modelinfos").mkdir(parents=True)
    (image / "modelinfos" / "llama.json").write_text("1")
    use_known_model_infos(image, cache)
    (image / "modelinfos" / "llama.json").write_text("2")
    use_known_model_infos(image, cache)
    assert (cache / "modelinfos" / "llama.json").read_text() == "1"
    assert [path.name for path in cache.iterdir()] == ["modelinfos"]


def test_a_cache_that_cannot_be_filled_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_part(source: Path, target: Path) -> Path:
        target.mkdir()
        raise OSError("no space left")

    (tmp_path / "image" / "modelinfos").mkdir(parents=True)
    monkeypatch.setattr(shutil, "copytree", copy_part)
    use_known_model_infos(tmp_path / "image", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
