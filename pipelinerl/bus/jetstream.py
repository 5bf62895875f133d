"""The bus over NATS JetStream.

Four streams, one durable consumer and one key-value bucket per run, one connection per process. It does not start a server
(`pipelinerl.local.nats` does) and does not change streams that exist.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import nats.js.errors
from nats.js.api import StreamConfig

from pipelinerl.bus.link import (
    NatsLink,
    bus_errors,
    is_cluster_forming,
    is_stream_full,
    is_stream_missing,
    open_link,
)
from pipelinerl.bus.protocol import (
    NO_HEADERS,
    ControlMessage,
    Headers,
    LogEntry,
    MemberEvent,
    PendingPrompt,
    StreamInfo,
    StreamLimits,
    Subjects,
    check_actor_name,
    check_control,
    used_before,
    watched,
)
from pipelinerl.bus.publisher import StreamPublisher
from pipelinerl.bus.reader import (
    MemberWatch,
    OrderedReader,
    ReadPlan,
    Received,
    headers_given,
    stored_messages,
    stream_info,
)
from pipelinerl.bus.streams import ACTORS, actors_consumer, members_bucket, stream_configs
from pipelinerl.bus.work_queue import NatsPrompt, PromptPuller
from pipelinerl.errors import BusError
from pipelinerl.service.retry import Backoff, retry_forever

_log = logging.getLogger(__name__)

_MSG_ID = "Nats-Msg-Id"
_NS = 1_000_000_000
CREATE_WITHIN_S = 60.0
"""For the servers of a cluster to find each other and choose a leader."""
CONNECT_TIMEOUT_S = 30.0
"""For a service, which may start before its NATS does."""


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
) -> AsyncIterator[JetStreamBus]:
    """The bus of `run` at `url` (several servers of a cluster: separated by commas).

    `name` is shown by NATS's monitoring; `credentials` is a file with `user:password` or a .creds file; `tls_dir` holds
    ca.crt, and tls.crt and tls.key where the server asks for them. All are read again at each connection.
    Raises `BusError` naming the url when no server answers in time, `FieldError` for a bad run name or file.
    """
    subjects = Subjects(run)
    async with open_link(
        url,
        name=name or run,
        credentials=credentials,
        tls_dir=tls_dir,
        connect_timeout_s=connect_timeout_s,
        request_timeout_s=request_timeout_s,
    ) as link:
        bus = JetStreamBus(link, subjects, limits or StreamLimits())
        await bus.open()
        try:
            yield bus
        finally:
            await bus.close()


class JetStreamBus:
    """Implements `Bus`. Made by `connect`."""

    def __init__(self, link: NatsLink, subjects: Subjects, limits: StreamLimits) -> None:
        self.run, self.limits = subjects.run, limits
        self._link, self._subjects = link, subjects
        self._publisher = StreamPublisher(link)
        self._puller = PromptPuller(link, subjects.prompts_stream, ACTORS)
        self._limit_texts: dict[str, str] = {}

    @property
    def max_payload_bytes(self) -> int:
        return self._link.max_payload_bytes

    @property
    def is_connected(self) -> bool:
        return self._link.is_connected

    async def open(self) -> None:
        """`connect` calls it."""
        await self._publisher.open()

    async def close(self) -> None:
        """Hands back a prompt group that was delivered and not taken. `connect` calls it."""
        await self._puller.close()

    async def create_streams(self, *, fresh: bool = False) -> None:
        """As `Bus` says. A cluster of servers that has no leader yet is waited for, `CREATE_WITHIN_S` at most."""
        deadline = time.monotonic() + CREATE_WITHIN_S
        await retry_forever(
            lambda: self._create_streams(fresh),
            "make the run's streams",
            retried=lambda error: is_cluster_forming(error) and time.monotonic() < deadline,
            backoff=Backoff(first_s=0.5, most_s=0.5),
        )

    async def _create_streams(self, fresh: bool) -> None:
        if fresh and (used := await self._used_streams()):
            raise used_before(self.run, used)
        for config in stream_configs(self._subjects, self.limits):
            await self._ensure_stream(config)
        if not await self._has_stream(self._subjects.members_stream):
            with bus_errors(f"creating the membership bucket at {self._link.url} (needs nats-server 2.11)"):
                await self._link.js.create_key_value(members_bucket(self._subjects, self.limits))
        with bus_errors(f"creating the consumer of {self._subjects.prompts_stream}"):
            try:
                await self._link.js.consumer_info(self._subjects.prompts_stream, ACTORS)
            except nats.js.errors.NotFoundError:
                await self._link.js.add_consumer(self._subjects.prompts_stream, actors_consumer(self.limits))

    async def delete_streams(self) -> None:
        for stream in self._subjects.every_stream:
            with bus_errors(f"deleting {stream}"), contextlib.suppress(nats.js.errors.NotFoundError):
                await self._link.js.delete_stream(stream)

    async def publish_prompt(self, payload: bytes, msg_id: str, headers: Headers = NO_HEADERS) -> int:
        return await self._store_once(self._subjects.prompts_stream, self._subjects.prompts, payload, msg_id, headers)

    async def next_prompt(self, timeout_s: float) -> NatsPrompt | None:
        return await self._puller.next(timeout_s)

    async def publish_sequence(self, payload: bytes, msg_id: str, headers: Headers = NO_HEADERS) -> int:
        stream, subject = self._subjects.sequences_stream, self._subjects.sequences
        return await self._store_once(stream, subject, payload, msg_id, headers)

    @contextlib.asynccontextmanager
    async def read_sequences(self, from_position: int) -> AsyncIterator[AsyncIterator[LogEntry]]:
        plan = ReadPlan(self._subjects.sequences_stream, from_position=max(1, from_position))
        async with OrderedReader(self._link, plan) as reader:
            yield _Messages(reader, _log_entry)

    async def purge_sequences(self, below_position: int) -> None:
        if below_position <= 1:
            return  # nothing is below; nats-py would take 0 for "everything"
        with bus_errors(f"purging {self._subjects.sequences_stream}"):
            # Beyond the end, the server would go on counting from there.
            end = (await self.sequences_info()).last_position
            await self._link.js.purge_stream(self._subjects.sequences_stream, seq=min(below_position, end + 1))

    async def publish_dead_letter(self, payload: bytes, msg_id: str) -> None:
        await self._store_once(self._subjects.dead_stream, self._subjects.dead, payload, msg_id)

    async def dead_letters(self) -> list[bytes]:
        stream, subject = self._subjects.dead_stream, self._subjects.dead
        found = await stored_messages(self._link, stream, subject, await self._info(stream))
        return [message.payload for message in found]

    async def prompts_info(self) -> StreamInfo:
        return await self._info(self._subjects.prompts_stream)

    async def pending_prompts(self) -> list[PendingPrompt]:
        stream, info = self._subjects.prompts_stream, await self.prompts_info()
        found = await stored_messages(self._link, stream, self._subjects.prompts, info)
        return [PendingPrompt(message.position, message.headers.get(_MSG_ID, "")) for message in found]

    async def sequences_info(self) -> StreamInfo:
        return await self._info(self._subjects.sequences_stream)

    async def publish_control(self, kind: str, payload: bytes, actor: str = "", headers: Headers = NO_HEADERS) -> None:
        check_control(kind, actor)
        await self._publisher.store(self._subjects.control(kind, actor), payload, dict(headers) or None)

    @contextlib.asynccontextmanager
    async def watch_control(
        self, kinds: Sequence[str], actor: str = ""
    ) -> AsyncIterator[AsyncIterator[ControlMessage]]:
        subjects = tuple(self._subjects.control(*pair) for pair in watched(kinds, actor))
        prefix = self._subjects.control("")

        def control_message(received: Received) -> ControlMessage:
            message, ack = received
            kind, _, name = message.subject.removeprefix(prefix).partition(".")
            return ControlMessage(kind, name, message.data, ack.stream_position, headers_given(message.headers))

        async with OrderedReader(self._link, ReadPlan(self._subjects.control_stream, subjects)) as reader:
            yield _Messages(reader, control_message)

    async def put_member(self, actor: str, payload: bytes) -> None:
        await self._publisher.store(self._subjects.member(check_actor_name(actor)), payload)

    async def remove_member(self, actor: str) -> None:
        await self._publisher.store(self._subjects.member(check_actor_name(actor)), b"", {"KV-Operation": "DEL"})

    @contextlib.asynccontextmanager
    async def watch_members(self) -> AsyncIterator[AsyncIterator[MemberEvent]]:
        stream = self._subjects.members_stream
        with bus_errors(f"watching members at {self._link.url}"):
            ttl_s = (await self._link.js.stream_info(stream)).config.max_age
        every = self._subjects.member("*")
        async with OrderedReader(self._link, ReadPlan(stream, (every,), snapshot_again=True)) as reader:
            yield MemberWatch(reader, ttl_s or self.limits.member_ttl_s)

    async def _store_once(
        self, stream: str, subject: str, payload: bytes, msg_id: str, headers: Headers = NO_HEADERS
    ) -> int:
        try:
            return await self._publisher.store(subject, payload, {**headers, _MSG_ID: msg_id})
        except BusError as error:
            if is_stream_full(error):
                raise BusError(f"{stream} is full: {await self._limits_of(stream)}") from error
            raise

    async def _limits_of(self, stream: str) -> str:
        """As they are in the server: whoever made the stream decided. They never change, so one question is enough."""
        if stream not in self._limit_texts:
            with bus_errors(f"looking at {stream} at {self._link.url}"):
                config = (await self._link.js.stream_info(stream)).config
            limits = {"messages": config.max_msgs, "bytes": config.max_bytes}
            shown = " and ".join(f"{most} {unit}" for unit, most in limits.items() if (most or 0) > 0)
            self._limit_texts[stream] = f"it may hold {shown}"
        return self._limit_texts[stream]

    async def _used_streams(self) -> list[str]:
        subjects, used = self._subjects, []
        for stream in (subjects.prompts_stream, subjects.sequences_stream, subjects.control_stream):
            if await self._has_stream(stream) and (await self._info(stream)).last_position > 0:
                used.append(stream)
        return used

    async def _ensure_stream(self, config: StreamConfig) -> None:
        assert config.name is not None
        if await self._has_stream(config.name):
            await self._tell_difference(config)
            return
        with bus_errors(f"creating {config.name} at {self._link.url}"):
            await self._link.js.add_stream(config)

    async def _tell_difference(self, wanted: StreamConfig) -> None:
        assert wanted.name is not None
        with bus_errors(f"looking at {wanted.name} at {self._link.url}"):
            there = (await self._link.js.stream_info(wanted.name)).config
        for what, is_so, asked_for in (
            ("servers that keep it", there.num_replicas, wanted.num_replicas),
            ("largest number of bytes", there.max_bytes, wanted.max_bytes),
        ):
            if (asked_for or -1) != (is_so or -1):
                _log.warning(
                    "%s exists, and stays as it is: %s: %s, not %s; `nats stream edit %s` changes it",
                    *(wanted.name, what, is_so, asked_for, wanted.name),
                )

    async def _has_stream(self, stream: str) -> bool:
        try:
            await self._info(stream)
        except BusError as error:
            if is_stream_missing(error):
                return False
            raise
        return True

    async def _info(self, stream: str) -> StreamInfo:
        return await stream_info(self._link, stream)


_Item = TypeVar("_Item")


class _Messages(Generic[_Item]):
    """What `convert` makes of each message of `reader`. Not a generator: one whose `anext` is cancelled would be over."""

    def __init__(self, reader: OrderedReader, convert: Callable[[Received], _Item]) -> None:
        self._reader, self._convert = reader, convert

    def __aiter__(self) -> _Messages[_Item]:
        return self

    async def __anext__(self) -> _Item:
        return self._convert(await self._reader.next_message())


def _log_entry(received: Received) -> LogEntry:
    message, ack = received
    msg_id = (message.headers or {}).get(_MSG_ID, "")
    return LogEntry(
        ack.stream_position, message.data, msg_id, ack.published_at_ns / _NS, headers_given(message.headers)
    )
