"""Run a program that gets a signal when its parent dies: `python die_with_parent.py PARENT_PID SIGNAL COMMAND ...`

A killed runner thus leaves no processes. This is a separate program, because the alternative, Python code between fork and
exec, can deadlock in a process with threads (such as gRPC's). It imports only the standard library. On Linux it uses
`PR_SET_PDEATHSIG`; elsewhere it only execs. The kernel watches the *thread* that started the program, so start it from a thread
that lives as long as the program should, never from a pool's worker. Grandchildren get no signal.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_CANNOT_RUN = 127


def guarded(command: tuple[str, ...] | list[str], death_signal: int = signal.SIGTERM) -> list[str]:
    """Return the command that runs `command` this way as a child of this process. Its pid stays the same after exec."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(death_signal)), *command]


def become(parent_pid: int, death_signal: int, command: list[str]) -> None:
    """Replace this process by `command`; the signal survives exec. Exits at once if the parent has already died."""
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
