"""Who may do what on a run's NATS, as lists. What they let through and refuse is tested against a real server in
tests/contract and tests/integration/test_nats_permissions.py."""

import json

import pytest

from pipelinerl.bus.permissions import inbox_prefix, main, permissions
from pipelinerl.errors import FieldError


def test_runs_share_no_subject_but_those_of_the_account() -> None:
    for user, shared in (("trainer", {"$JS.API.INFO"}), ("actor", set())):
        assert set(permissions("one")[user]["publish"]) & set(permissions("two")[user]["publish"]) == shared


@pytest.mark.parametrize(("user", "prefix"), [("actor", "_INBOX_actor"), ("", "_INBOX"), ("a.b", "_INBOX"), (">", "_INBOX")])
def test_answers_go_to_a_place_of_the_users_own(user: str, prefix: str) -> None:
    assert inbox_prefix(user) == prefix


@pytest.mark.parametrize("runs", [("demo",), ("one", "two")])
def test_the_command_prints_users_for_nats_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, runs: tuple[str, ...]
) -> None:
    monkeypatch.setattr("sys.argv", ["permissions", *runs])
    assert main() == 0
    users = json.loads(capsys.readouterr().out)["authorization"]["users"]
    assert {user["user"]: user["permissions"] for user in users} == permissions(*runs)


def test_users_of_several_runs_have_the_permissions_of_one_and_their_runs_name() -> None:
    several = permissions("one", "two")
    assert list(several) == ["one-trainer", "one-actor", "two-trainer", "two-actor", "admin"]
    assert several["two-actor"]["publish"] == permissions("two")["actor"]["publish"]
    assert several["two-actor"]["subscribe"] == ["_INBOX_two-actor.>"]


def test_a_name_that_no_run_can_have_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FieldError, match="run"):
        permissions("a.b")
    monkeypatch.setattr("sys.argv", ["permissions", "RUN"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "run = 'RUN': use 1-40 lowercase letters" in capsys.readouterr().err
