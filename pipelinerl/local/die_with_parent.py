"""Becomes another program that gets a signal when its parent dies: `python die_with_parent.py PARENT_PID SIGNAL COMMAND ...`

So a killed runner leaves nothing behind. A program of its own, because the alternative, Python code between fork and
exec, can deadlock in a process that has threads (gRPC's). Imports nothing but the standard library. Linux only
(`PR_SET_PDEATHSIG`); elsewhere it only execs. The kernel watches the *thread* that started the program: start it from
one that lives as long as the program should, never from a pool's worker. It does not reach grandchildren.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CANNOT_RUN = 127


def guarded(command: tuple[str, ...] | list[str], death_signal: int = signal.SIGTERM) -> list[str]:
    """The command that runs `command` so, as a child of this process. It keeps its pid through exec. Pure but for the pid."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(death_signal)), *command]


def become(parent_pid: int, death_signal: int, command: list[str]) -> None:
    """Replaces this process by `command`; the signal survives exec. Exits at once when the parent is gone already."""
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
