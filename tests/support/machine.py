"""What tests ask of the machine: a port that is free, whether a process has ended, and how many files may be open.

Tests wait with `until` and `wait_until` for what other processes and threads do, of which no event tells.
"""

import asyncio
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelinerl.local.processes import why_taken


def free_port() -> int:
    with socket.create_server(("0.0.0.0", 0)) as held:
        return int(held.getsockname()[1])


def lasting_port() -> int:
    """A free port below those that the system gives to whoever asks for any, so that it stays free until it is bound, and
    when its process is started again; 0 if there is none."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(given - 1 - os.getpid() % (given // 2), 1024, -1)
    return next((port for port in ports if not why_taken(port)), 0)


def ends_within(pid: int, timeout_s: float) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


@contextmanager
def usual_open_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def until(condition: Callable[[], object], timeout_s: float = 150.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], object], timeout_s: float = 150.0) -> None:
    latest = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < latest
        time.sleep(0.02)
