"""Ties the life of a child process to that of its parent, so that a killed runner leaves nothing behind.

It covers Linux (`PR_SET_PDEATHSIG`); elsewhere the returned function does nothing and an orderly stop is all there is.
The kernel watches the *thread* that forked: start such a child from a thread that lives as long as the child should,
never from a pool's worker. It does not reach grandchildren.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent(signal_number: int = signal.SIGTERM) -> Callable[[], None]:
    """A `preexec_fn` that makes the child receive `signal_number` when the thread that started it ends."""
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up here: the child of a fork should only call it
    parent = os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal_number)
        if os.getppid() != parent:  # it died between the fork and the line above
            os._exit(1)

    return in_child
