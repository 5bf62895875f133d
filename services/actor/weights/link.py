"""The actor's end of the Unix socket to vLLM's workers: orders out, one answer per worker back.

One connection per worker; an order goes to all of them and is answered when all have answered. A lost connection fails
everything that waits. It knows no versions and no vLLM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile

from pipelinerl.errors import TransferError
from services.actor.weights import wire

log = logging.getLogger(__name__)

Answer = wire.Done | wire.Received | wire.Failed


class WorkerLink:
    """Open with `WorkerLink.listen`, hand `path` to the workers, await `hellos`, then `ask`."""

    def __init__(self, directory: str, num_workers: int) -> None:
        self.path = os.path.join(directory, "weights.sock")
        self._directory, self._num_workers = directory, num_workers
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._hellos: list[wire.Hello] = []
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

    async def hellos(self, timeout_s: float) -> list[wire.Hello]:
        """Every worker's first message. Raises TransferError when they are not all there in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._all_here)
        except TimeoutError as error:
            message = f"{len(self._hellos)} of {self._num_workers} vLLM workers connected within {timeout_s} s"
            raise TransferError(message) from error
        return self._hellos

    async def ask(self, body: wire.Join | wire.Receive | wire.Discard) -> list[Answer]:
        """Every worker's answer, Failed ones included. Raises TransferError when a connection is or gets lost."""
        if self._lost:
            raise TransferError(self._lost)
        number, self._next_number = self._next_number, self._next_number + 1
        future: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (future, [])
        line = wire.encode(wire.Request(number, body))
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
            hello = wire.decode_hello(await reader.readline())
            self._writers[hello.worker_rank] = writer
            self._hellos.append(hello)
            if len(self._hellos) == self._num_workers:
                self._all_here.set_result(None)
            while line := await reader.readline():
                self._take(wire.decode_reply(line))
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            log.error("a vLLM worker's weight connection broke: %s", error)
        finally:
            self._lose("a vLLM worker's weight connection ended")
            writer.close()

    def _take(self, reply: wire.Reply) -> None:
        future, answers = self._waiting.get(reply.number, (None, []))
        answers.append(reply.body)
        if future is not None and not future.done() and len(answers) == self._num_workers:
            future.set_result(answers)

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(TransferError(self._lost))
