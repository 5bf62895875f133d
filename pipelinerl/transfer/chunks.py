"""Tensors to chunks of bytes and back, by a manifest's layout; each chunk's header and checksum; the memory they live in.

Nothing here sends, receives or chooses where chunks live.
"""

from __future__ import annotations

import hashlib
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.manifest import (
    DEFAULT_CHUNK_BYTES,
    Chunk,
    Manifest,
    ManifestDiffers,
    ParameterSpec,
    WrongChunk,
    aligned,
    build_manifest,
)

COLUMNS = 1024
ROW_BYTES = COLUMNS * 8
_DIGEST_BYTES = 7
"""So that it fits a chunk header's signed 64-bit field."""


def checksum(chunk: Tensor) -> int:
    """56 bits of a contiguous uint8 tensor: XXH3 in host memory, `device_checksum` elsewhere. Releases the GIL.

    The two are different numbers, so both ends of a group compute it where that group's chunks live. On one core here XXH3
    runs at over 50 GB/s while a chunk is in a cache, almost three times as fast as sums by NumPy. It would need a device to
    send every byte.
    """
    if chunk.device.type != "cpu":
        return device_checksum(chunk)
    return int.from_bytes(xxhash.xxh3_64_digest(chunk.numpy().data)[:_DIGEST_BYTES], "little")


def device_checksum(chunk: Tensor) -> int:
    """By sums that torch computes where the chunk is: 8 KiB and 8 bytes per row come to the host. Waits for the device.

    The bytes are laid out as rows of 1024 words of 64 bits, the last row filled with zeros. All row sums and all column
    sums, modulo 2^64, are hashed with the number of bytes. Any change of one, two or three words is found, whatever they are,
    as is any exchange of rows, columns or two words: what escapes leaves every row's and every column's sum as it was.
    It guards against corruption and mix-ups, not against an attacker.
    """
    sums = tensor_sums(chunk).cpu().numpy().astype("<i8", copy=False)
    num_bytes = chunk.numel().to_bytes(8, "little")
    digest = hashlib.blake2b(sums.data, digest_size=_DIGEST_BYTES, salt=num_bytes)
    return int.from_bytes(digest.digest(), "little")


def tensor_sums(chunk: Tensor) -> Tensor:
    """int64[rows + COLUMNS], the sums along rows, then along columns."""
    whole = chunk.numel() // ROW_BYTES * ROW_BYTES
    last = chunk.new_zeros(ROW_BYTES)
    last[: chunk.numel() - whole] = chunk[whole:]
    rows, row = chunk[:whole].view(torch.int64).view(-1, COLUMNS), last.view(torch.int64)
    return torch.cat((rows.sum(1), row.sum(0, keepdim=True), rows.sum(0) + row))


MAGIC = 0x50524C32  # "PRL2"; the last digit is the wire format's
HEADER_SIZE = 6


def chunk_header(version: PolicyVersion, chunk: Chunk, checksum: int) -> Tensor:
    """int64[6]: what precedes each chunk on the wire, so that a receiver notices a mix-up before it takes the bytes.

    With NCCL it is a small tensor on the device, sent as the chunks are: in order with them, under the same timeouts, and gone
    with the communicator when a transfer is given up. The key-value store would be a second channel to keep in step.
    """
    values = [MAGIC, version.incarnation, version.number, chunk.index, checksum, chunk.num_bytes]
    return torch.tensor(values, dtype=torch.int64)


def announced_checksum(header: Tensor, version: PolicyVersion, chunk: Chunk) -> int:
    """That of the chunk which follows `header`. Raises WrongChunk when this is no header, or that of another chunk."""
    magic, incarnation, number, index, checksum, num_bytes = header.tolist()
    for field, expected, actual in (
        ("magic", f"{MAGIC:#x}", f"{magic:#x}"),
        ("version", version, PolicyVersion(incarnation, number)),
        ("chunk", chunk.index, index),
        ("num_bytes", chunk.num_bytes, num_bytes),
    ):
        if expected != actual:
            raise WrongChunk(f"chunk header: {field} is {actual}, expected {expected}")
    return int(checksum)


@torch.no_grad()
def add_low_rank(weight: Tensor, a: Tensor, b: Tensor, scaling: float, transposed: bool) -> Tensor:
    """weight + scaling · B·A, computed in float32 and rounded once to the weight's dtype: trainer and actors compute it alike.

    A [rank, in] and B [out, rank] are first rounded to that dtype, in which they take part in the forward pass. Weight
    [out, in], or [in, out] where it is `transposed`.
    """
    a, b = (factor.to(weight.dtype).float() for factor in (a, b))
    left, right = (a.T, b.T) if transposed else (b, a)
    return torch.addmm(weight.float(), left, right, alpha=scaling).to(weight.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` → "float32"."""
    return str(dtype).removeprefix("torch.")


def describe(
    parameters: Iterable[tuple[str, Tensor]], *, wire_dtype: str = "", chunk_bytes: int = DEFAULT_CHUNK_BYTES
) -> Manifest:
    """The manifest of `parameters` (such as `model.named_parameters()`, which names tied weights once)."""
    described = [(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in parameters]
    return build_manifest(described, wire_dtype=wire_dtype, chunk_bytes=chunk_bytes)


@torch.no_grad()
def pack(
    manifest: Manifest, parameters: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], into: Tensor | None = None
) -> Tensor:
    """Copy the parameters into one stream: uint8[total_bytes], converted to the wire dtypes, padding zeroed.

    Given as pairs, they are taken one after the other, so that no two need to be there at once; names that the manifest does
    not have are passed over. `into`: such a stream that may be overwritten; None: new host memory. Raises ManifestDiffers if
    a parameter is missing or has another shape or dtype than the manifest says.
    """
    stream = torch.empty(manifest.total_bytes, dtype=torch.uint8) if into is None else into
    places = {spec.name: index for index, spec in enumerate(manifest.parameters)}
    for name, tensor in parameters.items() if isinstance(parameters, Mapping) else parameters:
        index = places.pop(name, None)
        if index is None:
            continue
        spec, offset, size = manifest.parameters[index], manifest.offsets[index], manifest.sizes[index]
        if tuple(tensor.shape) != tuple(spec.shape):
            raise ManifestDiffers(name, "shape", tuple(tensor.shape), tuple(spec.shape))
        if dtype_name(tensor.dtype) != spec.dtype:
            raise ManifestDiffers(name, "dtype", dtype_name(tensor.dtype), spec.dtype)
        _as_tensor(stream[offset : offset + size], spec, manifest).copy_(tensor)
        stream[offset + size : offset + aligned(size)].zero_()
    for index in places.values():
        raise ManifestDiffers(manifest.parameters[index].name, "presence", "missing", "present")
    return stream


def chunk_of(stream: Tensor, chunk: Chunk) -> Tensor:
    """uint8[chunk.num_bytes]: a view of the stream."""
    return stream[chunk.offset : chunk.offset + chunk.num_bytes]


def version_checksum(manifest_id: str, chunk_checksums: Sequence[int]) -> int:
    """64 bits for all weights of a version: equal weights under equal manifests give the same number."""
    text = manifest_id + ":" + ",".join(f"{value:08x}" for value in chunk_checksums)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Unpacker:
    """Gives chunks their memory, and turns those that have arrived into tensors: views of that memory.

    Call `room` for one chunk after another, and `add` for one after another when they have arrived; two threads may do that.
    What arrives in several chunks, a tensor that does not fit into one, has its room in one piece.
    `take`: new memory, uint8[the number of bytes asked for].
    """

    def __init__(self, manifest: Manifest, take: Callable[[int], Tensor]) -> None:
        self._manifest, self._take = manifest, take
        self._incomplete: deque[Tensor] = deque()
        """What has room and is not handed out, in order."""

    def room(self, chunk: Chunk) -> Tensor:
        """uint8[chunk.num_bytes], contents undefined: where the chunk's bytes belong."""
        start = self._manifest.offsets[chunk.parameters[0]]
        if chunk.offset == start:
            self._incomplete.append(self._take(self._manifest.ends[chunk.parameters[-1]] - start))
        begin = chunk.offset - start
        return self._incomplete[-1][begin : begin + chunk.num_bytes]

    def add(self, chunk: Chunk) -> list[tuple[str, Tensor]]:
        """The parameters that `chunk` completes, in the manifest's order."""
        manifest = self._manifest
        if chunk.offset + chunk.num_bytes < manifest.ends[chunk.parameters[-1]]:
            return []
        whole, start = self._incomplete.popleft(), manifest.offsets[chunk.parameters[0]]
        done = []
        for index in chunk.parameters:
            spec, begin = manifest.parameters[index], manifest.offsets[index] - start
            done.append((spec.name, _as_tensor(whole[begin : begin + manifest.sizes[index]], spec, manifest)))
        return done


def _as_tensor(raw: Tensor, spec: ParameterSpec, manifest: Manifest) -> Tensor:
    return raw.view(getattr(torch, manifest.sent_dtype(spec))).view(tuple(spec.shape))


# --- Memory for chunks, and chunks ahead of their use ------------------------------------------------------------------

_HELD_BY_NOBODY = 2
"""References to an array in the list, as `sys.getrefcount` sees them: the list's and its own argument's."""


class ReusedMemory:
    """Host memory that is used again once nobody holds a tensor in it: new pages cost more than the bytes put into them.

    Each buffer is a NumPy array. A tensor over it, and every view of that tensor, shares one storage, which holds one reference
    to the array; so the array's reference count says whether anybody still looks at the memory, whoever made the views. What is
    still held is left to its holder and replaced. Device memory is not handled: torch's allocator keeps it itself.
    `most`: buffers kept, the larger ones first. Not thread-safe.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._buffers: list[np.ndarray] = []

    def take(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes], contents undefined. Nobody else has it as long as a view of it lives."""
        for index in range(len(self._buffers)):
            if sys.getrefcount(self._buffers[index]) == _HELD_BY_NOBODY and self._buffers[index].nbytes >= num_bytes:
                return torch.from_numpy(self._buffers[index])[:num_bytes]
        buffer = np.empty(num_bytes, np.uint8)
        self._buffers.append(buffer)
        self._buffers.sort(key=lambda kept: kept.nbytes)
        del self._buffers[: -self._most]  # who holds one of these keeps it
        return torch.from_numpy(buffer)


_Item = TypeVar("_Item")


def prefetch(items: Iterable[_Item], buffers: int, name: str) -> Generator[_Item, None, None]:
    """The same items, made on a thread that begins with the first one asked for; close it, whatever happens.

    At most `buffers` (≥ 2) items exist at a time: the one handed out last and those made or being made beyond it. An error
    of `items` is raised where the item would have come. There is no timeout: making one item must itself be bounded, and
    closing waits for it.
    """
    assert buffers >= 2, "the one in hand and one that is being made"
    free, ready, closed = threading.Semaphore(buffers), queue.SimpleQueue[Any](), threading.Event()

    def make() -> None:
        try:
            iterator = iter(items)
            while free.acquire() and not closed.is_set():
                ready.put(next(iterator))
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: the error goes to whoever iterates
            ready.put(error)

    thread = threading.Thread(target=make, name=name, daemon=True)
    thread.start()
    in_hand = False
    try:
        while not isinstance(item := ready.get(), StopIteration):
            if isinstance(item, BaseException):
                raise item
            if in_hand:
                free.release()  # only now: the caller may have kept the item before until it got this one
            in_hand = True
            yield item
            del item
    finally:
        closed.set()
        free.release()
        thread.join()
