"""The bus inside one process, for services' unit tests: what JetStream does to a run's streams, without a server.

It persists nothing, does not cross processes, and reads time from the event loop. It remembers message ids for good and drops
no dead letter; whatever else the contract tests ask of JetStream, services see here too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipelinerl.bus.protocol import (
    EVERY_ACTOR,
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
from pipelinerl.errors import BusError, PayloadTooLarge


def _now_s() -> float:
    return asyncio.get_running_loop().time()


class Log:
    """Messages by position, each id once."""

    def __init__(self, name: str, max_messages: int) -> None:
        self._name, self._max_messages = name, max_messages
        self.entries: dict[int, LogEntry] = {}
        self._positions: dict[str, int] = {}  # by message id
        self.last_position = 0

    def append(self, payload: bytes, msg_id: str, headers: Headers) -> int:
        if msg_id in self._positions:
            return self._positions[msg_id]
        if len(self.entries) >= self._max_messages:
            raise BusError(f"{self._name} is full: it may hold {self._max_messages} messages")
        self.last_position += 1
        if msg_id:
            self._positions[msg_id] = self.last_position
        self.entries[self.last_position] = LogEntry(self.last_position, payload, msg_id, time.time(), headers)
        return self.last_position

    def info(self) -> StreamInfo:
        first = min(self.entries, default=self.last_position + 1)
        first_at_s = self.entries[first].published_at_s if self.entries else None
        size = sum(len(entry.payload) for entry in self.entries.values())
        return StreamInfo(len(self.entries), size, first, self.last_position, first_at_s)


class WorkQueue(Log):
    """Each message goes to one taker, and to another when `ack_wait_s` passes without a word."""

    def __init__(self, limits: StreamLimits) -> None:
        super().__init__("PROMPTS", limits.prompts_max_messages)
        self._ack_wait_s = limits.ack_wait_s
        self._deliveries: dict[int, int] = {}
        self._deadlines_s: dict[int, float] = {}  # of those in a taker's hands

    def take(self) -> tuple[LogEntry, int] | None:
        """The oldest message in nobody's hands, and how often it was delivered with this time."""
        for position, entry in self.entries.items():
            if self._deadlines_s.get(position, 0.0) <= _now_s():
                self._deadlines_s[position] = _now_s() + self._ack_wait_s
                self._deliveries[position] = self._deliveries.get(position, 0) + 1
                return entry, self._deliveries[position]
        return None

    def extend(self, position: int) -> None:
        if position in self._deadlines_s:
            self._deadlines_s[position] = _now_s() + self._ack_wait_s

    def give_back(self, position: int) -> None:
        self._deadlines_s.pop(position, None)

    def remove(self, position: int) -> None:
        self.entries.pop(position, None)
        self._deadlines_s.pop(position, None)

    def next_deadline_s(self) -> float | None:
        return min(self._deadlines_s.values(), default=None)


class Members:
    """Registrations that expire `ttl_s` after their last put, as changes: (position, actor, payload or None)."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s, self._position = ttl_s, 0
        self._expires_at_s: dict[str, float] = {}
        self._last: dict[str, tuple[int, str, bytes | None]] = {}

    def _change(self, actor: str, payload: bytes | None) -> None:
        self._position += 1
        self._last[actor] = (self._position, actor, payload)

    def put(self, actor: str, payload: bytes) -> None:
        self._expires_at_s[actor] = _now_s() + self._ttl_s
        self._change(actor, payload)

    def remove(self, actor: str) -> None:
        if self._expires_at_s.pop(actor, None) is not None:
            self._change(actor, None)

    def expire(self, now_s: float) -> None:
        for actor in [actor for actor, expires_at_s in self._expires_at_s.items() if expires_at_s <= now_s]:
            self.remove(actor)

    def next_expiry_s(self) -> float | None:
        return min(self._expires_at_s.values(), default=None)

    def after(self, position: int) -> tuple[int, str, bytes | None] | None:
        return min((change for change in self._last.values() if change[0] > position), default=None)


class RunStreams:
    def __init__(self, limits: StreamLimits) -> None:
        self.prompts, self.sequences = WorkQueue(limits), Log("SEQUENCES", limits.sequences_max_messages)
        self.dead = Log("DEAD", limits.dead_max_messages)
        self.members = Members(limits.member_ttl_s)
        self.control: dict[tuple[str, str], ControlMessage] = {}
        self.control_position = 0


@dataclass
class MemoryServer:
    """Stands where a NATS server stands: the buses that share one see each other's messages."""

    max_payload_bytes: int = 1024**2
    reachable: bool = True
    """False: every call raises `BusError` and iterators wait, as during an outage. Change it with `set_reachable`."""
    runs: dict[str, RunStreams] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def set_reachable(self, reachable: bool) -> None:
        self.reachable = reachable
        self.notify()

    def notify(self) -> None:
        """Wakes everyone who waits now."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, until_s: float | None) -> None:
        """Until the next change, or the loop's clock says `until_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                await self._changed.wait()


class MemoryPrompt:
    """A `PromptDelivery`."""

    def __init__(self, bus: MemoryBus, entry: LogEntry, num_deliveries: int) -> None:
        self._bus, self.num_deliveries = bus, num_deliveries
        self.position, self.payload, self.msg_id, self.headers = (
            entry.position,
            entry.payload,
            entry.msg_id,
            entry.headers,
        )

    async def ack(self) -> None:
        self._bus._streams().prompts.remove(self.position)

    async def in_progress(self) -> None:
        self._bus._streams().prompts.extend(self.position)

    async def give_back(self) -> None:
        self._bus._streams().prompts.give_back(self.position)
        self._bus.server.notify()

    async def terminate(self, reason: str) -> None:
        self._bus._streams().prompts.remove(self.position)


class _Feed:
    """Async iterator over what `poll` finds; waits for a change, or for `wakes_at`, when it finds nothing."""

    def __init__(
        self, server: MemoryServer, poll: Callable[[], Any], wakes_at: Callable[[], float | None] = lambda: None
    ) -> None:
        self._server, self._poll, self._wakes_at = server, poll, wakes_at

    def __aiter__(self) -> _Feed:
        return self

    async def __anext__(self) -> Any:
        while True:
            if not self._server.reachable:
                await self._server.wait(None)
            elif (item := self._poll()) is not None:
                return item
            else:
                await self._server.wait(self._wakes_at())


class MemoryBus:
    """Implements `Bus`. Buses of one run share `server`; without one, this bus is the run's only one."""

    def __init__(self, run: str, *, server: MemoryServer | None = None, limits: StreamLimits | None = None) -> None:
        self.run, self.limits = run, limits or StreamLimits()
        self.server = server or MemoryServer()

    async def __aenter__(self) -> MemoryBus:
        self._check_reachable()
        return self

    async def __aexit__(self, *exc: object) -> None:
        return

    @property
    def max_payload_bytes(self) -> int:
        return self.server.max_payload_bytes

    @property
    def is_connected(self) -> bool:
        return self.server.reachable

    async def create_streams(self, *, fresh: bool = False) -> None:
        self._check_reachable()
        streams, names = self.server.runs.setdefault(self.run, RunStreams(self.limits)), Subjects(self.run)
        last_positions = {
            names.prompts_stream: streams.prompts.last_position,
            names.sequences_stream: streams.sequences.last_position,
            names.control_stream: streams.control_position,
        }
        if fresh and (used := [name for name, last in last_positions.items() if last > 0]):
            raise used_before(self.run, used)

    async def delete_streams(self) -> None:
        self._check_reachable()
        self.server.runs.pop(self.run, None)
        self.server.notify()

    async def publish_prompt(self, payload: bytes, msg_id: str, headers: Headers = NO_HEADERS) -> int:
        return self._append(self._streams().prompts, "prompts", payload, msg_id, headers)

    async def next_prompt(self, timeout_s: float) -> MemoryPrompt | None:
        deadline_s = _now_s() + timeout_s
        while True:
            prompts = self._streams().prompts
            if (taken := prompts.take()) is not None:
                return MemoryPrompt(self, *taken)
            if _now_s() >= deadline_s:
                return None
            redelivery_s = prompts.next_deadline_s()
            await self.server.wait(deadline_s if redelivery_s is None else min(deadline_s, redelivery_s))

    async def publish_sequence(self, payload: bytes, msg_id: str, headers: Headers = NO_HEADERS) -> int:
        return self._append(self._streams().sequences, "sequences", payload, msg_id, headers)

    @contextlib.asynccontextmanager
    async def read_sequences(self, from_position: int) -> AsyncIterator[AsyncIterator[LogEntry]]:
        position = from_position
        self._streams()

        def poll() -> LogEntry | None:
            nonlocal position
            log = self._streams().sequences
            entry = log.entries.get(max(position, min(log.entries, default=0)))
            position = entry.position + 1 if entry else position
            return entry

        yield _Feed(self.server, poll)

    async def purge_sequences(self, below_position: int) -> None:
        entries = self._streams().sequences.entries
        for position in [position for position in entries if position < below_position]:
            del entries[position]

    async def publish_dead_letter(self, payload: bytes, msg_id: str) -> None:
        self._append(self._streams().dead, "dead", payload, msg_id, NO_HEADERS)

    async def dead_letters(self) -> list[bytes]:
        return [entry.payload for entry in self._streams().dead.entries.values()]

    async def prompts_info(self) -> StreamInfo:
        return self._streams().prompts.info()

    async def pending_prompts(self) -> list[PendingPrompt]:
        return [PendingPrompt(entry.position, entry.msg_id) for entry in self._streams().prompts.entries.values()]

    async def sequences_info(self) -> StreamInfo:
        return self._streams().sequences.info()

    async def publish_control(self, kind: str, payload: bytes, actor: str = "", headers: Headers = NO_HEADERS) -> None:
        check_control(kind, actor)
        self._check_size(f"control.{kind}", payload)
        streams = self._streams()
        streams.control_position += 1
        streams.control[kind, actor] = ControlMessage(kind, actor, payload, streams.control_position, headers)
        self.server.notify()

    @contextlib.asynccontextmanager
    async def watch_control(
        self, kinds: Sequence[str], actor: str = ""
    ) -> AsyncIterator[AsyncIterator[ControlMessage]]:
        position, pairs = 0, watched(kinds, actor)
        self._streams()

        def poll() -> ControlMessage | None:
            nonlocal position
            newer = [
                message
                for key, message in self._streams().control.items()
                if message.position > position and (key in pairs or (key[1] and (key[0], EVERY_ACTOR) in pairs))
            ]
            found = min(newer, key=lambda message: message.position, default=None)
            position = found.position if found else position
            return replace(found) if found else None

        yield _Feed(self.server, poll)

    async def put_member(self, actor: str, payload: bytes) -> None:
        self._check_size("members", payload)
        self._streams().members.put(check_actor_name(actor), payload)
        self.server.notify()

    async def remove_member(self, actor: str) -> None:
        self._streams().members.remove(check_actor_name(actor))
        self.server.notify()

    @contextlib.asynccontextmanager
    async def watch_members(self) -> AsyncIterator[AsyncIterator[MemberEvent]]:
        position = 0
        present: set[str] = set()
        self._streams()

        def poll() -> MemberEvent | None:
            nonlocal position
            members = self._streams().members
            members.expire(_now_s())
            while (change := members.after(position)) is not None:
                position, actor, payload = change
                if payload is not None or actor in present:
                    (present.discard if payload is None else present.add)(actor)
                    return MemberEvent(actor, payload)
            return None

        yield _Feed(self.server, poll, lambda: self._streams().members.next_expiry_s())

    def _append(self, log: Log, subject: str, payload: bytes, msg_id: str, headers: Headers) -> int:
        self._check_size(subject, payload)
        position = log.append(payload, msg_id, headers)
        self.server.notify()
        return position

    def _check_reachable(self) -> None:
        if not self.server.reachable:
            raise BusError("not connected to the in-memory bus: it is unreachable")

    def _streams(self) -> RunStreams:
        self._check_reachable()
        streams = self.server.runs.get(self.run)
        if streams is None:
            raise BusError(f"the streams of run {self.run!r} are not there (yet)")
        return streams

    def _check_size(self, subject: str, payload: bytes) -> None:
        if len(payload) > self.server.max_payload_bytes:
            raise PayloadTooLarge(f"{self.run}.{subject}", len(payload), self.server.max_payload_bytes)
