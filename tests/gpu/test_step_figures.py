"""Phases and memory of a step as the device tells them, without the host waiting for it."""

from __future__ import annotations

import pytest
import torch

from services.trainer.learn.meter import PhaseTimer, mark_for, take_memory_peak

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
LONG = 2_000_000_000
"""Cycles: about a second."""


def test_a_phase_is_the_devices_time_and_the_host_does_not_wait() -> None:
    timer = PhaseTimer(mark_for(torch.device("cuda")))
    with timer.measure("optimizer"):
        torch.cuda._sleep(LONG)
    assert timer.take() == {}
    torch.cuda.synchronize()
    assert timer.take()["optimizer"] > 0.2


def test_the_peak_of_memory_is_that_since_it_was_last_asked() -> None:
    device = torch.device("cuda")
    take_memory_peak(device)
    held = torch.ones(2**28, dtype=torch.uint8, device="cuda")
    del held
    assert take_memory_peak(device) >= 2**28
    assert take_memory_peak(device) < 2**28
