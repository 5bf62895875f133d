"""Who may do what on a run's NATS, as lists. What they let through is tested against a real server in tests/contract."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipelinerl.bus.permissions import (
    Permissions,
    inbox_prefix,
    main,
    permissions,
)
from pipelinerl.errors import FieldError


def test_an_actor_may_do_this_and_no_more() -> None:
    assert permissions("demo")["actor"] == Permissions(
        publish=(
            "demo.sequences",
            "demo.prompts",
            "demo.dead",
            "demo.control.joined.*",
            "demo.control.staged.*",
            "demo.control.serving.*",
            "demo.control.failed.*",
            "$KV.members-demo.*",
            "$JS.API.CONSUMER.MSG.NEXT.PROMPTS_demo.actors",
            "$JS.ACK.PROMPTS_demo.actors.>",
            "$JS.ACK.*.*.PROMPTS_demo.actors.>",
            "$JS.API.STREAM.INFO.PROMPTS_demo",
            "$JS.API.STREAM.INFO.SEQUENCES_demo",
            "$JS.API.STREAM.INFO.DEAD_demo",
            "$JS.API.CONSUMER.CREATE.CONTROL_demo",
            "$JS.API.CONSUMER.MSG.NEXT.CONTROL_demo.*",
            "$JS.API.CONSUMER.DELETE.CONTROL_demo.*",
        ),
        subscribe=("_INBOX_actor.>",),
    )


def test_the_trainer_deletes_no_stream_and_speaks_in_no_actors_name() -> None:
    allowed = permissions("demo")["trainer"]
    assert allowed.subscribe == ("_INBOX_trainer.>",)
    assert not [subject for subject in allowed.publish if "STREAM.DELETE" in subject or "STREAM.UPDATE" in subject]
    assert not {"demo.sequences", "demo.dead", "demo.control.>"} & set(allowed.publish)
    assert [subject for subject in allowed.publish if subject.startswith("demo.control.commit")] == [
        "demo.control.commit",
        "demo.control.commit.*",
    ]
    assert not [subject for subject in allowed.publish if ">" in subject]


def test_lists_are_stable_and_without_doubles() -> None:
    for user, allowed in permissions("a-run").items():
        assert permissions("a-run")[user] == allowed
        assert len(set(allowed.publish)) == len(allowed.publish)


def test_runs_share_no_subject_but_those_of_the_account() -> None:
    for user in ("trainer", "actor"):
        shared = set(permissions("one")[user].publish) & set(permissions("two")[user].publish)
        assert shared == ({"$JS.API.INFO"} if user == "trainer" else set())


def allowed_by(block: dict[str, Any]) -> dict[str, Permissions]:
    """By user, as nats-server reads an `authorization` block."""
    return {
        user["user"]: Permissions(*(tuple(user["permissions"][side]) for side in ("publish", "subscribe")))
        for user in block["users"]
    }


def test_a_name_that_no_run_can_have_is_refused() -> None:
    with pytest.raises(FieldError, match="run"):
        permissions("a.b")


@pytest.mark.parametrize(
    ("user", "prefix"), [("actor", "_INBOX_actor"), ("", "_INBOX"), ("a.b", "_INBOX"), (">", "_INBOX")]
)
def test_answers_go_to_a_place_of_the_users_own(user: str, prefix: str) -> None:
    assert inbox_prefix(user) == prefix


def test_the_command_prints_users_for_nats_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["permissions", "demo"])
    assert main() == 0
    assert allowed_by(json.loads(capsys.readouterr().out)["authorization"]) == permissions("demo")


def test_the_command_refuses_a_name_that_no_run_can_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["permissions", "RUN"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "run = 'RUN': use 1-40 lowercase letters" in capsys.readouterr().err
