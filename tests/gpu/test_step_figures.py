"""Phases and memory of a step as the device tells them, without the host waiting for it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from services.trainer.learn.meter import PhaseTimer, StepMeter, mark_for

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
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=2)).cuda()  # fmt: skip
    meter = StepMeter(model)
    meter.take_memory_peak()
    held = torch.ones(2**28, dtype=torch.uint8, device="cuda")
    del held
    assert meter.take_memory_peak() >= 2**28
    assert meter.take_memory_peak() < 2**28
