"""A Secret as client-go sends it where helm stores a release: in Kubernetes's protobuf. Only the fields in use are read."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

MAGIC = b"k8s\x00"


def read_secret(body: bytes) -> dict[str, Any]:
    """`body`: an envelope `Unknown` (field 2: the object) around a v1 Secret."""
    fields = list(_fields(dict(_fields(body.removeprefix(MAGIC)))[2]))
    secret, metadata = dict(fields), list(_fields(dict(fields)[1]))
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": secret[3].decode(),
        "metadata": {
            "name": dict(metadata)[1].decode(),
            "labels": {key.decode(): value.decode() for key, value in _entries(metadata, 11)},
        },
        "data": {key.decode(): base64.b64encode(value).decode() for key, value in _entries(fields, 2)},
    }


def _entries(fields: list[tuple[int, bytes]], number: int) -> Iterator[tuple[bytes, bytes]]:
    """Pairs of a map field."""
    for found, value in fields:
        if found == number:
            pair = dict(_fields(value))
            yield pair[1], pair[2]


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, content) of the length-delimited fields."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == 0:
            _, at = _varint(message, at)
        elif tag & 7 == 2:
            size, at = _varint(message, at)
            yield tag >> 3, message[at : at + size]
            at += size
        else:
            raise ValueError(f"wire type {tag & 7}: not read here")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte, at = message[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
