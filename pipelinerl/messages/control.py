"""The control channel's messages as immutable dataclasses: membership and the weight-update protocol.

docs/architecture.md draws the exchange. The weights' manifest is not here (`pipelinerl.transfer.manifest`), and neither
is any state machine that these messages drive.

Field names are the same on both sides, so one table of rules by field name checks every message. Whether an epoch or a
version is the current one is for the state machines to judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple, TypeVar

from google.protobuf.message import Message

from pipelinerl.errors import MessageError
from pipelinerl.messages.validation import building, check_finite, check_text, check_uint, parse
from pipelinerl.v1 import control_pb2 as pb

Phase = Literal["joining", "serving", "draining"]
Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class Registration:
    """Actor → trainer, its entry in the membership bucket."""

    actor: str
    process: str
    """Changes when the process restarts."""
    grpc_address: str
    """host:port of its ActorService."""
    ranks: int
    """Tensor-parallel size: ranks it takes in the transfer group."""
    manifest_id: str = ""
    """Of the weights that its model is prepared for; "" = not known yet."""
    policy_version: int = 0
    incarnation: int = 0
    """Of the trainer that made the version it serves; 0 = it serves none of this run yet."""
    phase: Phase = "joining"
    pod_uid: str = ""
    """Of the Kubernetes pod it runs in; "" = none."""


@dataclass(frozen=True)
class EpochMember:
    """Its ranks are first_rank .. first_rank + ranks - 1; rank 0 is the trainer."""

    actor: str
    process: str
    first_rank: int
    ranks: int


@dataclass(frozen=True)
class EpochStart:
    """Trainer → actors, `epoch`: the transfer group's membership."""

    incarnation: int
    epoch: int
    store_address: str
    """host:port of the store that the trainer hosts for this epoch."""
    backend: Backend
    world_size: int
    members: tuple[EpochMember, ...]
    manifest_id: str
    deadline_s: float
    """Seconds a member has to join; who has not is left out of the next epoch."""


@dataclass(frozen=True)
class EpochJoined:
    """Actor → trainer, `joined.<actor>`."""

    actor: str
    incarnation: int
    epoch: int


@dataclass(frozen=True)
class Announce:
    """Trainer → actors, `announce`: bytes of this version follow on the collective."""

    incarnation: int
    epoch: int
    version: int
    manifest_id: str
    deadline_s: float
    """Seconds a member has to stage it."""


@dataclass(frozen=True)
class Staged:
    """Actor → trainer, `staged.<actor>`: complete and checked, not yet served."""

    actor: str
    incarnation: int
    epoch: int
    version: int
    checksum: int
    """Over all chunk checksums (64 bits), compared with the trainer's own."""
    bytes: int
    receive_s: float
    """First byte to last, seconds."""
    prepare_s: float
    """Into the engine's layout, seconds."""


@dataclass(frozen=True)
class Commit:
    """Trainer → actors, `commit`: serve it now."""

    incarnation: int
    epoch: int
    version: int


@dataclass(frozen=True)
class Serving:
    """Actor → trainer, `serving.<actor>`."""

    actor: str
    incarnation: int
    epoch: int
    version: int
    stall_s: float
    """Time in which it generated nothing because of this update, seconds."""


@dataclass(frozen=True)
class Abort:
    """Either way, `abort` and `failed.<actor>`: this version's transfer is over; staging is discarded."""

    incarnation: int
    """0 = of none: the actor's model does not take the manifest's weights, and the actor ends."""
    epoch: int
    version: int
    reason: str
    actor: str = ""
    """Who says so; "" = the trainer."""
    group_broke: bool = False
    """An actor's: the transfer group failed, which may be another member's doing."""


@dataclass(frozen=True)
class RunEnd:
    """Trainer → everyone, `end`: the run is over, or has failed."""

    incarnation: int
    version: int
    ok: bool
    reason: str = ""


Control = Registration | EpochStart | EpochJoined | Announce | Staged | Commit | Serving | Abort | RunEnd


_Control = TypeVar("_Control", bound=Control)
_Rule = Callable[[Any, str, str], None]

_RANK_BITS = 10
"""An actor takes fewer than 1024 ranks: far above any use, and a broken number does no harm."""
_PROTO: dict[type, type[Message]] = {
    Registration: pb.Registration,
    EpochStart: pb.EpochStart,
    EpochJoined: pb.EpochJoined,
    Announce: pb.Announce,
    Staged: pb.Staged,
    Commit: pb.Commit,
    Serving: pb.Serving,
    Abort: pb.Abort,
    RunEnd: pb.RunEnd,
}


class LowRankFields(NamedTuple):
    """See the message `LowRank`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    a: str
    b: str
    scaling: float
    transposed: bool


class ManifestFields(NamedTuple):
    """What a `WeightManifest` message holds; `pipelinerl.transfer.manifest` gives it meaning."""

    manifest_id: str
    parameters: tuple[tuple[str, tuple[int, ...], str], ...]
    """(name, shape, dtype) of each parameter, in the order in which their bytes are sent."""
    chunk_bytes: int
    wire_dtype: str
    """"" = each parameter's own."""
    low_rank: tuple[LowRankFields, ...] = ()


def encode_control(message: Control) -> bytes:
    """Raises `MessageError` for what `decode_control` would refuse."""
    kind = type(message).__name__
    _check(message, kind)
    with building(kind):
        return _PROTO[type(message)](**asdict(message)).SerializeToString()


def decode_control(data: bytes, message_type: type[_Control], *, max_bytes: int = 0) -> _Control:
    """`message_type` is a class of `pipelinerl.messages.control`. Raises `MessageError`; `max_bytes` 0 = any."""
    kind = message_type.__name__
    proto = parse(_PROTO[message_type](), data, kind, max_bytes)
    values = {field.name: getattr(proto, field.name) for field in fields(message_type)}
    if isinstance(proto, pb.EpochStart):
        values["members"] = tuple(_member(member) for member in proto.members)
    message = message_type(**values)
    _check(message, kind)
    return message


def encode_manifest(
    manifest_id: str,
    parameters: Iterable[tuple[str, tuple[int, ...], str]],
    chunk_bytes: int,
    wire_dtype: str = "",
    low_rank: Iterable[LowRankFields] = (),
) -> bytes:
    """Raises `MessageError` for what `decode_manifest` would refuse."""
    manifest = ManifestFields(manifest_id, tuple(parameters), chunk_bytes, wire_dtype, tuple(low_rank))
    _check_manifest(manifest)
    with building("WeightManifest"):
        return pb.WeightManifest(
            manifest_id=manifest_id,
            parameters=[
                pb.ParameterSpec(name=name, shape=shape, dtype=dtype) for name, shape, dtype in manifest.parameters
            ],
            chunk_bytes=chunk_bytes,
            wire_dtype=wire_dtype,
            low_rank=[pb.LowRank(**item._asdict()) for item in manifest.low_rank],
        ).SerializeToString()


def decode_manifest(data: bytes, *, max_bytes: int = 0) -> ManifestFields:
    """Raises `MessageError`. That `manifest_id` fits the rest is for `pipelinerl.transfer.manifest` to check."""
    message = parse(pb.WeightManifest(), data, "WeightManifest", max_bytes)
    parameters = tuple((spec.name, tuple(spec.shape), spec.dtype) for spec in message.parameters)
    low_rank = tuple(_low_rank(item) for item in message.low_rank)
    manifest = ManifestFields(message.manifest_id, parameters, message.chunk_bytes, message.wire_dtype, low_rank)
    _check_manifest(manifest)
    return manifest


def _low_rank(item: pb.LowRank) -> LowRankFields:
    return LowRankFields(item.name, tuple(item.shape), item.dtype, item.a, item.b, item.scaling, item.transposed)


def _member(message: pb.EpochMember) -> EpochMember:
    return EpochMember(message.actor, message.process, message.first_rank, message.ranks)


def _check(message: Control, kind: str) -> None:
    for field in fields(message):
        rule = _RULES.get((kind, field.name)) or _RULES.get(("", field.name))
        if rule is not None:
            rule(getattr(message, field.name), kind, field.name)
    if isinstance(message, EpochStart):
        _check_ranks(message, kind)


def _check_ranks(start: EpochStart, kind: str) -> None:
    """The members' ranks and the trainer's rank 0 fill [0, world_size), each once; no actor is there twice."""
    taken = [0]
    for member in start.members:
        check_text(member.actor, kind, "members.actor")
        check_text(member.process, kind, "members.process")
        check_uint(member.first_rank, kind, "members.first_rank", at_least=1)
        check_uint(member.ranks, kind, "members.ranks", at_least=1, bits=_RANK_BITS)
        taken.extend(range(member.first_rank, member.first_rank + member.ranks))
    if sorted(taken) != list(range(len(taken))) or start.world_size != len(taken):
        raise MessageError(kind, "members", f"ranks {sorted(taken)} do not fill world_size = {start.world_size}")
    if len({member.actor for member in start.members}) != len(start.members):
        raise MessageError(kind, "members", "an actor is listed twice")


def _check_manifest(manifest: ManifestFields) -> None:
    kind = "WeightManifest"
    check_text(manifest.manifest_id, kind, "manifest_id")
    check_uint(manifest.chunk_bytes, kind, "chunk_bytes", at_least=1, bits=64)
    _one_of("", "float32", "bfloat16", "float16")(manifest.wire_dtype, kind, "wire_dtype")
    if not manifest.parameters:
        raise MessageError(kind, "parameters", "is empty")
    for name, shape, dtype in manifest.parameters:
        check_text(name, kind, "parameters.name")
        check_text(dtype, kind, f"parameters[{name}].dtype")
        for size in shape:
            check_uint(size, kind, f"parameters[{name}].shape", bits=64)
    if len({name for name, _, _ in manifest.parameters}) != len(manifest.parameters):
        raise MessageError(kind, "parameters", "a name is listed twice")
    for item in manifest.low_rank:
        for field in ("name", "dtype", "a", "b"):
            check_text(getattr(item, field), kind, f"low_rank.{field}")
        for size in item.shape:
            check_uint(size, kind, f"low_rank[{item.name}].shape", bits=64)
        check_finite(item.scaling, kind, f"low_rank[{item.name}].scaling")


def _uint(*, at_least: int = 0, bits: int = 64) -> _Rule:
    return lambda value, kind, field: check_uint(value, kind, field, at_least=at_least, bits=bits)


def _seconds(value: float, kind: str, field: str) -> None:
    check_finite(value, kind, field, at_least=0.0)


def _deadline(value: float, kind: str, field: str) -> None:
    _seconds(value, kind, field)
    if value == 0:
        raise MessageError(kind, field, "is 0: no deadline can be met")


def _one_of(*allowed: str) -> _Rule:
    def check(value: str, kind: str, field: str) -> None:
        if value not in allowed:
            raise MessageError(kind, field, f"{value!r} is not one of {', '.join(map(repr, allowed))}")

    return check


def _anything(value: object, kind: str, field: str) -> None:
    return


# (message, field) → rule; message "" = every message that has the field.
_RULES: dict[tuple[str, str], _Rule] = {
    ("", "actor"): check_text,
    ("Abort", "actor"): _anything,
    ("Abort", "incarnation"): _uint(bits=32),
    ("", "process"): check_text,
    ("", "grpc_address"): check_text,
    ("", "store_address"): check_text,
    ("", "manifest_id"): check_text,
    ("Registration", "manifest_id"): _anything,
    ("", "incarnation"): _uint(at_least=1, bits=32),
    ("Registration", "incarnation"): _uint(bits=32),
    ("", "epoch"): _uint(),
    ("", "version"): _uint(),
    ("", "policy_version"): _uint(),
    ("", "ranks"): _uint(at_least=1, bits=_RANK_BITS),
    ("", "world_size"): _uint(at_least=1, bits=32),
    ("", "checksum"): _uint(),
    ("", "bytes"): _uint(),
    ("", "deadline_s"): _deadline,
    ("", "receive_s"): _seconds,
    ("", "prepare_s"): _seconds,
    ("", "stall_s"): _seconds,
    ("", "backend"): _one_of("gloo", "nccl"),
    ("", "phase"): _one_of("joining", "serving", "draining"),
}
