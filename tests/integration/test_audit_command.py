"""`pipelinerl audit` as a user types it, of a run with a real nats-server: while it goes on, and when it does not."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.nats_server import NatsServer
from pipelinerl.bus.jetstream import Bus, connect
from pipelinerl.bus.permissions import ACTOR, ADMIN, TRAINER
from pipelinerl.cli import main
from pipelinerl.messages.sequences import VersionSpan, decode_group
from pipelinerl.run_dir import RunDir, write_json
from tests.support.guarded_nats import RolesBus
from tests.unit.builders import RUN, make_group
from tests.unit.test_trainer_resume import RECIPE, Life, publish, roll_back


@asynccontextmanager
async def run_that_goes_on(folder: Path) -> AsyncIterator[tuple[Life, Bus, str]]:
    """One version trained, a checkpoint, sequences in the log and groups on the queue; the journal is on disk."""
    run = RunDir(folder, RUN)
    (folder / "addresses").mkdir(parents=True)
    write_json(run.identity, {"run": RUN, "recipe": "unit", "started": "2026-03-04T05:06:07+00:00"})
    with NatsServer(run.nats_store, extra=run.credentials.make(RUN)) as server:
        async with connect(server.url, RUN, credentials=run.credentials.nats(ADMIN), tls_dir=run.credentials.tls_dir) as bus:
            write_json(run.address("nats"), {"url": server.url})
            write_json(run.pids, {"nats": server.pid, "trainer": server.pid})  # both of this folder, and alive
            await bus.create_streams()
            one = Life(folder, bus, RECIPE)  # type: ignore[arg-type]
            try:
                await one.begin()
                await one.idle()
                for _ in range(2):
                    await answer(one, bus)
                await one.idle()
                assert await one.step()
                await one.checkpoint()
                await answer(one, bus)
                await one.idle()
                one.journal.flush()
                yield one, bus, server.url
            finally:
                await one.die()


async def answer(one: Life, bus: Bus) -> None:
    delivery = await bus.next_prompt(timeout_s=10)
    group = decode_group(delivery.payload)
    for index in range(group.num_samples):
        await publish(bus, group, index, VersionSpan(one.version, 0, 2, 1))  # type: ignore[arg-type]
    await delivery.ack()


Audit = Callable[..., Awaitable[tuple[int, str]]]


@pytest.fixture
def audit(capsys: pytest.CaptureFixture[str]) -> Audit:
    """`audit(folder, *options)`: the command's exit code and all that it printed."""

    async def run(folder: Path, *options: str) -> tuple[int, str]:
        capsys.readouterr()
        code = await asyncio.to_thread(main, ["audit", str(folder), *options])
        return code, "".join(capsys.readouterr())

    return run


async def told(audit: Audit, folder: Path, *options: str) -> dict[str, Any]:
    return dict(json.loads((await audit(folder, "--json", *options))[1]))


async def test_a_run_that_goes_on_and_when_it_has_stopped(tmp_path: Path, audit: Audit) -> None:
    folder = tmp_path / "run"
    async with run_that_goes_on(folder) as (one, _, url):
        code, said = await audit(folder)
        assert code == 0, said
        assert "unit: goes on, 1 start, version 1" in said
        counts = one.tracker.ledger.counts
        assert f"issued {counts['issued']} = trained 4 + dropped stale 0" in said
        assert "SEQUENCES holds 6 messages, positions 1 to 6; a restart needs none up to 4" in said
        own = RunDir(folder, RUN).credentials
        login = ("--credentials", str(own.nats(ADMIN)), "--tls-dir", str(own.tls_dir))
        elsewhere = await told(audit, folder, "--nats", url, *login)
        assert (elsewhere["ok"], elsewhere["streams"]["messages"]) == (True, 6)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    code, said = await audit(folder, "--versions")
    assert code == 0, said
    assert "stopped before its end" in said
    assert "version 1: 4" in said
    assert "SEQUENCES holds 6 messages" in said
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


async def test_a_rolled_back_run_goes_on_with_a_server_that_kept_running(tmp_path: Path, audit: Audit) -> None:
    """As in a cluster: the folder has no streams, and the server still knows the ids of the sequences that come again."""
    async with run_that_goes_on(tmp_path / "first") as (one, _, url):
        own = RunDir(tmp_path / "first", RUN).credentials
        for task in one.tasks:
            task.cancel()
        folder = tmp_path / "claim"
        folder.mkdir()
        for name in ("ledger.jsonl", "lineage.json", "recipe.yaml", "group-key.json"):
            shutil.copy(one.run_dir / name, folder)
        shutil.copytree(one.run_dir / "checkpoints", folder / "checkpoints")
        roll_back(folder, 0)
        login = ("--nats", url, "--credentials", str(own.nats(ADMIN)), "--tls-dir", str(own.tls_dir))
        code, said = await audit(folder, *login)
        assert code == 0, said
        async with (
            connect(url, RUN, credentials=own.nats(TRAINER), tls_dir=own.tls_dir) as trainer,
            connect(url, RUN, credentials=own.nats(ACTOR), tls_dir=own.tls_dir) as actor,
        ):
            bus: Any = RolesBus(trainer, actor, trainer)
            again = Life(folder, bus, RECIPE)
            try:
                await again.begin()
                assert again.version == 0
                for _ in range(2):
                    await answer(again, bus)
                await again.idle()
                assert await again.step() == ["g00000000", "g00000001"]
            finally:
                await again.die()
        code, said = await audit(folder, *login)
        assert code == 0, said


async def test_what_does_not_add_up_exits_1(tmp_path: Path, audit: Audit) -> None:
    folder = tmp_path / "run"
    async with run_that_goes_on(folder) as (_, bus, _url):
        await publish(bus, make_group(77), 0, VersionSpan(1, 0, 2, 1))  # type: ignore[arg-type]
        code, said = await audit(folder)
        assert code == 1
        assert "FAILED  SEQUENCES holds no sequence that was never issued: 1\n            g00000077.0" in said
    assert (await told(audit, folder))["ok"] is False


async def test_only_streams_of_no_trainer_may_be_missing(tmp_path: Path, audit: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped before its trainer started adds up; streams that are gone, or a server that is silent, do not."""
    run = RunDir(tmp_path, RUN)
    write_json(run.identity, {"run": RUN})
    with NatsServer(run.nats_store):
        pass
    code, said = await audit(tmp_path)
    assert (code, "unit: no trainer has started, 0 starts" in said) == (0, True), said
    assert "-       every sequence in flight can be found: no trainer has started" in said
    assert await asyncio.to_thread(main, ["dead-letters", str(tmp_path)]) == 0
    write_json(tmp_path / "lineage.json", {"run": RUN, "starts": [0]})
    code, said = await audit(tmp_path)
    assert (code, "the streams cannot be read: looking at PROMPTS_unit" in said) == (1, True), said
    assert await asyncio.to_thread(main, ["dead-letters", str(tmp_path)]) == 1
    (tmp_path / "lineage.json").unlink()
    monkeypatch.setattr("pipelinerl.bus.jetstream.connect", partial(connect, connect_timeout_s=0.2))
    code, said = await audit(tmp_path, "--nats", "nats://127.0.0.1:1")
    assert (code, "the streams cannot be read: cannot connect to NATS" in said) == (1, True)
