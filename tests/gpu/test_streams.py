"""In which order a device copies, computes and checks: nobody waits who need not, nobody reads too early."""

from __future__ import annotations

import pytest
import torch

from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.chunks import checksum, describe, device_checksum, pack
from pipelinerl.transfer.delta import encode_anchor, encode_delta
from pipelinerl.transfer.group import HOST, on_device
from services.trainer.weight_sync.sender import WeightSender

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
LONG = 2_000_000_000
"""Cycles: about a second."""


def test_checksum_on_the_device_is_what_torch_computes_on_the_host() -> None:
    for num_bytes in (64, 8192, 2**20 + 64, 2**26):
        chunk = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
        assert checksum(chunk.cuda()) == device_checksum(chunk)


def test_snapshot_is_of_the_weights_before_the_next_step_and_the_host_does_not_wait() -> None:
    weights = {"w": torch.ones(1_000_000, device="cuda")}
    sender = WeightSender(describe(weights.items()), placement=on_device(torch.device("cuda:0")))
    sender.snapshot(PolicyVersion(1, 0), {"w": weights["w"].mul_(1)})  # a kernel is loaded at its first use
    torch.cuda.synchronize()

    torch.cuda._sleep(LONG)  # the optimizer step that makes this version
    weights["w"].mul_(2)
    snapshot = sender.snapshot(PolicyVersion(1, 1), weights)
    weights["w"].mul_(10)  # the next one
    assert not torch.cuda.current_stream().query()

    torch.cuda.synchronize()
    assert snapshot.stream.view(torch.float32)[:1_000_000].eq(2).all()


def test_decoding_does_not_wait_for_what_is_loaded_beside_it() -> None:
    placement = on_device(torch.device("cuda:0"))
    torch.ones(10, device="cuda").sum().item()  # a kernel is loaded at its first use
    torch.cuda.synchronize()
    with placement.scope():
        torch.cuda._sleep(LONG)
    torch.ones(10, device="cuda").sum().item()
    assert not placement.stream.query()
    torch.cuda.synchronize()


def test_the_weight_log_writes_what_a_device_holds_as_what_the_host_holds() -> None:
    weights = {"w": torch.randn(300_000, dtype=torch.bfloat16), "v": torch.randn(1000)}
    manifest, placement = describe(weights.items()), on_device(torch.device("cuda:0"))
    before, after, old = PolicyVersion(1, 0), PolicyVersion(1, 1), pack(manifest, weights)
    for share in (0.0, 0.01, 0.2, 0.6):
        changed = torch.rand(old.shape) < share
        new = torch.where(changed, torch.randint(0, 256, old.shape, dtype=torch.uint8), old)
        here, there = (old, new), (old.cuda(), new.cuda())
        parts = [*encode_delta(manifest, before, after, *here), *encode_anchor(manifest, after, new)]
        on_gpu = [
            *encode_delta(manifest, before, after, *there, placement),
            *encode_anchor(manifest, after, there[1], placement),
        ]
        assert list(map(bytes, on_gpu)) == list(map(bytes, parts))


def test_a_model_on_the_host_has_no_stream() -> None:
    assert on_device(torch.device("cpu")) is HOST
