"""What ranks say to each other: a kind, small fields and arrays, as bytes in the safetensors format (never pickle).

Sends nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

_HEADER = 8
"""Bytes before safetensors' JSON header: its length, little endian."""


@dataclass(frozen=True, eq=False)
class Message:
    """`fields` are JSON-able."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        contiguous = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        return save(contiguous, metadata={"kind": self.kind, "fields": json.dumps(dict(self.fields))})

    @classmethod
    def from_bytes(cls, data: bytes) -> Message:
        """Inverse of `to_bytes`."""
        length = int.from_bytes(data[:_HEADER], "little")
        metadata = json.loads(data[_HEADER : _HEADER + length])["__metadata__"]
        return cls(metadata["kind"], json.loads(metadata["fields"]), load(data))
