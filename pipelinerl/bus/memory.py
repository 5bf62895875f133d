"""The bus inside one process: for tests, and for driving services together without a NATS server.

It passes JetStream's contract tests. It persists nothing, does not cross processes, and reads time from the event loop,
so that a loop with a clock of its own can drive deadlines and expiry.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, TypeVar

from pipelinerl.bus.memory_streams import DeadLetters, LastPerKey, Log, Members, Taken, WorkQueue
from pipelinerl.bus.protocol import ControlMessage, LogEntry, MemberEvent, PendingPrompt, StreamInfo, StreamLimits
from pipelinerl.bus.subjects import EVERY_ACTOR, Subjects, check_actor_name, check_control, used_before, watched
from pipelinerl.errors import BusError, PayloadTooLarge

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
        self.position, self.payload, self.msg_id, self.num_deliveries = taken

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

    async def publish_prompt(self, payload: bytes, msg_id: str) -> int:
        self._check_size("prompts", payload)
        position = self._streams().prompts.put(payload, msg_id, _now_s(), time.time())
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

    async def publish_sequence(self, payload: bytes, msg_id: str) -> int:
        self._check_size("sequences", payload)
        position = self._streams().sequences.append(payload, msg_id, _now_s(), time.time())
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

    async def publish_control(self, kind: str, payload: bytes, actor: str = "") -> None:
        check_control(kind, actor)
        self._check_size(f"control.{kind}", payload)
        self._streams().control.put((kind, actor), payload)
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
            return ControlMessage(*change.key, change.payload or b"", position)

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
