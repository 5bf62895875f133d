"""Common parts of the message decoders: parse bytes, check one field or array, name the fault."""

from __future__ import annotations

import math
from types import TracebackType
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from pipelinerl.errors import MessageError
from pipelinerl.recipe.fields import MOST_REWARD

_Proto = TypeVar("_Proto", bound=Message)
LOGPROB_ROUNDING = 1e-3
"""A log-probability may exceed 0 by this much (nats): engines compute it in low precision."""
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")


def parse(message: _Proto, data: bytes, kind: str) -> _Proto:
    """Fill `message` from `data` and return it. Raises `MessageError` if it does not parse."""
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise MessageError(kind, "", f"{len(data)} bytes do not parse: {error}") from error
    return message


class building:
    """Context manager that turns protobuf's errors for a value (out of range, or text that is not Unicode) into
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
    """Raise `MessageError` unless `value` is in [at_least, 2**bits)."""
    if not at_least <= value < 1 << bits:
        raise MessageError(kind, field, f"{value} is not in [{at_least}, 2**{bits})")


def check_finite(value: float, kind: str, field: str, *, at_least: float = -math.inf) -> None:
    if not (math.isfinite(value) and value >= at_least):
        wanted = "a finite number" if at_least == -math.inf else f"a finite number >= {at_least:g}"
        raise MessageError(kind, field, f"{value} is not {wanted}")


def check_reward(value: float, kind: str, field: str) -> None:
    """Check a reward against the global limit. The scorer has already applied the recipe's `reward.max_abs`."""
    check_finite(value, kind, field)
    if abs(value) > MOST_REWARD:
        raise MessageError(kind, field, f"{value} is beyond {MOST_REWARD:g}")


def check_text(value: str, kind: str, field: str) -> None:
    if not value:
        raise MessageError(kind, field, "is empty")


def check_run(run: str, expected_run: str, kind: str) -> None:
    check_text(run, kind, "run")
    if expected_run and run != expected_run:
        raise MessageError(kind, "run", f"{run!r} is not this run, {expected_run!r}")


def token_ids_from_bytes(data: bytes, kind: str, field: str) -> NDArray[np.int32]:
    """Return int32[tokens], read-only. Raises `MessageError` if the length is no multiple of 4 bytes."""
    return _from_bytes(data, _INT32, kind, field)


def logprobs_from_bytes(data: bytes, kind: str, field: str) -> NDArray[np.float32]:
    """Return float32[tokens], read-only. Raises `MessageError` if the length is no multiple of 4 bytes."""
    return _from_bytes(data, _FLOAT32, kind, field)


def _from_bytes(data: bytes, dtype: np.dtype, kind: str, field: str) -> NDArray:
    if len(data) % dtype.itemsize:
        raise MessageError(kind, field, f"{len(data)} bytes are not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def check_token_ids(token_ids: NDArray[np.int32], kind: str, field: str) -> None:
    _check_array(token_ids, _INT32, kind, field)
    if len(token_ids):
        lowest = token_ids.argmin()  # a quarter of the cost of `min`, which matters for short sequences
        if token_ids[lowest] < 0:
            raise MessageError(kind, field, f"token {lowest} is {token_ids[lowest]}: ids are not negative")


def check_logprobs(logprobs: NDArray[np.float32], kind: str, field: str) -> None:
    _check_array(logprobs, _FLOAT32, kind, field)
    if not len(logprobs):
        return
    # Written so that NaN fails: argmax finds it, and no comparison with it is true.
    highest, lowest = logprobs.argmax(), logprobs.argmin()
    if logprobs[highest] <= LOGPROB_ROUNDING and logprobs[lowest] > -np.inf:
        return
    bad = lowest if logprobs[highest] <= LOGPROB_ROUNDING else highest
    raise MessageError(kind, field, f"token {bad} has {logprobs[bad]}: a log-probability is finite and <= 0")


def _check_array(array: NDArray, dtype: np.dtype, kind: str, field: str) -> None:
    """Check that the array is [tokens] with this little-endian dtype."""
    if array.ndim != 1 or (array.dtype is not dtype and array.dtype != dtype):
        raise MessageError(kind, field, f"has dtype {array.dtype} and shape {array.shape}, not {dtype} and [tokens]")
