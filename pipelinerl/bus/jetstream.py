"""The bus over NATS JetStream.

Four streams, one durable consumer and one key-value bucket per run, one connection per process. It does not start a server
(`pipelinerl.local.nats` does) and does not change streams that exist. It never publishes twice: what to do about a failure is
the caller's decision, and a message with an id can be repeated unharmed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js.api import StreamConfig

from pipelinerl.bus.link import (
    NatsAccess,
    NatsLink,
    bus_errors,
    is_cluster_forming,
    is_stream_full,
    is_stream_missing,
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
from pipelinerl.bus.reader import (
    MemberWatch,
    OrderedReader,
    Received,
    headers_given,
    stored_messages,
    stream_info,
)
from pipelinerl.bus.streams import ACTORS, actors_consumer, members_bucket, stream_configs
from pipelinerl.bus.work_queue import NatsPrompt, PromptPuller
from pipelinerl.errors import BusError, NotPermitted, PayloadTooLarge
from pipelinerl.service.retry import Backoff, retry_forever

_log = logging.getLogger(__name__)

_MSG_ID = "Nats-Msg-Id"
_NS = 1_000_000_000
_HEADER_FRAME_BYTES = len("NATS/1.0\r\n\r\n")
_FIELD_FRAME_BYTES = len(": \r\n")
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
    link = NatsLink(url, NatsAccess(url, credentials, tls_dir), request_timeout_s)
    async with link.opened(name or run, connect_timeout_s):
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
        self._puller = PromptPuller(link, subjects.prompts_stream, ACTORS)
        self._limit_texts: dict[str, str] = {}
        self._waiting: dict[str, tuple[str, asyncio.Future[Msg]]] = {}  # publishes by token: subject, answer
        self._tokens = map(str, itertools.count())
        self._inbox = link.client.new_inbox() + "."

    @property
    def max_payload_bytes(self) -> int:
        return self._link.client.max_payload

    @property
    def is_connected(self) -> bool:
        return self._link.is_connected

    async def open(self) -> None:
        """Subscribes the inbox of acknowledgements; nats-py renews that after a reconnection. `connect` calls it.

        Raises `NotPermitted` when this user may not."""
        inbox = f"{self._inbox}*"
        refused: list[str] = []
        self._link.refused.add(refused.append)
        with bus_errors(f"subscribing at {self._link.url}"):
            await self._link.client.subscribe(inbox, cb=self._on_answer, pending_msgs_limit=0, pending_bytes_limit=0)
            # nats-py's first ping may overtake the subscription; a refusal comes before the second's answer.
            for _ in range(2):
                await self._link.client.flush()
        self._link.refused.discard(refused.append)
        if inbox.lower() in refused:
            raise NotPermitted(self._link.user, inbox, "subscribe")
        self._link.disconnected.add(self._on_disconnect)
        self._link.refused.add(self._on_refusal)

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
        subjects = self._subjects
        filled = (subjects.prompts_stream, subjects.sequences_stream, subjects.control_stream)
        if fresh and (used := [stream for stream in filled if await self._last_position(stream)]):
            raise used_before(self.run, used)
        for config in stream_configs(subjects, self.limits):
            await self._ensure_stream(config)
        if await self._last_position(subjects.members_stream) is None:
            with bus_errors(f"creating the membership bucket at {self._link.url} (needs nats-server 2.11)"):
                await self._link.js.create_key_value(members_bucket(subjects, self.limits))
        with bus_errors(f"creating the consumer of {subjects.prompts_stream}"):
            try:
                await self._link.js.consumer_info(subjects.prompts_stream, ACTORS)
            except nats.js.errors.NotFoundError:
                await self._link.js.add_consumer(subjects.prompts_stream, actors_consumer(self.limits))

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
        stream = self._subjects.sequences_stream
        async with OrderedReader(self._link, stream, from_position=max(1, from_position)) as reader:
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
        found = await stored_messages(self._link, self._subjects.dead_stream, self._subjects.dead)
        return [message.data or b"" for message in found]

    async def prompts_info(self) -> StreamInfo:
        return await stream_info(self._link, self._subjects.prompts_stream)

    async def pending_prompts(self) -> list[PendingPrompt]:
        found = await stored_messages(self._link, self._subjects.prompts_stream, self._subjects.prompts)
        return [PendingPrompt(message.seq or 0, (message.headers or {}).get(_MSG_ID, "")) for message in found]

    async def sequences_info(self) -> StreamInfo:
        return await stream_info(self._link, self._subjects.sequences_stream)

    async def publish_control(self, kind: str, payload: bytes, actor: str = "", headers: Headers = NO_HEADERS) -> None:
        check_control(kind, actor)
        await self._store(self._subjects.control(kind, actor), payload, dict(headers))

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

        async with OrderedReader(self._link, self._subjects.control_stream, subjects) as reader:
            yield _Messages(reader, control_message)

    async def put_member(self, actor: str, payload: bytes) -> None:
        await self._store(self._subjects.member(check_actor_name(actor)), payload, {})

    async def remove_member(self, actor: str) -> None:
        await self._store(self._subjects.member(check_actor_name(actor)), b"", {"KV-Operation": "DEL"})

    @contextlib.asynccontextmanager
    async def watch_members(self) -> AsyncIterator[AsyncIterator[MemberEvent]]:
        stream = self._subjects.members_stream
        with bus_errors(f"watching members at {self._link.url}"):
            ttl_s = (await self._link.js.stream_info(stream)).config.max_age
        every = self._subjects.member("*")
        async with OrderedReader(self._link, stream, (every,), snapshot_again=True) as reader:
            yield MemberWatch(reader, ttl_s or self.limits.member_ttl_s)

    async def _store_once(
        self, stream: str, subject: str, payload: bytes, msg_id: str, headers: Headers = NO_HEADERS
    ) -> int:
        try:
            return await self._store(subject, payload, {**headers, _MSG_ID: msg_id})
        except BusError as error:
            if is_stream_full(error):
                raise BusError(f"{stream} is full: {await self._limits_of(stream)}") from error
            raise

    async def _store(self, subject: str, payload: bytes, headers: dict[str, str]) -> int:
        """Position in the stream, once acknowledged; any number of tasks may wait at once.

        The same as nats-py's `js.publish` at half its cost per message (no task, no random token, no full reading of the
        answer). Raises `PayloadTooLarge`, `NotPermitted`, and `BusError` when it is not acknowledged in time.
        """
        size = len(payload) + (_HEADER_FRAME_BYTES if headers else 0)
        size += sum(len(key) + len(value.encode()) + _FIELD_FRAME_BYTES for key, value in headers.items())
        if size > self.max_payload_bytes:
            raise PayloadTooLarge(subject, size, self.max_payload_bytes)
        await self._link.wait_connected(self._link.request_timeout_s)
        with bus_errors(f"publishing {len(payload)} bytes on {subject}"):
            answer = await self._exchange(subject, payload, headers)
            if answer.headers and answer.headers.get("Status") == "503":
                raise nats.js.errors.NoStreamResponseError
            acknowledgement = json.loads(answer.data)
            if "error" in acknowledgement:
                raise nats.js.errors.APIError.from_error(acknowledgement["error"])
            return int(acknowledgement["seq"])

    async def _exchange(self, subject: str, payload: bytes, headers: dict[str, str]) -> Msg:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Msg] = loop.create_future()
        token = next(self._tokens)
        self._waiting[token] = (subject, answer)
        timer = loop.call_later(self._link.request_timeout_s, _fail, answer, nats.errors.TimeoutError())
        try:
            await self._link.client.publish(subject, payload, reply=self._inbox + token, headers=headers or None)
            return await answer
        finally:
            timer.cancel()
            del self._waiting[token]

    async def _on_answer(self, message: Msg) -> None:
        _subject, answer = self._waiting.get(message.subject[len(self._inbox) :], ("", None))
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _on_disconnect(self) -> None:
        """The answers to what was sent are lost; whether it was stored is not known."""
        for _subject, answer in self._waiting.values():
            _fail(answer, nats.errors.Error("connection lost before the acknowledgement"))

    def _on_refusal(self, lowered: str) -> None:
        for subject, answer in self._waiting.values():
            if subject.lower() == lowered:
                _fail(answer, NotPermitted(self._link.user, subject))

    async def _limits_of(self, stream: str) -> str:
        """As they are in the server: whoever made the stream decided. They never change, so one question is enough."""
        if stream not in self._limit_texts:
            with bus_errors(f"looking at {stream} at {self._link.url}"):
                config = (await self._link.js.stream_info(stream)).config
            limits = {"messages": config.max_msgs, "bytes": config.max_bytes}
            shown = " and ".join(f"{most} {unit}" for unit, most in limits.items() if (most or 0) > 0)
            self._limit_texts[stream] = f"it may hold {shown}"
        return self._limit_texts[stream]

    async def _ensure_stream(self, wanted: StreamConfig) -> None:
        assert wanted.name is not None
        with bus_errors(f"creating {wanted.name} at {self._link.url}"):
            try:
                there = (await self._link.js.stream_info(wanted.name)).config
            except nats.js.errors.NotFoundError:
                await self._link.js.add_stream(wanted)
                return
        for what, is_so, asked_for in (
            ("servers that keep it", there.num_replicas, wanted.num_replicas),
            ("largest number of bytes", there.max_bytes, wanted.max_bytes),
        ):
            if (asked_for or -1) != (is_so or -1):
                _log.warning(
                    "%s exists, and stays as it is: %s: %s, not %s; `nats stream edit %s` changes it",
                    *(wanted.name, what, is_so, asked_for, wanted.name),
                )

    async def _last_position(self, stream: str) -> int | None:
        """0 for a stream that nothing was ever published to, None where there is none."""
        try:
            return (await stream_info(self._link, stream)).last_position
        except BusError as error:
            if is_stream_missing(error):
                return None
            raise


def _fail(answer: asyncio.Future[Msg], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


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
