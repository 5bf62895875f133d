"""Takes prompt groups from the work queue, one at a time, through the durable consumer that all actors share.

A wait asks the server for one message, for as long as it waits. A cancelled wait leaves its question open to the next
one, so that it neither loses a group nor takes a second. It does not look into groups and does not bound redeliveries.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import deque

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from pipelinerl.bus.link import AckSubject, NatsLink, bus_errors
from pipelinerl.bus.reader import headers_given
from pipelinerl.errors import BusError, NotPermitted

_log = logging.getLogger(__name__)

_SHORTEST_QUESTION_S = 0.001
_REFUSED_S = 0.2
"""Before asking again when the server refused for a reason that passes."""
_NS = 1_000_000_000
_ACK, _NAK, _IN_PROGRESS, _TERMINATE = b"+ACK", b"-NAK", b"+WPI", b"+TERM"
_NOBODY_THERE = "503"
_TIME_OVER = ("404", "408")


class NatsPrompt:
    """A `PromptDelivery`. `ack`, `give_back` and `terminate` return once the server has confirmed them."""

    def __init__(self, link: NatsLink, message: Msg) -> None:
        self._link, self._reply = link, message.reply
        self.payload: bytes = message.data
        self.msg_id = (message.headers or {}).get("Nats-Msg-Id", "")
        self.headers = headers_given(message.headers)
        ack = AckSubject.parse(message.reply)
        self.position, self.num_deliveries = ack.stream_position, ack.num_deliveries

    async def ack(self) -> None:
        await self._link.request(self._reply, _ACK)

    async def in_progress(self) -> None:
        with bus_errors("extending the deadline of a prompt group"):
            await self._link.client.publish(self._reply, _IN_PROGRESS)

    async def give_back(self) -> None:
        await self._link.request(self._reply, _NAK)

    async def terminate(self, reason: str) -> None:
        await self._link.request(self._reply, _TERMINATE + b" " + " ".join(reason.split()).encode())


class PromptPuller:
    """Consumes PROMPTS; waits for a group, which the feeder publishes or the server redelivers."""

    def __init__(self, link: NatsLink, stream: str, consumer: str) -> None:
        self._link, self._stream = link, stream
        self._asking = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._ready: deque[Msg] = deque()
        self._error: BusError | None = None
        self._question = 0  # number of the last one; part of its inbox, so that late answers are told apart
        self._question_ends = 0.0  # loop time
        self._answered = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._inbox = ""
        self._subscription: Subscription | None = None

    async def next(self, timeout_s: float) -> NatsPrompt | None:
        """The next group, or None when none came in time. Raises `BusError` without connection or stream."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        async with self._one_at_a_time:
            await self._link.wait_connected(timeout_s)
            await self._subscribe()
            while not self._ready:
                if (now := loop.time()) >= deadline:
                    await self._link.wait_connected(0)
                    return None
                if now >= self._question_ends:
                    await self._ask(deadline - now)
                await self._wait_for_answer(min(deadline, self._question_ends) - now)
            return NatsPrompt(self._link, self._ready.popleft())

    async def close(self) -> None:
        """Hands back what was delivered and not yet taken; what cannot be is redelivered after `ack_wait_s`."""
        self._link.reconnected.discard(self._forget_question)
        self._link.refused.discard(self._on_refusal)
        if self._subscription is None or not self._link.is_connected:
            return
        try:
            with bus_errors("leaving the work queue"):
                await self._subscription.unsubscribe()
            while self._ready:
                await NatsPrompt(self._link, self._ready.popleft()).give_back()
        except BusError as error:
            _log.warning("a prompt group was not handed back: %s", error)

    async def _subscribe(self) -> None:
        if self._subscription is not None:
            return
        self._inbox = self._link.client.new_inbox()
        with bus_errors(f"taking prompt groups at {self._link.url}"):
            self._subscription = await self._link.client.subscribe(
                f"{self._inbox}.*", cb=self._on_message, pending_bytes_limit=0
            )
        self._link.reconnected.add(self._forget_question)
        self._link.refused.add(self._on_refusal)

    async def _ask(self, duration_s: float) -> None:
        self._question += 1
        self._question_ends = asyncio.get_running_loop().time() + duration_s
        question = {"batch": 1, "expires": int(max(duration_s, _SHORTEST_QUESTION_S) * _NS)}
        with bus_errors(f"taking prompt groups at {self._link.url}"):
            await self._link.client.publish(
                self._asking,
                json.dumps(question).encode(),
                reply=f"{self._inbox}.{self._question}",
            )

    async def _wait_for_answer(self, timeout_s: float) -> None:
        self._answered.clear()
        if self._ready:
            return
        if self._error is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._answered.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _forget_question(self) -> None:
        """The server forgets open questions with the connection."""
        self._question_ends = 0.0
        self._answered.set()

    def _on_refusal(self, lowered: str) -> None:
        if lowered == self._asking.lower():
            self._error = NotPermitted(self._link.user, self._asking)
            self._forget_question()

    async def _on_message(self, message: Msg) -> None:
        if not message.subject.startswith(self._inbox):
            self._ready.append(message)
            self._forget_question()
        elif message.subject == f"{self._inbox}.{self._question}":
            self._on_status(message.headers or {})

    def _on_status(self, headers: dict[str, str]) -> None:
        status, description = headers.get("Status", ""), headers.get("Description", "")
        if status == _NOBODY_THERE or "Deleted" in description:
            self._error = BusError(f"no prompt groups from {self._stream}: the run's streams are not there (yet)")
            self._forget_question()
        elif status in _TIME_OVER:
            self._forget_question()
        else:
            self._question_ends = asyncio.get_running_loop().time() + _REFUSED_S
            self._answered.set()
