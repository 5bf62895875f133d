"""One service process of a local run: start it, wait until it serves, stop it and everything it started.

The process has a session of its own, so that the terminal's Ctrl-C reaches only the runner, which then stops services
in order; and it gets SIGTERM when the runner dies. Does not restart anything: that is `supervisor.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pipelinerl.errors import ServiceError
from pipelinerl.local.die_with_parent import guarded
from pipelinerl.local.http_get import http_status
from pipelinerl.local.session import kill_session, session_ended, session_pids
from pipelinerl.service.address import ServiceAddress, read_address

_log = logging.getLogger(__name__)

_POLL_S = 0.05
_TAIL_LINES = 20
_LEFTOVER_S = 1.0
_KILL_ROUNDS, _KILL_WAIT_S = 3, 1.0
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """What to start. `environment` is the whole environment of the process."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    address_file: Path


class ServiceDied(ServiceError):
    """A service's process ended when it should not. Attributes: `name`, `returncode` (-9 = SIGKILL), `log`, `tail`."""

    def __init__(self, name: str, returncode: int, log: Path, tail: str) -> None:
        self.name, self.returncode, self.log, self.tail = name, returncode, log, tail
        how = f"was killed by {_signal_name(-returncode)}" if returncode < 0 else f"exited with code {returncode}"
        super().__init__(f"{name} {how}; end of {log}:\n{tail or '(empty)'}")


class ServiceNotReady(ServiceError):
    """A service lives but does not serve in time. Attributes: `name`, `waited_s`, `log`, `tail`."""

    def __init__(self, name: str, waited_s: float, what: str, log: Path, tail: str) -> None:
        self.name, self.waited_s, self.log, self.tail = name, waited_s, log, tail
        super().__init__(f"{name} {what} after {waited_s:g} s; end of {log}:\n{tail or '(empty)'}")


class ServiceProcess:
    """A started process. Make it with `start`; whoever does must `terminate` or `kill` it."""

    def __init__(self, launch: Launch, process: Process) -> None:
        self.launch, self._process = launch, process
        self.name, self.pid = launch.name, process.pid

    @classmethod
    async def start(cls, launch: Launch) -> ServiceProcess:
        """Starts the process; its output is appended to the log. Raises `ServiceError` when it cannot be executed."""
        launch.address_file.unlink(missing_ok=True)
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        with launch.log.open("ab") as log:
            try:
                process = await asyncio.create_subprocess_exec(
                    *guarded(launch.command), env=dict(launch.environment), stdin=asyncio.subprocess.DEVNULL,
                    stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise ServiceError(f"{launch.name} cannot be started: {error}") from error
        return cls(launch, process)

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative = the signal that ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def died(self) -> ServiceDied:
        """The error to raise for this process after it ended."""
        assert self.returncode is not None
        return ServiceDied(self.name, self.returncode, self.launch.log, log_tail(self.launch.log))

    async def address(self, timeout_s: float) -> ServiceAddress:
        """Waits for the address file. Raises `ServiceDied` at once when the process ends, `ServiceNotReady` late."""
        return await self._until(self._read_address, timeout_s, "wrote no address")

    async def ready(self, timeout_s: float) -> ServiceAddress:
        """Waits for the address file and a good answer of /readyz. Raises as `address` does."""
        address = await self.address(timeout_s)

        async def answers() -> ServiceAddress | None:
            return address if await http_status(address.http, "/readyz", timeout_s=2.0) == 200 else None

        return await self._until(answers, timeout_s, f"is not ready (http://{address.http}/readyz)")

    async def _read_address(self) -> ServiceAddress | None:
        file = self.launch.address_file
        return read_address(file) if file.is_file() else None

    async def _until(self, probe: Callable[[], Awaitable[T | None]], timeout_s: float, failure: str) -> T:
        """First result of `probe` that is not None, asked again and again while the process lives."""
        exited = asyncio.ensure_future(self.wait())
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            while (found := await probe()) is None:
                await asyncio.wait({exited}, timeout=_POLL_S)
                if exited.done():
                    raise self.died()
                if loop.time() >= deadline:
                    tail = log_tail(self.launch.log)
                    raise ServiceNotReady(self.name, timeout_s, failure, self.launch.log, tail)
            return found
        finally:
            exited.cancel()

    async def terminate(self, grace_s: float) -> int:
        """SIGTERM to the process, SIGKILL to it and all it started after `grace_s`. Returns the exit code.

        Only the process itself gets the SIGTERM: it stops its own workers in its own order. Those that outlive it get a
        second to notice, and then SIGKILL. A kernel that takes its time to end them (gigabytes to free on a machine that
        swaps) is not waited for without end: that they die is certain, and what the run did stands.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await asyncio.shield(self.wait())
        leftover_s = min(_LEFTOVER_S, max(0.0, deadline - loop.time()))
        if self.returncode is not None and await session_ended(self.pid, leftover_s):
            return self.returncode
        if not await self._killed():
            _log.warning("%s: processes %s are still ending after SIGKILL", self.name, session_pids(self.pid))
        return -signal.SIGKILL if self.returncode is None else self.returncode

    def kill(self) -> None:
        """SIGKILL to the process and all it started, at once, without waiting."""
        kill_session(self.pid)

    async def kill_and_wait(self) -> int:
        """`kill`, and returns the exit code once every process of it is gone.

        Raises `ServiceError` when the kernel cannot end one (it hangs in a device or a dead network disk).
        """
        if await self._killed():
            return await self.wait()
        raise ServiceError(f"{self.name}: processes {session_pids(self.pid)} survive SIGKILL")

    async def _killed(self) -> bool:
        for _ in range(_KILL_ROUNDS):
            self.kill()  # again: a worker may have forked while we killed
            if await session_ended(self.pid, _KILL_WAIT_S):
                await self.wait()
                return True
        return False


def log_tail(log: Path, lines: int = _TAIL_LINES) -> str:
    """Last lines of a log, without colours; empty when there is no log."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 400 * lines))
        text = _ANSI.sub("", file.read().decode(errors="replace"))
    return "\n".join(text.splitlines()[-lines:])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
