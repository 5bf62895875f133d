"""Protobuf ↔ the dataclasses of `pipelinerl.control`, and the manifest's fields. Re-exported by `pipelinerl.codec`.

Field names are the same on both sides, so one table of rules by field name checks every message. Whether an epoch or a
version is the current one is for the state machines to judge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

from pipelinerl import control
from pipelinerl.errors import MessageError
from pipelinerl.message_checks import check_finite, check_text, check_uint
from pipelinerl.v1 import control_pb2 as pb
from pipelinerl.wire import building, parse

_Control = TypeVar("_Control", bound=control.Control)
_Rule = Callable[[Any, str, str], None]

_RANK_BITS = 10
"""An actor takes fewer than 1024 ranks: far above any use, and a broken number does no harm."""
_PROTO: dict[type, type[Message]] = {
    control.Registration: pb.Registration,
    control.EpochStart: pb.EpochStart,
    control.EpochJoined: pb.EpochJoined,
    control.Announce: pb.Announce,
    control.Staged: pb.Staged,
    control.Commit: pb.Commit,
    control.Serving: pb.Serving,
    control.Abort: pb.Abort,
    control.RunEnd: pb.RunEnd,
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
    """What a `WeightManifest` message holds; `pipelinerl.weights.manifest` gives it meaning."""

    manifest_id: str
    parameters: tuple[tuple[str, tuple[int, ...], str], ...]
    """(name, shape, dtype) of each parameter, in the order in which their bytes are sent."""
    chunk_bytes: int
    wire_dtype: str
    """"" = each parameter's own."""
    low_rank: tuple[LowRankFields, ...] = ()


def encode_control(message: control.Control) -> bytes:
    """Raises `MessageError` for what `decode_control` would refuse."""
    kind = type(message).__name__
    _check(message, kind)
    with building(kind):
        return _PROTO[type(message)](**asdict(message)).SerializeToString()


def decode_control(data: bytes, message_type: type[_Control], *, max_bytes: int = 0) -> _Control:
    """`message_type` is a class of `pipelinerl.control`. Raises `MessageError`; `max_bytes` 0 = any."""
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
    """Raises `MessageError`. That `manifest_id` fits the rest is for `pipelinerl.weights.manifest` to check."""
    message = parse(pb.WeightManifest(), data, "WeightManifest", max_bytes)
    parameters = tuple((spec.name, tuple(spec.shape), spec.dtype) for spec in message.parameters)
    low_rank = tuple(_low_rank(item) for item in message.low_rank)
    manifest = ManifestFields(message.manifest_id, parameters, message.chunk_bytes, message.wire_dtype, low_rank)
    _check_manifest(manifest)
    return manifest


def _low_rank(item: pb.LowRank) -> LowRankFields:
    return LowRankFields(item.name, tuple(item.shape), item.dtype, item.a, item.b, item.scaling, item.transposed)


def _member(message: pb.EpochMember) -> control.EpochMember:
    return control.EpochMember(message.actor, message.process, message.first_rank, message.ranks)


def _check(message: control.Control, kind: str) -> None:
    for field in fields(message):
        rule = _RULES.get((kind, field.name)) or _RULES.get(("", field.name))
        if rule is not None:
            rule(getattr(message, field.name), kind, field.name)
    if isinstance(message, control.EpochStart):
        _check_ranks(message, kind)


def _check_ranks(start: control.EpochStart, kind: str) -> None:
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
