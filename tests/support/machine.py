"""What tests ask of the machine: a port that is free, time that passes, whether a process has ended, and how many files may be
open.

Tests wait with `until` and `wait_until` for what other processes and threads do, of which no event tells.
"""

import asyncio
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import SystemRandom
from unittest.mock import patch

import pytest


def free_port() -> int:
    """Return a free port below the range from which Linux serves clients and port 0, so that no other process is given it."""
    while True:
        port = SystemRandom().randrange(15_000, 30_000)
        with suppress(OSError), socket.create_server(("0.0.0.0", port)):
            return port


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a free port of 127.0.0.1 that no other process gets. It refuses connections until a server listens there, which
    sets SO_REUSEADDR, as servers do."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


@contextmanager
def an_hour_later() -> Iterator[None]:
    """Put the running event loop's clock forward, so that shorter timeouts which are awaited in the block end at once."""
    loop = asyncio.get_running_loop()
    with patch.object(loop, "time", lambda: time.monotonic() + 3600.0):
        yield


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


async def until_logged(caplog: pytest.LogCaptureFixture, text: str, times: int = 1) -> None:
    await until(lambda: caplog.text.count(text) >= times)


def wait_until(condition: Callable[[], object]) -> None:
    latest = time.monotonic() + 150.0
    while not condition():
        assert time.monotonic() < latest
        time.sleep(0.02)
