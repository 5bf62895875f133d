"""Update a vLLM engine's weights from the actor's process: prepare, join, receive, commit, discard.

`join_group`, `receive` and `discard` go to vLLM's workers over a Unix socket, as one JSON object per line.
`prepare` and `commit` use vLLM's own remote calls, which wait for the end of a decode step and block decoding.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipelinerl.errors import ManifestMismatch, ServiceError, TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.manifest import GroupFailed, GroupSpec, Manifest

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

PREPARE_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class WeightLoading:
    """A worker's first message: the loader's `mode`, the `reason` why it is not the shadow loader, and a `problem` if the model
    cannot take the manifest's weights. `reason` and `problem` may be empty."""

    mode: str
    reason: str = ""
    problem: str = ""


@dataclass(frozen=True)
class StagedWeights:
    """Figures of a version that is received and checked. The trainer compares `checksum` (64 bits over all received bytes) with
    its own. `receive_s`: time of receiving and checking. `prepare_s`: time of loading, without waits for bytes. In results
    of `WeightUpdateClient.receive`, both times are the maximum over the ranks."""

    checksum: int
    num_bytes: int
    receive_s: float
    prepare_s: float


class CommitFailed(ServiceError):
    """A swap, or a change to or from sleep mode, failed half-way. The served weights are unknown, so the process should end."""


class Join(msgspec.Struct, tag=True, frozen=True):
    """Join a transfer group. A worker's rank in it is `group.rank` plus the worker's rank in the engine."""

    group: GroupSpec
    timeout_s: float


class Receive(msgspec.Struct, tag=True, frozen=True):
    """Receive a version into staging and prepare it for serving. `path`: file with the whole version; "" = use the group."""

    version: PolicyVersion
    timeout_s: float
    path: str = ""


class Discard(msgspec.Struct, tag=True, frozen=True):
    """Give up a staged version, or a running transfer and its group. Received chunks are kept until another version comes."""


Order = Join | Receive | Discard


class Reply(msgspec.Struct, frozen=True):
    """The result of a Receive, or the `problem` that made an order fail. `group_broke`: the transfer group failed."""

    staged: StagedWeights | None = None
    problem: str = ""
    group_broke: bool = False


class WorkerLink:
    """The actor's socket for vLLM's workers. Call `listen`, pass `path` to the workers, await `hellos`, then call `ask` for
    each order. An order goes to all workers and is complete when all have replied. If one connection is lost, all waiting
    orders fail."""

    def __init__(self, num_workers: int) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="prl-", ignore_cleanup_errors=True)
        self.path = os.path.join(self._directory.name, "weights.sock")
        self._num_workers = num_workers
        self._server: asyncio.Server | None = None
        self._workers: list[tuple[asyncio.StreamWriter, deque[asyncio.Future[Reply]]]] = []
        self._hellos = asyncio.Queue[WeightLoading]()
        self._lost = ""

    async def listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def hellos(self, timeout_s: float) -> list[WeightLoading]:
        """Return every worker's first message, in any order. Raises TransferError if some are missing after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                return [await self._hellos.get() for _ in range(self._num_workers)]
        except TimeoutError as error:
            message = f"{len(self._workers)} of {self._num_workers} vLLM workers connected within {timeout_s} s"
            raise TransferError(message) from error

    async def ask(self, order: Order) -> list[StagedWeights]:
        """Send an order to all workers and return what they staged, if anything. Raises TransferError if a worker fails or its
        connection is lost, and GroupFailed if the group broke."""
        if self._lost:
            raise TransferError(self._lost)
        for writer, waiting in self._workers:
            waiting.append(asyncio.get_running_loop().create_future())
            writer.write(as_line(order))
        replies = await asyncio.gather(*(waiting[-1] for _, waiting in self._workers))
        for reply in replies:
            if reply.problem:
                raise GroupFailed("", reply.problem) if reply.group_broke else TransferError(reply.problem)
        return [reply.staged for reply in replies if reply.staged]

    async def close(self) -> None:
        self._lose("closed")
        for writer, _ in self._workers:
            writer.close()
        if self._server is not None:
            self._server.close()
        await asyncio.to_thread(self._directory.cleanup)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello, waiting = msgspec.json.decode(await reader.readline(), type=WeightLoading), deque[asyncio.Future[Reply]]()
            self._workers.append((writer, waiting))
            self._hellos.put_nowait(hello)
            while line := await reader.readline():
                reply, future = msgspec.json.decode(line, type=Reply), waiting.popleft()
                if not future.done():  # the caller may have been cancelled
                    future.set_result(reply)
        except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
            log.error("a vLLM worker's weight connection broke: %s", error)
        finally:
            self._lose("a vLLM worker's weight connection ended")
            writer.close()

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        for future in (future for _, waiting in self._workers for future in waiting):
            if not future.done():
                future.set_exception(TransferError(self._lost))


def as_line(message: WeightLoading | Order | Reply) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def parse_version(text: str) -> PolicyVersion:
    """Parse vLLM's label `<incarnation>:<number>`. Any other label means weights that no trainer sent, and gives 0:0."""
    incarnation, separator, number = text.partition(":")
    return PolicyVersion(int(incarnation), int(number)) if separator else PolicyVersion(0, 0)


@dataclass(eq=False)
class WeightUpdateClient:
    """Loads versions into vLLM. Calls must not overlap, except that `discard` may be called while `receive` waits. Calls raise
    `TransferError`; `sleep`, `wake` and a commit that fails half-way raise `CommitFailed`."""

    llm: AsyncLLM
    _: KW_ONLY
    recompute_kv: bool = False
    """Recompute the KV cache of unfinished sequences under new weights instead of keeping it."""
    bind_host: str | None = None
    """Address at which other ranks reach this pod with gloo; None = the machine's name."""
    force_paused: bool = False
    """Load whole weights with the `PausedLoader` only."""
    staging_buffers: int = 2
    """Number of chunks that a worker holds at a time while it receives."""
    swapping: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    before_swap: Callable[[], Awaitable[None]] | None = field(default=None, init=False)
    _link: WorkerLink | None = field(default=None, init=False)

    async def prepare(self, manifest: Manifest) -> WeightLoading:
        """Prepare the workers for a manifest, and build the shadow model if it is needed. Decoding stops meanwhile. Raises
        `ManifestMismatch` if the served model cannot take these weights."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.close()
        link = WorkerLink(self.llm.vllm_config.parallel_config.world_size)
        options = {"staging_buffers": self.staging_buffers, "force_paused": self.force_paused}
        init_info = {"socket_path": link.path, "manifest": manifest.to_bytes(), **options}
        try:
            await link.listen()
            await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))
            hellos = await link.hellos(PREPARE_TIMEOUT_S)
            if problem := next((hello.problem for hello in hellos if hello.problem), ""):
                raise ManifestMismatch(problem)
        except BaseException:
            await link.close()
            raise
        self._link = link
        return hellos[0]

    async def join_group(self, group: GroupSpec, timeout_s: float) -> None:
        """Leave the previous group and join this one. `group.rank` is the rank of this engine's first worker."""
        assert self._link is not None, "prepare comes first"
        await self._link.ask(Join(replace(group, bind_host=self.bind_host), timeout_s))

    async def receive(self, version: PolicyVersion, deadline_s: float, file: Path | None = None) -> StagedWeights:
        """Receive and stage a version within `deadline_s`. If this fails, the workers leave the group. A cancelled caller must
        call `discard`. `file`: unchanging file that has the version's whole stream; None = receive from the group."""
        assert self._link is not None, "prepare comes first"
        staged = await self._link.ask(Receive(version, deadline_s, "" if file is None else str(file)))
        checksums = {one.checksum for one in staged}
        if len(checksums) != 1:
            raise TransferError(f"ranks of one engine staged different bytes of version {version}: {sorted(checksums)}")
        receive_s, prepare_s = max(one.receive_s for one in staged), max(one.prepare_s for one in staged)
        return replace(staged[0], receive_s=receive_s, prepare_s=prepare_s)

    async def commit(self, version: PolicyVersion) -> float:
        """Pause between two decode steps, swap, and resume. Return the seconds of the pause. Unfinished sequences continue.
        Raises TransferError if the swap cannot begin; the old weights stay served. Raises `CommitFailed` if it fails later."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async with self.swapping:
            # `AsyncLLM.pause_generation` would also sleep for 20 ms, to return pending outputs first. This is not needed here.
            await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=self.recompute_kv)
            started = time.monotonic()
            try:
                if self.before_swap is not None:
                    await self.before_swap()
                await self.llm.start_weight_update()
                await self.llm.update_weights(WeightTransferUpdateRequest(update_info={"version": str(version)}))
            except Exception as error:  # vLLM reports a worker's exception as a bare Exception
                await self.llm.resume_generation()
                raise TransferError(f"version {version} cannot be committed: {error}") from error
            try:
                await self.llm.finish_weight_update(weight_version=str(version))
                await self.llm.resume_generation()
            except Exception as error:
                raise CommitFailed(f"the swap to version {version} failed: {error}") from error
            return time.monotonic() - started

    async def sleep(self) -> None:
        """Pause the engine and free its GPU memory (vLLM's sleep mode). Unfinished sequences are kept, and their KV cache is
        later computed again."""
        # Level 1 copies the weights to host memory, because an update lacks the base weights of adapters and all tensors that
        # layers compute, such as rotary tables.
        await self._in_sleep_mode(self.llm.sleep(level=1, mode="keep"))

    async def wake(self) -> None:
        """Take the GPU memory again and continue with the weights from before `sleep`. Does nothing if the engine is awake."""
        await self._in_sleep_mode(self.llm.wake_up())

    @staticmethod
    async def _in_sleep_mode(change: Awaitable[object]) -> None:
        try:
            await change
        except Exception as error:
            raise CommitFailed(f"the engine cannot fall asleep or wake up: {error}") from error

    async def discard(self) -> None:
        """Give up a running transfer or a staged version. Wait for the workers, at most for their stall timeout."""
        if self._link is not None:
            await self._link.ask(Discard())

    async def close(self) -> None:
        """Leave the group, end the workers' transfer threads and remove the socket; a staged version is lost."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()
