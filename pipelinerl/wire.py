"""Bytes ↔ protobuf messages, with every failure as a `MessageError`. The codecs build on it; it knows no message."""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from pipelinerl.errors import MessageError

_Proto = TypeVar("_Proto", bound=Message)


def parse(message: _Proto, data: bytes, kind: str, max_bytes: int) -> _Proto:
    """Fills `message` from `data`. Raises `MessageError` when it does not parse or exceeds `max_bytes` (0 = any)."""
    if max_bytes and len(data) > max_bytes:
        raise MessageError(kind, "", f"{len(data)} bytes exceed the limit of {max_bytes}")
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise MessageError(kind, "", f"{len(data)} bytes do not parse: {error}") from error
    return message


class building:
    """`with building(kind):` turns protobuf's refusal of a value (a number out of range, text that is not Unicode) into a
    `MessageError`."""

    __slots__ = ("_kind",)

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, ValueError):
            raise MessageError(self._kind, "", str(error)) from error
