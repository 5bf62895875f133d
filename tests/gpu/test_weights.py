"""Weights on devices: copied in order, sent by NCCL between processes of which one may die, and changed in a running engine.

In which order a device copies, computes and checks: nobody waits who need not, nobody reads too early.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

from pipelinerl.errors import TransferError
from pipelinerl.messages.control import Backend
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.service.settings import split_host_port
from pipelinerl.transfer.chunks import checksum, describe, device_checksum, pack
from pipelinerl.transfer.delta import encode_anchor, encode_delta
from pipelinerl.transfer.group import HOST, GroupStore, WeightGroup, on_device
from pipelinerl.transfer.manifest import GroupSpec
from services.actor.weight_sync.worker import Receiver
from services.trainer.weight_sync.sender import WeightSender

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
LONG = 2_000_000_000
"""Cycles: about a second."""
GPU_TOLERANCE = 2e-3
"""Nats: float32 on the device against float32 on the host."""
VERSION = PolicyVersion(1, 3)
EPOCHS = ["epoch-1", "epoch-2"]
MEET_WITHIN_S = 60.0
STALL_TIMEOUT_S = 5.0
CHUNK_BYTES = 2**22


def weights(device: str) -> dict[str, Tensor]:
    """64 MB that both ends can make: tensors within and across chunks."""
    sizes = [10_000_000, 3, 100_000, 6_000_000]
    return {f"w{i}": torch.arange(size, dtype=torch.float32, device=device) + i for i, size in enumerate(sizes)}


def connect(store: str, name: str, rank: int, device: str, given_up: threading.Event | None = None) -> WeightGroup:
    torch.cuda.set_device(device)
    spec = GroupSpec(store, name, rank, 2, "nccl")
    return WeightGroup.connect(spec, MEET_WITHIN_S, given_up, on_device(torch.device(device)))


def receiver(group: WeightGroup) -> Receiver:
    manifest = describe(weights("cpu").items(), chunk_bytes=CHUNK_BYTES)
    limits = {"timeout_s": MEET_WITHIN_S, "stall_timeout_s": STALL_TIMEOUT_S}
    return Receiver(group, manifest, VERSION, aborted=threading.Event(), buffers=3, **limits)


def trainer(said: Connection, device: str) -> None:
    """Sends one snapshot in a group of each epoch, and says the checksum or what went wrong."""
    torch.cuda.set_device(device)
    store, parameters = GroupStore(), weights(device)
    said.send(store.address)
    manifest, placement = describe(parameters.items(), chunk_bytes=CHUNK_BYTES), on_device(torch.device(device))
    sender = WeightSender(manifest, stall_timeout_s=STALL_TIMEOUT_S, placement=placement)
    snapshot = sender.snapshot(VERSION, parameters)
    for tensor in parameters.values():
        tensor.zero_()
    for name in EPOCHS:
        try:
            group = connect(store.address, name, 0, device)
            said.send(sender.broadcast(snapshot, group, MEET_WITHIN_S).result().checksum)
            group.close()
        except TransferError as error:
            said.send(type(error).__name__)
    said.recv()  # the store lives until the test has seen everything


def actor(said: Connection, device: str, store: str, name: str) -> None:
    """Receives, compares with what should come, and says the checksum."""
    group = connect(store, name, 1, device)
    receiving, expected = receiver(group), weights(device)
    for parameter, tensor in receiving.tensors():
        assert tensor.device == torch.device(device)
        assert torch.equal(tensor, expected[parameter]), parameter
    said.send(receiving.staged().checksum)
    said.recv()
    group.close()


def halting_actor(said: Connection, device: str, store: str, name: str) -> None:
    """Takes one tensor's chunks, says so and stops."""
    receiving = receiver(connect(store, name, 1, device))
    next(receiving.tensors())
    said.send("halted")
    threading.Event().wait()


def silent_trainer(said: Connection, device: str) -> None:
    store = GroupStore()
    said.send(store.address)
    group = connect(store.address, EPOCHS[0], 0, device)
    said.send("connected")
    said.recv()
    group.close()


def waiting_actor(said: Connection, device: str, store: str) -> None:
    given_up = threading.Event()
    group = connect(store, EPOCHS[0], 1, device, given_up)
    threading.Thread(target=lambda: (said.recv(), given_up.set()), daemon=True).start()
    said.send("waiting")
    try:
        group.broadcast(torch.zeros(1000, device=device), 600.0)
    except TransferError as error:
        group.close()
        said.send(type(error).__name__)


@contextmanager
def rank(role: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """A process that plays `role`, and this end of what it says. Killed at the block's end if it still runs."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=role, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def heard(said: Connection, within_s: float = 120.0) -> Any:
    """The next thing said. Raises AssertionError when there is none in time; EOFError when the process has ended."""
    assert said.poll(within_s), f"nothing within {within_s} s"
    return said.recv()


def test_snapshot_arrives_on_the_other_device_with_the_senders_checksum(two_ranks) -> None:
    first, second = two_ranks
    with rank(trainer, first) as (_, sending):
        store = heard(sending)
        for epoch in EPOCHS:
            with rank(actor, second, store, epoch) as (_, receiving):
                assert heard(receiving) == heard(sending)


@pytest.mark.parametrize("how", ["killed while it receives", "dead between checking in and connecting"])
def test_a_peer_that_dies_ends_a_broadcast_within_the_deadline_and_the_next_group_works(how: str, two_ranks) -> None:
    first, second = two_ranks
    with rank(trainer, first) as (_, sending):
        store = heard(sending)
        if how.startswith("killed"):
            with rank(halting_actor, second, store, EPOCHS[0]) as (process, halting):
                assert heard(halting) == "halted"
                process.kill()
                assert heard(sending, 4 * STALL_TIMEOUT_S) in ("GroupFailed", "DeadlineExceeded")
        else:
            TCPStore("127.0.0.1", split_host_port(store)[1], is_master=False).set("epoch-1/here/1", '["", 0]')
            assert heard(sending, 3 * MEET_WITHIN_S) in ("GroupFailed", "DeadlineExceeded")
        with rank(actor, second, store, EPOCHS[1]) as (_, receiving):
            assert heard(receiving) == heard(sending)


def test_giving_up_ends_a_receive_at_once(two_ranks) -> None:
    first, second = two_ranks
    with rank(silent_trainer, first) as (_, silent), rank(waiting_actor, second, heard(silent)) as (_, waiting):
        assert (heard(silent), heard(waiting)) == ("connected", "waiting")
        waiting.send("give up")
        assert heard(waiting, 30) == "TransferAborted"


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
        on_gpu = list(encode_delta(manifest, before, after, *there, placement))
        on_gpu += encode_anchor(manifest, after, there[1], placement)
        assert list(map(bytes, on_gpu)) == list(map(bytes, parts))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
async def test_weights_of_an_engine_change_in_place_under_cuda_graphs(
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
