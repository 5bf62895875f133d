"""Processes of a local run: starting a service, waiting until it serves, stopping it and all it started, when one that died is
started again, and which still live.

A service has a session of its own, so that the terminal's Ctrl-C reaches only the runner, which then stops services in order;
and it gets SIGTERM when the runner dies. Its workers stay in the session, also those in a process group of their own and those
that outlive a killed parent. Linux reads /proc; elsewhere the process group has to do. Restarts nothing: `runner` does.
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
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pipelinerl.errors import FieldError, ServiceError
from pipelinerl.local.die_with_parent import guarded
from pipelinerl.run_dir import RunDir, check_folder
from pipelinerl.service.lifecycle import EXIT_USER_ERROR, MISTAKE
from pipelinerl.service.logs import printable
from pipelinerl.service.retry import Backoff
from pipelinerl.service.settings import ServiceAddress, read_address

_log = logging.getLogger(__name__)
_PROC = Path("/proc")
_POLL_S = 0.05
_TAIL_LINES = 20
LOG_BYTES = 64 * 1024**2
"""Of one service's log, and once more of what it held before."""
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
    suspect: str = ""
    """What may have sent the signal that ends it, and how to keep that from it."""


class ServiceDied(ServiceError):
    """A service's process ended when it should not. Attributes: `name`, `returncode` (-9 = SIGKILL)."""

    def __init__(self, name: str, returncode: int, log: Path, tail: str, restarts: int = 0, suspect: str = "") -> None:
        """`restarts`: those in a row after which it is given up. `tail`: of its log; of a user's mistake only what says so is
        told. `suspect`: as of its launch."""
        self.name, self.returncode = name, returncode
        try:
            how = f"exited with code {returncode}" if returncode >= 0 else f"was killed by {signal.Signals(-returncode).name}"
        except ValueError:  # a real-time signal
            how = f"was killed by signal {-returncode}"
        after = f" after {restarts} restarts in a row" if restarts else ""
        why = f" ({suspect})" if suspect and returncode < 0 else ""
        if returncode == EXIT_USER_ERROR and (found := tail.rfind(f"\n{MISTAKE}")) >= 0:
            tail = tail[found + 1 :]
        super().__init__(f"{name} {how}{after}{why}; end of {log}:\n{tail or '(empty)'}")


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

    def died(self, restarts: int = 0) -> ServiceDied:
        """The error to raise for this process after it ended."""
        assert self.returncode is not None
        return ServiceDied(
            self.name, self.returncode, self.launch.log, log_tail(self.launch.log), restarts, self.launch.suspect
        )

    async def address(self, timeout_s: float) -> ServiceAddress:
        """Waits for the address file. Raises `ServiceDied` at once when the process ends, `ServiceError` after `timeout_s`."""

        async def written() -> ServiceAddress | None:
            file = self.launch.address_file
            return read_address(file) if file.is_file() else None

        return await self.until(written, timeout_s, "wrote no address")

    async def ready(self, timeout_s: float) -> ServiceAddress:
        """Waits for the address file and a good answer of /readyz. Raises as `address` does."""
        address = await self.address(timeout_s)

        async def answers() -> ServiceAddress | None:
            return address if await asyncio.to_thread(http_status, address.http, "/readyz", 2.0) == 200 else None

        return await self.until(answers, timeout_s, f"is not ready (http://{address.http}/readyz)")

    async def until(self, probe: Callable[[], Awaitable[T | None]], timeout_s: float, failure: str) -> T:
        """First result of `probe` that is not None, asked again and again while the process lives. Raises as `address`."""
        exited = asyncio.ensure_future(self.wait())
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            while (found := await probe()) is None:
                await asyncio.wait({exited}, timeout=_POLL_S)
                if exited.done():
                    raise self.died()
                if loop.time() >= deadline:
                    end = f"end of {self.launch.log}:\n{log_tail(self.launch.log) or '(empty)'}"
                    raise ServiceError(f"{self.name} {failure} after {timeout_s:g} s; {end}")
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


@dataclass
class Restarts:
    """When to start a service again: counts its deaths in a row. Pure but for what it counts.

    Past a death at which the run stood further than at any before, the count begins again, so that what dies at ever the same
    place is given up and what is killed now and then is not.
    """

    limit: int = 5
    """Restarts in a row at most."""
    limit_unserved: int = 1
    """The same for a service that has never come up: what it lacks will hardly come by itself."""
    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=1.0, most_s=60.0))
    stable_s: float = 600.0
    """A process that lived that long is forgiven what came before."""
    in_a_row: int = field(default=0, init=False)
    _furthest: int = field(default=0, init=False)

    def next_delay_s(self, lived_s: float, exit_code: int, served: bool, reached: int = 0) -> float | None:
        """After one more death: the wait before the next start, None when there is none. `reached`: how far the run is."""
        if lived_s >= self.stable_s or reached > self._furthest:
            self.in_a_row = 0
        self._furthest = max(self._furthest, reached)
        if self.in_a_row >= (self.limit if served else self.limit_unserved) or exit_code == EXIT_USER_ERROR:
            return None
        self.in_a_row += 1
        return self.backoff.delay_s(self.in_a_row)


@dataclass(eq=False)
class Service:
    """A service of a run, whichever process it is at the moment."""

    name: str
    prepare: Callable[[], Launch]
    """What to start, asked before each start."""
    restarts: Restarts
    follows_run: bool = False
    """Its restarts are forgiven when the run gets further, not only when it lives long."""
    process: ServiceProcess | None = field(default=None, init=False)
    """The newest one; None before `start`."""
    _started: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> ServiceProcess:
        """Raises `ServiceError` when the command cannot be executed."""
        self.process = await ServiceProcess.start(self.prepare())
        self._started.set()
        self._started = asyncio.Event()
        return self.process

    async def next_process(self, after: ServiceProcess | None) -> ServiceProcess:
        """The newest process once it is another than `after`."""
        while self.process is None or self.process is after:
            await self._started.wait()
        return self.process


def service_of(name: str) -> str:
    """The service that a process of a local run belongs to: `actor` of `actor-0`. Pure."""
    return name.partition("-")[0]


def log_tail(log: Path, lines: int = _TAIL_LINES) -> str:
    """Last lines of a log, without colours; empty when there is no log."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 400 * lines))
        text = printable(_ANSI.sub("", file.read().decode(errors="replace")))
    return "\n".join(text.splitlines()[-lines:])


def bound_log(log: Path, most_bytes: int = LOG_BYTES) -> None:
    """Where the log has grown beyond `most_bytes`, its end goes to `<name>.log.1`, in place of what was there, and the log
    begins again. What its process, which keeps it open, writes between the two is lost."""
    if log.stat().st_size > most_bytes:
        with log.open("rb") as file, log.with_suffix(".log.1").open("wb") as kept:
            file.seek(-most_bytes, os.SEEK_END)
            shutil.copyfileobj(file, kept)
        os.truncate(log, 0)


def http_status(address: str, path: str, timeout_s: float) -> int | None:
    """Status code of `GET http://<address><path>`; None when nobody answers in time with HTTP."""
    try:
        with contextlib.closing(http.client.HTTPConnection(address, timeout=timeout_s)) as connection:
            connection.request("GET", path)
            return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None


def why_taken(port: int) -> str:
    """Why nobody can listen on `port` (0 to 65535) of this machine now; empty when somebody can. Does not reserve it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


# Limits


def raise_open_files() -> None:
    """Lets this process, and what it starts, open as many files as it may. A shell's usual 1,024 are few where anybody on the
    machine can connect to a service's port: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a limit above what the system allows by now
        if 0 <= soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# Sessions


def session_pids(session: int) -> list[int]:
    """Living processes (no zombies) of the session whose leader has, or had, the pid `session`."""
    return [int(entry.name) for entry in _PROC.glob("[0-9]*") if _session_of(entry) == session]


def _session_of(process: Path) -> int | None:
    """None of one that has ended, or is a zombie."""
    try:
        stat = (process / "stat").read_text(errors="replace")
    except OSError:
        return None
    state, _parent, _group, session, *_ = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(session)


def kill_session(session: int) -> None:
    """SIGKILL to every process of the session. None left is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)
    for pid in session_pids(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def session_ended(session: int, timeout_s: float) -> bool:
    """Waits until no process of the session lives; False when some still do after `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while session_pids(session):
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True


# The processes of a run, by its pids.json


def living(run_dir: RunDir, option: str = "--run-dir") -> dict[str, int]:
    """Name and pid of the run's processes that live. Raises `FieldError` on `option` where pids.json cannot be read."""
    if not run_dir.pids.exists():
        return {}  # it has not started any
    try:
        pids = json.loads(run_dir.pids.read_bytes())
        if not (isinstance(pids, dict) and all(isinstance(pid, int) for pid in pids.values())):
            raise ValueError("it holds no mapping of names to pids")
    except (OSError, ValueError) as error:
        fix = f"its pids.json cannot be read: {error}; remove it once none of the run's processes lives"
        raise FieldError(option, str(run_dir.path), fix) from error
    return {name: pid for name, pid in pids.items() if lives(pid, run_dir.path)}


def living_names(run_dir: RunDir) -> Collection[str]:
    """Of those that live; none where no list of them can be read."""
    try:
        return living(run_dir)
    except FieldError:
        return ()


def lives(pid: int, folder: Path) -> bool:
    """Whether that process lives and belongs to the run in `folder`: each of them has a file in it among its arguments or in
    its environment, and a pid may have come again for another program. Without /proc one that lives is taken for the run's."""
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
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if within in (_PROC / str(pid) / name).read_bytes():
                return True
    return False


def running_pids(run_dir: RunDir) -> dict[str, int]:
    """As `living`. Raises `FieldError` when no run is going on there."""
    check_folder(run_dir.path, "--run-dir")
    if pids := living(run_dir):
        return pids
    known = run_dir.pids.exists()
    why = "the run has ended; start it again, or name one that goes on"
    raise FieldError("--run-dir", str(run_dir.path), why if known else "is not the folder of a run: it has no pids.json")
