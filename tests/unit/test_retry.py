"""What a publisher does while the bus is away."""

from __future__ import annotations

import logging

import pytest

from pipelinerl.errors import BusError, PayloadTooLarge
from pipelinerl.service.retry import retry_forever


class Flaky:
    """Fails as often as there are errors, then answers 7."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    async def __call__(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return 7


async def test_tries_until_it_is_taken_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    attempt = Flaky(*[BusError("away")] * 3)
    with caplog.at_level(logging.INFO):
        assert await retry_forever(attempt, "publish x", first_s=0.001) == 7
    assert attempt.calls == 4
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert caplog.messages[0] == "cannot publish x, trying again until it works: away"


async def test_another_reason_for_waiting_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    away, full = BusError("away"), BusError("insufficient storage")
    assert await retry_forever(Flaky(away, away, full, full), "make the streams", first_s=0.001) == 7
    assert [message.rpartition(": ")[2] for message in caplog.messages] == ["away", "insufficient storage"]


@pytest.mark.parametrize("error", [PayloadTooLarge("s", 2, 1), ValueError("ours")])
async def test_what_no_patience_cures_is_raised_at_once(error: Exception) -> None:
    attempt = Flaky(error)
    with pytest.raises(type(error)):
        await retry_forever(attempt, "publish x")
    assert attempt.calls == 1
