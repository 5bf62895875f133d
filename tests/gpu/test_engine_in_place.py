"""A real vLLM engine with CUDA graphs: its weights are changed in place while it generates, by Gloo and by NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipelinerl.messages.control import Backend
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.group import HOST, on_device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
GPU_TOLERANCE = 2e-3
"""Nats: float32 on the device against float32 on the host."""


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
async def test_weights_change_in_place_under_cuda_graphs(
    backend: Backend, tied: bool, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    parity = pytest.importorskip("tests.support.parity")
    monkeypatch.setattr(parity, "TOLERANCE", GPU_TOLERANCE)
    if backend == "nccl":
        request.getfixturevalue("two_ranks")
    placement = on_device(torch.device("cuda:0")) if backend == "nccl" else HOST
    changes = {"enforce_eager": False, "gpu_memory_utilization": 0.3}
    v = [PolicyVersion(1, number) for number in range(5)]
    async with parity.running("llama", tied, tmp_path, backend=backend, placement=placement, **changes) as run:
        await run.label(v[0])
        await parity.check_refusals(run, tied)
        await run.connect()
        assert run.loading[-1].mode == "in_place", run.loading[-1].reason
        await parity.check_switch(run, v[0], v[1], recompute=False)
        await parity.check_switch(run, v[1], v[2], recompute=False)
        await parity.check_uncommitted(run, v[2], v[3])
        await parity.check_abandoned_transfer(run, v[4])
