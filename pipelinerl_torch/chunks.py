"""Tensors to chunks of bytes and back, by a manifest's layout.

Nothing here sends, receives or chooses where chunks live.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pipelinerl.weights.errors import ManifestDiffers
from pipelinerl.weights.manifest import DEFAULT_CHUNK_BYTES, Chunk, Manifest, ParameterSpec, aligned, build_manifest
from pipelinerl_torch.memory import ReusedMemory


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
    manifest: Manifest,
    parameters: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    device: torch.device | str = "cpu",
    into: Tensor | None = None,
) -> Tensor:
    """Copy the parameters into one stream: uint8[total_bytes] on `device`, converted to the wire dtypes, padding zeroed.

    Given as pairs, they are taken one after the other, so that no two need to be there at once; names that the manifest does
    not have are passed over. `into`: such a stream that may be overwritten. Raises ManifestDiffers if a parameter is missing
    or has another shape or dtype than the manifest says.
    """
    stream = torch.empty(manifest.total_bytes, dtype=torch.uint8, device=device) if into is None else into
    places = {spec.name: index for index, spec in enumerate(manifest.parameters)}
    for name, tensor in parameters.items() if isinstance(parameters, Mapping) else parameters:
        index = places.pop(name, None)
        if index is not None:
            _put(stream, manifest, index, tensor)
    for index in places.values():
        raise ManifestDiffers(manifest.parameters[index].name, "presence", "missing", "present")
    return stream


def _put(stream: Tensor, manifest: Manifest, index: int, tensor: Tensor) -> None:
    spec, offset, size = manifest.parameters[index], manifest.offsets[index], manifest.sizes[index]
    _check(spec, tensor)
    _as_tensor(stream[offset : offset + size], spec, manifest).copy_(tensor)
    stream[offset + size : offset + aligned(size)].zero_()


def chunk_of(stream: Tensor, chunk: Chunk) -> Tensor:
    """uint8[chunk.num_bytes]: a view of the stream."""
    return stream[chunk.offset : chunk.offset + chunk.num_bytes]


def version_checksum(manifest_id: str, chunk_checksums: Sequence[int]) -> int:
    """64 bits for all weights of a version: equal weights under equal manifests give the same number."""
    text = manifest_id + ":" + ",".join(f"{value:08x}" for value in chunk_checksums)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Unpacker:
    """Turns chunks, added in order, into tensors.

    A tensor that lies within one chunk is a view of it; one that spans chunks is assembled in memory of its own.
    Memory held beyond the chunk given is therefore at most one tensor. `memory`: where from, for chunks in host memory.
    """

    def __init__(self, manifest: Manifest, memory: ReusedMemory | None = None) -> None:
        self._manifest, self._memory = manifest, memory
        self._next = 0
        self._partial: Tensor | None = None

    def add(self, chunk: Tensor) -> list[tuple[str, Tensor]]:
        """The parameters that `chunk` (uint8[num_bytes], the next in order) completes, in the manifest's order."""
        layout = self._manifest.chunks[self._next]
        assert chunk.numel() == layout.num_bytes
        self._next += 1
        done = []
        for piece in layout.pieces:
            spec, size = self._manifest.parameters[piece.parameter], self._manifest.sizes[piece.parameter]
            raw = chunk[piece.chunk_offset : piece.chunk_offset + piece.num_bytes]
            if piece.num_bytes < size:
                if piece.tensor_offset == 0:
                    self._partial = self._new(size, chunk.device)
                assert self._partial is not None
                self._partial[piece.tensor_offset : piece.tensor_offset + piece.num_bytes] = raw
                if piece.tensor_offset + piece.num_bytes < size:
                    continue
                raw, self._partial = self._partial, None
            done.append((spec.name, _as_tensor(raw, spec, self._manifest)))
        return done

    def _new(self, num_bytes: int, device: torch.device) -> Tensor:
        if self._memory is not None:
            return self._memory.take(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _as_tensor(raw: Tensor, spec: ParameterSpec, manifest: Manifest) -> Tensor:
    return raw.view(getattr(torch, manifest.sent_dtype(spec))).view(spec.shape)


def _check(spec: ParameterSpec, tensor: Tensor) -> None:
    if tuple(tensor.shape) != spec.shape:
        raise ManifestDiffers(spec.name, "shape", tuple(tensor.shape), spec.shape)
    if dtype_name(tensor.dtype) != spec.dtype:
        raise ManifestDiffers(spec.name, "dtype", dtype_name(tensor.dtype), spec.dtype)
