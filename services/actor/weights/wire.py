"""Messages between the actor's process and vLLM's worker processes, over a Unix socket: one JSON object a line.

Why not vLLM's own remote calls: they are answered between decode steps only, and stop decoding while they run. A socket
lets a transfer begin, report and be given up while a step of half a second goes on, without polling; and a worker that
dies closes it.
"""

from __future__ import annotations

import msgspec


class Hello(msgspec.Struct, tag=True, frozen=True):
    """First line from a worker: who it is, and whether the manifest fits its model (`problem` empty)."""

    worker_rank: int
    mode: str
    reason: str = ""
    problem: str = ""


class Join(msgspec.Struct, tag=True, frozen=True):
    """Join a transfer group; a worker's rank is `first_rank` plus its own."""

    host: str
    port: int
    name: str
    first_rank: int
    world: int
    backend: str
    bind_host: str | None
    timeout_s: float


class Receive(msgspec.Struct, tag=True, frozen=True):
    """Receive a version into staging and prepare it for serving."""

    incarnation: int
    number: int
    timeout_s: float


class Discard(msgspec.Struct, tag=True, frozen=True):
    """Give up whatever is under way or staged, and leave the group if a transfer was under way."""


class Request(msgspec.Struct, frozen=True):
    """`number` is repeated in the reply."""

    number: int
    body: Join | Receive | Discard


class Done(msgspec.Struct, tag=True, frozen=True):
    """Join and Discard: nothing to say."""


class Received(msgspec.Struct, tag=True, frozen=True):
    """Complete and prepared. Seconds spent waiting for and checking bytes, and putting them into the engine's layout."""

    checksum: int
    num_bytes: int
    receive_s: float
    prepare_s: float


class Failed(msgspec.Struct, tag=True, frozen=True):
    """`kind` is the error's class name; `group_broke`: the transfer group failed, which may be another member's doing."""

    kind: str
    problem: str
    group_broke: bool = False


class Reply(msgspec.Struct, frozen=True):
    number: int
    body: Done | Received | Failed


def encode(message: Hello | Request | Reply) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode_hello(line: bytes) -> Hello:
    return msgspec.json.decode(line, type=Hello)


def decode_request(line: bytes) -> Request:
    return msgspec.json.decode(line, type=Request)


def decode_reply(line: bytes) -> Reply:
    return msgspec.json.decode(line, type=Reply)
