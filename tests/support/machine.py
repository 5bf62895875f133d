"""What tests ask of the machine: a port that is free, whether a process has ended, and how many files may be open.

Tests wait with `until` and `wait_until` for what other processes and threads do, of which no event tells.
"""

import asyncio
import itertools
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelinerl.local.processes import why_taken

_CALLS = itertools.count()
_UNSAFE_PORTS = 10_081
"""Chromium opens no page at some ports below."""


def free_port() -> int:
    """A port on which nobody listens. It is below those that the system gives to whoever asks for any, so that it stays free
    until it is bound, and between two processes that bind it. Each process of the tests begins elsewhere."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if given <= 2 * _UNSAFE_PORTS:  # this system gives nearly every port away
        with socket.create_server(("127.0.0.1", 0)) as held:
            return int(held.getsockname()[1])
    ports = (given - 1 - (64 * os.getpid() + number) % (given - _UNSAFE_PORTS) for number in _CALLS)
    return next(port for port in ports if not why_taken(port))


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
