"""One reward process as the verifier sees it, and the frames that pass between them over pipes.

The process is started, given items, heard from, and ended with everything it started. Nothing here decides about items:
what a lost worker means for them is the pool's business.

Frames are those of `multiprocessing.connection`: a length, and bytes that nobody unpickles. The first to the worker is the
recipe, as JSON; the first back is text: empty when the worker is up, otherwise the user's mistake. Then every frame to the
worker is a `VerifyItem` and every frame back its `VerifyResult`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from google.protobuf.message import DecodeError

from pipelinerl.errors import ServiceError, UserError
from pipelinerl.recipe.fields import Recipe
from pipelinerl.v1 import verifier_pb2

log = logging.getLogger(__name__)

RETIRED = 75
"""Exit code of a worker that leaves of its own accord, between two items, to be replaced by a fresh one."""
START_TIMEOUT_S = 120.0
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
_LOGGED_BYTES = 4096
_LENGTH = struct.Struct("!I")
"""Before each frame. Unsigned, since what a reward writes there must not look like a negative one."""


def children(pid: int) -> list[int]:
    """The direct children of all of a process's threads, by Linux's /proc; none when it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread ended
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def kill_tree(pid: int) -> None:
    """SIGKILL to the process, its descendants, also those in other process groups, and its own group; reaps nothing.

    Everything is stopped first, until a look finds nothing new, so that nothing is started behind our back.
    """
    stopped: set[int] = set()
    while found := {pid, *_descendants(pid)} - stopped:
        for process in found:
            _signal(process, signal.SIGSTOP)
        stopped |= found
    for process in stopped:
        _signal(process, signal.SIGKILL)
    _kill_group(pid)


def _kill_group(leader: int) -> None:
    """SIGKILL to what is left of the process group that `leader` led, if it led one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _descendants(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from _descendants(child)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


Loss = Literal["timeout", "death", "retirement"]
"""What ends a worker. It retires of its own accord and between two items, so that no item is to blame."""


class WorkerGone(Exception):
    """The process ended."""

    def __init__(self, how: str, loss: Loss = "death") -> None:
        self.loss = loss
        super().__init__(how)


class WorkerProcess:
    """Made by `start_worker`; `kill` must follow."""

    def __init__(self, process: Process) -> None:
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._last_output = ""
        self._output = asyncio.create_task(self._log_output())
        self.ended = asyncio.create_task(process.wait())
        """Done when the process has ended, also while nobody waits for a result."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def write(self, payload: bytes) -> None:
        """Queues one frame."""
        self._stdin.write(_LENGTH.pack(len(payload)) + payload)

    async def score(self, item: verifier_pb2.VerifyItem, within_s: float) -> verifier_pb2.VerifyResult:
        """Raises `TimeoutError`, after which the worker is of no use any more, and `WorkerGone`."""
        self.write(item.SerializeToString())
        payload = await self.read(within_s)
        try:
            result = verifier_pb2.VerifyResult.FromString(payload)
        except DecodeError as error:
            raise WorkerGone("something else than results is in its pipe") from error
        if result.sequence_id != item.sequence_id:
            raise WorkerGone(f"it answered about {result.sequence_id!r:.100} out of turn")
        return result

    async def read(self, within_s: float) -> bytes:
        """The next frame. One that came while this loop was busy is in time. Raises `TimeoutError` and `WorkerGone`."""
        frame = asyncio.create_task(self._next_frame())
        try:
            done, _ = await asyncio.wait((frame,), timeout=within_s)
            if not done:
                raise TimeoutError
            return frame.result()
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self.gone() from None
        finally:
            frame.cancel()

    async def _next_frame(self) -> bytes:
        (length,) = _LENGTH.unpack(await self._stdout.readexactly(_LENGTH.size))
        return await self._stdout.readexactly(length)

    async def gone(self) -> WorkerGone:
        """How it ended. Its end of the pipe is closed, or it has exited."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.shield(self.ended)
        code = self._process.returncode
        if code is None:
            return WorkerGone("it closed its pipe")
        how = f"exit code {code}"
        if code < 0:
            how = f"signal {signal.Signals(-code).name if -code in set(signal.Signals) else -code}"
        said = f"; last output: {self._last_output[-200:]}" if self._last_output else ""
        return WorkerGone(how + said, "retirement" if code == RETIRED else "death")

    async def kill(self) -> None:
        """Ends the process and everything it started, and waits until it is reaped."""
        if self._process.returncode is None:
            kill_tree(self.pid)
        else:
            _kill_group(self.pid)
        await self.ended
        self._output.cancel()
        self._stdin.close()

    async def _log_output(self) -> None:
        """Passes on what rewards print. Ends with the worker's standard error, or by cancellation."""
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(_LOGGED_BYTES):
            self._last_output = chunk.decode(errors="replace").strip()
            log.info("reward output: %s", self._last_output, extra={"worker": self.pid})


async def start_worker(recipe: Recipe) -> WorkerProcess:
    """A process that has imported its reward and is ready for items.

    It knows where Python finds modules, the locale, one thread per numeric library, and no secrets. Raises `UserError` when the
    recipe names a reward that does not exist, `ServiceError` when the process does not come up.
    """
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "MALLOC_ARENA_MAX": "2",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    worker = WorkerProcess(
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.verifier.worker"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=environment,
            start_new_session=True,
        )
    )
    try:
        worker.write(recipe.model_dump_json().encode())
        if mistake := await worker.read(START_TIMEOUT_S):
            raise UserError(mistake.decode())
    except BaseException as error:
        await worker.kill()
        if isinstance(error, TimeoutError):
            raise ServiceError(f"a reward worker did not come up within {START_TIMEOUT_S:.0f} s") from error
        if isinstance(error, WorkerGone):
            raise ServiceError(f"a reward worker ended while starting: {error}") from error
        raise
    return worker
