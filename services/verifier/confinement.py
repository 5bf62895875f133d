"""Limit processes that run users' code, and end them with all processes that they started. Linux only.

Users' code is trusted not to attack the machine, but may run too long or take too much memory. Therefore its address space and
CPU time are limited. Code in a sandbox may be controlled by a model. Therefore a process outside the sandbox also limits the
number of its processes and threads (`keep_in_bounds`).
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
"""Limits of a sandboxed reward worker or episode. A model's program in a sandbox cannot start processes, so it has only the
limit of threads. Simultaneous starts may exceed both limits."""
_RECEIVE_CALL, _ANSWER_CALL = 0xC0502100, 0xC0182101
"""SECCOMP_IOCTL_NOTIF_RECV and SECCOMP_IOCTL_NOTIF_SEND. Their structures have 80 and 24 bytes."""
_GO_ON = 1
MIB = 1024**2
libc = ctypes.CDLL(None, use_errno=True)


def attach_to_parent() -> None:
    """Have the kernel kill this process when its parent thread ends, and let this process adopt orphaned descendants."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int) -> None:
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def go_below_another() -> None:
    """Fork, and return only in the child, which gets its own process group. The parent watches it. A later `confine` adds a
    second watcher. If one of the two watchers is killed, the other ends all remaining processes."""
    if child := os.fork():
        keep_in_bounds(child)
    os.setpgid(0, 0)  # because the verifier kills the group of a dead worker
    attach_to_parent()


def keep_in_bounds(child: int, *ends: socket.socket) -> NoReturn:
    """Watch `child`, and answer its seccomp filter's requests for processes and threads. When it or this process's parent ends,
    kill the remaining descendants and end with the child's exit status. `ends`: a socket pair whose first end receives the
    filter's listener; none if the child has no such filter. Call `attach_to_parent` first."""
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
    """Undo the signal handlers and masks of users' code, and keep its timers from ending this process."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _exit_code_of(child: int, *ends: socket.socket) -> int:
    above = os.getppid()
    ended, above_ended = os.pidfd_open(child), os.pidfd_open(above)
    prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)  # sent when the parent ends; wakes even a stopped process
    listeners = list[int]()
    if ends:
        handed, childs = ends
        childs.close()
        _, listeners, _, _ = socket.recv_fds(handed, 1, 1)  # none if the child ended first
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in (2, ended, above_ended, *listeners):
            with contextlib.suppress(OSError):
                os.close(descriptor)
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
    """Answer a request for one more process or thread. `MOST_PROCESSES` and `MOST_THREADS` limit `child` and its descendants
    together or, if `child` is None, the requesting process alone."""
    call = bytearray(80)
    with contextlib.suppress(FileNotFoundError):  # the requesting process was killed meanwhile
        fcntl.ioctl(listener, _RECEIVE_CALL, call)
        number, asking = struct.unpack_from("=QI", call)
        processes = {asking} if child is None else {child, *descendants(child)}
        is_full = len(processes) >= MOST_PROCESSES or sum(map(_num_threads, processes)) >= MOST_THREADS
        how = (-errno.EAGAIN, 0) if is_full else (0, _GO_ON)
        fcntl.ioctl(listener, _ANSWER_CALL, struct.pack("=QqiI", number, 0, *how))


def _num_threads(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/task").st_nlink - 2
    except OSError:  # the process ended
        return 0


def take_pipes() -> tuple[Connection, Connection]:
    """Return standard input and output as connections, and redirect the output of users' code to standard error."""
    requests = Connection(os.dup(0), writable=False)  # programs that users' code starts do not inherit these descriptors
    results = Connection(os.dup(1), readable=False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return requests, results


def renew_cpu_limit(timeout_s: float) -> None:
    """Limit further CPU time to about `timeout_s` times the number of cores, in case the verifier does not kill the process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    allowance_s = int(timeout_s + 1) * (os.cpu_count() or 1) + _CPU_SLACK_S
    lower_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + allowance_s)


def clear_leftover_children() -> bool:
    """Kill and reap every process that this one started or adopted. Return False if new ones appear faster than they end."""
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
    """Return the direct children of all threads of a process, read from /proc; an empty list if the process is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread ended
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def kill_tree(pid: int) -> None:
    """Send SIGKILL to the process, its descendants and its process group, without reaping them. First stop it and its
    descendants with SIGSTOP, so that they cannot start others."""
    stopped: set[int] = set()
    while found := {pid, *descendants(pid)} - stopped:
        for process in found:
            _signal(process, signal.SIGSTOP)
        stopped |= found
    for process in stopped:
        _signal(process, signal.SIGKILL)
    kill_group(pid)


def kill_group(leader: int) -> None:
    """Send SIGKILL to the processes that are left in the process group of `leader`."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def descendants(pid: int) -> Iterator[int]:
    """Yield the process's children, their children, and so on."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def lower_limit(kind: int, most: int, *, for_good: bool = False) -> None:
    """Set the soft limit to `most` or the hard limit, whichever is lower. With `for_good`, also lower the hard limit."""
    hard = resource.getrlimit(kind)[1]
    soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (soft, soft if for_good else hard))


def address_space() -> int:
    """Return this process's address space in bytes, as RLIMIT_AS counts it."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()
