"""A run's streams, looked at while the run goes on and when it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.bus.jetstream import connect
from pipelinerl.commands.streams import RunStreams
from pipelinerl.errors import FieldError
from pipelinerl.local.nats import NatsServer
from pipelinerl.run_dir import RunDir, write_json


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "some-folder", "demo")
    run_dir.address("nats").parent.mkdir(parents=True)
    write_json(run_dir.path / "run.json", {"run": "demo"})
    return run_dir


async def publish(url: str) -> None:
    async with connect(url, "demo") as bus:
        await bus.create_streams()
        for number in range(3):
            await bus.publish_sequence(b"x", f"s{number}")


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    stats = {path: path.stat() for path in folder.rglob("*")}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


async def test_streams_of_a_run_that_goes_on_and_of_one_that_has_ended(run_dir: RunDir) -> None:
    async with NatsServer(run_dir.nats_store) as server:
        await publish(server.url)
        write_json(run_dir.pids, {"nats": server.pid})
        write_json(run_dir.address("nats"), {"url": server.url})
        async with RunStreams(run_dir.path).open() as bus:
            assert await bus.publish_sequence(b"x", "s3") == 4
    before = files(run_dir.path)
    async with RunStreams(run_dir.path).open() as bus:
        assert (await bus.sequences_info()).messages == 4
        await bus.publish_sequence(b"x", "into the copy")
    assert files(run_dir.path) == before


async def test_streams_on_a_server_by_the_runs_name(nats_url: str, run_name: str) -> None:
    async with connect(nats_url, run_name) as bus:
        await bus.create_streams()
        await bus.publish_sequence(b"x", "s1")
        async with RunStreams(nats_url=nats_url, run=run_name).open() as seen:
            assert (await seen.sequences_info()).messages == 1
        await bus.delete_streams()


async def test_the_folders_name_is_the_runs_without_run_json(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "demo", "demo")
    async with NatsServer(run_dir.nats_store) as server:
        await publish(server.url)
    async with RunStreams(run_dir.path).open() as bus:
        assert (bus.run, (await bus.sequences_info()).messages) == ("demo", 3)


async def test_a_place_without_streams_is_named(run_dir: RunDir, tmp_path: Path) -> None:
    for folder, problem in ((run_dir.path, "holds no streams"), (tmp_path / "absent", "is no folder")):
        with pytest.raises(FieldError, match=problem):
            async with RunStreams(folder).open():
                pass
    (run_dir.path / "run.json").write_text("[")
    with pytest.raises(FieldError, match=r"its run\.json cannot be read"):
        async with RunStreams(run_dir.path).open():
            pass


def test_half_an_answer_to_where_they_are_is_refused(tmp_path: Path) -> None:
    for given in ({}, {"run_dir": tmp_path, "nats_url": "nats://h"}, {"nats_url": "nats://h"}, {"run": "demo"}):
        with pytest.raises(FieldError):
            RunStreams(**given)  # type: ignore[arg-type]
