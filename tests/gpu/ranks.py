"""What the ranks of a transfer group do, each in a process of its own, and what they say to the test."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from pipelinerl.errors import TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.chunks import describe
from pipelinerl.transfer.group import GroupStore, WeightGroup, on_device
from pipelinerl.transfer.manifest import GroupSpec
from services.actor.weight_sync.worker import Receiver
from services.trainer.weight_sync.sender import WeightSender

VERSION = PolicyVersion(1, 3)
MEET_WITHIN_S = 60.0
STALL_TIMEOUT_S = 5.0
CHUNK_BYTES = 2**22


def weights(device: str) -> dict[str, Tensor]:
    """64 MB that both ends can make: tensors within and across chunks."""
    return {
        f"w{i}": torch.arange(size, dtype=torch.float32, device=device) + i
        for i, size in enumerate([10_000_000, 3, 100_000, 6_000_000])
    }


def connect(store: str, name: str, rank: int, device: str, given_up: threading.Event | None = None) -> WeightGroup:
    torch.cuda.set_device(device)
    spec = GroupSpec(store, name, rank, 2, "nccl")
    return WeightGroup.connect(spec, MEET_WITHIN_S, given_up, on_device(torch.device(device)))


def receiver(group: WeightGroup) -> Receiver:
    manifest = describe(weights("cpu").items(), chunk_bytes=CHUNK_BYTES)
    return Receiver(
        group, manifest, VERSION, timeout_s=MEET_WITHIN_S, stall_timeout_s=STALL_TIMEOUT_S, aborted=threading.Event(), buffers=3
    )


def trainer(said: Connection, device: str, names: list[str]) -> None:
    """Sends one snapshot in each of the groups `names`, and says the checksum or what went wrong."""
    torch.cuda.set_device(device)
    store = GroupStore()
    said.send(store.address)
    parameters = weights(device)
    sender = WeightSender(
        describe(parameters.items(), chunk_bytes=CHUNK_BYTES),
        stall_timeout_s=STALL_TIMEOUT_S,
        placement=on_device(torch.device(device)),
    )
    snapshot = sender.snapshot(VERSION, parameters)
    for tensor in parameters.values():
        tensor.zero_()
    for name in names:
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
    receiving = receiver(group)
    expected = weights(device)
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


def silent_trainer(said: Connection, device: str, name: str) -> None:
    store = GroupStore()
    said.send(store.address)
    group = connect(store.address, name, 0, device)
    said.send("connected")
    said.recv()
    group.close()


def waiting_actor(said: Connection, device: str, store: str, name: str) -> None:
    given_up = threading.Event()
    group = connect(store, name, 1, device, given_up)
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
