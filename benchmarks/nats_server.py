"""A real nats-server for benchmarks and tests, in a `with` block. A run starts its own as one of its services."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nats.js.errors import NotFoundError

from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.link import bus_errors
from pipelinerl.bus.protocol import Subjects
from pipelinerl.errors import ServiceError
from pipelinerl.local.die_with_parent import guarded
from pipelinerl.local.nats import READY_WITHIN_S, nats_command, nats_url

_POLL_S, _STOP_WITHIN_S = 0.01, 5.0


async def delete_streams(bus: Bus) -> None:
    for stream in Subjects(bus.run).every_stream:
        with bus_errors(f"deleting {stream}"), contextlib.suppress(NotFoundError):
            await bus.connection.js.delete_stream(stream)


@dataclass
class NatsServer:
    """`with NatsServer(folder) as server: connect(server.url)`. It dies with its parent, and can be started again after
    `stop()`. Raises `ServiceError` if the server is not ready in time."""

    folder: Path
    port: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    log_file: Path | None = None
    """Default: nats.log in `folder`."""
    url: str = field(default="", init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    @property
    def pid(self) -> int:
        assert self._process is not None, "it is running"
        return self._process.pid

    @property
    def log(self) -> Path:
        return self.log_file or self.folder / "nats.log"

    def prepare(self) -> tuple[str, ...]:
        """Write the configuration, and return the server's command."""
        return nats_command(self.folder, self.log, self.port, self.extra)

    def start(self) -> None:
        """Start the server, and return when clients can connect to `url`. Call it from a thread that outlives the server."""
        command = guarded(self.prepare())
        with self.log.open("ab") as log:
            # Ctrl-C is for the parent, which stops its children in order.
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + READY_WITHIN_S
        while not (url := nats_url(self.folder, self.pid)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_POLL_S)
                deadline = 0.0
            if time.monotonic() >= deadline:
                self.stop()
                raise ServiceError(f"nats-server is not ready; log: {self.log.read_text()}")
        self.url = url

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL. Does nothing if the server is not running."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process, self.url = None, ""

    def freeze(self) -> None:
        """Send SIGSTOP and return when the server stands still. On a busy machine it answers for a while after the signal."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def __enter__(self) -> NatsServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
