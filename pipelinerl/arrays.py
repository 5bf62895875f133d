"""Token ids and log-probabilities: bytes on the wire (little-endian int32 / float32), NumPy arrays here, and checks.

Reading makes no copy: the array is a read-only view of the bytes. It checks what an array can be wrong about by itself
(length, dtype, range); what it must agree with is checked where messages are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipelinerl.errors import MessageError
from pipelinerl.types import Logprobs, TokenIds

_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
LOGPROB_ROUNDING = 1e-3
"""A log-probability may exceed 0 by this much (nats): engines compute it in low precision."""


def token_ids_from_bytes(data: bytes, kind: str, field: str) -> TokenIds:
    """int32[tokens], read-only. Raises `MessageError` when the length is no multiple of 4 bytes."""
    return _from_bytes(data, _INT32, kind, field)


def logprobs_from_bytes(data: bytes, kind: str, field: str) -> Logprobs:
    """float32[tokens], read-only. Raises `MessageError` when the length is no multiple of 4 bytes."""
    return _from_bytes(data, _FLOAT32, kind, field)


def array_to_bytes(array: TokenIds | Logprobs) -> bytes:
    """The elements of an array that `check_token_ids` or `check_logprobs` has passed, little-endian."""
    return array.tobytes()


def check_token_ids(token_ids: TokenIds, kind: str, field: str) -> None:
    """Raises `MessageError` unless they are little-endian int32[tokens], none negative."""
    _check_shape(token_ids, _INT32, kind, field)
    if len(token_ids):
        lowest = token_ids.argmin()  # a quarter of the cost of `min`, which counts for short sequences
        if token_ids[lowest] < 0:
            raise MessageError(kind, field, f"token {lowest} is {token_ids[lowest]}: ids are not negative")


def check_logprobs(logprobs: Logprobs, kind: str, field: str) -> None:
    """Raises `MessageError` unless they are little-endian float32[tokens], finite and at most 0 (but for rounding)."""
    _check_shape(logprobs, _FLOAT32, kind, field)
    if not len(logprobs):
        return
    highest, lowest = logprobs.argmax(), logprobs.argmin()
    # Written so that NaN fails: argmax finds it, and no comparison with it is true.
    if not logprobs[highest] <= LOGPROB_ROUNDING:
        raise MessageError(kind, field, _bad_logprob(highest, logprobs))
    if not logprobs[lowest] > -np.inf:
        raise MessageError(kind, field, _bad_logprob(lowest, logprobs))


def _bad_logprob(index: np.intp, logprobs: Logprobs) -> str:
    return f"token {index} has {logprobs[index]}: a log-probability is finite and <= 0"


def _from_bytes(data: bytes, dtype: np.dtype, kind: str, field: str) -> NDArray:
    if len(data) % dtype.itemsize:
        raise MessageError(kind, field, f"{len(data)} bytes are no multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def _check_shape(array: NDArray, dtype: np.dtype, kind: str, field: str) -> None:
    if array.ndim != 1 or (array.dtype is not dtype and array.dtype != dtype):
        raise MessageError(kind, field, f"has dtype {array.dtype} and shape {array.shape}, not {dtype} and [tokens]")
