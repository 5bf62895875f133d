"""Ends a process and everything it started, also what moved to another process group. Linux's /proc.

One reward process as the verifier sees it: started, given items, heard from, ended with everything it started.

It decides nothing about items: what a lost worker means for them is the pool's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterable, Iterator
from pathlib import Path

from google.protobuf.message import DecodeError

from pipelinerl.errors import ServiceError, UserError
from pipelinerl.v1 import verifier_pb2
from services.verifier.frames import RETIRED, FrameReader, WorkerHello, WorkerSetup, frame


def children(pid: int) -> list[int]:
    """The direct children of all of a process's threads; none when it is gone."""
    found: list[int] = []
    for listing in _child_lists(pid):
        with contextlib.suppress(OSError):  # the thread ended
            found += map(int, listing.read_text().split())
    return found


def _child_lists(pid: int) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            yield Path(f"/proc/{pid}/task/{thread}/children")


def kill_tree(pid: int) -> None:
    """SIGKILL to the process, its descendants and its process group; reaps nothing.

    Everything is stopped first, until a look finds nothing new, so that nothing is started behind our back.
    """
    stopped: set[int] = set()
    while found := {pid, *_descendants(pid)} - stopped:
        for process in found:
            _signal(process, signal.SIGSTOP)
        stopped |= found
    for process in stopped:
        _signal(process, signal.SIGKILL)
    kill_group(pid)


def kill_group(leader: int) -> None:
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


log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
_LOGGED_BYTES = 4096


class WorkerGone(Exception):
    """The process ended. `retired`: of its own accord and between two items, so that no item is to blame."""

    def __init__(self, how: str, *, retired: bool) -> None:
        self.retired = retired
        super().__init__(how)


def worker_environment() -> dict[str, str]:
    """What a worker may know: where Python finds modules, the locale, one thread per numeric library. No secrets."""
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return passed_on | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "MALLOC_ARENA_MAX": "2",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


class WorkerProcess:
    """Made by `start_worker`; `kill` must follow."""

    def __init__(self, process: Process) -> None:
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._frames = process.stdin, FrameReader(process.stdout)
        self._last_output = ""
        self.is_stopping = False
        self._output = asyncio.create_task(self._log_output())
        self.ended = asyncio.create_task(process.wait())
        """Done when the process has ended, also while nobody waits for a result."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, items: Iterable[verifier_pb2.VerifyItem]) -> None:
        """Queues items; the results come in their order."""
        self.write(verifier_pb2.VerifyRequest(items=items).SerializeToString())

    def write(self, payload: bytes) -> None:
        self._stdin.write(frame(payload))

    def stop_after_item(self) -> None:
        """Asks it to finish the item under way and to forget the rest of what was sent."""
        self.is_stopping = True
        self.send(())

    async def result(self, within_s: float) -> verifier_pb2.VerifyResult | None:
        """The next item's result; None when it has stopped as it was asked to.

        Raises `TimeoutError`, after which one may ask again, and `WorkerGone`.
        """
        payload = await self.read(within_s)
        try:
            result = verifier_pb2.VerifyResult.FromString(payload)
        except DecodeError as error:
            raise WorkerGone("something else than results is in its pipe", retired=False) from error
        if result.status == verifier_pb2.VERIFY_STATUS_UNSPECIFIED:
            self.is_stopping = False
            return None
        return result

    async def read(self, within_s: float) -> bytes:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    return await self._frames.read()
            async with asyncio.timeout(0):  # it may have come while this loop was busy: what is there is in time
                return await self._frames.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self.gone() from None

    async def gone(self) -> WorkerGone:
        """How it ended. Its end of the pipe is closed, or it has exited."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.shield(self.ended)
        code = self._process.returncode
        if code is None:
            return WorkerGone("it closed its pipe", retired=False)
        how = f"exit code {code}" if code >= 0 else f"signal {_signal_name(-code)}"
        said = f"; last output: {self._last_output[-200:]}" if self._last_output else ""
        return WorkerGone(how + said, retired=code == RETIRED)

    async def kill(self) -> None:
        """Ends the process and everything it started, and waits until it is reaped."""
        if self._process.returncode is None:
            kill_tree(self.pid)
        else:
            kill_group(self.pid)
        await self.ended
        self._output.cancel()
        self._stdin.close()

    async def _log_output(self) -> None:
        """Passes on what rewards print. Ends with the worker's standard error, or by cancellation."""
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(_LOGGED_BYTES):
            self._last_output = chunk.decode(errors="replace").strip()
            log.info("reward output: %s", self._last_output, extra={"worker": self.pid})


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


async def start_worker(setup: WorkerSetup) -> WorkerProcess:
    """A process that has imported its reward and is ready for items.

    Raises `UserError` when the recipe names a reward that does not exist, `ServiceError` when it does not come up.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.verifier.worker",
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env=worker_environment(),
        start_new_session=True,
    )
    worker = WorkerProcess(process)
    try:
        await _greet(worker, setup)
    except BaseException:
        await worker.kill()
        raise
    return worker


async def _greet(worker: WorkerProcess, setup: WorkerSetup) -> None:
    worker.write(setup.to_json())
    try:
        hello = WorkerHello.from_json(await worker.read(START_TIMEOUT_S))
    except TimeoutError as error:
        raise ServiceError(f"a reward worker did not come up within {START_TIMEOUT_S:.0f} s") from error
    except WorkerGone as gone:
        raise ServiceError(f"a reward worker ended while starting: {gone}") from gone
    if hello.problem:
        raise UserError(hello.problem) if hello.users_mistake else ServiceError(hello.problem)
