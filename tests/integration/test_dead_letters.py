"""`pipelinerl dead-letters`, on what an actor has given up."""

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.nats_server import NatsServer
from pipelinerl.bus.jetstream import connect
from pipelinerl.cli import main
from pipelinerl.messages.sequences import DeadLetter, encode_group
from tests.unit.builders import make_group

LETTERS = (
    DeadLetter(
        run="demo",
        msg_id="g00000007",
        prompt_group=encode_group(make_group(7, run="demo")),
        reason="redelivered_too_often",
        deliveries=6,
        actor="actor-1",
        at_s=1.7e9,
    ),
    DeadLetter(
        run="demo",
        msg_id="g00000008/actor-0-1f",
        prompt_group=b"\xff\xff",
        reason="unreadable_group: no\nwire \x1b[2Jformat",
        deliveries=1,
        actor="actor-0",
        at_s=1e300,
    ),
)


async def store(server: NatsServer, *payloads: bytes) -> None:
    async with connect(server.url, "demo") as bus:
        await bus.create_streams()
        for number, payload in enumerate(payloads):
            await bus.publish_dead_letter(payload, f"m{number}")


@pytest.fixture
async def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    with NatsServer(folder / "nats") as server:
        await store(server, *(letter.SerializeToString() for letter in LETTERS), b"\x0a\x01x")
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


async def test_a_server_without_dead_letters_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with NatsServer(tmp_path) as server:
        await store(server)
        arguments = ["dead-letters", "--nats", server.url, "--run", "demo"]
        assert await asyncio.to_thread(main, arguments) == 0
    assert capsys.readouterr() == ("", "no prompt group was given up\n")


async def test_in_a_pod_of_the_run_nothing_need_be_named(
    tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The streams in a folder that has them come first; the run of another folder is asked for by its name."""
    with NatsServer(tmp_path / "nats") as server:
        await store(server)
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
        (["--nats", "nats://h"], "--run = ''"),
        (["RUN"], "holds no streams"),
        (["RUN/absent"], "there is no such folder"),
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
