"""The streams of one run as plain data: what JetStream does to them, without a server.

Pure: no clock, no waiting, no tasks. Every method that depends on time takes `now_s` (any monotonic clock, seconds).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from pipelinerl.bus.protocol import LogEntry, PendingPrompt, StreamInfo, StreamLimits
from pipelinerl.bus.subjects import EVERY_ACTOR
from pipelinerl.errors import BusError


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


class WorkQueue:
    """PROMPTS: each message goes to one taker, and to another when `ack_wait_s` passes without a word."""

    def __init__(self, limits: StreamLimits) -> None:
        self._limits, self._ids = limits, RecentIds(limits.duplicate_window_s)
        self._messages: dict[int, Taken] = {}
        self._published_at_s: dict[int, float] = {}  # of those messages
        self._waiting: list[int] = []  # heap: the oldest first, redelivered ones before newer ones
        self._deadlines_s: dict[int, float] = {}  # of those in a taker's hands
        self._last = 0

    def put(self, payload: bytes, msg_id: str, now_s: float, published_at_s: float = 0.0) -> int:
        """Position of the message. Raises `BusError` when full. A known id is not stored again."""
        known = self._ids.position_of(msg_id, now_s)
        if known is not None:
            return known
        if len(self._messages) >= self._limits.prompts_max_messages:
            raise BusError(f"PROMPTS is full: it may hold {self._limits.prompts_max_messages} messages")
        self._last += 1
        self._messages[self._last] = Taken(self._last, payload, msg_id, 0)
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
        return [PendingPrompt(position, msg_id) for position, _, msg_id, _ in self._messages.values()]

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

    def append(self, payload: bytes, msg_id: str, now_s: float, published_at_s: float) -> int:
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
        entry = LogEntry(self.last_position + 1, payload, msg_id, published_at_s)
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


class LastPerKey:
    """CONTROL and the membership bucket: the last message of each key, read in the order of their publication."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], Change] = {}
        self.last_position = 0

    def put(self, key: tuple[str, str], payload: bytes | None) -> None:
        self.last_position += 1
        self._last[key] = Change(self.last_position, key, payload)

    def get(self, key: tuple[str, str]) -> bytes | None:
        change = self._last.get(key)
        return change.payload if change else None

    def after(self, position: int, pairs: Collection[tuple[str, str]]) -> Change | None:
        """The next change behind `position` of a key among `pairs`, in which `EVERY_ACTOR` stands for any name."""

        def matches(key: tuple[str, str]) -> bool:
            return key in pairs or (key[1] != "" and (key[0], EVERY_ACTOR) in pairs)

        behind = (change for change in self._last.values() if change.position > position and matches(change.key))
        return min(behind, default=None)


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
