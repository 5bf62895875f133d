"""Convert tensors to and from chunks in a manifest's layout, and provide chunk headers, checksums and reusable memory."""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from pipelinerl.errors import TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.manifest import (
    DEFAULT_CHUNK_BYTES,
    Chunk,
    Manifest,
    ManifestDiffers,
    ParameterSpec,
    aligned,
    build_manifest,
)

COLUMNS = 1024
ROW_BYTES = COLUMNS * 8
_DIGEST_BYTES = 7
"""Size of a checksum. 8 bytes would not fit the chunk header's signed 64-bit field."""


def checksum(chunk: Tensor) -> int:
    """Return a 56-bit checksum of a contiguous uint8 tensor: XXH3 in host memory, else `device_checksum`.

    The two give different numbers, so both ends of a group must hold its chunks on the same kind of device.
    """
    if chunk.device.type != "cpu":
        return device_checksum(chunk)
    return int.from_bytes(xxhash.xxh3_64_digest(chunk.numpy().data)[:_DIGEST_BYTES], "little")  # releases the GIL


def device_checksum(chunk: Tensor) -> int:
    """Return a 56-bit hash of the number of bytes and `tensor_sums`. Only these sums leave the device.

    Apart from hash collisions, a change is missed only if it preserves all sums of rows and columns modulo 2^64, for which at
    least four words must change. The checksum guards against corruption and mix-ups, not against an attacker.
    """
    sums = tensor_sums(chunk).cpu().numpy().astype("<i8", copy=False)
    num_bytes = chunk.numel().to_bytes(8, "little")
    digest = hashlib.blake2b(sums.data, digest_size=_DIGEST_BYTES, salt=num_bytes)
    return int.from_bytes(digest.digest(), "little")


def tensor_sums(chunk: Tensor) -> Tensor:
    """Return the sum of each row of 64-bit words, then of each column: int64[rows + COLUMNS]."""
    whole = chunk.numel() // ROW_BYTES * ROW_BYTES
    last = chunk.new_zeros(ROW_BYTES)
    last[: chunk.numel() - whole] = chunk[whole:]
    rows, row = chunk[:whole].view(torch.int64).view(-1, COLUMNS), last.view(torch.int64)
    return torch.cat((rows.sum(1), row.sum(0, keepdim=True), rows.sum(0) + row))


MAGIC = 0x50524C32  # "PRL2"; the last digit is the version of the wire format
HEADER_SIZE = 6


def chunk_header(version: PolicyVersion, chunk: Chunk, checksum: int) -> Tensor:
    """Return the header that precedes a chunk on the wire, int64[6]. It reveals a wrong chunk before the bytes arrive."""
    values = [MAGIC, version.incarnation, version.number, chunk.index, checksum, chunk.num_bytes]
    return torch.tensor(values, dtype=torch.int64)


def announced_checksum(header: Tensor, version: PolicyVersion, chunk: Chunk) -> int:
    """Return the checksum in `header`. Raises TransferError unless this is the header of `chunk` in `version`."""
    magic, incarnation, number, index, checksum, num_bytes = header.tolist()
    for field, expected, actual in (
        ("magic", f"{MAGIC:#x}", f"{magic:#x}"),
        ("version", version, PolicyVersion(incarnation, number)),
        ("chunk", chunk.index, index),
        ("num_bytes", chunk.num_bytes, num_bytes),
    ):
        if expected != actual:
            raise TransferError(f"chunk header: {field} is {actual}, expected {expected}")
    return int(checksum)


@torch.no_grad()
def add_low_rank(weight: Tensor, a: Tensor, b: Tensor, scaling: float, transposed: bool) -> Tensor:
    """Return weight + scaling · B·A, computed in float32 and rounded once to the weight's dtype.

    A [rank, in] and B [out, rank] are first rounded to that dtype, as in the forward pass. The weight is [out, in], or
    [in, out] if `transposed`.
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
    """Return the manifest of `parameters` (such as `model.named_parameters()`, which names tied weights once)."""
    described = [(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in parameters]
    return build_manifest(described, wire_dtype=wire_dtype, chunk_bytes=chunk_bytes)


@torch.no_grad()
def pack(
    manifest: Manifest, parameters: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], into: Tensor | None = None
) -> Tensor:
    """Copy the parameters, converted to the wire dtypes, into one stream, uint8[total_bytes], whose padding is zero.

    (name, tensor) pairs are consumed one by one, so only one parameter needs to exist at a time. Names not in the manifest are
    ignored. `into`: a stream to overwrite; None = new host memory. Raises ManifestDiffers if a parameter is missing, or if its
    shape is not the manifest's, or its dtype is neither the manifest's nor the wire's.
    """
    stream = torch.empty(manifest.total_bytes, dtype=torch.uint8) if into is None else into
    indices = {spec.name: index for index, spec in enumerate(manifest.parameters)}
    for name, tensor in parameters.items() if isinstance(parameters, Mapping) else parameters:
        index = indices.pop(name, None)
        if index is None:
            continue
        spec, offset, size = manifest.parameters[index], manifest.offsets[index], manifest.sizes[index]
        if tuple(tensor.shape) != tuple(spec.shape):
            raise ManifestDiffers(name, "shape", tuple(tensor.shape), tuple(spec.shape))
        if dtype_name(tensor.dtype) not in (spec.dtype, manifest.sent_dtype(spec)):
            raise ManifestDiffers(name, "dtype", dtype_name(tensor.dtype), spec.dtype)
        _as_tensor(stream[offset : offset + size], spec, manifest).copy_(tensor)
        stream[offset + size : offset + aligned(size)].zero_()
    for index in indices.values():
        raise ManifestDiffers(manifest.parameters[index].name, "the manifest has this parameter, but the model here lacks it")
    return stream


def chunk_of(stream: Tensor, chunk: Chunk) -> Tensor:
    """Return the chunk's bytes, uint8[chunk.num_bytes], as a view of the stream."""
    return stream[chunk.offset : chunk.offset + chunk.num_bytes]


def version_checksum(manifest_id: str, chunk_checksums: Sequence[int]) -> int:
    """Return a 64-bit checksum of all weights of a version."""
    text = manifest_id + ":" + ",".join(f"{value:08x}" for value in chunk_checksums)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Unpacker:
    """Allocates memory for chunks with `take(n)` → uint8[n], and returns arrived chunks as tensors that are views of it.

    Call `memory_for` and, after the chunk's arrival, `add`, both in the manifest's order. Each may have its own thread.
    """

    def __init__(self, manifest: Manifest, take: Callable[[int], Tensor]) -> None:
        self._manifest, self._take = manifest, take
        self._incomplete: deque[Tensor] = deque()
        """Memory of tensors that `add` has not returned yet, in order."""

    def memory_for(self, chunk: Chunk) -> Tensor:
        """Return the memory for the chunk's bytes, uint8[chunk.num_bytes], contents undefined."""
        start = self._manifest.offsets[chunk.parameters[0]]
        if chunk.offset == start:
            self._incomplete.append(self._take(self._manifest.ends[chunk.parameters[-1]] - start))
        begin = chunk.offset - start
        return self._incomplete[-1][begin : begin + chunk.num_bytes]

    def rewind(self, chunk: Chunk) -> None:
        """Forget the memory of `chunk`, which is the next to add, and of later chunks. Call `memory_for` for them again."""
        while len(self._incomplete) > (chunk.offset > self._manifest.offsets[chunk.parameters[0]]):
            self._incomplete.pop()

    def add(self, chunk: Chunk) -> list[tuple[str, Tensor]]:
        """Return the parameters that `chunk` completes, in the manifest's order."""
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


class ReusedMemory:
    """Host memory that is reused once no tensor refers to it, because allocating new pages takes longer than filling them.

    Only the `most` largest buffers are kept. Not thread-safe.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._buffers: list[np.ndarray] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return uint8[num_bytes], contents undefined."""
        for index in range(len(self._buffers)):
            # An unused array has 2 references: from the list, and from getrefcount's argument. The storage that all views of a
            # tensor share holds a third one.
            if sys.getrefcount(self._buffers[index]) == 2 and self._buffers[index].nbytes >= num_bytes:
                return torch.from_numpy(self._buffers[index])[:num_bytes]
        buffer = np.empty(num_bytes, np.uint8)
        self._buffers.append(buffer)
        self._buffers.sort(key=lambda kept: kept.nbytes)
        del self._buffers[: -self._most]  # a tensor that uses one of these keeps it alive
        return torch.from_numpy(buffer)


_Item = TypeVar("_Item")


def prefetch(items: Iterable[_Item], buffers: int, name: str) -> Generator[_Item, None, None]:
    """Yield the items, which a thread makes in advance. Always close the generator; this waits for the item that is being made.

    At most `buffers` (≥ 2) items exist at a time, including the last one yielded. If making an item fails, the
    error is raised when the item is due.
    """
    assert buffers >= 2, "one item is yielded while another is made"
    iterator, end, thread = iter(items), object(), ThreadPoolExecutor(1, name)
    try:
        made: deque[Future[Any]] = deque(thread.submit(next, iterator, end) for _ in range(buffers))
        while (item := made.popleft().result()) is not end:
            if len(made) < buffers - 1:  # not earlier: until now, the caller may have kept the last item
                made.append(thread.submit(next, iterator, end))
            yield item
            del item
    finally:
        thread.shutdown(cancel_futures=True)
