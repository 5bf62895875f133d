"""What tests ask of the machine: a port that is free, and whether a process has ended."""

import os
import select
import socket


def free_port() -> int:
    """On every address of the machine."""
    with socket.create_server(("0.0.0.0", 0)) as held:
        return int(held.getsockname()[1])


def ends_within(pid: int, timeout_s: float) -> bool:
    """Whether process `pid`, which need not be our child, ends in time. A zombie has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)
