"""The ranks of the trainer: their parts of the work, their process groups, and the messages in those groups.

Ranks that share a packed row, or a copy of the weights, have consecutive numbers, because consecutive ranks are usually on one
node. Orders, batches, tensors, checkpoints and each shared row have separate process groups. A message is sent as a JSON header
and the bytes of its arrays, never as a pickle.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipelinerl.errors import ServiceError
from pipelinerl.service.settings import RankSettings

TRAIN, USE, SCORE, SAVE, HEARTBEAT, END = "train", "use", "score", "save", "beat", "end"
WEIGHTS, ADAPTER, VALUE_HEAD = "weights", "adapter", "value head"
"""Kinds of rank 0's orders. The orders `WEIGHTS`, `ADAPTER` and `VALUE_HEAD` make all ranks gather these parameters."""
BATCHES = "batches"
"""Kind of the messages with a step's batches."""


@dataclass(frozen=True)
class RankLayout:
    """Position of one rank among `size` ranks. `sequence_ranks` and `shard_ranks` divide `size`."""

    rank: int = 0
    size: int = 1
    sequence_ranks: int = 1
    """Number of ranks that share the tokens of one row."""
    shard_ranks: int = 1
    """Number of ranks that share one copy of weights, gradients and optimizer state."""

    @property
    def data_ranks(self) -> int:
        """Return the number of rows computed at the same time."""
        return self.size // self.sequence_ranks

    @property
    def sequence_index(self) -> int:
        """Return the index of this rank's part in its row."""
        return self.rank % self.sequence_ranks


@dataclass(frozen=True, eq=False)
class Message:
    """A message between ranks. `fields` must be JSON-compatible."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def parts(self) -> list[Tensor]:
        """Return the tensors to send: the header's length, the header, and each array's bytes, copied only if necessary."""
        arrays = {name: np.require(array, requirements=("C", "W")) for name, array in self.arrays.items()}
        shapes = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
        header = bytearray(json.dumps((self.kind, dict(self.fields), shapes)).encode())
        content = [torch.from_numpy(array.reshape(-1).view(np.uint8)) for array in arrays.values() if array.size]
        return [torch.tensor([len(header)]), torch.frombuffer(header, dtype=torch.uint8), *content]


ORDER_TIMEOUT = timedelta(minutes=30)
"""Maximum time for which a rank waits for rank 0's next message. Rank 0 sends one every `loop.HEARTBEAT_S` seconds, except
during long computations. The limit only matters if rank 0 needs more time to load the model, or vanishes without closing
its connections."""
TENSOR_TIMEOUT = timedelta(minutes=10)
"""Maximum duration of a collective on tensors, including the wait for ranks that are still computing."""
BATCH_TIMEOUT = timedelta(days=3650)
"""Maximum wait for a rank's next batches: practically unlimited, since a run may wait for sequences for any length of time."""


class Links:
    """Messages between rank 0 and the other ranks. Receivers must receive every message, in the order of sending. Any thread
    may begin to send, but only one thread at a time may receive."""

    def __init__(self, timeout: timedelta, patience: timedelta = timedelta(0)) -> None:
        """Open links in a new group, on all ranks together. `patience`: maximum wait for a message; 0 = `timeout`."""
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self._patience, self._sending = patience, threading.Lock()

    def begin_send(self, message: Message, to: int) -> list[Any]:
        """Begin to send a message, and return the work to wait for. Until the work is done, the arrays must not change."""
        with self._sending:
            return [dist.isend(part, to, group=self.group) for part in message.parts()]

    def send(self, message: Message, to: int) -> None:
        for work in self.begin_send(message, to):
            work.wait()

    def receive(self, *sources: int) -> list[Message]:
        """Receive the next message of each source, from all sources at the same time."""

        def filled(arrays: list[list[NDArray[Any]]]) -> list[list[NDArray[Any]]]:
            pairs = zip(sources, arrays, strict=True)
            parts = [(array.reshape(-1).view(np.uint8), source) for source, own in pairs for array in own]
            works: list[Any] = [dist.irecv(torch.from_numpy(part), at, group=self.group) for part, at in parts if part.size]
            for work in works:
                work.wait(self._patience)
            return arrays

        lengths = filled([[np.zeros(1, dtype=np.int64)] for _ in sources])
        headers = [json.loads(text.tobytes()) for (text,) in filled([[np.empty(size, np.uint8)] for ((size,),) in lengths])]
        arrays = filled([[np.empty(shape, dtype) for dtype, shape in shapes.values()] for _, _, shapes in headers])
        named = (dict(zip(header[2], own, strict=True)) for header, own in zip(headers, arrays, strict=True))
        return [Message(kind, fields, own) for (kind, fields, _), own in zip(headers, named, strict=True)]

    def broadcast(self, message: Message) -> None:
        for work in [work for rank in range(1, dist.get_world_size()) for work in self.begin_send(message, rank)]:
            work.wait()

    def receive_order(self) -> Message:
        """Other ranks: receive rank 0's next message. Raises `ServiceError` if rank 0 is gone."""
        try:
            return self.receive(0)[0]
        except RuntimeError as error:
            raise ServiceError(f"the connection to rank 0 is lost ({error}); rank 0's log says why") from error


@dataclass(frozen=True, eq=False)
class World:
    """This rank's layout, device and groups. A single rank has no groups and no meshes. `row_group`: group of the ranks that
    share this rank's rows."""

    layout: RankLayout
    device: torch.device
    links: Links | None = None
    mesh: DeviceMesh | None = None
    """Mesh over all ranks: (copies, shards), or (shards) if there is one copy."""
    row_group: Any = None
    saving: Links | None = None
    """Links between the threads that write checkpoints, separate so that they never block the computing threads."""
    batches: Links | None = None
    """Links on which rank 0 sends the batches of the next step while the current one is computed."""
    host_mesh: DeviceMesh | None = None
    """Like `mesh`, for shards in host memory. It is not used for communication."""

    @property
    def is_first(self) -> bool:
        return self.layout.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Return, on every rank, the sum of `values` over all ranks. Of ranks that share a row, only the first counts."""
        if self.mesh is None:
            return values
        total = values.clone() if self.layout.sequence_index == 0 else torch.zeros_like(values)
        dist.all_reduce(total)
        return total


def join_ranks(device: torch.device, same: Mapping[str, str] | None = None) -> None:
    """Join the process group of all ranks. `same`: values that must be equal on all ranks; otherwise raises `ServiceError`."""
    ranks, place = RankSettings(), dict[str, Any]()
    if ranks.rank_folder is not None:
        store = dist.FileStore(str(ranks.rank_folder / "ranks"), ranks.world_size)
        place = {"store": store, "rank": ranks.rank, "world_size": ranks.world_size}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TENSOR_TIMEOUT, **place)
    try:
        if same:
            _agree(same)
    except ValueError as error:  # a message cannot be decoded
        raise ServiceError(f"{_MISMATCH}: one of them runs another version of pipelinerl. {_REPLACE}") from error


_MISMATCH, _REPLACE = "the trainer's ranks do not match", "Delete all pods of the trainer at once, so that all are replaced"


def _agree(what: Mapping[str, str]) -> None:
    size = dist.get_world_size()
    links = Links(TENSOR_TIMEOUT)
    if dist.get_rank() > 0:
        links.send(Message("is", what), 0)
        problem = links.receive_order().fields["problem"]
    else:
        theirs = {rank: message.fields for rank, message in enumerate(links.receive(*range(1, size)), start=1)}
        differing = [
            f"rank {rank} has {name} {its.get(name)!r}, rank 0 has {ours!r}"
            for rank, its in theirs.items()
            for name, ours in what.items()
            if its.get(name) != ours
        ]
        problem = "; ".join(differing[:4])
        links.broadcast(Message("agreement", {"problem": problem}))
    if problem:
        raise ServiceError(f"{_MISMATCH}: {problem}. {_REPLACE}")


def world_of_ranks(context_parallel: int, shard_ranks: int, device: torch.device) -> World:
    """Return the world of all ranks. All ranks must call this. `shard_ranks`: 0 = all ranks."""
    size = dist.get_world_size()
    layout = RankLayout(dist.get_rank(), size, context_parallel, shard_ranks or size)
    links, saving, batches = Links(ORDER_TIMEOUT), Links(ORDER_TIMEOUT), Links(ORDER_TIMEOUT, BATCH_TIMEOUT)
    mesh, host = _shard_mesh(layout, device), torch.device("cpu")
    host_mesh = mesh if device == host else _shard_mesh(layout, host)
    row_group = None
    if layout.sequence_ranks > 1:
        shape = (layout.data_ranks, layout.sequence_ranks)
        row_group = init_device_mesh(device.type, shape, mesh_dim_names=("row", "part"))["part"].get_group()
    return World(layout, device, links, mesh, row_group, saving, batches, host_mesh)


def leave_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _shard_mesh(layout: RankLayout, device: torch.device) -> DeviceMesh:
    copies = layout.size // layout.shard_ranks
    if copies == 1:
        return init_device_mesh(device.type, (layout.size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (copies, layout.shard_ranks), mesh_dim_names=("copy", "shard"))
