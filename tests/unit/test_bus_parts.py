"""Parts of the bus without a server: who may do what, addresses without logins, retries of what can heal.

What the permissions let through and refuse is tested against a real server in tests/contract and
tests/integration/test_nats_permissions.py."""

import json
import logging

import pytest

from pipelinerl.bus.link import redacted
from pipelinerl.bus.permissions import inbox_prefix, main, permissions
from pipelinerl.errors import BusError, FieldError, NotPermitted, PayloadTooLarge
from pipelinerl.service.retry import Backoff, retry_forever


def test_runs_share_no_subject_but_those_of_the_account() -> None:
    for user, shared in (("trainer", {"$JS.API.INFO"}), ("actor", set())):
        assert set(permissions("one")[user]["publish"]) & set(permissions("two")[user]["publish"]) == shared


@pytest.mark.parametrize(("user", "prefix"), [("actor", "_INBOX_actor"), ("", "_INBOX"), ("a.b", "_INBOX"), (">", "_INBOX")])
def test_answers_go_to_a_place_of_the_users_own(user: str, prefix: str) -> None:
    assert inbox_prefix(user) == prefix


def test_users_of_several_runs_have_the_permissions_of_one_and_their_runs_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    several = permissions("one", "two")
    assert list(several) == ["one-trainer", "one-actor", "two-trainer", "two-actor", "admin"]
    assert several["two-actor"]["publish"] == permissions("two")["actor"]["publish"]
    assert several["two-actor"]["subscribe"] == ["_INBOX_two-actor.>"]
    monkeypatch.setattr("sys.argv", ["permissions", "one", "two"])
    assert main() == 0
    users = json.loads(capsys.readouterr().out)["authorization"]["users"]
    assert {user["user"]: user["permissions"] for user in users} == several


def test_a_name_that_no_run_can_have_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FieldError, match="run"):
        permissions("a.b")
    monkeypatch.setattr("sys.argv", ["permissions", "RUN"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "run = 'RUN': use 1-40 lowercase letters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("urls", "shown"),
    [
        ("nats://host:4222", "nats://host:4222"),
        ("nats://user:secret@host:4222", "nats://***@host:4222"),
        ("nats://token@host", "nats://***@host"),
        ("user:secret@host", "***@host"),
        ("nats://user:sec://ret@host", "nats://***@host"),
        ("nats://user:sec,ret@host", "nats://***@host"),
        ("nats://a,nats://user:secret@b,tls://user:sec@ret@c", "nats://a,nats://***@b,tls://***@c"),
        ("nats://user:secret@a,NATS://user:sec/ret@b", "nats://***@a,NATS://***@b"),
        ("nats://user:secret@a,user:secret@b", "nats://***@b"),
        ("user:sec@ret://x@host", "***@host"),
    ],
)
def test_no_part_of_a_login_is_shown(urls: str, shown: str) -> None:
    assert redacted(urls) == shown


SOON = Backoff(first_s=0.001)


class Flaky:
    """Fails as often as there are errors, then answers 7."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    async def __call__(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return 7


async def test_tries_until_it_is_taken_and_tells_each_reason_once(caplog: pytest.LogCaptureFixture) -> None:
    attempt = Flaky(*[BusError("away"), BusError("away"), BusError("insufficient storage")] * 3)
    with caplog.at_level(logging.INFO):
        assert await retry_forever(attempt, "publish x", backoff=SOON, level=logging.ERROR) == 7
    assert attempt.calls == 10
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "INFO"]
    assert caplog.messages[:2] == [f"cannot publish x, trying again: {why}" for why in ("away", "insufficient storage")]


@pytest.mark.parametrize("error", [PayloadTooLarge("s", 2, 1), NotPermitted("actor", "s"), ValueError("ours")])
async def test_what_no_patience_cures_is_raised_at_once(error: Exception) -> None:
    attempt = Flaky(error)
    with pytest.raises(type(error)):
        await retry_forever(attempt, "publish x")
    assert attempt.calls == 1


async def test_the_caller_says_what_is_retried() -> None:
    late, wrong = TimeoutError("late"), TimeoutError("wrong")
    with pytest.raises(TimeoutError, match="wrong"):
        await retry_forever(Flaky(late, wrong), "ask", retried=lambda error: error is late, backoff=SOON)


def test_delays_double_up_to_a_bound_and_jitter_only_shortens_them() -> None:
    steady = Backoff(first_s=0.1, most_s=0.5)
    assert [steady.delay_s(failures) for failures in (1, 2, 3, 4, 5000)] == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5])
    jittered = Backoff(first_s=1.0, most_s=1.0, jitter=0.5)
    assert all(0.5 <= jittered.delay_s(1) <= 1.0 for _ in range(100))
