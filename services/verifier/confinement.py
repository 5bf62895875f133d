"""How processes that run users' code are kept in bounds and ended with all they started. Linux.

Bounds are on address space and CPU time. This is no jail: the code is the user's and is trusted not to attack the machine; what
is not trusted is how long it runs and how much it takes on a model's output. The same means end such a process from outside
and, from inside, what its code left behind. Code in a sandbox, which may be at a model's orders, has a process above it that
also bounds what it starts (`keep_in_bounds`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import struct
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CPU_SLACK_S = 5
_CLEARING_PASSES = 100
MOST_PROCESSES, MOST_THREADS = 64, 512
"""Limits of one sandboxed program, reward worker or episode; all threads of all its processes count. Calls that are under way
at once may go a few beyond: what one of them makes is not counted until it is there."""
_RECEIVE_CALL, _ANSWER_CALL = 0xC0502100, 0xC0182101
"""SECCOMP_IOCTL_NOTIF_RECV and _SEND, of 80 and 24 bytes."""
_GO_ON = 1
MIB = 1024**2


def attach_to_parent() -> None:
    """SIGKILL when the parent's thread that started this process ends; orphans of its children come here."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def go_below_another() -> None:
    """Returns in a child of the process that called it, attached to that one, which does nothing but outlive it: of two
    processes that keep a sandbox in bounds either ends what is left when the other is killed. In a process group of its own,
    as whoever finds the first one dead kills that one's."""
    if child := os.fork():
        keep_in_bounds(child)
    os.setpgid(0, 0)
    attach_to_parent()


def keep_in_bounds(child: int, *ends: socket.socket) -> NoReturn:
    """Stays outside a sandbox while `child` is in it, and answers what its seccomp filter asks: whether one more process or
    thread may be. The filter's listener comes on the first of `ends`, whose other end is the second; without them nobody asks.

    Waits for the child's end, or that of the process above this one, whichever comes first; kills what is left below it, and
    ends as the child did. This process must have been attached to its parent.
    """
    code = 1
    try:
        _ignore_signals()
        code = _exit_code_of(child, *ends)
        if code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
    finally:
        os._exit(code)


def _ignore_signals() -> None:
    """All but what ends or stops a process in any case, and without users' handlers, which would go on outside: what a timer of
    theirs sends ends nothing here, and no child is reaped behind our back."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _exit_code_of(child: int, *ends: socket.socket) -> int:
    above = os.getppid()
    ended, above_ended = os.pidfd_open(child), os.pidfd_open(above)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)  # not SIGKILL: this process ends what is below, also when it has been stopped
    listeners = list[int]()
    if ends:
        handed, childs = ends
        childs.close()
        _, listeners, _, _ = socket.recv_fds(handed, 1, 1)  # none when the child ended before
    _close_all_but(2, ended, above_ended, *listeners)
    waiting = select.poll()
    for descriptor in (ended, above_ended, *listeners):
        waiting.register(descriptor, select.POLLIN)
    while os.getppid() == above:
        ready = {descriptor for descriptor, _ in waiting.poll()}
        if ready & {ended, above_ended}:
            break
        for listener in listeners:
            answer_call(listener, child)
    kill_tree(child)
    _, status = os.waitpid(child, 0)
    while not clear_leftover_children():
        pass
    return os.waitstatus_to_exitcode(status)


def answer_call(listener: int, child: int | None = None) -> None:
    """Say whether `child`, or a process below it, may make one more process or thread; without `child`, whether the one process
    that asks may make one more thread."""
    call = bytearray(80)
    with contextlib.suppress(FileNotFoundError):  # who asked was killed meanwhile
        fcntl.ioctl(listener, _RECEIVE_CALL, call)
        number, asking = struct.unpack_from("=QI", call)
        processes = {asking} if child is None else {child, *descendants(child)}
        is_full = len(processes) >= MOST_PROCESSES or sum(map(_num_threads, processes)) >= MOST_THREADS
        how = (-errno.EAGAIN, 0) if is_full else (0, _GO_ON)
        fcntl.ioctl(listener, _ANSWER_CALL, struct.pack("=QqiI", number, 0, *how))


def _num_threads(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/task").st_nlink - 2
    except OSError:  # it ended
        return 0


def _close_all_but(*kept: int) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)


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
    while found := {pid, *descendants(pid)} - stopped:
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


def descendants(pid: int) -> Iterator[int]:
    """Children, their children, and so on."""
    for child in children(pid):
        yield child
        yield from descendants(child)


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
