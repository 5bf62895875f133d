"""Who is there: reads a JetStream key-value bucket whose entries expire.

The server announces an expiry with a marker (nats-server 2.11). A watcher that could have missed one (disconnected, or
busy for longer than the marker stays) compares with a new snapshot of the bucket. It does not judge what a registration
says.
"""

from __future__ import annotations

import asyncio
from collections import deque

from nats.aio.msg import Msg

from pipelinerl.bus.protocol import MemberEvent
from pipelinerl.bus.reader import OrderedReader, Received

_REMOVED = ("KV-Operation", "Nats-Marker-Reason")
_DOUBT_AFTER_TTLS = 2.0


class MemberWatch:
    """Async iterator over `MemberEvent`. Consumes the bucket; waits for heartbeats, which actors send.

    A member without a heartbeat for two TTLs, of which no removal was seen, is doubted: the bucket is read again.
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
        if not any(key in (message.headers or {}) for key in _REMOVED):
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
