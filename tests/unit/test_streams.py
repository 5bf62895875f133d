"""In which order streams copy, send and load: checked without a device, by the clocks of `tests.support.streams`.

Most tests also run without some of the waits that they rest on: then there must be a race.
"""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipelinerl.errors import ManifestMismatch
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.chunks import describe, device_checksum
from pipelinerl.transfer.group import HOST, GroupStore, NcclTransport, WeightGroup
from pipelinerl.transfer.manifest import GroupSpec
from services.actor.weight_sync import worker
from services.actor.weight_sync.worker import Receiver
from services.trainer.checkpoint.state_files import write_state
from services.trainer.weight_sync import sender as sending
from services.trainer.weight_sync.sender import WeightSender
from tests.support.streams import Device, Stream, device_without_hardware
from tests.unit.test_nccl_transport import FakeNccl, nccl
from tests.unit.test_transfer_worker import VERSION, KeepingLoader, engine, meet, send

__all__ = ["nccl"]
NO_WAIT: Callable[..., None] = lambda *_: None  # noqa: E731


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return device_without_hardware(monkeypatch)


@pytest.mark.parametrize("unfit", [False, True], ids=["", "a parameter does not fit"])
@pytest.mark.parametrize("waits", [True, False])
def test_a_snapshot_comes_between_steps(device: Device, waits: bool, unfit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"a": torch.ones(8), "b": torch.ones(8)}
    sender = WeightSender(describe(weights.items()), placement=device.placement("snapshots"))
    if not waits:
        monkeypatch.setattr(Stream, "wait_stream", NO_WAIT)
    with device.on(device.default):
        weights["a"].mul_(2)
        try:
            sender.snapshot(VERSION, weights | {"b": torch.ones(9)} if unfit else weights)
        except ManifestMismatch:
            assert unfit
        weights["a"].mul_(3)
    found = {race.rpartition(" on ")[2] for race in device.races}
    assert found == (set() if waits else {"snapshots does not wait for default", "default does not wait for snapshots"})


class DeviceNccl(FakeNccl):
    """Works on a stream of its own, after the stream of its caller, as torch's does. `wire`: what rank 0 sends."""

    device: Device
    wire: list[Tensor]

    def __init__(self, store: Any, rank: int, world: int, options: Any) -> None:
        super().__init__(store, rank, world, options)
        self.stream, self.rank = Stream(self.device, "nccl"), rank

    def broadcast(self, tensors: list[Tensor], options: Any) -> FakeNccl:
        [tensor] = tensors
        self.stream.wait_stream(self.device.current())
        with self.device.on(self.stream):
            if self.rank == 0:
                self.wire.append(tensor.clone())
            elif self.wire:
                tensor.copy_(self.wire.pop(0))
        return self

    def is_completed(self) -> bool:
        self.stream.synchronize()  # the host sees what the device has done
        return super().is_completed()


def group_of(monkeypatch: pytest.MonkeyPatch, device: Device, rank: int, wire: list[Tensor]) -> WeightGroup:
    class Nccl(DeviceNccl):
        made: list[FakeNccl] = []  # noqa: RUF012 - of one group

    Nccl.device, Nccl.wire = device, wire if rank == 0 else []
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    placement = device.placement(f"group of rank {rank}")
    with device.on(device.default):
        transport = NcclTransport(None, rank, 2, 30.0, placement, threading.Event())  # type: ignore[arg-type]
    Nccl.wire = wire
    return WeightGroup(GroupSpec("", "epoch-1", rank, 2, "nccl"), transport, placement)  # type: ignore[arg-type]


@pytest.mark.parametrize("without", ["", "checksums that wait for the copy", "waits for NCCL"])
@pytest.mark.usefixtures("nccl")
def test_a_snapshot_is_sent_twice_and_received_in_order(device: Device, without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {f"w{i}": torch.arange(i, i + 3000.0) for i in range(5)}
    sender = WeightSender(describe(weights.items(), chunk_bytes=8192), placement=device.placement("snapshots"))
    with device.on(device.default):
        snapshot = sender.snapshot(VERSION, weights)

    def checksum(chunk: Tensor) -> int:
        value = device_checksum(chunk)
        device.current().synchronize()  # as `.cpu()` does of a device's tensor
        return value

    for module in (sending, worker):
        monkeypatch.setattr(module, "checksum", checksum)
    if without.startswith("checksums"):
        monkeypatch.setattr(snapshot, "_placement", HOST)
    wires: list[list[Tensor]] = [[], []]
    for wire in wires:
        group = group_of(monkeypatch, device, 0, wire)
        del wire[:]  # its greeting
        sender.broadcast(snapshot, group, 30.0).result()
    if without.startswith("waits"):
        monkeypatch.setattr(Stream, "synchronize", NO_WAIT)
    receiving = group_of(monkeypatch, device, 1, wires[1])
    aborted = threading.Event()
    receiver = Receiver(receiving, sender.manifest, VERSION, timeout_s=30.0, stall_timeout_s=5.0, aborted=aborted)
    with device.on(device.default):
        received = {name: tensor.clone() for name, tensor in receiver.tensors()}
    assert all(torch.equal(received[name], weights[name]) for name in weights)
    assert bool(device.races) == bool(without)


class CopyingLoader(KeepingLoader):
    """Has one set of tensors beside the live ones, and copies them there, as a loader in place does."""

    def load(self, tensors: Any) -> None:
        for name, tensor in tensors:
            if name in self.loaded:
                self.loaded[name].copy_(tensor)
            else:
                self.loaded[name] = tensor.clone()

    def swap(self) -> None:
        for name, tensor in self.loaded.items():
            self.live.setdefault(name, torch.zeros_like(tensor)).copy_(tensor)

    def drop(self) -> None:
        return


@pytest.mark.parametrize("waits", [True, False])
async def test_decoding_and_loading_meet_when_both_waited(device: Device, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "on_device", lambda _: device.placement("loading"))
    if not waits:
        monkeypatch.setattr(Stream, "synchronize", NO_WAIT)
    store = GroupStore()
    async with engine(CopyingLoader()) as actor:
        group, [serving] = await meet(actor, store), actor.workers
        for number in (4, 5):
            version = PolicyVersion(1, number)
            await asyncio.gather(actor.receive(version), send(group, version))
            serving.check_staged(version)
            with device.on(device.default):  # vLLM's main thread
                serving.swap()
                for tensor in actor.loaders[0].live.values():
                    tensor.sum()
        group.close()
    found = {race.rpartition(" on ")[2] for race in device.races}
    assert found == (set() if waits else {"default does not wait for loading", "loading does not wait for default"})


def test_writing_a_state_uses_no_stream_of_the_first_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: used.append("current_stream"))
    (tmp_path / "state").mkdir()
    write_state({"weight/a": torch.ones(3)}, tmp_path / "state", None)
    assert (tmp_path / "state" / ".metadata").is_file()
    assert used == []
