"""Processes of a local run: start a service, wait until it serves, stop it and its workers, and decide on restarts.

Each service leads its own session. The terminal's Ctrl-C therefore reaches only the runner, which stops the services in order.
Workers in a service's session can be killed even after the service has ended. Workers with their own session, such as the
verifier's, end with their parent. On Linux, sessions are read from /proc, and a service gets SIGTERM when the runner dies. On
other systems, only the service's process group is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import re
import resource
import shutil
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pipelinerl.errors import EXIT_USER_ERROR, FieldError, ServiceError, how_ended
from pipelinerl.local.die_with_parent import guarded
from pipelinerl.run_dir import RunDir, check_folder
from pipelinerl.service.lifecycle import MISTAKE
from pipelinerl.service.logs import printable
from pipelinerl.service.retry import Backoff
from pipelinerl.service.settings import ServiceAddress, read_address

_log = logging.getLogger(__name__)
_PROC = Path("/proc")
_POLL_S = 0.05
_TAIL_LINES = 20
LOG_BYTES = 64 * 1024**2
"""Size above which a service's log is emptied, after its last `LOG_BYTES` bytes have been copied to a second file."""
_LEFTOVER_S = 1.0
_KILL_ROUNDS, _KILL_WAIT_S = 3, 1.0
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """A process to start. Its environment variables are exactly those of `environment`."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    address_file: Path
    suspect: str = ""
    """Hint for the user if a signal ends the process: who may have sent the signal, and how to prevent that."""


class ServiceDied(ServiceError):
    """A service's process ended unexpectedly. Attributes: `name`, `returncode` (-9 = SIGKILL)."""

    def __init__(self, launch: Launch, returncode: int, restarts: int = 0) -> None:
        """`restarts`: number of restarts in a row for the message; 0 = leave it out. The message quotes the end of the log, or
        only the user's mistake if the service reported one."""
        self.name, self.returncode, tail = launch.name, returncode, log_tail(launch.log)
        how = f"exited with code {returncode}" if returncode >= 0 else f"was killed by {how_ended(returncode)}"
        after = f" after {restarts} restarts in a row" if restarts else ""
        why = f" ({launch.suspect})" if launch.suspect and returncode < 0 else ""
        if returncode == EXIT_USER_ERROR and (found := tail.rfind(f"\n{MISTAKE}")) >= 0:
            tail = tail[found + 1 :]
        super().__init__(f"{launch.name} {how}{after}{why}; end of {launch.log}:\n{tail or '(empty)'}")


class ServiceProcess:
    """A started process. The caller of `start` must call `terminate` or `kill_and_wait`."""

    def __init__(self, launch: Launch, process: Process) -> None:
        self.launch, self._process = launch, process
        self.name, self.pid = launch.name, process.pid

    @classmethod
    async def start(cls, launch: Launch) -> ServiceProcess:
        """Start the process with its output appended to the log. Raises `ServiceError` if no process can be started."""
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
        """Exit code; None while the process runs; minus the signal's number if a signal ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def died(self, restarts: int = 0) -> ServiceDied:
        """Return the error to raise for this process after it has ended."""
        assert self.returncode is not None
        return ServiceDied(self.launch, self.returncode, restarts)

    async def address(self, timeout_s: float) -> ServiceAddress:
        """Wait for the address file, and return its content. Raises `ServiceDied` if the process ends, and `ServiceError` if
        the file is still missing after `timeout_s`."""
        file = self.launch.address_file
        return await self.until(lambda: read_address(file) if file.is_file() else None, timeout_s, "has written no address")

    async def ready(self, timeout_s: float) -> ServiceAddress:
        """Wait for the address file, then for status 200 from /readyz; return the address. Raises the errors of `address`."""
        address = await self.address(timeout_s)
        url = f"http://{address.http}/readyz"
        await self.until(lambda: http_status(address.http, "/readyz", 2.0) == 200 or None, timeout_s, f"is not ready ({url})")
        return address

    async def until(self, probe: Callable[[], T | None], timeout_s: float, failure: str) -> T:
        """Call `probe` in a thread until its result is not None, and return the result. Raises `ServiceDied` at once when the
        process ends. Raises `ServiceError` after `timeout_s`, with `failure`, such as "is not ready", in its message."""
        exited = asyncio.ensure_future(self.wait())
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            while (found := await asyncio.to_thread(probe)) is None:
                await asyncio.wait({exited}, timeout=_POLL_S)
                if exited.done():
                    raise self.died()
                if loop.time() >= deadline:
                    end = f"end of {self.launch.log}:\n{log_tail(self.launch.log) or '(empty)'}"
                    raise ServiceError(f"{self.name} {failure} after {timeout_s:g} s; {end}")
            return found
        finally:
            exited.cancel()

    async def terminate(self, grace_s: float) -> None:
        """Send SIGTERM to the process and, after `grace_s`, SIGKILL to it and its workers. Workers get no SIGTERM, because the
        process stops them itself. Workers that outlive it get SIGKILL after at most `_LEFTOVER_S`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await asyncio.shield(self.wait())
        leftover_s = min(_LEFTOVER_S, max(0.0, deadline - loop.time()))
        if self.returncode is None or not await session_ended(self.pid, leftover_s):
            try:
                await self.kill_and_wait()
            except ServiceError as error:
                _log.warning("%s", error)

    async def kill_and_wait(self) -> None:
        """Kill the process and its workers. Raises `ServiceError` if one survives, for instance because a device hangs."""
        for _ in range(_KILL_ROUNDS):
            kill_session(self.pid)  # A worker may have forked since the previous round.
            if await session_ended(self.pid, _KILL_WAIT_S):
                await self.wait()
                return
        raise ServiceError(f"{self.name}: processes {session_pids(self.pid)} survive SIGKILL")


@dataclass
class Restarts:
    """Decide whether and when a service is restarted, by its number of restarts in a row. A process that lived for `stable_s`
    resets this number, as does progress of the run since the last death. After a user's mistake, a service is not restarted."""

    limit: int = 5
    """Maximum restarts in a row."""
    limit_unserved: int = 1
    """Maximum restarts in a row of a service that has never served. Its fault is likely to persist, so this limit is lower."""
    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=1.0, most_s=60.0))
    stable_s: float = 600.0
    """Seconds that a process must live to reset the number of restarts in a row."""
    in_a_row: int = field(default=0, init=False)
    _furthest: int = field(default=0, init=False)

    def next_delay_s(self, lived_s: float, exit_code: int, served: bool, reached: int = 0) -> float | None:
        """Count a death. Return the seconds until the next start; None = do not restart. `served`: whether any process of the
        service has served. `reached`: the run's furthest step; 0 = ignore the run's progress."""
        if lived_s >= self.stable_s or reached > self._furthest:
            self.in_a_row = 0
        self._furthest = max(self._furthest, reached)
        if self.in_a_row >= (self.limit if served else self.limit_unserved) or exit_code == EXIT_USER_ERROR:
            return None
        self.in_a_row += 1
        return self.backoff.delay_s(self.in_a_row)


@dataclass(eq=False)
class Service:
    """A service of a run, with its current process."""

    name: str
    prepare: Callable[[], Launch]
    """Called before each start. It returns the process to start."""
    restarts: Restarts
    process: ServiceProcess | None = field(default=None, init=False)
    """The newest process; None before the first start."""
    keeper: asyncio.Task[None] | None = field(default=None, init=False)
    """Task that restarts an actor after its death."""
    given_up: bool = field(default=False, init=False)


def service_of(name: str) -> str:
    """Return the service of a process, such as `actor` for `actor-0`."""
    return name.partition("-")[0]


def log_tail(log: Path, lines: int = _TAIL_LINES) -> str:
    """Return the last lines of a log without colours; "" if there is no log."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 400 * lines))
        text = printable(_ANSI.sub("", file.read().decode(errors="replace")))
    return "\n".join(text.splitlines()[-lines:])


def bound_log(log: Path, most_bytes: int = LOG_BYTES) -> None:
    """If a log has more than `most_bytes`, copy its last `most_bytes` bytes to `<name>.log.1`, and empty the log. Lines that
    the service writes to the log meanwhile may be lost."""
    if log.stat().st_size > most_bytes:
        with log.open("rb") as file, log.with_suffix(".log.1").open("wb") as kept:
            file.seek(-most_bytes, os.SEEK_END)
            shutil.copyfileobj(file, kept)
        os.truncate(log, 0)


def http_status(address: str, path: str, timeout_s: float) -> int | None:
    """Return the status code of `GET http://<address><path>`; None if no HTTP answer arrives in `timeout_s`."""
    try:
        with contextlib.closing(http.client.HTTPConnection(address, timeout=timeout_s)) as connection:
            connection.request("GET", path)
            return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None


def why_taken(port: int) -> str:
    """Return the reason why no process can listen on `port` (0 to 65535); "" if the port is free. The port is not reserved."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def raise_open_files() -> None:
    """Raise the limit of open files to its maximum. Other users of this machine could use up a low limit with connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # The system may allow less than `hard`.
        if 0 <= soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# Sessions


def session_pids(session: int) -> list[int]:
    """Return the pids of a session's living processes, without zombies. `session` is the pid of the process that began it."""
    return [int(entry.name) for entry in _PROC.glob("[0-9]*") if _session_of(entry) == session]


def _session_of(process: Path) -> int | None:
    try:
        stat = (process / "stat").read_text(errors="replace")
    except OSError:
        return None
    state, _parent, _group, session, *_ = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(session)


def kill_session(session: int) -> None:
    """Send SIGKILL to every process of the session, if any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)
    for pid in session_pids(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def session_ended(session: int, timeout_s: float) -> bool:
    """Wait until the session has no living process. Return False if it still has one after `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while session_pids(session):
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


# The processes of a run, as its pids.json lists them


def living(run_dir: RunDir, option: str = "--run-dir") -> dict[str, int]:
    """Return the names and pids of the run's living processes. Raises `FieldError` about `option` for a damaged pids.json."""
    if not run_dir.pids.exists():
        return {}  # The run has started no process yet.
    try:
        pids = json.loads(run_dir.pids.read_bytes())
        if not (isinstance(pids, dict) and all(isinstance(pid, int) for pid in pids.values())):
            raise ValueError("it is not a mapping of names to pids")
    except (OSError, ValueError) as error:
        fix = f"its pids.json cannot be read: {error}; once all processes of the run have ended, delete pids.json"
        raise FieldError(option, str(run_dir.path), fix) from error
    return {name: pid for name, pid in pids.items() if lives(pid, run_dir.path)}


def check_stopped(run_dir: RunDir, option: str) -> None:
    """Raise `FieldError` about `option` if processes of the run are alive."""
    if pids := living(run_dir, option):
        named = ", ".join(f"{name} (pid {pid})" for name, pid in pids.items())
        raise FieldError(option, str(run_dir.path), f"the run is still running: {named}; wait for its end, or stop it")


def living_names(run_dir: RunDir) -> Collection[str]:
    """Return the names of the run's living processes; empty if pids.json cannot be read."""
    try:
        return living(run_dir)
    except FieldError:
        return ()


def lives(pid: int, folder: Path) -> bool:
    """Return whether the process is alive and belongs to the run in `folder`. Pids are reused, so its arguments or environment
    must name a file in `folder`. Without /proc, any living process counts."""
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except OSError as error:
            return isinstance(error, PermissionError)
        return True
    if _session_of(_PROC / str(pid)) is None:
        return False
    within = f"{folder.resolve()}{os.sep}".encode()
    for name in ("cmdline", "environ"):
        with contextlib.suppress(OSError):  # The process has ended or belongs to another user.
            if within in (_PROC / str(pid) / name).read_bytes():
                return True
    return False


def running_pids(run_dir: RunDir) -> dict[str, int]:
    """Return the names and pids of the run's living processes. Raises `FieldError` if there are none."""
    check_folder(run_dir.path, "--run-dir")
    if pids := living(run_dir):
        return pids
    known = run_dir.pids.exists()
    why = "the run has ended; start it again, or name one that is running"
    raise FieldError("--run-dir", str(run_dir.path), why if known else "is not the folder of a run: it has no pids.json")
