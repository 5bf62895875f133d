"""Objects of the weight log as bytes: anchors, which are safetensors files, and lossless deltas from one version to another.

Manifest and version determine an anchor's header, so a reader compares all its bytes. A delta is a header (`_HEADER`) and then
one record per chunk of the manifest. A record has these parts, or only the first one if the chunk is unchanged:

    length     8 bytes   number of bytes that follow in this record; 0 if the chunk is unchanged
    num_words  8 bytes   number of XORs in the block
    num_gaps   8 bytes   number of gap bytes in the block
    block      the rest  compressed by zstd: first all gap bytes, then all XORs

An XOR combines a changed word's old and new value. A word has 2 bytes if the chunk has a 16-bit tensor, else 4. The lowest byte
of each XOR comes first, then the next byte of each XOR, and so on. Each changed word has a gap, the number n of unchanged words
just before it, which is coded as n // 255 bytes of value 255 and a last byte n % 255. If over a quarter of the words changed,
the block has no gaps, and an XOR for every word of the chunk.

The device that holds the versions finds the changed words. Only the block's words and their positions are copied to the host.
Compressing and decoding take one core, in calls that release the GIL. Decoding checks sizes before it allocates memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import pyarrow
import torch
from torch import Tensor

from pipelinerl.errors import TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.chunks import chunk_of
from pipelinerl.transfer.group import HOST, Placement
from pipelinerl.transfer.manifest import DTYPE_BYTES, Chunk, Manifest

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
_Words: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_MAGIC = b"PRLDELT2"
"""The last digit is the version of the format."""
_HEADER, _FIELDS = struct.Struct("<8s16sIQQ"), ("magic", "manifest_id", "incarnation", "from_version", "to_version")
_LENGTH, _SIZES = struct.Struct("<Q"), struct.Struct("<QQ")
_SKIP = 255
_SAFETENSORS = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ZSTD = pyarrow.Codec("zstd", compression_level=1)


class LogDamaged(TransferError):
    """An object or an announcement of the weight log is wrong. `object`: its key or name. `field`: its wrong part."""

    def __init__(self, object: str, field: str, problem: str) -> None:
        self.object, self.field = object, field
        super().__init__(f"weight log, {object}: {field} {problem}")


def largest_object(manifest: Manifest) -> int:
    """Return an upper bound for the size of an anchor or a delta, in bytes."""
    return 2 * manifest.total_bytes + len(anchor_header(manifest, PolicyVersion(2**32, 2**64)))


def anchor_header(manifest: Manifest, version: PolicyVersion) -> bytes:
    """Return the bytes that precede an anchor's tensors. The tensors follow in the manifest's order without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "manifest_id": manifest.manifest_id, "version": str(version)}}
    start = 0
    for spec, size in zip(manifest.parameters, manifest.sizes, strict=True):
        dtype = _SAFETENSORS[manifest.sent_dtype(spec)]
        header[spec.name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def encode_anchor(
    manifest: Manifest, version: PolicyVersion, stream: Tensor, placement: Placement = HOST
) -> Iterator[bytes | memoryview]:
    """Yield the parts of an anchor. `stream`: uint8[total_bytes] in the memory of `placement`."""
    yield anchor_header(manifest, version)
    for offset, size in zip(manifest.offsets, manifest.sizes, strict=True):
        yield placement.on_host(stream[offset : offset + size]).numpy().data


def decode_anchor(manifest: Manifest, version: PolicyVersion, data: Bytes, into: Bytes, name: str) -> Iterator[None]:
    """Write the stream of an anchor into `into`, uint8[total_bytes], one tensor per step. Raises `LogDamaged`."""
    header = anchor_header(manifest, version)
    start, expected = len(header), len(header) + sum(manifest.sizes)
    if len(data) != expected:
        raise LogDamaged(name, "bytes", f"are {len(data)}, expected {expected}")
    if data[:start].tobytes() != header:
        raise LogDamaged(name, "header", f"is not that of version {version} of manifest {manifest.manifest_id}")
    for offset, end, size in zip(manifest.offsets, manifest.ends, manifest.sizes, strict=True):
        into[offset : offset + size] = data[start : start + size]
        into[offset + size : end] = 0
        start += size
        yield


def encode_delta(
    manifest: Manifest, before: PolicyVersion, after: PolicyVersion, old: Tensor, new: Tensor, placement: Placement = HOST
) -> Iterator[bytes | memoryview]:
    """Yield the parts of the delta from stream `old` to stream `new`. Both streams are uint8[total_bytes] in the memory of
    `placement`, and both versions have the same incarnation."""
    yield _HEADER.pack(_MAGIC, manifest.manifest_id.encode(), after.incarnation, before.number, after.number)
    for chunk in manifest.chunks:
        bits = 8 * _word_bytes(manifest, chunk)
        with placement.scope():
            body = _encode(*(chunk_of(stream, chunk).view(getattr(torch, f"int{bits}")) for stream in (old, new)))
        yield _LENGTH.pack(len(body))
        yield body


def decode_delta(
    manifest: Manifest, before: PolicyVersion, after: PolicyVersion, data: Bytes, into: Bytes, name: str
) -> Iterator[None]:
    """Change the stream `into` from version `before` to `after`, one chunk per step. Raises `LogDamaged`; the stream may then
    mix both versions."""
    expected = (_MAGIC, manifest.manifest_id.encode(), after.incarnation, before.number, after.number)
    if len(data) < _HEADER.size:
        raise LogDamaged(name, "header", f"is cut off after {len(data)} bytes")
    for field, wanted, found in zip(_FIELDS, expected, _HEADER.unpack(data[: _HEADER.size].data), strict=True):
        if wanted != found:
            raise LogDamaged(name, field, f"is {found!r}, expected {wanted!r}")
    start = _HEADER.size
    for chunk in manifest.chunks:
        body = start + _LENGTH.size
        try:
            (length,) = _LENGTH.unpack(data[start:body].data)
            if length > len(data) - body:
                raise ValueError(f"has a length of {length}, but only {len(data) - body} bytes are left")
            words = into[chunk.offset : chunk.offset + chunk.num_bytes].view(f"u{_word_bytes(manifest, chunk)}")
            _decode(data[body : body + length], words)
        except (ValueError, OSError, struct.error) as error:  # OSError is zstd's
            raise LogDamaged(name, f"chunks[{chunk.index}]", str(error)) from error
        start = body + length
        yield
    if start != len(data):
        raise LogDamaged(name, "bytes", f"are {len(data)}, expected {start}")


def _word_bytes(manifest: Manifest, chunk: Chunk) -> int:
    return min(4, *(DTYPE_BYTES[manifest.sent_dtype(manifest.parameters[index])] for index in chunk.parameters))


def _encode(old: Tensor, new: Tensor) -> bytes:
    difference, gaps = old ^ new, np.empty(0, np.uint8)
    num_changed = int(difference.count_nonzero())  # counted first: positions take 8 bytes each on the device
    if not num_changed:
        return b""
    if num_changed <= new.numel() // 4:
        positions = difference.nonzero().squeeze(1)
        gaps, difference = _gaps(positions.cpu().numpy()), difference[positions]
    planes = difference.cpu().numpy().view(np.uint8).reshape(-1, difference.itemsize).T.ravel()  # all lowest bytes first
    packed = _ZSTD.compress(np.concatenate((gaps, planes)), asbytes=True)
    return _SIZES.pack(len(difference), len(gaps)) + packed


def _decode(body: Bytes, into: _Words) -> None:
    """Apply a chunk's record to its words `into`. Raises ValueError, struct.error or zstd's OSError for a damaged record."""
    if not len(body):
        return
    num_words, num_gaps = _SIZES.unpack(body[: _SIZES.size].data)
    least = num_words if num_gaps else 0
    if not 0 < num_words <= into.size or not least <= num_gaps <= num_words + into.size // _SKIP:
        raise ValueError(f"claims {num_words} XORs and {num_gaps} gap bytes, which do not fit its {into.size} words")
    packed, num_bytes = pyarrow.py_buffer(body[_SIZES.size :]), num_gaps + num_words * into.itemsize
    raw = np.frombuffer(_ZSTD.decompress(packed, num_bytes), np.uint8)
    words, positions = raw[num_gaps:].reshape(into.itemsize, -1).T.ravel().view(into.dtype), _positions(raw[:num_gaps])
    if not num_gaps and num_words == into.size:
        into ^= words
    elif len(positions) == num_words and positions[-1] < into.size:
        into[positions] ^= words
    else:
        raise ValueError(f"has {len(positions)} positions for {num_words} changed words, or one beyond its {into.size} words")


def _gaps(positions: _Words) -> Bytes:
    gaps = positions.copy()
    gaps[1:] -= positions[:-1] + 1
    skips = gaps // _SKIP
    ends = np.cumsum(skips + 1) - 1
    coded = np.full(int(ends[-1]) + 1, _SKIP, np.uint8)
    coded[ends] = gaps - skips * _SKIP
    return coded


def _positions(gaps: Bytes) -> _Words:
    """Return the ascending positions of the changed words, int64[n], from their coded gaps."""
    ends = np.flatnonzero(gaps != _SKIP)
    return np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(len(ends))
