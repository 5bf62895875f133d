"""`pipelinerl audit` and `pipelinerl dead-letters` as a user types them, of a run with a real nats-server."""

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
from pipelinerl.messages.sequences import DeadLetter, VersionSpan, decode_group, encode_group
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


# pipelinerl dead-letters


FIRST = DeadLetter(
    run="demo", msg_id="g00000007", prompt_group=encode_group(make_group(7, run="demo")), reason="redelivered_too_often",
    deliveries=6, actor="actor-1", at_s=1.7e9,
)  # fmt: skip
SECOND = DeadLetter(
    run="demo", msg_id="g00000008/actor-0-1f", prompt_group=b"\xff\xff", reason="unreadable_group: no\nwire \x1b[2Jformat",
    deliveries=1, actor="actor-0", at_s=1e300,
)  # fmt: skip


@pytest.fixture
async def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    with NatsServer(folder / "nats") as server:
        async with connect(server.url, "demo") as bus:
            await bus.create_streams()
            for number, payload in enumerate((FIRST.SerializeToString(), SECOND.SerializeToString(), b"\x0a\x01x")):
                await bus.publish_dead_letter(payload, f"m{number}")
    return folder


def test_the_table_has_a_line_for_each_and_json_the_whole_of_it(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dead-letters", str(run_dir)]) == 0
    shown = capsys.readouterr()
    heading, first, second = shown.out.splitlines()
    assert heading.split() == ["TIME", "GROUP", "DELIVERIES", "ACTOR", "REASON", "PROMPT"]
    assert first.split() == ["2023-11-14T22:13:20+00:00", "g00000007", "6", "actor-1", "redelivered_too_often", "1+2"]
    assert "g00000008" in second
    assert r"unreadable_group: no wire \x1b[2Jformat" in second
    assert second.endswith("(2 bytes, unreadable)")
    assert "1 messages are not dead letters of this run" in shown.err
    assert main(["dead-letters", str(run_dir), "--json"]) == 0
    one, other = map(json.loads, capsys.readouterr().out.splitlines())
    assert (one["group_id"], one["prompt_token_ids"], one["num_samples"]) == ("g00000007", [1, 2, 3], 2)
    assert (other["msg_id"], other["prompt_group_base64"]) == ("g00000008/actor-0-1f", "//8=")


async def test_in_a_pod_of_the_run_nothing_need_be_named(
    tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streams in a folder that has them come first; the run of another folder is asked for by its name."""
    with NatsServer(tmp_path / "nats") as server:
        async with connect(server.url, "demo") as bus:
            await bus.create_streams()
        monkeypatch.setenv("PIPELINERL_NATS_URL", server.url)
        monkeypatch.setenv("PIPELINERL_RUN", "demo")
        elsewhere = tmp_path / "runs" / "demo"
        elsewhere.mkdir(parents=True)
        for arguments, said in (([], "no prompt group"), ([str(elsewhere)], "no prompt group"), ([str(run_dir)], "1 mess")):
            assert await asyncio.to_thread(main, ["dead-letters", *arguments]) == 0
            assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give the folder of a run, or --nats URL --run NAME"),
        (["RUN", "--nats", "nats://h", "--run", "demo"], "give the folder of a run, or --nats URL --run NAME"),
        (["RUN"], "holds no streams"),
        (["RUN/broken"], "its run.json does not name the run"),
    ],
)
def test_a_place_must_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("[")
    (tmp_path / "run.json").write_text('{"run": "demo"}')
    (tmp_path / "lineage.json").touch()
    assert main(["dead-letters", *(part.replace("RUN", str(tmp_path)) for part in arguments)]) == 2
    assert said in capsys.readouterr().err
