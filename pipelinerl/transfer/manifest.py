"""The manifest, on which both ends of a weight transfer agree, and a transfer's errors. Dtypes are names; torch is not needed.

The manifest says which tensors are sent, in which form, and how they are cut into chunks. It is fixed for a run, so an update
carries only its id. The tensors are laid out one after another in a stream of bytes, each at a multiple of `ALIGNMENT`. A chunk
is a piece of the stream: as many whole tensors as fit, or a part of one tensor that does not fit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from pipelinerl.errors import FieldError, ManifestMismatch, MessageError, TransferError
from pipelinerl.messages.control import Backend
from pipelinerl.messages.sequences import PolicyVersion, parse
from pipelinerl.v1.control_pb2 import LowRank, ParameterSpec, WeightManifest


class ManifestDiffers(ManifestMismatch):
    """The manifest and the model here differ in a parameter, or in the total number of elements."""

    def __init__(self, parameter: str, problem: str, ours: object = None, theirs: object = None) -> None:
        """`problem`: a sentence or, if `ours` and `theirs` are given, the name of the field that has these values."""
        values = "" if theirs is None else f" is {theirs!r} in the manifest, {ours!r} here"
        super().__init__(f"{parameter}: {problem}{values}")


class GroupFailed(TransferError):
    """The collective group could not be built, or lost a member. It is unusable now."""

    def __init__(self, group: str, problem: str) -> None:
        super().__init__(f"weight group {group}: {problem}" if group else problem)


class DeadlineExceeded(GroupFailed):
    """The group made no progress within the time allowed. `missing`: ranks that did not check in at the store
    (known only to rank 0)."""

    def __init__(self, group: str, waiting_for: str, timeout_s: float, missing: tuple[int, ...] = ()) -> None:
        self.missing = missing
        super().__init__(group, f"{waiting_for} took longer than {timeout_s:.1f} s")


class TransferAborted(TransferError):
    """This side or rank 0 gave up the transfer."""


class Kept(NamedTuple):
    """The first `num_chunks` chunks of a version, which a receiver keeps after its group broke. `content`: the version's name
    from `Manifest.content`."""

    content: str = ""
    num_chunks: int = 0


@dataclass(frozen=True)
class GroupSpec:
    """A rank's part in a group."""

    store: str
    """The store's host:port."""
    name: str
    """A name such as `epoch-3`, which must be new for every group on one store."""
    rank: int
    world: int
    backend: Backend = "gloo"
    bind_host: str | None = None
    """Address at which the other ranks reach this one with gloo; None = the machine's name."""
    kept: Kept = Kept()  # noqa: RUF009 - immutable
    """Chunks that need not be sent to this rank; in an open `WeightGroup`, chunks that all receivers keep."""


ALIGNMENT = 64
"""Each tensor begins at a multiple of this many bytes, so that a received tensor of any dtype can be a view of its chunk."""
DEFAULT_CHUNK_BYTES = 16 * 2**20
NCCL_CHUNK_BYTES = 128 * 2**20
"""Default size of a chunk with nccl. It is larger than with gloo, because nccl's fixed cost per chunk weighs more."""
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
FORMAT = b"5"
"""Version of the layout and the transfer. The manifest's id depends on it, so sides of different formats refuse each other."""
KIND = "WeightManifest"


@dataclass(frozen=True)
class Chunk:
    """Bytes [offset, offset + num_bytes) of the stream. `parameters`: indices of its parameters in the manifest."""

    index: int
    offset: int
    num_bytes: int
    parameters: range


@dataclass(frozen=True)
class TransferResult:
    """Result of sending a version. `checksum`: its `version_checksum`. `num_bytes`: total size of the chunks that were sent."""

    checksum: int
    num_bytes: int
    seconds: float


class Manifest:
    """A `WeightManifest` message without its id (control.proto explains its fields), and the layout that follows from it.

    If `low_rank` is not empty, the parameters are its factors, and all other weights stay as in the initial model. Raises
    FieldError for values that cannot be laid out.
    """

    def __init__(self, content: WeightManifest) -> None:
        self._content = content
        self.parameters, self.low_rank = tuple(content.parameters), tuple(content.low_rank)
        self.chunk_bytes, self.wire_dtype = content.chunk_bytes, content.wire_dtype
        if self.chunk_bytes < ALIGNMENT or self.chunk_bytes % ALIGNMENT:
            raise FieldError("chunk_bytes", self.chunk_bytes, f"must be a positive multiple of {ALIGNMENT}")
        if self.wire_dtype and self.wire_dtype not in DTYPE_BYTES:
            raise FieldError("wire_dtype", self.wire_dtype, f"must be empty or one of {sorted(DTYPE_BYTES)}")
        if not self.parameters:
            raise FieldError("parameters", (), "must contain at least one parameter")
        names: set[str] = set()
        for spec in self.parameters:
            if not spec.name:
                raise FieldError("parameters.name", "", "give each parameter a name")
            if spec.name in names:
                raise FieldError("parameters", spec.name, "use each name once")
            names.add(spec.name)
            if spec.dtype not in DTYPE_BYTES:
                raise FieldError(f"parameters[{spec.name}].dtype", spec.dtype, f"must be one of {sorted(DTYPE_BYTES)}")
            if not all(spec.shape):
                raise FieldError(f"parameters[{spec.name}].shape", tuple(spec.shape), "must have positive sizes only")
        _validate_low_rank(self)

    @cached_property
    def manifest_id(self) -> str:
        """Hash of everything on which both sides must agree, as 16 hex digits."""
        content = self._content.SerializeToString(deterministic=True)
        return hashlib.blake2b(content, digest_size=8, key=FORMAT).hexdigest()

    def content(self, version: PolicyVersion) -> str:
        """Return a name for the bytes of `version`. Chunks that ranks keep under the same name have the same bytes."""
        return f"{version}/{self.manifest_id}"

    def sent_dtype(self, spec: ParameterSpec) -> str:
        return self.wire_dtype or spec.dtype

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each parameter on the wire, without padding."""
        return tuple(math.prod(spec.shape) * DTYPE_BYTES[self.sent_dtype(spec)] for spec in self.parameters)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each parameter in the stream, in bytes."""
        return (0, *self.ends[:-1])

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """End of each parameter in the stream, padding included, in bytes."""
        return tuple(accumulate(map(aligned, self.sizes)))

    @cached_property
    def slowest_chunk_s(self) -> float:
        """Seconds that the largest chunk takes at 20 MB/s. A transfer must not count as stuck earlier."""
        return max(chunk.num_bytes for chunk in self.chunks) / 20e6

    @property
    def total_bytes(self) -> int:
        """Length of the stream, padding included."""
        return self.ends[-1]

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Pieces of the stream of at most `chunk_bytes`, in order."""
        chunks: list[Chunk] = []
        first = 0
        while first < len(self.parameters):
            start, after = self.offsets[first], first + 1
            while after < len(self.parameters) and self.ends[after] - start <= self.chunk_bytes:
                after += 1
            end = self.ends[after - 1]
            for offset in range(start, end, self.chunk_bytes):
                num_bytes = min(self.chunk_bytes, end - offset)
                chunks.append(Chunk(len(chunks), offset, num_bytes, range(first, after)))
            first = after
        return tuple(chunks)

    def to_bytes(self) -> bytes:
        """Return the `WeightManifest` message of the control channel."""
        message = WeightManifest(manifest_id=self.manifest_id)
        message.MergeFrom(self._content)
        return message.SerializeToString()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse a `WeightManifest`. Raises `MessageError` if it is malformed or its id does not match its content."""
        message = parse(WeightManifest(), data, KIND)
        manifest_id = message.manifest_id
        message.ClearField("manifest_id")
        try:
            manifest = cls(message)
        except FieldError as error:
            raise MessageError(KIND, error.field, str(error)) from error
        if manifest.manifest_id != manifest_id:
            raise MessageError(KIND, "manifest_id", f"is {manifest_id}, but the content's id is {manifest.manifest_id}")
        return manifest


def build_manifest(
    parameters: Iterable[tuple[str, Iterable[int], str]],
    *,
    wire_dtype: str = "",
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    low_rank: Iterable[LowRank] = (),
) -> Manifest:
    """Lay out `parameters`, given as (name, shape, dtype name), in their order. Raises FieldError if one is invalid."""
    specs = [ParameterSpec(name=name, shape=shape, dtype=dtype) for name, shape, dtype in parameters]
    return Manifest(WeightManifest(parameters=specs, chunk_bytes=chunk_bytes, wire_dtype=wire_dtype, low_rank=low_rank))


def aligned(num_bytes: int) -> int:
    """Round `num_bytes` up to a multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def chunk_size(mib: float | None, backend: Backend) -> int:
    """Return a chunk's size in bytes. `mib`: a recipe's `weights.chunk_mib`; None = the backend's default size."""
    if mib is None:
        return NCCL_CHUNK_BYTES if backend == "nccl" else DEFAULT_CHUNK_BYTES
    return aligned(max(1, int(mib * 2**20)))


def _validate_low_rank(manifest: Manifest) -> None:
    shapes = {spec.name: tuple(spec.shape) for spec in manifest.parameters}
    used = [name for item in manifest.low_rank for name in (item.a, item.b)]
    if manifest.low_rank and sorted(used) != sorted(shapes):
        raise FieldError("low_rank", sorted(set(used) ^ set(shapes)), "use each parameter as a factor of exactly one weight")
    for item in manifest.low_rank:
        a, b, shape = shapes[item.a], shapes[item.b], tuple(item.shape)
        product, wanted = ("(B·A)ᵀ", a[-1:] + b[:1]) if item.transposed else ("B·A", b[:1] + a[-1:])
        if not (len(a) == len(b) == 2 and a[0] == b[1] and shape == wanted):
            raise FieldError(f"low_rank[{item.name}].shape", shape, f"must be the shape of {product}: A has {a}, B {b}")
        if item.dtype not in DTYPE_BYTES:
            raise FieldError(f"low_rank[{item.name}].dtype", item.dtype, f"must be one of {sorted(DTYPE_BYTES)}")
        if not math.isfinite(item.scaling):
            raise FieldError(f"low_rank[{item.name}].scaling", item.scaling, "must be a finite number")
