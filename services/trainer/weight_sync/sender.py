"""The trainer's side of the weight transfer: manifest, snapshots, groups and broadcasts, and the weight log.

Only `snapshot` stops the optimizer. It copies the weights once, in the dtype of the transfer; on a GPU, a separate
CUDA stream does the copy. A snapshot may be sent several times, on any group, on a background thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from pipelinerl.bus.jetstream import Bus
from pipelinerl.errors import TransferError
from pipelinerl.messages.control import Backend
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.rl.memory import LOG_COPIES, MOST_SNAPSHOTS
from pipelinerl.service.lifecycle import on_thread
from pipelinerl.service.retry import Backoff, is_transfer_error, retry_forever
from pipelinerl.transfer.chunks import (
    ReusedMemory,
    checksum,
    chunk_header,
    chunk_of,
    describe,
    dtype_name,
    pack,
    prefetch,
    version_checksum,
)
from pipelinerl.transfer.group import HOST, GroupStore, Placement, WeightGroup, close_when_met, on_device
from pipelinerl.transfer.manifest import Chunk, GroupSpec, LowRank, Manifest, TransferAborted, TransferResult, build_manifest
from pipelinerl.transfer.weight_log import WeightLog
from pipelinerl.v1.control_pb2 import Published
from services.trainer.learn.lora import factor_names, layer_adapters, served_parameters

log = logging.getLogger(__name__)

LOG_BACKOFF = Backoff(first_s=0.5, most_s=15.0, jitter=0.2)


def as_in_files(
    model: PreTrainedModel, parameters: Iterable[tuple[str, Tensor]], converted: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with the names and shapes of the model's files, which any engine can load. In memory they differ if
    transformers renames layers or stacks a mixture's experts. `converted`: if given, only these parameters are converted."""
    for name, tensor in parameters:
        plain = converted is not None and name not in converted
        yield from [(name, tensor)] if plain else revert_weight_conversion(model, {name: tensor}).items()


def converted_parameters(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of parameters that have another name or shape in the model's files. Takes 10 to 50 µs per parameter."""
    shapes = _shapes(model)
    return frozenset(name for name, one in shapes if revert_weight_conversion(model, {name: one}).get(name) is not one)


def whole_weights(model: PreTrainedModel, *, wire_dtype: str, chunk_bytes: int) -> Manifest:
    """Return the manifest for sending whole weights. One rank can compute it without the others."""
    return describe(as_in_files(model, _shapes(model)), wire_dtype=wire_dtype, chunk_bytes=chunk_bytes)


def _shapes(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor on the meta device) for each served parameter."""
    return ((name, torch.empty(p.shape, dtype=p.dtype, device="meta")) for name, p, _ in served_parameters(model))


def adapter_factors(model: PreTrainedModel, *, wire_dtype: str, chunk_bytes: int) -> Manifest:
    """Return the manifest for sending adapter factors. Its `low_rank` says how the factors change the weights."""
    factors, low_rank = [], []
    for name, adapter in layer_adapters(model).items():
        (a, b), dtype = factor_names(name), dtype_name(adapter.weight.dtype)
        factors += [(a, tuple(adapter.a.shape), dtype), (b, tuple(adapter.b.shape), dtype)]
        shape, scaling = adapter.weight.shape, adapter.scaling
        low_rank.append(LowRank(name=f"{name}.weight", shape=shape, dtype=dtype, a=a, b=b, scaling=scaling))
        low_rank[-1].transposed = adapter.transposed
    return build_manifest(factors, wire_dtype=wire_dtype, chunk_bytes=chunk_bytes, low_rank=low_rank)


class Snapshot:
    """A copy of one version's weights. `stream`: uint8[manifest.total_bytes] in the memory of `placement`."""

    def __init__(self, manifest: Manifest, version: PolicyVersion, stream: Tensor, placement: Placement = HOST) -> None:
        self.manifest, self.version, self.stream, self._placement = manifest, version, stream, placement
        self._checksums: dict[int, int] = {}
        self._sha256, self._hashing = b"", threading.Lock()

    def ready(self, chunk: Chunk, placement: Placement) -> tuple[Tensor, int]:
        """Wait until `stream` is filled. Return the chunk's bytes in the memory of `placement`, and their checksum."""
        with placement.scope(), self._placement.scope():
            raw = chunk_of(self.stream, chunk).to(placement.device, non_blocking=placement.stream is not None)
            if chunk.index not in self._checksums:
                self._checksums[chunk.index] = checksum(raw)
        return raw, self._checksums[chunk.index]

    def sha256(self) -> bytes:
        """Wait until `stream` is filled. Return the SHA-256 of its bytes, computed only once."""
        with self._hashing:
            if not self._sha256:
                sha256 = hashlib.sha256()
                for chunk in self.manifest.chunks:
                    sha256.update(self._placement.on_host(chunk_of(self.stream, chunk)).numpy().data)
                self._sha256 = sha256.digest()
            return self._sha256


class WeightSender:
    """Takes snapshots of the trainer's weights, opens a group for each epoch or side group, and starts broadcasts.

    `stall_timeout_s`: maximum time for one chunk before the group counts as broken, raised to `Manifest.slowest_chunk_s` if
    that is more. `placement`: memory of snapshots. `group_placement`: memory from which groups send; None = `placement`.
    `store`: rendezvous of the groups. `host`: this pod's address for actors.
    """

    def __init__(
        self,
        manifest: Manifest,
        stall_timeout_s: float = 10.0,
        placement: Placement = HOST,
        group_placement: Placement | None = None,
        *,
        store: GroupStore | None = None,
        host: str = "127.0.0.1",
        backend: Backend = "gloo",
    ) -> None:
        self.manifest, self.placement, self.group_placement = manifest, placement, group_placement or placement
        self._stall_timeout_s = max(stall_timeout_s, manifest.slowest_chunk_s)
        self._store, self._host, self.backend = store, host, backend
        self._memory = ReusedMemory(MOST_SNAPSHOTS + LOG_COPIES)

    @torch.no_grad()
    def snapshot(self, version: PolicyVersion, parameters: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> Snapshot:
        """Copy the parameters. On a GPU, later work of the caller's CUDA stream waits for the copy. Raises `ManifestDiffers` if
        a parameter is missing, or has another shape or dtype."""
        with self.placement.beside():
            num_bytes, device = self.manifest.total_bytes, self.placement.device
            if device.type == self.group_placement.device.type == "cpu":
                stream = self._memory.take(num_bytes)
            else:  # torch's allocators cache this memory. Snapshots that the host keeps for a device are pinned.
                stream = torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=device.type == "cpu")
            pack(self.manifest, parameters, stream)
        return Snapshot(self.manifest, version, stream, self.placement)

    def open_group(self, epoch: int, world_size: int, deadline_s: float, patience_s: float | None = None) -> CollectiveGroup:
        """Start to connect with the other ranks of a group. `patience_s`: maximum wait between the connections of two ranks."""
        assert self._store is not None
        spec = GroupSpec(self._store.own_address, f"epoch-{epoch}", 0, world_size, self.backend, self._host)
        given_up, placement = threading.Event(), on_device(self.group_placement.device)
        connect = partial(WeightGroup.connect, spec, deadline_s, given_up, placement, patience_s)
        meeting = on_thread(f"open-{spec.name}", connect)
        return CollectiveGroup(self, self._store.address, meeting, given_up)

    def broadcast(
        self, snapshot: Snapshot, group: WeightGroup, timeout_s: float, given_up: threading.Event | None = None
    ) -> Future[TransferResult]:
        """Start to send on `group` on a separate thread, without chunks that all receivers already have. Until sending ends, no
        other code may use the group. A failure closes the group. Setting `given_up` stops sending within the stall timeout."""
        started, placement, stop = time.monotonic(), group.placement, given_up or threading.Event()
        first = group.first_chunk(snapshot.manifest.content(snapshot.version))
        kept, chunks = snapshot.manifest.chunks[:first], snapshot.manifest.chunks[first:]
        ready = prefetch((snapshot.ready(chunk, placement) for chunk in chunks), 2, f"checksum-{snapshot.version}")

        def send() -> TransferResult:
            checksums: list[int] = []
            try:
                with placement.scope(), closing(ready):
                    checksums.extend(snapshot.ready(chunk, placement)[1] for chunk in kept)
                    for chunk, (raw, value) in zip(chunks, ready, strict=True):
                        checksums.append(value)
                        header = chunk_header(snapshot.version, chunk, value).to(placement.device)
                        for tensor in (header, raw):
                            if stop.is_set():
                                raise TransferAborted(f"sending of version {snapshot.version} was given up")
                            left_s = min(started + timeout_s - time.monotonic(), self._stall_timeout_s)
                            group.broadcast(tensor, left_s)
            except BaseException:
                group.close()
                raise
            whole = version_checksum(snapshot.manifest.manifest_id, checksums)
            return TransferResult(whole, sum(chunk.num_bytes for chunk in chunks), time.monotonic() - started)

        return on_thread(f"broadcast-{snapshot.version}", send)


class CollectiveGroup:
    """The trainer's handle for one transfer group. Cancelling a waiting caller does not stop the operation; `abandon` does."""

    def __init__(
        self, sender: WeightSender, store_address: str, meeting: Future[WeightGroup], given_up: threading.Event
    ) -> None:
        self.store_address = store_address
        self._sender, self._meeting, self._given_up = sender, meeting, given_up
        self._broadcast: Future[TransferResult] | None = None

    async def built(self) -> None:
        """Wait until every rank has connected. Raises `TransferError`; a `DeadlineExceeded` names the `missing` ranks."""
        await asyncio.wrap_future(self._meeting)

    async def broadcast(self, snapshot: Snapshot, deadline_s: float) -> TransferResult:
        """Send the snapshot. If this fails, close the group and raise `TransferError`."""
        self._broadcast = self._sender.broadcast(snapshot, self._meeting.result(), deadline_s, self._given_up)
        return await asyncio.wrap_future(self._broadcast)

    async def abandon(self) -> None:
        """Give up the running operation and return at once. A stuck operation ends by its own timeouts and closes its group."""
        self._given_up.set()  # this also ends a wait for ranks, and a broadcast between two chunks
        if self._broadcast is None or self._broadcast.done():  # otherwise, its thread closes the group
            await asyncio.to_thread(self._meeting.add_done_callback, close_when_met)


class LogWriter:
    """Writes offered versions to the weight log, and announces each one when it is complete in the store.

    It never delays training: if writing takes longer than a step, versions are skipped, and the next delta spans them. After
    a failure, it writes the newest version. The last written snapshot and the one being written stay in memory."""

    def __init__(self, weight_log: WeightLog) -> None:
        self._log = weight_log
        self._newest: Snapshot | None = None
        self._arrived, self._released, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._held_above: int | None = None
        self._idle.set()
        self.published: Published | None = None
        """The last announcement; None before the first."""
        self.problem = ""
        """Why the last attempt to write failed; empty if it succeeded."""

    def offer(self, snapshot: Snapshot) -> None:
        """Write this version next, in place of an earlier one that still waits to be written."""
        self._newest = snapshot
        self._idle.clear()
        self._arrived.set()

    def hold(self, above: int | None) -> None:
        """Announce no version after `above` from now on; None = announce all."""
        self._held_above = above
        self._released.set()

    async def all_announced(self) -> None:
        """Wait until the newest offered version is announced."""
        await self._idle.wait()

    async def run(self, bus: Bus) -> None:
        """Write and announce versions until cancelled."""
        while True:
            await self._arrived.wait()
            published = await retry_forever(self._write, "write the weight log", retried=is_transfer_error, backoff=LOG_BACKOFF)
            while self._held_above is not None and published.version > self._held_above:
                self._released.clear()
                await self._released.wait()
            await retry_forever(partial(bus.publish_control, "published", published.SerializeToString()), "publish 'published'")
            self.published = published
            if not self._arrived.is_set():
                self._idle.set()
            try:
                await self._log.discard_old()
            except TransferError as error:
                log.warning("old versions stay in the weight log until the next version is written: %s", error)

    async def _write(self) -> Published:
        snapshot = self._newest
        assert snapshot is not None, "a snapshot has arrived"
        self._arrived.clear()
        try:
            published = await self._log.add(snapshot.version, snapshot.stream, await asyncio.to_thread(snapshot.sha256))
            self.problem = ""
            return published
        except BaseException as error:
            self.problem = str(error)
            self._arrived.set()
            raise
