"""The bus inside one process, for services' unit tests: what JetStream does to a run's streams, without a server.

It persists nothing, does not cross processes, and reads time from the event loop. It remembers message ids for good and drops
no dead letter; whatever else the contract tests ask of JetStream, services see here too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from pipelinerl.bus.protocol import (
    EVERY_ACTOR,
    NO_HEADERS,
    ControlMessage,
    Headers,
    LogEntry,
    MemberEvent,
    StreamInfo,
    StreamLimits,
    check_actor_name,
    check_control,
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
        self.positions: dict[str, int] = {}  # by message id
        self.last_position = 0

    def append(self, payload: bytes, msg_id: str, headers: Headers) -> int:
        if msg_id in self.positions:
            return self.positions[msg_id]
        if len(self.entries) >= self._max_messages:
            raise BusError(f"{self._name} is full: it may hold {self._max_messages} messages")
        self.last_position += 1
        if msg_id:
            self.positions[msg_id] = self.last_position
        self.entries[self.last_position] = LogEntry(self.last_position, payload, msg_id, headers)
        return self.last_position

    def info(self) -> StreamInfo:
        first = min(self.entries, default=self.last_position + 1)
        size = sum(len(entry.payload) for entry in self.entries.values())
        return StreamInfo(len(self.entries), size, first, self.last_position)


class RunStreams:
    def __init__(self, limits: StreamLimits) -> None:
        self.prompts = Log("PROMPTS", limits.prompts_max_messages)
        self.deliveries: dict[int, int] = {}  # of prompts, by position
        self.deadlines_s: dict[int, float] = {}  # of those in a taker's hands
        self.sequences = Log("SEQUENCES", limits.sequences_max_messages)
        self.dead = Log("DEAD", limits.dead_max_messages)
        self.control: dict[tuple[str, str], ControlMessage] = {}
        self.members: dict[str, tuple[int, bytes | None]] = {}  # position and payload of each one's last change
        self.expiries_s: dict[str, float] = {}  # of present members
        self.changes = 0  # of control and members

    def change_member(self, actor: str, payload: bytes | None) -> None:
        self.changes += 1
        self.members[actor] = (self.changes, payload)


@dataclass
class MemoryServer:
    """Stands where a NATS server stands: the buses that share one see each other's messages."""

    max_payload_bytes: int = 1024**2
    reachable: bool = True
    """False: every call raises `BusError` and iterators wait, as during an outage. Change it with `set_reachable`."""
    streams: RunStreams | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def set_reachable(self, reachable: bool) -> None:
        self.reachable = reachable
        self.notify()

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, until_s: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                await self._changed.wait()


class MemoryPrompt:
    """As `PromptDelivery`."""

    def __init__(self, bus: MemoryBus, entry: LogEntry, num_deliveries: int) -> None:
        self._bus, self.num_deliveries = bus, num_deliveries
        self.position, self.payload = entry.position, entry.payload
        self.msg_id, self.headers = entry.msg_id, entry.headers

    async def ack(self) -> None:
        streams = self._bus._streams()
        streams.prompts.entries.pop(self.position, None)
        streams.deadlines_s.pop(self.position, None)

    async def in_progress(self) -> None:
        deadlines_s = self._bus._streams().deadlines_s
        if self.position in deadlines_s:
            deadlines_s[self.position] = _now_s() + self._bus.limits.ack_wait_s

    async def give_back(self) -> None:
        self._bus._streams().deadlines_s.pop(self.position, None)
        self._bus.server.notify()

    async def terminate(self, reason: str) -> None:
        await self.ack()


class _Feed(AsyncIterator[Any]):
    """Async iterator over what `next_after(position)` finds; waits for a change when it finds nothing."""

    def __init__(self, bus: MemoryBus, next_after: Callable[[int], tuple[int, Any] | None], position: int = 0) -> None:
        self._bus, self._next_after, self._position = bus, next_after, position

    async def __anext__(self) -> Any:
        while True:
            if not self._bus.server.reachable:
                await self._bus.server.wait(None)
            elif (found := self._next_after(self._position)) is not None:
                self._position, item = found
                return item
            else:
                await self._bus.server.wait(min(self._bus._streams().expiries_s.values(), default=None))


class MemoryBus:
    """As `Bus`. Those that share `server` are of one run; without one, this bus is the run's only one and has its streams."""

    def __init__(self, run: str, *, server: MemoryServer | None = None, limits: StreamLimits | None = None) -> None:
        self.run, self.limits = run, limits or StreamLimits()
        self.server = server or MemoryServer(streams=RunStreams(self.limits))

    async def __aenter__(self) -> MemoryBus:
        self._check_reachable()
        return self

    async def __aexit__(self, *exc: object) -> None:
        return

    @property
    def max_payload_bytes(self) -> int:
        return self.server.max_payload_bytes

    async def create_streams(self) -> None:
        self._check_reachable()
        self.server.streams = self.server.streams or RunStreams(self.limits)

    async def publish_prompt(self, payload: bytes, msg_id: str, headers: Headers = NO_HEADERS) -> int:
        return self._append(self._streams().prompts, "prompts", payload, msg_id, headers)

    async def next_prompt(self, timeout_s: float) -> MemoryPrompt | None:
        until_s = _now_s() + timeout_s
        while True:
            streams = self._streams()
            for position, entry in streams.prompts.entries.items():
                if streams.deadlines_s.get(position, 0.0) <= _now_s():
                    streams.deadlines_s[position] = _now_s() + self.limits.ack_wait_s
                    streams.deliveries[position] = streams.deliveries.get(position, 0) + 1
                    return MemoryPrompt(self, entry, streams.deliveries[position])
            if _now_s() >= until_s:
                return None
            await self.server.wait(min([until_s, *streams.deadlines_s.values()]))

    async def pending_prompts(self) -> dict[str, int]:
        return {entry.msg_id: entry.position for entry in self._streams().prompts.entries.values()}

    async def prompts_info(self) -> StreamInfo:
        return self._streams().prompts.info()

    async def publish_sequence(self, payload: bytes, msg_id: str, headers: Headers = NO_HEADERS) -> int:
        return self._append(self._streams().sequences, "sequences", payload, msg_id, headers)

    def read_sequences(self, from_position: int) -> nullcontext[_Feed]:
        def next_after(position: int) -> tuple[int, LogEntry] | None:
            return next((item for item in self._streams().sequences.entries.items() if item[0] > position), None)

        return self._feed(next_after, from_position - 1)

    async def purge_sequences(self, below_position: int) -> None:
        entries = self._streams().sequences.entries
        for position in [position for position in entries if position < below_position]:
            del entries[position]

    async def empty(self) -> None:
        """Forget also the ids."""
        streams = self._streams()
        for one in (streams.prompts, streams.sequences):
            one.entries.clear()
            one.positions.clear()
        streams.deliveries.clear()
        streams.deadlines_s.clear()

    async def sequences_info(self) -> StreamInfo:
        return self._streams().sequences.info()

    async def publish_dead_letter(self, payload: bytes, msg_id: str) -> None:
        self._append(self._streams().dead, "dead", payload, msg_id)

    async def dead_letters(self) -> list[bytes]:
        return [entry.payload for entry in self._streams().dead.entries.values()]

    async def publish_control(self, kind: str, payload: bytes, actor: str = "", headers: Headers = NO_HEADERS) -> None:
        check_control(kind, actor)
        self._check_size(f"control.{kind}", payload)
        streams = self._streams()
        streams.changes += 1
        streams.control[kind, actor] = ControlMessage(kind, actor, payload, streams.changes, headers)
        self.server.notify()

    def watch_control(self, kinds: Sequence[str], actor: str = "") -> nullcontext[_Feed]:
        pairs = watched(kinds, actor)

        def next_after(position: int) -> tuple[int, ControlMessage] | None:
            newer = [
                (message.position, message)
                for (kind, name), message in self._streams().control.items()
                if message.position > position and ((kind, name) in pairs or (name and (kind, EVERY_ACTOR) in pairs))
            ]
            return min(newer, key=lambda found: found[0], default=None)

        return self._feed(next_after)

    async def put_member(self, actor: str, payload: bytes) -> None:
        streams = self._streams()
        streams.expiries_s[check_actor_name(actor)] = _now_s() + self.limits.member_ttl_s
        streams.change_member(actor, payload)
        self.server.notify()

    async def remove_member(self, actor: str) -> None:
        streams = self._streams()
        if streams.expiries_s.pop(actor, None) is not None:
            streams.change_member(actor, None)
        self.server.notify()

    def watch_members(self) -> nullcontext[_Feed]:
        present: set[str] = set()

        def next_after(position: int) -> tuple[int, MemberEvent] | None:
            streams = self._streams()
            for actor in [actor for actor, at_s in streams.expiries_s.items() if at_s <= _now_s()]:
                del streams.expiries_s[actor]
                streams.change_member(actor, None)
            for actor, (change, payload) in sorted(streams.members.items(), key=lambda item: item[1][0]):
                if change > position and (payload is not None or actor in present):
                    (present.discard if payload is None else present.add)(actor)
                    return change, MemberEvent(actor, payload)
            return None

        return self._feed(next_after)

    def _feed(self, next_after: Callable[[int], tuple[int, Any] | None], position: int = 0) -> nullcontext[_Feed]:
        self._streams()
        return nullcontext(_Feed(self, next_after, position))

    def _append(self, log: Log, subject: str, payload: bytes, msg_id: str, headers: Headers = NO_HEADERS) -> int:
        self._check_size(subject, payload)
        position = log.append(payload, msg_id, headers)
        self.server.notify()
        return position

    def _check_reachable(self) -> None:
        if not self.server.reachable:
            raise BusError("not connected to the in-memory bus: it is unreachable")

    def _streams(self) -> RunStreams:
        self._check_reachable()
        if self.server.streams is None:
            raise BusError(f"the streams of run {self.run!r} do not exist (yet)")
        return self.server.streams

    def _check_size(self, subject: str, payload: bytes) -> None:
        if len(payload) > self.server.max_payload_bytes:
            raise PayloadTooLarge(f"{self.run}.{subject}", len(payload), self.server.max_payload_bytes)
