"""Messages between the actor's process and vLLM's worker processes, over a Unix socket: one JSON object a line.

Why not vLLM's own remote calls: they are answered between decode steps only, and stop decoding while they run. A socket
lets a transfer begin, report and be given up while a step of half a second goes on, without polling; and a worker that
dies closes it.

The actor's end of the Unix socket to vLLM's workers: orders out, one answer per worker back.

One connection per worker; an order goes to all of them and is answered when all have answered. A lost connection fails
everything that waits. It knows no versions and no vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile

import msgspec

from pipelinerl.errors import TransferError


class Hello(msgspec.Struct, tag=True, frozen=True):
    """First line from a worker: who it is, and whether the manifest fits its model (`problem` empty)."""

    worker_rank: int
    mode: str
    reason: str = ""
    problem: str = ""


class Join(msgspec.Struct, tag=True, frozen=True):
    """Join a transfer group; a worker's rank is `first_rank` plus its own."""

    host: str
    port: int
    name: str
    first_rank: int
    world: int
    backend: str
    bind_host: str | None
    timeout_s: float


class Receive(msgspec.Struct, tag=True, frozen=True):
    """Receive a version into staging and prepare it for serving."""

    incarnation: int
    number: int
    timeout_s: float


class Discard(msgspec.Struct, tag=True, frozen=True):
    """Give up whatever is under way or staged, and leave the group if a transfer was under way."""


class Request(msgspec.Struct, frozen=True):
    """`number` is repeated in the reply."""

    number: int
    body: Join | Receive | Discard


class Done(msgspec.Struct, tag=True, frozen=True):
    """Join and Discard: nothing to say."""


class Received(msgspec.Struct, tag=True, frozen=True):
    """Complete and prepared. Seconds spent waiting for and checking bytes, and putting them into the engine's layout."""

    checksum: int
    num_bytes: int
    receive_s: float
    prepare_s: float


class Failed(msgspec.Struct, tag=True, frozen=True):
    """`kind` is the error's class name; `group_broke`: the transfer group failed, which may be another member's doing."""

    kind: str
    problem: str
    group_broke: bool = False


class Reply(msgspec.Struct, frozen=True):
    number: int
    body: Done | Received | Failed


def encode(message: Hello | Request | Reply) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode_hello(line: bytes) -> Hello:
    return msgspec.json.decode(line, type=Hello)


def decode_request(line: bytes) -> Request:
    return msgspec.json.decode(line, type=Request)


def decode_reply(line: bytes) -> Reply:
    return msgspec.json.decode(line, type=Reply)


log = logging.getLogger(__name__)

Answer = Done | Received | Failed


class WorkerLink:
    """Open with `WorkerLink.listen`, hand `path` to the workers, await `hellos`, then `ask`."""

    def __init__(self, directory: str, num_workers: int) -> None:
        self.path = os.path.join(directory, "weights.sock")
        self._directory, self._num_workers = directory, num_workers
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._hellos: list[Hello] = []
        self._all_here: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting: dict[int, tuple[asyncio.Future[list[Answer]], list[Answer]]] = {}
        self._next_number = 0
        self._lost = ""

    @classmethod
    async def listen(cls, num_workers: int) -> WorkerLink:
        """A socket in a new private directory."""
        link = cls(tempfile.mkdtemp(prefix="prl-"), num_workers)
        link._server = await asyncio.start_unix_server(link._serve, link.path)
        return link

    async def hellos(self, timeout_s: float) -> list[Hello]:
        """Every worker's first message. Raises TransferError when they are not all there in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._all_here)
        except TimeoutError as error:
            message = f"{len(self._hellos)} of {self._num_workers} vLLM workers connected within {timeout_s} s"
            raise TransferError(message) from error
        return self._hellos

    async def ask(self, body: Join | Receive | Discard) -> list[Answer]:
        """Every worker's answer, Failed ones included. Raises TransferError when a connection is or gets lost."""
        if self._lost:
            raise TransferError(self._lost)
        number, self._next_number = self._next_number, self._next_number + 1
        future: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (future, [])
        line = encode(Request(number, body))
        for writer in self._writers.values():
            writer.write(line)
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """Ends the workers' transfer threads too."""
        self._lose("closed")
        for writer in self._writers.values():
            writer.close()
        if self._server is not None:
            self._server.close()
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one worker's connection ends."""
        try:
            hello = decode_hello(await reader.readline())
            self._writers[hello.worker_rank] = writer
            self._hellos.append(hello)
            if len(self._hellos) == self._num_workers:
                self._all_here.set_result(None)
            while line := await reader.readline():
                self._take(decode_reply(line))
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            log.error("a vLLM worker's weight connection broke: %s", error)
        finally:
            self._lose("a vLLM worker's weight connection ended")
            writer.close()

    def _take(self, reply: Reply) -> None:
        future, answers = self._waiting.get(reply.number, (None, []))
        answers.append(reply.body)
        if future is not None and not future.done() and len(answers) == self._num_workers:
            future.set_result(answers)

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(TransferError(self._lost))
