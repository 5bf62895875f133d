"""Readers of streams: an iterator over a stream, a list of its stored messages, a watch on members, and the work queue.

`OrderedReader` reads from an ephemeral pull consumer without acknowledgements. After a reconnection, a restart of the server,
missing heartbeats or a gap, it continues with a new consumer after the last message received.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from datetime import datetime
from typing import Generic, TypeVar

import nats.js.errors
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, RawStreamMsg

from pipelinerl.bus.link import NS, Connection, Puller, bus_errors, is_stream_missing
from pipelinerl.bus.protocol import ACTORS, NO_HEADERS, Headers, MemberEvent, StreamInfo, Subjects
from pipelinerl.errors import BusError, NotPermitted
from pipelinerl.service.retry import Backoff, is_bus_outage, retry_forever

_log = logging.getLogger(__name__)

_Item = TypeVar("_Item")

MSG_ID = "Nats-Msg-Id"
_WALKS = 64
"""Number of ranges of positions that `stored_messages` reads at the same time."""
_MESSAGE_NOT_FOUND = 10037


async def stream_info(connection: Connection, stream: str) -> StreamInfo:
    """Return a stream's state. nats-py's own call leaves out the time of the oldest message. Raises `BusError`."""
    with bus_errors(f"looking at {stream} at {connection.url}"):
        state = (await connection.ask(f"$JS.API.STREAM.INFO.{stream}"))["state"]
    messages, last = state["messages"], state["last_seq"]
    if not messages:
        return StreamInfo(0, state["bytes"], last + 1, last)
    first_at_s = datetime.fromisoformat(state["first_ts"]).timestamp()
    return StreamInfo(messages, state["bytes"], state["first_seq"], last, first_at_s)


async def stored_messages(connection: Connection, stream: str, subject: str) -> list[RawStreamMsg]:
    """Return the messages of `subject` in order. Each is requested separately, because PROMPTS, a work queue, allows no second
    consumer. A message that is removed or added during the call may be missing. Raises `BusError`."""
    info = await stream_info(connection, stream)
    first, end = info.first_position, info.last_position + 1
    size = max(1, math.ceil((end - first) / _WALKS))
    walks = [_walk(connection, stream, subject, start, min(end, start + size)) for start in range(first, end, size)]
    tasks = [asyncio.ensure_future(walk) for walk in walks]
    try:
        return [message for messages in await asyncio.gather(*tasks) for message in messages]
    finally:
        for task in tasks:
            task.cancel()


async def _walk(connection: Connection, stream: str, subject: str, start: int, end: int) -> list[RawStreamMsg]:
    found: list[RawStreamMsg] = []
    with bus_errors(f"looking into {stream} at {connection.url}"):
        while start < end:
            try:
                message = await connection.js.get_msg(stream, seq=start, subject=subject, next=True)
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


def headers_given(message: Msg) -> Headers:
    """Return the headers that the publisher gave, without those that the server and the bus added."""
    given = {name: value for name, value in (message.headers or {}).items() if not name.startswith("Nats-")}
    return given or NO_HEADERS


def _status(message: Msg) -> tuple[str, str]:
    headers = message.headers or {}
    return headers.get("Status", ""), headers.get("Description", "")


BATCH = 256
"""Maximum number of messages to read ahead."""
_PULL_BYTES = 65 * 1024**2
"""Bytes to request at once: more than the largest message that NATS allows."""
_PULL_EXPIRES_S = 30.0
_HEARTBEAT_S = 5.0
_SILENCE_S = 2 * _HEARTBEAT_S + 1.0
_CONSUMER_IDLE_S = 300.0
_CLOSE_TIMEOUT_S = 1.0
_HEARTBEAT = "100"
_PULL_ENDED = ("408", "409")


class OrderedReader(Puller, Generic[_Item]):
    """Async iterator over the messages of one stream, in order, each converted by `convert`. It needs an `async with` block,
    and waits at the stream's end. Cancelling `anext` loses no message. Raises `BusError` if the stream is missing or the server
    does not answer at the block's start; `NotPermitted` if this user may not read."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        convert: Callable[[Msg], _Item],
        *,
        subjects: tuple[str, ...] = (),
        from_position: int = 0,
        read_ahead: int = BATCH,
    ) -> None:
        """With `from_position` 0, read the last message of each subject, then every new one. `read_ahead`: maximum number of
        messages to buffer."""
        super().__init__(connection, stream)
        self._read_ahead = read_ahead
        self._convert, self._subjects, self._next_position = convert, subjects, from_position
        self._buffer: deque[tuple[_Item, int]] = deque()  # items, each with its size in bytes
        self._buffered_bytes = 0
        self._outstanding = 0  # messages asked for and not yet delivered
        self._consumer_position = 0
        self._lost = False

    async def __aenter__(self) -> OrderedReader[_Item]:
        await self._attach()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._detach()

    def __aiter__(self) -> OrderedReader[_Item]:
        return self

    async def __anext__(self) -> _Item:
        while not self._buffer:
            if self._lost:
                await self._reattach()
            if self._is_low():
                await self._pull()
            if self._buffer or self._lost or await self._wait(_SILENCE_S):
                continue
            if self._connection.is_connected:  # not even a heartbeat came: the consumer or its server is gone
                self.on_reconnect()
        item, size = self._buffer.popleft()
        self._buffered_bytes -= size
        if self._is_low() and not self._lost:
            await self._pull()
        return item

    def on_reconnect(self) -> None:
        """Have the reader create a new consumer before it waits again. Messages received so far are kept."""
        self._lost = True
        self._woken.set()

    def _is_low(self) -> bool:
        held = self._outstanding + len(self._buffer)
        return held <= self._read_ahead // 2 and self._buffered_bytes <= _PULL_BYTES and self._connection.is_connected

    async def _pull(self) -> None:
        count = self._read_ahead - self._outstanding - len(self._buffer)
        self._outstanding += count
        try:
            with bus_errors(f"reading {self._stream}"):
                await self._ask(_PULL_EXPIRES_S, batch=count, max_bytes=_PULL_BYTES, idle_heartbeat=int(_HEARTBEAT_S * NS))
        except BusError:
            if self._connection.is_closed:
                raise
            self.on_reconnect()

    async def _reattach(self) -> None:
        await self._detach()
        await retry_forever(
            self._attach,
            f"read {self._stream}",
            retried=lambda error: is_bus_outage(error) and not is_stream_missing(error),
            backoff=Backoff(first_s=0.5, most_s=0.5),
        )

    async def _attach(self) -> None:
        """Create a consumer and a new inbox, so that no message of an older consumer arrives."""
        self._lost, self._outstanding, self._consumer_position = False, 0, 0
        from_last = self._next_position == 0
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.LAST_PER_SUBJECT if from_last else DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=None if from_last else self._next_position,
            filter_subjects=list(self._subjects) or None,
            ack_policy=AckPolicy.NONE,
            inactive_threshold=_CONSUMER_IDLE_S,
            mem_storage=True,
            num_replicas=1,
        )
        try:
            await self._connection.wait_connected()
            with bus_errors(f"reading {self._stream} at {self._connection.url}"):
                await self._subscribe()
                self._consumer = (await self._connection.js.add_consumer(self._stream, config)).name
        except BaseException:  # even a cancellation; the next `anext` then attaches again
            self._lost = True
            await self._detach()
            raise

    async def _detach(self) -> None:
        consumer, self._consumer = self._consumer, ""
        try:
            with bus_errors("leaving"):
                await self._unsubscribe()
                if consumer and self._connection.is_connected:
                    async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                        await self._connection.js.delete_consumer(self._stream, consumer)
        except (BusError, NotPermitted) as error:  # the consumer is gone, or the server removes it when idle
            _log.debug("consumer of %s not deleted: %s", self._stream, error)

    async def _on_message(self, message: Msg) -> None:
        if message.subject == self._inbox:
            self._on_status(message)
        elif not self._lost:
            self._on_delivery(message)
        self._woken.set()

    def _on_delivery(self, message: Msg) -> None:
        position = message.metadata.sequence
        if position.consumer != self._consumer_position + 1:
            self.on_reconnect()
            return
        self._consumer_position = position.consumer
        self._next_position = position.stream + 1
        self._outstanding -= 1
        self._buffered_bytes += len(message.data)
        self._buffer.append((self._convert(message), len(message.data)))

    def _on_status(self, message: Msg) -> None:
        """Treat the consumer as lost, unless the message is a heartbeat or reports the normal end of a pull."""
        status, description = _status(message)
        if status == _HEARTBEAT:
            return
        unserved = (message.headers or {}).get("Nats-Pending-Messages")
        if status in _PULL_ENDED and unserved is not None and "Deleted" not in description:
            self._outstanding -= int(unserved)
        else:
            self.on_reconnect()


_REMOVAL_HEADERS = ("KV-Operation", "Nats-Marker-Reason")
_DOUBT_AFTER_TTLS = 2.0


class MemberWatch(OrderedReader[MemberEvent]):
    """Async iterator over membership events: registrations, heartbeats, removals and expiries in the membership bucket.

    The server announces an expiry with a marker, which a client that was disconnected may miss. The iterator therefore asks the
    bucket about each member that has sent no heartbeat for two TTLs.
    """

    def __init__(self, connection: Connection, subjects: Subjects, ttl_s: float) -> None:
        super().__init__(connection, subjects.members_stream, _member_event, subjects=(subjects.member("*"),))
        self._subject_of, self._doubt_after_s = subjects.member, _DOUBT_AFTER_TTLS * ttl_s
        self._seen_at: dict[str, float] = {}  # loop time of each present member's last heartbeat

    async def __anext__(self) -> MemberEvent:
        while True:
            if (gone := await self._gone_unseen()) is not None:
                return gone
            try:
                async with asyncio.timeout(self._doubt_after_s):
                    event = await super().__anext__()
            except TimeoutError:
                continue
            if event.payload is not None:
                self._seen_at[event.actor] = asyncio.get_running_loop().time()
                return event
            if self._seen_at.pop(event.actor, None) is not None:
                return event

    async def _gone_unseen(self) -> MemberEvent | None:
        now = asyncio.get_running_loop().time()
        silent = [actor for actor, seen_at in self._seen_at.items() if now - seen_at > self._doubt_after_s]
        for actor in silent:
            subject = self._subject_of(actor)
            try:
                await self._connection.wait_connected(0)
                with bus_errors(f"looking for {subject}"):
                    state = (await self._connection.js.stream_info(self._stream, subjects_filter=subject)).state
            except BusError as error:
                _log.debug("cannot check now whether actor %s is still registered: %s", actor, error)
                return None
            if not (state.subjects or self._buffer):
                del self._seen_at[actor]
                return MemberEvent(actor, None)
            self._seen_at[actor] = now  # a heartbeat or the marker of its expiry is on its way
        return None


def _member_event(message: Msg) -> MemberEvent:
    is_removal = any(key in (message.headers or {}) for key in _REMOVAL_HEADERS)
    return MemberEvent(message.subject.rsplit(".", 1)[-1], None if is_removal else message.data)


_SHORTEST_QUESTION_S = 0.001
_REFUSED_S = 0.2
"""Seconds before the next request if the server refused the last one for a temporary reason."""
_NOBODY_THERE = "503"
_TIME_OVER = ("404", "408")


class PromptDelivery:
    """A prompt group that was delivered to this actor. If it is not acknowledged within `ack_wait_s`, it is delivered again, at
    the same `position`. `num_deliveries` counts the deliveries so far, including this one. All methods raise `BusError`. All
    except `in_progress` wait for the server's confirmation."""

    def __init__(self, connection: Connection, message: Msg) -> None:
        self._connection, self._reply = connection, message.reply
        self.payload: bytes = message.data
        self.msg_id: str = (message.headers or {}).get(MSG_ID, "")
        self.headers = headers_given(message)
        self.position, self.num_deliveries = message.metadata.sequence.stream, message.metadata.num_delivered

    async def ack(self) -> None:
        """Remove the finished group from the queue."""
        await self._answer(b"+ACK")

    async def in_progress(self) -> None:
        """Extend the deadline by another `ack_wait_s`."""
        with bus_errors("extending the deadline of a prompt group"):
            await self._connection.publish(self._reply, b"+WPI")

    async def give_back(self) -> None:
        """Hand the group back for immediate redelivery."""
        await self._answer(b"-NAK")

    async def terminate(self, reason: str) -> None:
        """Remove a group that does not parse or was delivered too often."""
        await self._answer(b"+TERM " + " ".join(reason.split()).encode())

    async def _answer(self, word: bytes) -> None:
        await self._connection.wait_connected()
        with bus_errors(f"answering the delivery of prompt group {self.msg_id}"):
            await self._connection.request(self._reply, word)


class PromptQueue(Puller):
    """Take prompt groups from PROMPTS, one at a time, through the consumer that all actors share.

    `next` requests one message from the server. If the call is cancelled, its request stays open, and the next call gets the
    group.
    """

    def __init__(self, connection: Connection, stream: str) -> None:
        super().__init__(connection, stream, ACTORS)
        self._ready: deque[Msg] = deque()
        self._question = 0  # number of the newest request; a reply subject ends with its request's number
        self._question_ends = 0.0  # loop time until which no new request is sent
        self._one_at_a_time = asyncio.Lock()

    async def next(self, timeout_s: float) -> PromptDelivery | None:
        """Return the next group, or None after `timeout_s`. Raises `BusError` without a connection or a stream."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        async with self._one_at_a_time:
            await self._connection.wait_connected(timeout_s)
            with bus_errors(f"taking prompt groups at {self._connection.url}"):
                if self._subscription is None:
                    await self._subscribe(".*")
                while not self._ready:
                    if (now := loop.time()) >= deadline:
                        await self._connection.wait_connected(0)
                        return None
                    if now >= self._question_ends:
                        self._question += 1
                        self._question_ends = deadline
                        await self._ask(max(deadline - now, _SHORTEST_QUESTION_S), f".{self._question}", batch=1)
                    if not self._ready:
                        await self._wait(min(deadline, self._question_ends) - now)
                return PromptDelivery(self._connection, self._ready.popleft())

    async def close(self) -> None:
        """Hand back groups that `next` has not returned yet. If that fails, NATS redelivers them after `ack_wait_s`."""
        if not self._connection.is_connected:
            return
        try:
            with bus_errors("leaving the work queue"):
                await self._unsubscribe()
            while self._ready:
                await PromptDelivery(self._connection, self._ready.popleft()).give_back()
        except BusError as error:
            _log.warning("cannot hand back prompt groups, which will be redelivered after ack_wait_s: %s", error)

    def on_reconnect(self) -> None:
        """Request again, since the server forgets open requests when a connection ends."""
        self._question_ends = 0.0
        self._woken.set()

    async def _on_message(self, message: Msg) -> None:
        if not message.subject.startswith(self._inbox):
            self._ready.append(message)
            self.on_reconnect()
        elif message.subject == f"{self._inbox}.{self._question}":
            self._on_status(message)

    def _on_status(self, message: Msg) -> None:
        status, description = _status(message)
        if status == _NOBODY_THERE or "Deleted" in description:
            self._error = BusError(f"no prompt groups from {self._stream}: the run's streams do not exist (yet)")
            self.on_reconnect()
        elif status in _TIME_OVER:
            self.on_reconnect()
        else:
            self._question_ends = asyncio.get_running_loop().time() + _REFUSED_S
            self._woken.set()
