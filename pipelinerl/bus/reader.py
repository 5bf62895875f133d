"""Reading streams: all that one holds, the messages of one in order, and the members of a run.

`OrderedReader` reads a stream from a position, or from the last message of each subject, without losing any. An ephemeral pull
consumer without acknowledgements delivers; when it is lost (reconnection, restart of the server, silence, a gap) another one
continues after the last message received. Reading ahead is bounded. nats-py's own ordered consumer is a push consumer that
answers flow control every 250 ms and drops what it cannot buffer; hence this one.

`stored_messages` needs no consumer: a work queue has its one consumer already and refuses another. Nothing here decodes
payloads, acknowledges anything or keeps a position beyond its own life.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import NamedTuple

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, RawStreamMsg

from pipelinerl.bus.link import AckSubject, NatsLink, bus_errors, is_stream_missing
from pipelinerl.bus.protocol import NO_HEADERS, Headers, MemberEvent, StreamInfo
from pipelinerl.errors import BusError, NotPermitted
from pipelinerl.service.retry import Backoff, is_bus_outage, retry_forever

_log = logging.getLogger(__name__)

_WALKS = 64
"""Gets in flight at once: bounded, since a payload comes with each."""
_MESSAGE_NOT_FOUND = 10037


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
    state = found["state"]
    messages, last = state["messages"], state["last_seq"]
    if not messages:
        return StreamInfo(0, state["bytes"], last + 1, last)
    first_at_s = datetime.fromisoformat(state["first_ts"]).timestamp()
    return StreamInfo(messages, state["bytes"], state["first_seq"], last, first_at_s)


async def stored_messages(link: NatsLink, stream: str, subject: str) -> list[RawStreamMsg]:
    """Messages of `subject` in order. Raises `BusError`.

    Costs one round trip per message, holes nothing; what is removed or added meanwhile may be in it or not.
    """
    info = await stream_info(link, stream)
    ranges = _cut(info.first_position, info.last_position + 1, _WALKS)
    tasks = [asyncio.ensure_future(_walk(link, stream, subject, *positions)) for positions in ranges]
    try:
        walked = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return [message for messages in walked for message in messages]


async def _walk(link: NatsLink, stream: str, subject: str, start: int, end: int) -> list[RawStreamMsg]:
    """Those at positions in [start, end)."""
    found: list[RawStreamMsg] = []
    with bus_errors(f"looking into {stream} at {link.url}"):
        while start < end:
            try:
                message = await link.js.get_msg(stream, seq=start, subject=subject, next=True)
            except nats.js.errors.NotFoundError as error:
                if error.err_code == _MESSAGE_NOT_FOUND:
                    break
                raise
            assert message.seq is not None
            if message.seq >= end:
                break
            found.append(message)
            start = message.seq + 1
    return found


def _cut(start: int, end: int, parts: int) -> list[tuple[int, int]]:
    """[start, end) in at most `parts` ranges of almost equal size. Pure."""
    size = -(-max(0, end - start) // parts)
    return [(low, min(end, low + size)) for low in range(start, end, size)] if size else []


BATCH = 256
"""Messages read ahead at most."""
_PULL_BYTES = 65 * 1024**2
"""Bytes asked for at once: one message of NATS's largest size always fits."""
_PULL_EXPIRES_S = 30.0
_HEARTBEAT_S = 5.0
_SILENCE_S = 2 * _HEARTBEAT_S + 1.0
_CONSUMER_IDLE_S = 300.0
_CLOSE_TIMEOUT_S = 1.0
_NS = 1_000_000_000
_HEARTBEAT = "100"
_PULL_ENDED = ("408", "409")


class Received(NamedTuple):
    message: Msg
    ack: AckSubject


def headers_given(received: dict[str, str] | None) -> Headers:
    """Those that the publisher gave, without the server's and the bus's own."""
    return {name: value for name, value in (received or {}).items() if not name.startswith("Nats-")} or NO_HEADERS


@dataclass(frozen=True)
class SnapshotStart:
    """`size` messages that were there when the consumer was made follow. Only with `snapshot_again`."""

    size: int


class OrderedReader:
    """Async iterator over `Received` (and `SnapshotStart`). Cancelling `anext` loses nothing.

    Consumes one stream; waits for messages, which publishers supply; ends by leaving its `async with`.
    Raises `BusError` when the stream does not exist (any more), `NotPermitted` when this user may not read it.
    """

    def __init__(
        self,
        link: NatsLink,
        stream: str,
        subjects: tuple[str, ...] = (),
        *,
        from_position: int = 0,
        snapshot_again: bool = False,
    ) -> None:
        """`from_position` 0: the last message of each subject, then every new one. `snapshot_again`: after a loss, deliver the
        last message of each subject again instead of going on after the last position."""
        self._link, self._stream, self._subjects = link, stream, subjects
        self._next_position, self._snapshot_again = from_position, snapshot_again
        self._buffer: deque[Received | SnapshotStart] = deque()
        self._buffered_bytes = 0
        self._outstanding = 0  # messages asked for and not yet delivered
        self._consumer = self._inbox = ""
        self._consumer_position = 0
        self._subscription: Subscription | None = None
        self._lost = False
        self._refusal: NotPermitted | None = None
        self._wake = asyncio.Event()

    async def __aenter__(self) -> OrderedReader:
        try:
            await self._attach()
        except BaseException:  # cancellation too: no `__aexit__` follows
            await self._detach()
            raise
        self._link.reconnected.add(self.restart)
        self._link.refused.add(self._on_refusal)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._link.reconnected.discard(self.restart)
        self._link.refused.discard(self._on_refusal)
        await self._detach()

    def __aiter__(self) -> OrderedReader:
        return self

    async def __anext__(self) -> Received | SnapshotStart:
        while not self._buffer:
            if self._lost:
                await self._reattach()
            if self._is_low():
                await self._pull()
            await self._wait()
        item = self._buffer.popleft()
        if isinstance(item, Received):
            self._buffered_bytes -= len(item.message.data)
            if self._is_low() and not self._lost:
                await self._pull()
        return item

    async def next_message(self) -> Received:
        """The next message, without `snapshot_again`."""
        item = await self.__anext__()
        assert isinstance(item, Received)
        return item

    def restart(self) -> None:
        """Makes another consumer before the next message is waited for. What was received stays."""
        self._lost = True
        self._wake.set()

    async def _wait(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        if self._buffer or self._lost:
            return
        self._wake.clear()
        try:
            async with asyncio.timeout(_SILENCE_S):  # `wait_for` may swallow a cancellation that comes with a message
                await self._wake.wait()
        except TimeoutError:
            if self._link.is_connected:  # not even heartbeats: the consumer or its server is gone
                self.restart()

    def _is_low(self) -> bool:
        held = self._outstanding + len(self._buffer)
        return held <= BATCH // 2 and self._buffered_bytes <= _PULL_BYTES and self._link.is_connected

    async def _pull(self) -> None:
        count = BATCH - self._outstanding - len(self._buffer)
        request = {
            "batch": count,
            "max_bytes": _PULL_BYTES,
            "expires": int(_PULL_EXPIRES_S * _NS),
            "idle_heartbeat": int(_HEARTBEAT_S * _NS),
        }
        subject = self._pulling
        self._outstanding += count
        try:
            with bus_errors(f"reading {self._stream}"):
                await self._link.client.publish(subject, json.dumps(request).encode(), reply=self._inbox)
        except BusError:
            if self._link.client.is_closed:
                raise
            self.restart()

    @property
    def _pulling(self) -> str:
        return f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"

    def _on_refusal(self, lowered: str) -> None:
        if lowered == self._pulling.lower():
            self._refusal = NotPermitted(self._link.user, self._pulling)
            self._wake.set()

    async def _reattach(self) -> None:
        await self._detach()
        await retry_forever(
            self._attach,
            f"read {self._stream}",
            retried=lambda error: is_bus_outage(error) and not is_stream_missing(error),
            backoff=Backoff(first_s=0.5, most_s=0.5),
        )

    async def _attach(self) -> None:
        """Subscribes a new inbox and makes a consumer; what an older consumer still sends goes nowhere."""
        self._lost, self._outstanding, self._consumer_position = False, 0, 0
        try:
            await self._link.wait_connected(self._link.request_timeout_s)
            with bus_errors(f"reading {self._stream} at {self._link.url}"):
                self._inbox = self._link.client.new_inbox()
                self._subscription = await self._link.client.subscribe(
                    self._inbox, cb=self._on_message, pending_bytes_limit=0
                )
                info = await self._link.js.add_consumer(self._stream, self._consumer_config())
        except BaseException:  # cancellation too: the next `anext` starts over
            self._lost = True
            raise
        self._consumer = info.name
        if self._snapshot_again:
            self._buffer.append(SnapshotStart(info.num_pending or 0))

    def _consumer_config(self) -> ConsumerConfig:
        from_last = self._next_position == 0 or self._snapshot_again
        return ConsumerConfig(
            deliver_policy=DeliverPolicy.LAST_PER_SUBJECT if from_last else DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=None if from_last else self._next_position,
            filter_subjects=list(self._subjects) or None,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=_CONSUMER_IDLE_S,
            mem_storage=True,
            num_replicas=1,
        )

    async def _detach(self) -> None:
        subscription, self._subscription = self._subscription, None
        consumer, self._consumer = self._consumer, ""
        if self._link.client.is_closed:
            return
        try:
            with bus_errors("leaving"):
                if subscription is not None:
                    await subscription.unsubscribe()
                if consumer and self._link.is_connected:
                    async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                        await self._link.js.delete_consumer(self._stream, consumer)
        except BusError as error:  # it is gone already, or goes by itself when idle
            _log.debug("consumer of %s not deleted: %s", self._stream, error)

    async def _on_message(self, message: Msg) -> None:
        if message.subject == self._inbox:
            self._on_status(message.headers or {})
        elif not self._lost:
            self._on_delivery(message)
        self._wake.set()

    def _on_delivery(self, message: Msg) -> None:
        ack = AckSubject.parse(message.reply)
        if ack.consumer_position != self._consumer_position + 1:
            self.restart()
            return
        self._consumer_position = ack.consumer_position
        self._next_position = ack.stream_position + 1
        self._outstanding -= 1
        self._buffered_bytes += len(message.data)
        self._buffer.append(Received(message, ack))

    def _on_status(self, headers: dict[str, str]) -> None:
        """Heartbeats only wake the waiting reader. Any end of a pull that is not an ordinary one is a loss."""
        status, description = headers.get("Status", ""), headers.get("Description", "")
        if status == _HEARTBEAT:
            return
        unserved = headers.get("Nats-Pending-Messages")
        if status in _PULL_ENDED and unserved is not None and "Deleted" not in description:
            self._outstanding -= int(unserved)
        else:
            self.restart()


_REMOVAL_HEADERS = ("KV-Operation", "Nats-Marker-Reason")
_DOUBT_AFTER_TTLS = 2.0


class MemberWatch:
    """Async iterator over `MemberEvent`. Consumes the bucket of registrations; waits for heartbeats, which actors send.

    The server announces an expiry with a marker (nats-server 2.11). A watcher that could have missed one (disconnected, or
    busy for longer than the marker stays) compares with a new snapshot of the bucket: it reads the bucket again when a
    member has sent no heartbeat for two TTLs and no removal of it was seen.
    """

    def __init__(self, reader: OrderedReader, ttl_s: float) -> None:
        self._reader, self._doubt_after_s = reader, _DOUBT_AFTER_TTLS * ttl_s
        self._seen_at: dict[str, float] = {}  # loop time of each present member's last heartbeat
        self._snapshot_began: float | None = None
        self._events: deque[MemberEvent] = deque()

    def __aiter__(self) -> MemberWatch:
        return self

    async def __anext__(self) -> MemberEvent:
        while not self._events:
            try:
                async with asyncio.timeout(self._doubt_after_s):
                    item = await anext(self._reader)
            except TimeoutError:
                self._doubt()
                continue
            if isinstance(item, Received):
                self._on_message(item.message)
                if item.ack.num_pending == 0:
                    self._end_snapshot()
                self._doubt()
            else:
                self._snapshot_began = asyncio.get_running_loop().time()
                if item.size == 0:
                    self._end_snapshot()
        return self._events.popleft()

    def _on_message(self, message: Msg) -> None:
        actor = message.subject.rsplit(".", 1)[-1]
        if not any(key in (message.headers or {}) for key in _REMOVAL_HEADERS):
            self._seen_at[actor] = asyncio.get_running_loop().time()
            self._events.append(MemberEvent(actor, message.data))
        elif self._seen_at.pop(actor, None) is not None:
            self._events.append(MemberEvent(actor, None))

    def _end_snapshot(self) -> None:
        """Everything there at the snapshot's begin has been read: whoever was not in it has left."""
        if self._snapshot_began is None:
            return
        for actor in [actor for actor, seen_at in self._seen_at.items() if seen_at < self._snapshot_began]:
            del self._seen_at[actor]
            self._events.append(MemberEvent(actor, None))
        self._snapshot_began = None

    def _doubt(self) -> None:
        oldest = asyncio.get_running_loop().time() - self._doubt_after_s
        if self._snapshot_began is None and any(seen_at < oldest for seen_at in self._seen_at.values()):
            self._reader.restart()
