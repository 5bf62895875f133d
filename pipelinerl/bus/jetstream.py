"""The streams of a run over NATS JetStream: four streams, one durable consumer and one key-value bucket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import nats.js.api
import nats.js.errors
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, KeyValueConfig, RetentionPolicy, StorageType, StreamConfig

from pipelinerl.bus.link import Connection, bus_errors, is_cluster_forming, is_stream_full
from pipelinerl.bus.protocol import (
    ACTORS,
    NO_HEADERS,
    ControlMessage,
    Headers,
    LogEntry,
    StreamInfo,
    StreamLimits,
    Subjects,
    check_actor_name,
    check_control,
    watched,
)
from pipelinerl.bus.reader import (
    MSG_ID,
    MemberWatch,
    OrderedReader,
    PromptDelivery,
    PromptQueue,
    headers_given,
    stored_messages,
    stream_info,
)
from pipelinerl.errors import BusError, FieldError, PayloadTooLarge
from pipelinerl.service.lifecycle import unless_stopped
from pipelinerl.service.retry import Backoff, retry_forever
from pipelinerl.service.settings import BusSettings

_log = logging.getLogger(__name__)

_HEADER_FRAME_BYTES = len("NATS/1.0\r\n\r\n")
_FIELD_FRAME_BYTES = len(": \r\n")
CREATE_WITHIN_S = 60.0
"""Maximum wait, in seconds, until the servers of a new cluster have elected a leader."""
CONNECT_TIMEOUT_S = 30.0


@contextlib.asynccontextmanager
async def connect(
    url: str,
    run: str,
    *,
    limits: StreamLimits | None = None,
    name: str = "",
    credentials: Path | None = None,
    tls_dir: Path | None = None,
    connect_timeout_s: float = 5.0,
    request_timeout_s: float = 10.0,
) -> AsyncIterator[Bus]:
    """Connect to the streams of `run`.

    `url`: one server, or those of a cluster, separated by commas. `name`: shown by NATS's monitoring. `credentials`, `tls_dir`:
    see `BusSettings`. Raises `FieldError` for an invalid run name or an unusable file, and the errors of `Connection.opened`.
    """
    subjects = Subjects(run)
    connection = Connection(url, credentials, tls_dir, request_timeout_s)
    async with connection.opened(name or run, connect_timeout_s):
        bus = Bus(connection, subjects, limits or StreamLimits())
        try:
            yield bus
        finally:
            await bus.queue.close()


@contextlib.asynccontextmanager
async def service_bus(
    settings: BusSettings, stop: asyncio.Event, limits: StreamLimits | None = None, request_timeout_s: float = 10.0
) -> AsyncIterator[Bus]:
    """Connect a service to its run, and retry until NATS is reachable. Raises `StartStopped` if `stop` is set first. An
    error other than `BusError`, such as `FieldError` for a missing file, is raised at once."""
    opened = partial(
        connect,
        settings.nats_url,
        settings.run,
        limits=limits,
        name=settings.instance,
        credentials=settings.nats_credentials,
        tls_dir=settings.nats_tls_dir,
        connect_timeout_s=CONNECT_TIMEOUT_S,
        request_timeout_s=request_timeout_s,
    )
    async with contextlib.AsyncExitStack() as stack:
        yield await unless_stopped(retry_forever(lambda: stack.enter_async_context(opened()), "connect"), stop)


class Bus:
    """The streams of one run, opened by `connect`.

    A call raises `BusError` if the server does not answer in time or the stream is full; the caller must then keep its message
    and try again. It raises `NotPermitted` if this user may not make the call. Of messages with the same `msg_id` within
    `duplicate_window_s`, a stream stores only the first. The iterators of `read_sequences` and `watch_...` need an `async with`
    block, continue after a reconnection, and lose no message if `anext` is cancelled.
    """

    def __init__(self, connection: Connection, subjects: Subjects, limits: StreamLimits) -> None:
        self.connection, self.run, self.limits = connection, subjects.run, limits
        self._subjects = subjects
        self.queue = PromptQueue(connection, subjects.prompts_stream)

    @property
    def max_payload_bytes(self) -> int:
        """Maximum bytes of a message, including its headers. A message id takes up its own length and about 30 bytes more."""
        return self.connection.max_payload

    async def create_streams(self, *, fresh: bool = False) -> None:
        """Create the streams and the membership bucket; existing ones keep their contents and limits. Wait up to
        `CREATE_WITHIN_S` for a cluster of servers that has no leader yet.

        With `fresh`, raises `FieldError` and creates nothing if PROMPTS, SEQUENCES or CONTROL ever held a message. It would be
        mistaken for one of this run, because each run counts its ids from 0.
        """
        deadline = time.monotonic() + CREATE_WITHIN_S
        await retry_forever(
            lambda: self._create_streams(fresh),
            "make the run's streams",
            retried=lambda error: is_cluster_forming(error) and time.monotonic() < deadline,
            backoff=Backoff(first_s=0.5, most_s=0.5),
        )

    async def _create_streams(self, fresh: bool) -> None:
        subjects, js = self._subjects, self.connection.js
        there = {stream: await self._info(stream) for stream in subjects.every_stream}
        filled = (subjects.prompts_stream, subjects.sequences_stream, subjects.control_stream)
        if fresh and (used := [stream for stream in filled if (info := there[stream]) and info.state.last_seq]):
            raise FieldError(
                "run",
                self.run,
                f"{' and '.join(used)} on this NATS server have held messages of an earlier run of this name; give another "
                f"run name, or delete that run's streams: {', '.join(subjects.every_stream)} (`nats stream rm NAME`)",
            )
        for wanted in stream_configs(subjects, self.limits):
            assert wanted.name is not None
            if (info := there[wanted.name]) is not None:
                for what, field in (("number of replicas", "num_replicas"), ("limit in bytes", "max_bytes")):
                    if (getattr(wanted, field) or -1) != (current := getattr(info.config, field) or -1):
                        text = "%s keeps its %s of %s, although the run asks for %s; to change it, use `nats stream edit %s`"
                        _log.warning(text, wanted.name, what, current, getattr(wanted, field), wanted.name)
                continue
            with bus_errors(f"creating {wanted.name} at {self.connection.url}"):
                await js.add_stream(wanted)
        if there[subjects.members_stream] is None:
            with bus_errors(f"creating the membership bucket at {self.connection.url} (needs nats-server 2.11 or newer)"):
                await js.create_key_value(members_bucket(subjects, self.limits))
        with bus_errors(f"creating the consumer of {subjects.prompts_stream}"):
            try:
                await js.consumer_info(subjects.prompts_stream, ACTORS)
            except nats.js.errors.NotFoundError:
                await js.add_consumer(subjects.prompts_stream, actors_consumer(self.limits))

    async def publish_prompt(self, payload: bytes, msg_id: str, headers: Headers = NO_HEADERS) -> int:
        """Publish a prompt group and return its position in the queue. Publishing a group again needs another `msg_id`. Raises
        `PayloadTooLarge`, `BusError`."""
        return await self._store_once(self._subjects.prompts_stream, self._subjects.prompts, payload, msg_id, headers)

    async def next_prompt(self, timeout_s: float) -> PromptDelivery | None:
        """Take the next group from the work queue. Return None if none came within `timeout_s` (> 0)."""
        return await self.queue.next(timeout_s)

    async def pending_prompts(self) -> dict[str, int]:
        """Return the positions of all unfinished groups by message id, in queue order, including groups that were delivered. A
        group that is acknowledged or published during the call may be missing."""
        found = await stored_messages(self.connection, self._subjects.prompts_stream, self._subjects.prompts)
        return {(message.headers or {}).get(MSG_ID, ""): message.seq or 0 for message in found}

    async def prompts_info(self) -> StreamInfo:
        """Return the queue's state. Groups below `first_position` have left the queue."""
        return await stream_info(self.connection, self._subjects.prompts_stream)

    async def publish_sequence(self, payload: bytes, msg_id: str, headers: Headers = NO_HEADERS) -> int:
        """Publish a sequence and return its position in the log. Raises `PayloadTooLarge`, `BusError`."""
        return await self._store_once(self._subjects.sequences_stream, self._subjects.sequences, payload, msg_id, headers)

    def read_sequences(self, from_position: int) -> OrderedReader[LogEntry]:
        """Iterate over the log from `from_position` (>= 1), and wait for more at its end. Purged messages are left out."""

        def log_entry(message: Msg) -> LogEntry:
            msg_id = (message.headers or {}).get(MSG_ID, "")
            return LogEntry(message.metadata.sequence.stream, message.data, msg_id, headers_given(message))

        return OrderedReader(self.connection, self._subjects.sequences_stream, log_entry, from_position=max(1, from_position))

    async def purge_sequences(self, below_position: int) -> None:
        """Remove the sequences below this position. Later sequences are numbered as if nothing had been removed."""
        if below_position <= 1:
            return  # With 0, nats-py would purge the whole stream.
        with bus_errors(f"purging {self._subjects.sequences_stream}"):
            # If the server were given a position beyond the end, it would number later messages from there.
            end = (await self.sequences_info()).last_position
            await self.connection.js.purge_stream(self._subjects.sequences_stream, seq=min(below_position, end + 1))

    async def empty(self) -> None:
        """Delete and recreate the streams of prompt groups and sequences, so that the server also forgets message ids. Later
        messages continue the old numbering. Raises `NotPermitted` and `BusError`. After an error, call this method again: it
        recreates a missing stream, whose numbering then begins at 1."""
        for stream in (self._subjects.prompts_stream, self._subjects.sequences_stream):
            if (info := await self._info(stream)) is not None:
                with bus_errors(f"emptying {stream}"):
                    await self.connection.js.delete_stream(stream)
                    await self.connection.js.add_stream(info.config.evolve(first_seq=info.state.last_seq + 1))
        await self._create_streams(fresh=False)

    async def sequences_info(self) -> StreamInfo:
        return await stream_info(self.connection, self._subjects.sequences_stream)

    async def publish_dead_letter(self, payload: bytes, msg_id: str) -> None:
        """Store the record of a prompt group that was given up. Raises `PayloadTooLarge`, `BusError`."""
        await self._store_once(self._subjects.dead_stream, self._subjects.dead, payload, msg_id)

    async def dead_letters(self) -> list[bytes]:
        """Return the payloads of all dead letters, the oldest first."""
        found = await stored_messages(self.connection, self._subjects.dead_stream, self._subjects.dead)
        return [message.data or b"" for message in found]

    async def publish_control(self, kind: str, payload: bytes, actor: str = "", headers: Headers = NO_HEADERS) -> None:
        """Publish a control message. It replaces the previous message of this kind and actor, even an unread one."""
        check_control(kind, actor)
        await self._store(self._subjects.control(kind, actor), payload, dict(headers))

    def watch_control(self, kinds: Sequence[str], actor: str = "") -> OrderedReader[ControlMessage]:
        """Iterate over the last message of each subject of `kinds` (see `watched`), then over new ones, in stream order."""
        prefix = self._subjects.control("")

        def control_message(message: Msg) -> ControlMessage:
            kind, _, name = message.subject.removeprefix(prefix).partition(".")
            return ControlMessage(kind, name, message.data, message.metadata.sequence.stream, headers_given(message))

        subjects = tuple(self._subjects.control(*pair) for pair in watched(kinds, actor))
        return OrderedReader(self.connection, self._subjects.control_stream, control_message, subjects=subjects)

    async def put_member(self, actor: str, payload: bytes) -> None:
        """Register a member, or renew its registration, which expires after `member_ttl_s`."""
        await self._store(self._subjects.member(check_actor_name(actor)), payload, {})

    async def remove_member(self, actor: str) -> None:
        await self._store(self._subjects.member(actor), b"", {"KV-Operation": "DEL"})

    def watch_members(self) -> MemberWatch:
        """Iterate over the registered members, then over every new registration, renewal, removal and expiry."""
        return MemberWatch(self.connection, self._subjects, self.limits.member_ttl_s)

    async def _store_once(self, stream: str, subject: str, payload: bytes, msg_id: str, headers: Headers = NO_HEADERS) -> int:
        try:
            return await self._store(subject, payload, {**headers, MSG_ID: msg_id})
        except BusError as error:
            if is_stream_full(error):
                raise BusError(f"{stream} is full: {await self.limits_of(stream)}") from error
            raise

    async def _store(self, subject: str, payload: bytes, headers: dict[str, str]) -> int:
        size = len(payload) + (_HEADER_FRAME_BYTES if headers else 0)
        size += sum(len(key) + len(value.encode()) + _FIELD_FRAME_BYTES for key, value in headers.items())
        if size > self.max_payload_bytes:
            raise PayloadTooLarge(subject, size, self.max_payload_bytes)
        await self.connection.wait_connected()
        with bus_errors(f"publishing {len(payload)} bytes on {subject}"):
            return int((await self.connection.ask(subject, payload, headers or None))["seq"])

    async def limits_of(self, stream: str) -> str:
        """Return a stream's limits in words, for the error about a full stream. Raises `BusError`."""
        with bus_errors(f"looking at {stream} at {self.connection.url}"):
            config = (await self.connection.js.stream_info(stream)).config
        limits = {"messages": config.max_msgs, "bytes": config.max_bytes}
        return "it may hold " + " and ".join(f"{most} {unit}" for unit, most in limits.items() if (most or 0) > 0)

    async def _info(self, stream: str) -> nats.js.api.StreamInfo | None:
        with bus_errors(f"looking at {stream} at {self.connection.url}"), contextlib.suppress(nats.js.errors.NotFoundError):
            return await self.connection.js.stream_info(stream)
        return None


_UNLIMITED = -1
_LEAST_MARKER_TTL_S = 1.0
_MAX_ACTORS = 16_384
"""Maximum number of actors. Each has one open request for a prompt group, and one consumer on CONTROL. nats-server's own
defaults are too low: 512 open requests and, since 2.15, 1,000 consumers per stream."""


def stream_configs(subjects: Subjects, limits: StreamLimits) -> list[StreamConfig]:
    """Return the configurations of PROMPTS, SEQUENCES, CONTROL and DEAD.

    A full stream refuses messages, except that CONTROL accepts one that is no larger than the message that it replaces, and
    DEAD drops its oldest message.
    """
    small = limits.max_bytes(1 / 16)
    common: dict[str, Any] = {"num_replicas": limits.replicas, "duplicate_window": limits.duplicate_window_s}
    common |= {"discard": DiscardPolicy.NEW, "storage": StorageType.FILE}
    queue = {"retention": RetentionPolicy.WORK_QUEUE, "max_msgs": limits.prompts_max_messages}  # acks remove messages
    log = {"max_msgs": limits.sequences_max_messages}
    last = {"max_msgs_per_subject": 1, "max_consumers": _MAX_ACTORS}
    newest = {"max_msgs": limits.dead_max_messages, "discard": DiscardPolicy.OLD}
    streams: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
        (subjects.prompts_stream, subjects.prompts, limits.max_bytes(1 / 8), queue),
        (subjects.sequences_stream, subjects.sequences, limits.sequences_max_bytes, log),
        (subjects.control_stream, subjects.control_all, small, last),
        (subjects.dead_stream, subjects.dead, small, newest),
    )
    return [StreamConfig(name=name, subjects=[one], max_bytes=most, **(common | more)) for name, one, most, more in streams]


def actors_consumer(limits: StreamLimits) -> ConsumerConfig:
    """Return the configuration of the consumer that all actors share. It sets no limit on deliveries, because the server would
    silently stop delivering a group at that limit, and keep it for ever."""
    return ConsumerConfig(
        durable_name=ACTORS,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=limits.ack_wait_s,
        max_deliver=_UNLIMITED,
        max_ack_pending=_UNLIMITED,
        max_waiting=_MAX_ACTORS,
    )


def members_bucket(subjects: Subjects, limits: StreamLimits) -> KeyValueConfig:
    """Return the configuration of a bucket whose entries expire. nats-server 2.11 or newer tells watchers of each expiry."""
    return KeyValueConfig(
        bucket=subjects.members_bucket,
        history=1,
        ttl=limits.member_ttl_s,
        max_bytes=limits.max_bytes(1 / 64),
        limit_marker_ttl=max(_LEAST_MARKER_TTL_S, limits.member_ttl_s),
        storage=StorageType.FILE,
        replicas=limits.replicas,
    )
