"""The streams of one run as plain data: what JetStream does to them, without a server.

Pure: no clock, no waiting, no tasks. Every method that depends on time takes `now_s` (any monotonic clock, seconds).

The bus inside one process: for tests, and for driving services together without a NATS server.

It passes JetStream's contract tests. It persists nothing, does not cross processes, and reads time from the event loop,
so that a loop with a clock of its own can drive deadlines and expiry.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar

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


class RecentIds:
    """Message ids seen within a window, with the position each was stored at."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._positions: dict[str, tuple[int, float]] = {}  # in order of time

    def position_of(self, msg_id: str, now_s: float) -> int | None:
        while self._positions:
            oldest = next(iter(self._positions))
            if now_s - self._positions[oldest][1] < self._window_s:
                break
            del self._positions[oldest]
        found = self._positions.get(msg_id)
        return found[0] if found else None

    def add(self, msg_id: str, position: int, now_s: float) -> None:
        if msg_id:
            self._positions[msg_id] = (position, now_s)


class Taken(NamedTuple):
    position: int
    payload: bytes
    msg_id: str
    num_deliveries: int
    headers: Headers


class WorkQueue:
    """PROMPTS: each message goes to one taker, and to another when `ack_wait_s` passes without a word."""

    def __init__(self, limits: StreamLimits) -> None:
        self._limits, self._ids = limits, RecentIds(limits.duplicate_window_s)
        self._messages: dict[int, Taken] = {}
        self._published_at_s: dict[int, float] = {}  # of those messages
        self._waiting: list[int] = []  # heap: the oldest first, redelivered ones before newer ones
        self._deadlines_s: dict[int, float] = {}  # of those in a taker's hands
        self._last = 0

    def put(
        self, payload: bytes, msg_id: str, now_s: float, published_at_s: float = 0.0, headers: Headers = NO_HEADERS
    ) -> int:
        """Position of the message. Raises `BusError` when full. A known id is not stored again."""
        known = self._ids.position_of(msg_id, now_s)
        if known is not None:
            return known
        if len(self._messages) >= self._limits.prompts_max_messages:
            raise BusError(f"PROMPTS is full: it may hold {self._limits.prompts_max_messages} messages")
        self._last += 1
        self._messages[self._last] = Taken(self._last, payload, msg_id, 0, headers)
        self._published_at_s[self._last] = published_at_s
        heapq.heappush(self._waiting, self._last)
        self._ids.add(msg_id, self._last, now_s)
        return self._last

    def take(self, now_s: float) -> Taken | None:
        for position in [position for position, deadline_s in self._deadlines_s.items() if deadline_s <= now_s]:
            self.give_back(position)
        while self._waiting:
            position = heapq.heappop(self._waiting)
            if position in self._messages:  # else: acknowledged after its deadline had passed
                taken = self._messages[position]
                self._messages[position] = taken._replace(num_deliveries=taken.num_deliveries + 1)
                self._deadlines_s[position] = now_s + self._limits.ack_wait_s
                return self._messages[position]
        return None

    def remove(self, position: int) -> None:
        """Acknowledged or terminated; also by a taker whose deadline has passed."""
        self._messages.pop(position, None)
        self._published_at_s.pop(position, None)
        self._deadlines_s.pop(position, None)

    def extend(self, position: int, now_s: float) -> None:
        if position in self._deadlines_s:
            self._deadlines_s[position] = now_s + self._limits.ack_wait_s

    def give_back(self, position: int) -> None:
        if self._deadlines_s.pop(position, None) is not None:
            heapq.heappush(self._waiting, position)

    def next_deadline_s(self) -> float | None:
        return min(self._deadlines_s.values(), default=None)

    def pending(self) -> list[PendingPrompt]:
        return [PendingPrompt(message.position, message.msg_id) for message in self._messages.values()]

    def info(self) -> StreamInfo:
        size = sum(len(message.payload) for message in self._messages.values())
        first = min(self._messages, default=self._last + 1)
        return StreamInfo(len(self._messages), size, first, self._last, self._published_at_s.get(first))


class Log:
    """SEQUENCES: positions only grow; messages leave from the old end, by purging."""

    def __init__(self, limits: StreamLimits) -> None:
        self._limits, self._ids = limits, RecentIds(limits.duplicate_window_s)
        self._entries: deque[LogEntry] = deque()
        self._first, self._bytes = 1, 0

    @property
    def last_position(self) -> int:
        return self._first + len(self._entries) - 1

    def append(
        self, payload: bytes, msg_id: str, now_s: float, published_at_s: float, headers: Headers = NO_HEADERS
    ) -> int:
        """Position of the message. Raises `BusError` when full."""
        known = self._ids.position_of(msg_id, now_s)
        if known is not None:
            return known
        limits = self._limits
        if (
            len(self._entries) >= limits.sequences_max_messages
            or self._bytes + len(payload) > limits.sequences_max_bytes
        ):
            raise BusError(
                f"SEQUENCES is full: it may hold {limits.sequences_max_messages} messages and "
                f"{limits.sequences_max_bytes} bytes"
            )
        entry = LogEntry(self.last_position + 1, payload, msg_id, published_at_s, headers)
        self._entries.append(entry)
        self._bytes += len(payload)
        self._ids.add(msg_id, entry.position, now_s)
        return entry.position

    def at_or_after(self, position: int) -> LogEntry | None:
        index = max(0, position - self._first)
        return self._entries[index] if index < len(self._entries) else None

    def purge(self, below_position: int) -> None:
        while self._entries and self._entries[0].position < below_position:
            self._bytes -= len(self._entries.popleft().payload)
            self._first += 1

    def info(self) -> StreamInfo:
        first_at_s = self._entries[0].published_at_s if self._entries else None
        return StreamInfo(len(self._entries), self._bytes, self._first, self.last_position, first_at_s)


class DeadLetters:
    """DEAD: the last messages that were given up."""

    def __init__(self, limits: StreamLimits) -> None:
        self._ids = RecentIds(limits.duplicate_window_s)
        self.kept: deque[bytes] = deque(maxlen=limits.dead_max_messages)

    def add(self, payload: bytes, msg_id: str, now_s: float) -> None:
        if self._ids.position_of(msg_id, now_s) is None:
            self.kept.append(payload)
            self._ids.add(msg_id, 0, now_s)


class Change(NamedTuple):
    position: int
    key: tuple[str, str]
    payload: bytes | None
    """None: removed."""
    headers: Headers = NO_HEADERS


class LastPerKey:
    """CONTROL and the membership bucket: the last message of each key, read in the order of their publication."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], Change] = {}
        self.last_position = 0

    def put(self, key: tuple[str, str], payload: bytes | None, headers: Headers = NO_HEADERS) -> None:
        self.last_position += 1
        self._last[key] = Change(self.last_position, key, payload, headers)

    def get(self, key: tuple[str, str]) -> bytes | None:
        change = self._last.get(key)
        return change.payload if change else None

    def after(self, position: int, pairs: Collection[tuple[str, str]]) -> Change | None:
        """The next change behind `position` of a key among `pairs`, in which `EVERY_ACTOR` stands for any name."""

        def matches(key: tuple[str, str]) -> bool:
            return key in pairs or (key[1] != "" and (key[0], EVERY_ACTOR) in pairs)

        behind = (change for change in self._last.values() if change.position > position and matches(change.key))
        return min(behind, key=lambda change: change.position, default=None)


@dataclass
class Members:
    """Registrations that expire `ttl_s` after their last put."""

    ttl_s: float
    changes: LastPerKey = field(default_factory=LastPerKey)
    _expires_at_s: dict[str, float] = field(default_factory=dict)

    def put(self, actor: str, payload: bytes, now_s: float) -> None:
        self._expires_at_s[actor] = now_s + self.ttl_s
        self.changes.put(("member", actor), payload)

    def remove(self, actor: str) -> None:
        if self._expires_at_s.pop(actor, None) is not None:
            self.changes.put(("member", actor), None)

    def expire(self, now_s: float) -> None:
        for actor in [actor for actor, expires_at_s in self._expires_at_s.items() if expires_at_s <= now_s]:
            self.remove(actor)

    def next_expiry_s(self) -> float | None:
        return min(self._expires_at_s.values(), default=None)


_Item = TypeVar("_Item")
_MEMBER = (("member", EVERY_ACTOR),)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


class _Streams:
    """One run's streams and the event that tells waiters that something in them changed."""

    def __init__(self, limits: StreamLimits) -> None:
        self.prompts, self.sequences = WorkQueue(limits), Log(limits)
        self.control, self.members = LastPerKey(), Members(limits.member_ttl_s)
        self.dead = DeadLetters(limits)


@dataclass
class MemoryServer:
    """Stands where a NATS server stands: the buses that share one see each other's messages."""

    max_payload_bytes: int = 1024**2
    reachable: bool = True
    """False: every call raises `BusError` and iterators wait, as during an outage. Change it with `set_reachable`."""
    runs: dict[str, _Streams] = field(default_factory=dict)
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

    def __init__(self, bus: MemoryBus, taken: Taken) -> None:
        self._bus = bus
        self.position, self.payload, self.msg_id, self.num_deliveries, self.headers = taken

    async def ack(self) -> None:
        self._bus._streams().prompts.remove(self.position)

    async def in_progress(self) -> None:
        self._bus._streams().prompts.extend(self.position, _now_s())

    async def give_back(self) -> None:
        self._bus._streams().prompts.give_back(self.position)
        self._bus.server.notify()

    async def terminate(self, reason: str) -> None:
        self._bus._streams().prompts.remove(self.position)


class _Feed(Generic[_Item]):
    """Async iterator over what `poll` finds; waits for a change, or for `wakes_at`, when it finds nothing."""

    def __init__(self, server: MemoryServer, poll: Callable[[], _Item | None], wakes_at: Callable[[], float | None]):
        self._server, self._poll, self._wakes_at = server, poll, wakes_at

    def __aiter__(self) -> _Feed[_Item]:
        return self

    async def __anext__(self) -> _Item:
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
        self.run, self.limits = Subjects(run).run, limits or StreamLimits()
        self.server = server or MemoryServer()

    async def __aenter__(self) -> MemoryBus:
        if not self.server.reachable:
            raise BusError("cannot connect to the in-memory bus: it is unreachable")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        return

    @property
    def max_payload_bytes(self) -> int:
        return self.server.max_payload_bytes

    @property
    def is_connected(self) -> bool:
        return self.server.reachable

    async def create_streams(self, *, fresh: bool = False) -> None:
        self._check_reachable()
        if fresh and (used := self._used_streams()):
            raise used_before(self.run, used)
        self.server.runs.setdefault(self.run, _Streams(self.limits))

    async def delete_streams(self) -> None:
        self._check_reachable()
        self.server.runs.pop(self.run, None)
        self.server.notify()

    async def publish_prompt(self, payload: bytes, msg_id: str, headers: Headers = NO_HEADERS) -> int:
        self._check_size("prompts", payload)
        position = self._streams().prompts.put(payload, msg_id, _now_s(), time.time(), headers)
        self.server.notify()
        return position

    async def next_prompt(self, timeout_s: float) -> MemoryPrompt | None:
        deadline_s = _now_s() + timeout_s
        while True:
            prompts = self._streams().prompts
            if (taken := prompts.take(_now_s())) is not None:
                return MemoryPrompt(self, taken)
            if _now_s() >= deadline_s:
                return None
            redelivery_s = prompts.next_deadline_s()
            await self.server.wait(deadline_s if redelivery_s is None else min(deadline_s, redelivery_s))

    async def publish_sequence(self, payload: bytes, msg_id: str, headers: Headers = NO_HEADERS) -> int:
        self._check_size("sequences", payload)
        position = self._streams().sequences.append(payload, msg_id, _now_s(), time.time(), headers)
        self.server.notify()
        return position

    @contextlib.asynccontextmanager
    async def read_sequences(self, from_position: int) -> AsyncIterator[AsyncIterator[LogEntry]]:
        position = from_position
        self._streams()

        def poll() -> LogEntry | None:
            nonlocal position
            entry = self._streams().sequences.at_or_after(position)
            position = entry.position + 1 if entry else position
            return entry

        yield _Feed(self.server, poll, lambda: None)

    async def purge_sequences(self, below_position: int) -> None:
        self._streams().sequences.purge(below_position)

    async def publish_dead_letter(self, payload: bytes, msg_id: str) -> None:
        self._check_size("dead", payload)
        self._streams().dead.add(payload, msg_id, _now_s())

    async def dead_letters(self) -> list[bytes]:
        return list(self._streams().dead.kept)

    async def prompts_info(self) -> StreamInfo:
        return self._streams().prompts.info()

    async def pending_prompts(self) -> list[PendingPrompt]:
        return self._streams().prompts.pending()

    async def sequences_info(self) -> StreamInfo:
        return self._streams().sequences.info()

    async def publish_control(self, kind: str, payload: bytes, actor: str = "", headers: Headers = NO_HEADERS) -> None:
        check_control(kind, actor)
        self._check_size(f"control.{kind}", payload)
        self._streams().control.put((kind, actor), payload, headers)
        self.server.notify()

    @contextlib.asynccontextmanager
    async def watch_control(
        self, kinds: Sequence[str], actor: str = ""
    ) -> AsyncIterator[AsyncIterator[ControlMessage]]:
        position, pairs = 0, watched(kinds, actor)
        self._streams()

        def poll() -> ControlMessage | None:
            nonlocal position
            change = self._streams().control.after(position, pairs)
            if change is None:
                return None
            position = change.position
            return ControlMessage(*change.key, change.payload or b"", position, change.headers)

        yield _Feed(self.server, poll, lambda: None)

    async def put_member(self, actor: str, payload: bytes) -> None:
        self._check_size("members", payload)
        self._streams().members.put(check_actor_name(actor), payload, _now_s())
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
            while (change := members.changes.after(position, _MEMBER)) is not None:
                position, actor = change.position, change.key[1]
                if change.payload is not None or actor in present:
                    (present.discard if change.payload is None else present.add)(actor)
                    return MemberEvent(actor, change.payload)
            return None

        yield _Feed(self.server, poll, lambda: self._streams().members.next_expiry_s())

    def _used_streams(self) -> list[str]:
        streams, names = self.server.runs.get(self.run), Subjects(self.run)
        if streams is None:
            return []
        last_positions = {
            names.prompts_stream: streams.prompts.info().last_position,
            names.sequences_stream: streams.sequences.last_position,
            names.control_stream: streams.control.last_position,
        }
        return [name for name, last in last_positions.items() if last > 0]

    def _check_reachable(self) -> None:
        if not self.server.reachable:
            raise BusError("not connected to the in-memory bus: it is unreachable")

    def _streams(self) -> _Streams:
        self._check_reachable()
        streams = self.server.runs.get(self.run)
        if streams is None:
            raise BusError(f"the streams of run {self.run!r} are not there (yet)")
        return streams

    def _check_size(self, subject: str, payload: bytes) -> None:
        if len(payload) > self.server.max_payload_bytes:
            raise PayloadTooLarge(f"{self.run}.{subject}", len(payload), self.server.max_payload_bytes)
