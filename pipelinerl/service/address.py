"""`host:port` texts, and the address file: how a process started on port 0 tells its runner where it listens."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from pipelinerl.errors import ServiceError
from pipelinerl.run_dir import write_json
from pipelinerl.service.settings import ServiceSettings


@dataclass(frozen=True)
class ServiceAddress:
    """`grpc` and `http` are `host:port`; `pid` is the process that listens there."""

    grpc: str
    http: str
    pid: int


def host_port(host: str, port: int) -> str:
    """`host:port`, as everything that takes an address reads it: an IPv6 address in brackets. Pure."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(address: str) -> tuple[str, int]:
    """The reverse. Raises `ValueError` for a text without a port. Pure."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def announce(settings: ServiceSettings, grpc_port: int, http_port: int) -> ServiceAddress:
    """Where others reach this process, written to the address file where the settings name one."""
    host = settings.advertise_host
    address = ServiceAddress(host_port(host, grpc_port), host_port(host, http_port), os.getpid())
    if settings.address_file is not None:
        write_json(settings.address_file, asdict(address))
    return address


def read_address(path: Path) -> ServiceAddress:
    """Raises `ServiceError` when the file is absent or is not an address file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return ServiceAddress(grpc=str(data["grpc"]), http=str(data["http"]), pid=int(data["pid"]))
    except OSError as error:
        raise ServiceError(f"address file {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"address file {path} does not hold {{grpc, http, pid}}: {error!r}") from error
