"""Retrying what can heal: outages are waited for, mistakes raise at once."""

import logging

import pytest

from pipelinerl.errors import BusError, NotPermitted, PayloadTooLarge
from pipelinerl.service.retry import MOST_REASONS, Backoff, retry_forever

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


async def test_reasons_that_never_repeat_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    ever_new = [BusError(f"port {port}") for port in range(2 * MOST_REASONS)]
    assert await retry_forever(Flaky(*ever_new), "publish x", backoff=Backoff(first_s=0.001, most_s=0.001)) == 7
    assert len(caplog.records) == MOST_REASONS


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
