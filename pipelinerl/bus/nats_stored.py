"""Looks at what a stream holds, without a consumer: a work queue has its one consumer already and refuses another.

Gets messages one by one, many at once. It acknowledges nothing and moves nobody's place in the stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import nats.errors
import nats.js.errors

from pipelinerl.bus.nats_link import NatsLink, bus_errors
from pipelinerl.bus.protocol import StreamInfo
from pipelinerl.errors import BusError

_WALKS = 64
"""Gets in flight at once: bounded, since a payload comes with each."""
_MESSAGE_NOT_FOUND = 10037


@dataclass(frozen=True, slots=True)
class StoredMessage:
    position: int
    headers: dict[str, str]
    payload: bytes


async def stream_info(link: NatsLink, stream: str) -> StreamInfo:
    """What the server says of a stream. Raises `BusError`.

    Asked for without nats-py's own call, which leaves out when the oldest message came.
    """
    with bus_errors(f"looking at {stream} at {link.url}"):
        try:
            answer = await link.client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=link.request_timeout_s)
        except nats.errors.NoRespondersError as error:
            raise nats.js.errors.ServiceUnavailableError from error
        found = json.loads(answer.data)
        if "error" in found:
            raise nats.js.errors.APIError.from_error(found["error"])
    return info_of(found["state"])


def info_of(state: Mapping[str, Any]) -> StreamInfo:
    """JetStream's state of a stream as ours. Pure."""
    messages, last = state["messages"], state["last_seq"]
    if not messages:
        return StreamInfo(0, state["bytes"], last + 1, last)
    first_at_s = datetime.fromisoformat(state["first_ts"]).timestamp()
    return StreamInfo(messages, state["bytes"], state["first_seq"], last, first_at_s)


async def stored_messages(link: NatsLink, stream: str, subject: str, info: StreamInfo) -> list[StoredMessage]:
    """Messages of `subject` at `info`'s positions that are still there, in order. Raises `BusError`.

    Costs one round trip per message, holes nothing; what is removed or added meanwhile may be in it or not.
    """
    ranges = _cut(info.first_position, info.last_position + 1, _WALKS)
    tasks = [asyncio.ensure_future(_walk(link, stream, subject, *positions)) for positions in ranges]
    try:
        walked = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return [message for messages in walked for message in messages]


async def _walk(link: NatsLink, stream: str, subject: str, start: int, end: int) -> list[StoredMessage]:
    """Those at positions in [start, end)."""
    found, position = [], start
    while position < end:
        message = await _at_or_after(link, stream, subject, position)
        if message is None or message.position >= end:
            break
        found.append(message)
        position = message.position + 1
    return found


async def _at_or_after(link: NatsLink, stream: str, subject: str, position: int) -> StoredMessage | None:
    with bus_errors(f"looking into {stream} at {link.url}"):
        try:
            raw = await link.js.get_msg(stream, seq=position, subject=subject, next=True)
        except nats.js.errors.NotFoundError as error:
            if error.err_code == _MESSAGE_NOT_FOUND:
                return None
            raise
    if raw.seq is None:
        raise BusError(f"looking into {stream} at {link.url}: the answer names no position")
    return StoredMessage(raw.seq, raw.headers or {}, raw.data or b"")


def _cut(start: int, end: int, parts: int) -> list[tuple[int, int]]:
    """[start, end) in at most `parts` ranges of almost equal size. Pure."""
    size = -(-max(0, end - start) // parts)
    return [(low, min(end, low + size)) for low in range(start, end, size)] if size else []
