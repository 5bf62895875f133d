"""What a worker process does to itself so that a reward can hurt one item and no more. Linux.

Limits address space and CPU time, dies with the verifier, and clears away processes that a reward left behind. It is
no jail: a reward's code is the user's and is trusted not to attack the machine; what is not trusted is how long it runs
and how much it takes on a model's output.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal

from services.verifier.process_tree import children, kill_tree

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CPU_SLACK_S = 5
_CLEARING_PASSES = 100
_MIB = 1024**2


def attach_to_verifier() -> None:
    """SIGKILL when the verifier's thread that started this process ends; orphans of a reward's children come here."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for option, value in ((_PR_SET_PDEATHSIG, signal.SIGKILL), (_PR_SET_CHILD_SUBREAPER, 1)):
        if prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


class MemoryLimit:
    """Address space for rewards, beyond what the process has when this is made."""

    def __init__(self, memory_mib: int) -> None:
        self._own = _address_space()
        self._reserve = memory_mib * _MIB
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _lower_limit(resource.RLIMIT_AS, self._own + self._reserve)

    def is_half_gone(self) -> bool:
        """Whether rewards kept so much that the next one would have less than half of the limit to itself."""
        return _address_space() - self._own > self._reserve // 2


class CpuBackstop:
    """SIGXCPU for a reward that the verifier, whose deadline comes first, did not end: wall-clock limit times cores."""

    def __init__(self, timeout_s: float) -> None:
        self._allowance_s = int(timeout_s + 1) * (os.cpu_count() or 1) + _CPU_SLACK_S

    def renew(self) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _lower_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + self._allowance_s)


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


def _lower_limit(kind: int, soft: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _address_space() -> int:
    """Bytes, as RLIMIT_AS counts them."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()
