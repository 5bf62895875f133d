"""Becomes another program that gets SIGTERM when its parent dies: `python die_with_parent.py PARENT_PID COMMAND ...`

A program of its own, started by `process.py`, because the alternative, Python code between fork and exec, can deadlock
in a process that has threads (gRPC's). Imports nothing but the standard library. Elsewhere than on Linux it only execs.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def become(parent_pid: int, command: list[str]) -> None:
    """Replaces this process by `command`; the signal survives exec. Exits at once when the parent is gone already."""
    if sys.platform == "linux":
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent_pid:
            sys.exit(0)
    os.execvp(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
