"""Ends a process and everything it started, also what moved to another process group. Linux's /proc."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path


def children(pid: int) -> list[int]:
    """The direct children of all of a process's threads; none when it is gone."""
    found: list[int] = []
    for listing in _child_lists(pid):
        with contextlib.suppress(OSError):  # the thread ended
            found += map(int, listing.read_text().split())
    return found


def _child_lists(pid: int) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            yield Path(f"/proc/{pid}/task/{thread}/children")


def kill_tree(pid: int) -> None:
    """SIGKILL to the process, its descendants and its process group; reaps nothing.

    Everything is stopped first, until a look finds nothing new, so that nothing is started behind our back.
    """
    stopped: set[int] = set()
    while found := {pid, *_descendants(pid)} - stopped:
        for process in found:
            _signal(process, signal.SIGSTOP)
        stopped |= found
    for process in stopped:
        _signal(process, signal.SIGKILL)
    kill_group(pid)


def kill_group(leader: int) -> None:
    """SIGKILL to what is left of the process group that `leader` led, if it led one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _descendants(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from _descendants(child)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
