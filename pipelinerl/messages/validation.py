"""What every decoder of a message does: parse bytes within a bound, check one field, name what is wrong."""

from __future__ import annotations

import math
from types import TracebackType
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from pipelinerl.errors import MessageError

_Proto = TypeVar("_Proto", bound=Message)


def parse(message: _Proto, data: bytes, kind: str) -> _Proto:
    """Fills `message` from `data` and returns it. Raises `MessageError` when it does not parse."""
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


def check_uint(value: int, kind: str, field: str, *, at_least: int = 0, bits: int = 32) -> None:
    """Raises `MessageError` unless `value` is in [at_least, 2**bits)."""
    if not at_least <= value < 1 << bits:
        raise MessageError(kind, field, f"{value} is not in [{at_least}, 2**{bits})")


def check_finite(value: float, kind: str, field: str, *, at_least: float = -math.inf) -> None:
    if not (math.isfinite(value) and value >= at_least):
        wanted = "a finite number" if at_least == -math.inf else f"a finite number >= {at_least:g}"
        raise MessageError(kind, field, f"{value} is not {wanted}")


def check_text(value: str, kind: str, field: str) -> None:
    if not value:
        raise MessageError(kind, field, "is empty")


def check_run(run: str, expected_run: str, kind: str) -> None:
    check_text(run, kind, "run")
    if expected_run and run != expected_run:
        raise MessageError(kind, "run", f"{run!r} is not this run, {expected_run!r}")
