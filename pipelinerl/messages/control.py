"""Decode and check the control channel's messages, which are the protobuf classes of `control.proto`.

docs/weight-updates.md describes the exchange. The receiver checks whether a message's epoch and version are current.
"""

from __future__ import annotations

from typing import Literal, TypeVar, get_args

from pipelinerl.errors import MessageError
from pipelinerl.messages.sequences import check_finite, parse
from pipelinerl.v1 import control_pb2 as pb

Phase = Literal["starting", "joining", "serving", "draining"]
Backend = Literal["gloo", "nccl"]
Order = pb.EpochStart | pb.Announce | pb.Commit | pb.Published | pb.Sleep | pb.Abort | pb.RunEnd
Control = Order | pb.Registration | pb.EpochJoined | pb.Staged | pb.Serving

_Control = TypeVar("_Control", bound=Control)

_MAX_RANKS = 1023
"""Maximum number of ranks of one actor. The limit keeps a corrupt number from allocating memory for millions of ranks."""
_REQUIRED = {
    *("actor", "process", "grpc_address", "store_address", "manifest_id", "place"),
    *("incarnation", "ranks", "first_rank", "world_size", "deadline_s"),
}
"""Fields that must be neither empty nor 0, except in the messages of `_MAY_BE_EMPTY`."""
_MAY_BE_EMPTY = {
    *(("Abort", "actor"), ("Abort", "incarnation")),
    *(("Registration", "manifest_id"), ("Registration", "incarnation"), ("Registration", "grpc_address")),
}
_CHOICES = {"backend": get_args(Backend), "phase": get_args(Phase)}


def decode_control(data: bytes, message_type: type[_Control]) -> _Control:
    """Parse and check a message. Raises `MessageError` if it is invalid."""
    kind = message_type.__name__
    message = parse(message_type(), data, kind)
    _check_fields(message, kind)
    if isinstance(message, pb.EpochStart):
        _check_ranks(message)
    return message


def _check_fields(message: Control | pb.EpochMember, kind: str, prefix: str = "") -> None:
    for field in message.DESCRIPTOR.fields:
        name, value = field.name, getattr(message, field.name)
        if name in _REQUIRED and not value and (kind, name) not in _MAY_BE_EMPTY:
            problem = "is 0; it must be greater" if name == "deadline_s" else f"is {value}"
            raise MessageError(kind, prefix + name, "is empty" if value == "" else problem)
        if name in _CHOICES and value not in _CHOICES[name]:
            raise MessageError(kind, prefix + name, f"{value!r} is not one of {', '.join(map(repr, _CHOICES[name]))}")
        if name == "ranks" and value > _MAX_RANKS:
            raise MessageError(kind, prefix + name, f"{value} is not in [1, {_MAX_RANKS}]")
        if isinstance(value, float):  # every float is in seconds
            check_finite(value, kind, prefix + name, at_least=0.0)


def _check_ranks(start: pb.EpochStart) -> None:
    """Check that the trainer's rank 0 and the members' ranks are 0 to world_size - 1, and that no actor is listed twice."""
    taken = [0]
    for member in start.members:
        _check_fields(member, "EpochStart", "members.")
        taken.extend(range(member.first_rank, member.first_rank + member.ranks))
    if sorted(taken) != list(range(len(taken))) or start.world_size != len(taken):
        raise MessageError("EpochStart", "members", f"ranks {sorted(taken)} are not 0 to {start.world_size - 1}")
    if len({member.actor for member in start.members}) != len(start.members):
        raise MessageError("EpochStart", "members", "an actor is listed twice")
