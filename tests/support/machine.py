"""What tests ask of the machine: a port that nobody else gets, whether a process has ended, and how many files may be open.

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

_RESERVED: list[socket.socket] = []


def free_port() -> int:
    """Return a TCP port on which nobody listens. It stays reserved until this process ends: the system gives it to no other
    program that asks for any port, while servers that name it may bind it again and again, since they set SO_REUSEADDR."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("0.0.0.0", 0))
    _RESERVED.append(reserved)
    return int(reserved.getsockname()[1])


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
