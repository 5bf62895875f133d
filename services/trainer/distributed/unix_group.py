"""Collectives among the ranks of one machine over Unix sockets, as a backend of torch's for tensors in host memory.

Gloo, which torch has for that, takes whoever is first to connect to a rank's port for that rank. The kernel lets nobody else
into the folder of these sockets, so whoever connects here is one. Each rank has a socket to each other. An operation is done
when its call returns; sums are the same on all ranks.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipelinerl.transfer.exchange import exchange

BACKEND = "unix"
_RANK_BYTES = 4
"""Of what a rank that connects says first."""
_PIECE = 2**20
"""Elements that are summed at a time: every rank holds so many of each."""
_REDUCED = {
    dist.ReduceOp.SUM: lambda rows: rows.sum(0),
    dist.ReduceOp.AVG: lambda rows: rows.mean(0),
    dist.ReduceOp.MAX: lambda rows: rows.amax(0),
    dist.ReduceOp.MIN: lambda rows: rows.amin(0),
}


def register_backend(folder: Path) -> None:
    """Makes `BACKEND` known to torch. Sockets of its groups are in `folder` while the ranks connect."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> UnixGroup:
        return UnixGroup(_connected(folder, store, rank, size, timeout), rank, size, timeout)

    dist.Backend.register_backend(BACKEND, create, devices=["cpu"])


def _connected(folder: Path, store: dist.Store, rank: int, size: int, timeout: timedelta) -> dict[int, socket.socket]:
    """Those to all other ranks, by rank: this one connects to the lower ones, and the higher ones to this one."""
    peers, path = dict[int, socket.socket](), folder / secrets.token_hex(4)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(size)
        listener.settimeout(timeout.total_seconds())
        store.set(f"socket {rank}", path.name)
        try:
            for lower in range(rank):
                peers[lower] = socket.socket(socket.AF_UNIX)
                peers[lower].connect(str(folder / store.get(f"socket {lower}").decode()))
                peers[lower].sendall(rank.to_bytes(_RANK_BYTES, "big"))
            for _ in range(rank + 1, size):
                peer, _address = listener.accept()
                peers[int.from_bytes(peer.recv(_RANK_BYTES, socket.MSG_WAITALL), "big")] = peer
        finally:
            path.unlink()
    for peer in peers.values():
        peer.setblocking(False)
    return peers


class _Done(dist.Work):
    """What is waited for after a call."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class UnixGroup(dist.ProcessGroup):
    """What the trainer and FSDP call of torch's process groups, with their arguments, for contiguous tensors.

    Raises RuntimeError when a rank has left, or is not heard within the group's timeout.
    """

    def __init__(self, peers: Mapping[int, socket.socket], rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._peers, self._rank, self._size, self._timeout_s = peers, rank, size, timeout.total_seconds()
        self._name = ""
        self._lock = threading.Lock()

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return BACKEND

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    @property
    def group_name(self) -> Any:
        return self._name

    def shutdown(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        for tensor in tensors:
            if self._rank == opts.rootRank:
                self._exchange(dict.fromkeys(self._peers, tensor), {})
            else:
                self._exchange({}, {opts.rootRank: tensor})
        return _Done()

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        for piece in (piece for tensor in tensors for piece in tensor.view(-1).split(_PIECE)):
            rows = piece.new_empty(self._size, len(piece))
            self.all_gather_single(rows, piece)
            piece.copy_(_REDUCED[opts.reduceOp.op](rows))
        return _Done()

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        for output, tensor in zip(outputs, tensors, strict=True):
            self._swap([tensor] * self._size, output)
        return _Done()

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """`outputs` are the root's."""
        if self._rank != opts.rootRank:
            self._exchange({opts.rootRank: tensors[0]}, {})
        else:
            outputs[0][self._rank].copy_(tensors[0])
            self._exchange({}, {rank: outputs[0][rank] for rank in self._peers})
        return _Done()

    def scatter(self, outputs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> dist.Work:  # type: ignore[override]
        """`tensors` are the root's."""
        if self._rank != opts.rootRank:
            self._exchange({}, {opts.rootRank: outputs[0]})
        else:
            outputs[0].copy_(tensors[0][self._rank])
            self._exchange({rank: tensors[0][rank] for rank in self._peers}, {})
        return _Done()

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        self._swap([tensor.view(-1)] * self._size, output.view(self._size, -1))
        return _Done()

    def all_gather_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> dist.Work:
        for output, tensor in zip(outputs, tensors, strict=True):
            self.all_gather_single(output, tensor)
        return _Done()

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> dist.Work:
        parts = tensor.view(self._size, -1)
        rows = torch.empty_like(parts)
        self._swap(parts, rows)
        output.copy_(_REDUCED[opts.reduceOp.op](rows).view_as(output))
        return _Done()

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> dist.Work:
        """Sizes of the ranks' parts along the first dimension; none = equal ones."""
        parts = tensor.split(sizes or len(tensor) // self._size)
        self._swap(parts, output.split(output_sizes or len(output) // self._size))
        return _Done()

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.allreduce([torch.zeros(1)], dist.AllreduceOptions())

    def send(self, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
        for tensor in tensors:
            self._exchange({to: tensor}, {})
        return _Done()

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        for tensor in tensors:
            self._exchange({}, {source: tensor})
        return _Done()

    def _swap(self, parts: Any, into: Any) -> None:
        """Sends each rank its one of `parts`, and has what each rank sends written `into` its place."""
        into[self._rank].copy_(parts[self._rank])
        self._exchange({rank: parts[rank] for rank in self._peers}, {rank: into[rank] for rank in self._peers})

    def _exchange(self, out: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> None:
        sending = {self._peers[rank]: _view(tensor) for rank, tensor in out.items()}
        receiving = {self._peers[rank]: _view(tensor) for rank, tensor in into.items()}
        with self._lock:
            try:
                exchange(sending, receiving, self._timeout_s)
            except OSError as error:
                whom = f"rank {self._rank} has lost contact with ranks {sorted(out.keys() | into.keys())}"
                raise RuntimeError(f"{whom}: {str(error) or f'nothing within {self._timeout_s:g} s'}") from error


def _view(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
