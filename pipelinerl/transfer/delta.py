"""Objects of the weight log as bytes: anchors, which are safetensors files, and lossless deltas from one version to another.

An anchor's header follows from the manifest and the version, so a reader compares it and parses nothing. A delta has one record
per chunk of the manifest: an encoding, a length, and the XOR of both versions' words, which have 2 bytes in chunks with 16-bit
tensors and 4 in others. SPARSE holds the gaps before the changed words, then their XORs by byte planes, compressed together by
zstd. A gap is one byte below 255, after one byte of 255 for each 255 words to skip. XOR holds all words by byte planes, and
WHOLE the new bytes.

Everything runs on one core, in calls of NumPy and zstd that release the GIL. Decoding checks sizes before it allocates memory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import pyarrow

from pipelinerl.errors import TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.manifest import DTYPE_BYTES, Chunk, Manifest

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
_Words: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

UNCHANGED, SPARSE, XOR, WHOLE = range(4)
_MAGIC = b"PRLDELT1"
"""The last digit is the version of the format."""
_HEADER, _FIELDS = struct.Struct("<8s16sIQQ"), ("magic", "manifest_id", "incarnation", "from_version", "to_version")
_RECORD, _SIZES = struct.Struct("<BQ"), struct.Struct("<QQ")
"""A record's encoding and length; in a SPARSE record, the number of changed words and of bytes of their gaps."""
_SKIP = 255
_SAFETENSORS = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ZSTD = pyarrow.Codec("zstd", compression_level=1)


class LogDamaged(TransferError):
    """An object or an announcement of the weight log is wrong. `object`: its key. `field`: its wrong part."""

    def __init__(self, object: str, field: str, problem: str) -> None:
        self.object, self.field = object, field
        super().__init__(f"weight log, {object}: {field} {problem}")


def largest_object(manifest: Manifest) -> int:
    """Return an upper bound of the bytes of anchors and deltas."""
    return 2 * manifest.total_bytes + len(anchor_header(manifest, PolicyVersion(2**32, 2**64)))


def anchor_header(manifest: Manifest, version: PolicyVersion) -> bytes:
    """Return the bytes of an anchor in front of its tensors, which follow in the manifest's order without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "manifest_id": manifest.manifest_id, "version": str(version)}}
    start = 0
    for spec, size in zip(manifest.parameters, manifest.sizes, strict=True):
        dtype = _SAFETENSORS[manifest.sent_dtype(spec)]
        header[spec.name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def encode_anchor(manifest: Manifest, version: PolicyVersion, stream: Bytes) -> Iterator[bytes | memoryview]:
    """Yield the parts of an anchor. The tensors are views of `stream`, uint8[total_bytes]."""
    yield anchor_header(manifest, version)
    for offset, size in zip(manifest.offsets, manifest.sizes, strict=True):
        yield stream[offset : offset + size].data


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
    manifest: Manifest, before: PolicyVersion, after: PolicyVersion, old: Bytes, new: Bytes
) -> Iterator[bytes | memoryview]:
    """Yield the parts of the delta from stream `old` to stream `new`, uint8[total_bytes] each, of the same incarnation."""
    yield _HEADER.pack(_MAGIC, manifest.manifest_id.encode(), after.incarnation, before.number, after.number)
    for chunk in manifest.chunks:
        encoding, body = _encode(_words(manifest, chunk, old), _words(manifest, chunk, new))
        yield _RECORD.pack(encoding, len(body))
        yield body


def decode_delta(
    manifest: Manifest, before: PolicyVersion, after: PolicyVersion, data: Bytes, into: Bytes, name: str
) -> Iterator[None]:
    """Turn the stream `into` from version `before` into `after`, one chunk per step. Raises `LogDamaged`, and then leaves a
    mixture of both."""
    expected = (_MAGIC, manifest.manifest_id.encode(), after.incarnation, before.number, after.number)
    if len(data) < _HEADER.size:
        raise LogDamaged(name, "header", f"is cut off after {len(data)} bytes")
    for field, wanted, found in zip(_FIELDS, expected, _HEADER.unpack(data[: _HEADER.size].data), strict=True):
        if wanted != found:
            raise LogDamaged(name, field, f"is {found!r}, expected {wanted!r}")
    start = _HEADER.size
    for chunk in manifest.chunks:
        body = start + _RECORD.size
        try:
            encoding, length = _RECORD.unpack(data[start:body].data)
            if length > len(data) - body:
                raise ValueError(f"has a length of {length} with {len(data) - body} bytes left")
            _decode(encoding, data[body : body + length], _words(manifest, chunk, into))
        except (ValueError, OSError, struct.error) as error:  # OSError is zstd's
            raise LogDamaged(name, f"chunks[{chunk.index}]", str(error)) from error
        start = body + length
        yield
    if start != len(data):
        raise LogDamaged(name, "bytes", f"are {len(data)}, expected {start}")


def _words(manifest: Manifest, chunk: Chunk, stream: Bytes) -> _Words:
    """Return a view of the chunk's bytes as words."""
    narrowest = min(DTYPE_BYTES[manifest.sent_dtype(manifest.parameters[index])] for index in chunk.parameters)
    return stream[chunk.offset : chunk.offset + chunk.num_bytes].view(np.uint16 if narrowest == 2 else np.uint32)


def _encode(old: _Words, new: _Words) -> tuple[int, bytes | memoryview]:
    difference = old ^ new
    changed = _nonzero(difference)
    if not len(changed):
        return UNCHANGED, b""
    if len(changed) <= new.size // 4:
        gaps = _gaps(changed)
        packed = _ZSTD.compress(np.concatenate((gaps, _planes(difference[changed]))), asbytes=True)
        encoding, body = SPARSE, _SIZES.pack(len(changed), len(gaps)) + packed
    else:
        encoding, body = XOR, _ZSTD.compress(_planes(difference), asbytes=True)
    return (encoding, body) if len(body) < new.nbytes else (WHOLE, new.view(np.uint8).data)


def _decode(encoding: int, body: Bytes, into: _Words) -> None:
    """Apply a record to the words `into`. Raises ValueError, struct.error, or zstd's OSError."""
    if encoding == SPARSE:
        num_changed, num_gaps = _SIZES.unpack(body[: _SIZES.size].data)
        if not 0 < num_changed <= into.size or not num_changed <= num_gaps <= num_changed + into.size // _SKIP:
            raise ValueError(f"claims {num_changed} changes in {num_gaps} bytes of gaps, which {into.size} words cannot have")
        raw = _unpacked(body[_SIZES.size :], num_gaps + num_changed * into.itemsize)
        positions = _positions(raw[:num_gaps])
        if len(positions) != num_changed or positions[-1] >= into.size:
            raise ValueError(f"has {len(positions)} positions for {num_changed} changes, or one beyond {into.size} words")
        into[positions] ^= _from_planes(raw[num_gaps:], into.dtype)
    elif encoding == XOR:
        into ^= _from_planes(_unpacked(body, into.nbytes), into.dtype)
    elif encoding == WHOLE and len(body) == into.nbytes:
        into[:] = body.view(into.dtype)
    elif encoding != UNCHANGED or len(body):
        raise ValueError(f"has encoding {encoding} with {len(body)} bytes for {into.nbytes}")


def _unpacked(body: Bytes, num_bytes: int) -> Bytes:
    """Return uint8[num_bytes]. Raises OSError if zstd finds damage or another size."""
    return np.frombuffer(_ZSTD.decompress(pyarrow.py_buffer(body), num_bytes), np.uint8)


def _nonzero(words: _Words) -> _Words:
    """Return the positions of words that are not zero. Looking at 8 bytes at a time first is several times as fast."""
    eights, shift = words.view(np.uint64), (8 // words.itemsize).bit_length() - 1
    groups = np.flatnonzero(eights != 0)
    inside = np.flatnonzero(eights[groups].view(words.dtype) != 0)
    return (groups << shift)[inside >> shift] + (inside & ((1 << shift) - 1))


def _gaps(positions: _Words) -> Bytes:
    gaps = positions.copy()
    gaps[1:] -= positions[:-1] + 1
    skips = gaps // _SKIP
    ends = np.cumsum(skips + 1) - 1
    coded = np.full(int(ends[-1]) + 1, _SKIP, np.uint8)
    coded[ends] = gaps - skips * _SKIP
    return coded


def _positions(gaps: Bytes) -> _Words:
    """Return the ascending positions, int64[n], of which `gaps` is the code."""
    ends = np.flatnonzero(gaps != _SKIP)
    return np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(len(ends))


def _planes(words: _Words) -> Bytes:
    """Return the lowest bytes of all words, then the next ones, and so on."""
    return words.view(np.uint8).reshape(-1, words.itemsize).T.ravel()


def _from_planes(planes: Bytes, dtype: np.dtype[Any]) -> _Words:
    return planes.reshape(dtype.itemsize, -1).T.ravel().view(dtype)
