"""How processes that run users' code are kept in bounds and ended with all they started. Linux.

Bounds are on address space and CPU time. This is no jail: the code is the user's and is trusted not to attack the machine; what
is not trusted is how long it runs and how much it takes on a model's output. The same means end such a process from outside
and, from inside, what its code left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CPU_SLACK_S = 5
_CLEARING_PASSES = 100
MIB = 1024**2


def attach_to_parent() -> None:
    """SIGKILL when the parent's thread that started this process ends; orphans of its children come here."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for option, value in ((_PR_SET_PDEATHSIG, signal.SIGKILL), (_PR_SET_CHILD_SUBREAPER, 1)):
        if prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def take_pipes() -> tuple[Connection, Connection]:
    """Standard input and output, moved away from users' code: that reads nothing, and prints to standard error."""
    requests = Connection(os.dup(0), writable=False)  # descriptors that a program started by users' code does not get
    results = Connection(os.dup(1), readable=False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return requests, results


def renew_cpu_limit(timeout_s: float) -> None:
    """SIGXCPU for code that the verifier, whose deadline comes first, did not end: wall-clock limit times cores."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    allowance_s = int(timeout_s + 1) * (os.cpu_count() or 1) + _CPU_SLACK_S
    lower_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + allowance_s)


def clear_leftover_children() -> bool:
    """Kills and reaps every process that this one started or adopted; False when they come faster than they go.

    One system call when there is none.
    """
    for _ in range(_CLEARING_PASSES):
        try:
            os.waitpid(-1, os.WNOHANG)
            for child in children(os.getpid()):
                kill_tree(child)
                os.waitpid(child, 0)
        except ChildProcessError:
            return True
    return False


def children(pid: int) -> list[int]:
    """The direct children of all of a process's threads, by Linux's /proc; none when it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread ended
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def kill_tree(pid: int) -> None:
    """SIGKILL to the process, its descendants, also those in other process groups, and its own group; reaps nothing.

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


def lower_limit(kind: int, soft: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def address_space() -> int:
    """Bytes, as RLIMIT_AS counts them."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()
