"""A trainer's sending end and a receiver without an engine, each in a process of its own, for the weight-update benchmark.

Both answer commands over a pipe. What is compared: the product's `WeightSender` and `Receiver` (headers, checksums, memory
of its own for each chunk), and a bare `ProcessGroupGloo` that broadcasts the same bytes in pieces of a chunk's size. It does
not train, and what it receives is dropped.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.service.settings import split_host_port
from pipelinerl.transfer.chunks import ReusedMemory, checksum, chunk_of, version_checksum
from pipelinerl.transfer.group import GroupStore, WeightGroup
from pipelinerl.transfer.manifest import GroupSpec, Manifest
from services.actor.weight_sync.worker import Receiver
from services.trainer.weight_sync.sender import WeightSender

HOST = "127.0.0.1"
TIMEOUT_S = 120.0
BUFFERS = 2
"""As by default in a recipe."""


@dataclass(frozen=True)
class Moved:
    """One version through one end. Monotonic seconds; `snapshot_s` is the trainer's copy before the first byte."""

    began_s: float
    ended_s: float
    checksum: int = 0
    snapshot_s: float = 0.0


class Peer:
    """Common to both ends: rank, groups by name, the bare broadcast. Commands are its methods' names."""

    _stream: torch.Tensor
    """What the bare broadcast sends or fills: uint8[total_bytes]."""

    def __init__(self, manifest: Manifest, rank: int, store: str, world: int, host: str) -> None:
        self._manifest, self._rank, self._where, self._world, self._host = manifest, rank, store, world, host
        self._group: WeightGroup | None = None
        self._bare: Any = None

    def join(self, name: str) -> None:
        """The product's group."""
        spec = GroupSpec(self._where, name, self._rank, self._world, "gloo", self._host)
        self._group = WeightGroup.connect(spec, TIMEOUT_S)

    def join_bare(self, name: str) -> None:
        store = TCPStore(*split_host_port(self._where), is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=TIMEOUT_S)
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
        self._bare = gloo(PrefixStore(name, store), self._rank, self._world, options)

    def bare(self) -> Moved:
        """A broadcast of all chunks, one after another, out of and into memory that is there already."""
        pieces = self._stream.split(self._manifest.chunk_bytes)
        began_s = time.monotonic()
        for piece in pieces:
            self._bare.broadcast(piece, 0).wait()
        return Moved(began_s, time.monotonic())


class SendingPeer(Peer):
    """Rank 0. Hosts the store."""

    def __init__(self, manifest: Manifest, world: int = 2, host: str = HOST) -> None:
        self._store = GroupStore(host)
        super().__init__(manifest, 0, self._store.address, world, host)
        self._sender = WeightSender(manifest, stall_timeout_s=TIMEOUT_S)
        generator = torch.Generator().manual_seed(0)
        self._weights = {
            spec.name: torch.empty(tuple(spec.shape), dtype=getattr(torch, spec.dtype)).normal_(0, 0.02, generator=generator)
            for spec in manifest.parameters
        }
        self._stream = self._sender.snapshot(PolicyVersion(0, 0), self._weights).stream

    def address(self) -> str:
        """host:port of the store where the groups meet."""
        return self._where

    def send(self, version: PolicyVersion) -> Moved:
        """A snapshot, then the product's broadcast; checksums are computed anew each time."""
        assert self._group is not None
        asked_s = time.monotonic()
        snapshot = self._sender.snapshot(version, self._weights)
        began_s = time.monotonic()
        result = self._sender.broadcast(snapshot, self._group, TIMEOUT_S).result()
        return Moved(began_s, began_s + result.seconds, result.checksum, began_s - asked_s)

    def write(self, version: PolicyVersion, file: Path) -> Moved:
        """A snapshot into a file, which then has what a reader of the weight log has decoded."""
        asked_s = time.monotonic()
        stream = self._sender.snapshot(version, self._weights).stream
        began_s = time.monotonic()
        stream.numpy().tofile(file)
        checksums = [checksum(chunk_of(stream, chunk)) for chunk in self._manifest.chunks]
        whole = version_checksum(self._manifest.manifest_id, checksums)
        return Moved(began_s, time.monotonic(), whole, began_s - asked_s)

    def copy(self, repeats: int) -> list[float]:
        """Seconds of copying all bytes within memory that is there already, one thread."""
        target, seconds = self._stream.clone(), []
        for _ in range(repeats):
            began_s = time.monotonic()
            target.copy_(self._stream)
            seconds.append(time.monotonic() - began_s)
        return seconds


class ReceivingPeer(Peer):
    """Another rank."""

    def __init__(self, manifest: Manifest, store: str, rank: int = 1, world: int = 2, host: str = HOST) -> None:
        super().__init__(manifest, rank, store, world, host)
        self._memory = ReusedMemory(BUFFERS + 1), ReusedMemory(BUFFERS)
        self._stream = torch.zeros(manifest.total_bytes, dtype=torch.uint8)

    def receive(self, version: PolicyVersion) -> Moved:
        """As an actor stages, up to the tensors; nothing is done with them."""
        assert self._group is not None
        receiver = Receiver(
            self._group, self._manifest, version, timeout_s=TIMEOUT_S, stall_timeout_s=TIMEOUT_S,
            aborted=threading.Event(), buffers=BUFFERS, memory=self._memory,
        )  # fmt: skip
        began_s = time.monotonic()
        for _ in receiver.tensors():
            pass
        return Moved(began_s, time.monotonic(), receiver.staged().checksum)


def _serve(kind: type[Peer], arguments: tuple[Any, ...], commands: Connection, namespace: str) -> None:
    if namespace:
        with open(f"/var/run/netns/{namespace}", "rb") as file:
            assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
    torch.set_num_threads(1)
    peer = kind(*arguments)
    while (command := commands.recv()) is not None:
        name, given = command
        commands.send(getattr(peer, name)(*given))
    os._exit(0)


class RemotePeer:
    """The watcher's end: `await peer("send", version)`. One command at a time."""

    def __init__(self, process: Any, commands: Connection) -> None:
        self._process, self._commands = process, commands

    async def __call__(self, name: str, *given: Any) -> Any:
        """Raises EOFError when the process died."""
        self._commands.send((name, given))
        return await asyncio.to_thread(self._commands.recv)


@contextmanager
def peer(kind: type[Peer], *arguments: Any, namespace: str = "") -> Iterator[RemotePeer]:
    """Starts the process, in the network namespace of that name if one is given; kills it at the block's end."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # so that torch is imported once
    process = context.Process(target=_serve, args=(kind, arguments, there, namespace), daemon=True)
    process.start()
    there.close()
    try:
        yield RemotePeer(process, here)
    finally:
        process.kill()
        process.join()
        here.close()
