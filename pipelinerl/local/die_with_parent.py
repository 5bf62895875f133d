"""Run a program that gets a signal when its parent dies: `python die_with_parent.py PARENT_PID SIGNAL COMMAND ...`

This ends services when their runner is killed. A `preexec_fn` of `subprocess` could do the same, but can deadlock in a process
with threads. On Linux the program uses `PR_SET_PDEATHSIG`; elsewhere no signal is sent. The kernel sends the signal when the
*thread* that started the program ends, so never start it from a pool's worker thread. Grandchildren get no signal.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CANNOT_RUN = 127


def guarded(command: tuple[str, ...] | list[str], death_signal: int = signal.SIGTERM) -> list[str]:
    """Return a command for this process to start. The child becomes `command`, and gets `death_signal` if this process dies."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(death_signal)), *command]


def become(parent_pid: int, death_signal: int, command: list[str]) -> None:
    """Replace this process by `command`. On Linux, it gets `death_signal` when the parent dies; exit if the parent is dead."""
    if sys.platform == "linux":
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent_pid:
            sys.exit(0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        sys.exit(_CANNOT_RUN)


if __name__ == "__main__":
    become(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
