"""A user's reward module that misbehaves as its item's completion says. Run by the verifier's workers in tests only."""

import contextlib
import ctypes
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HOARD: list[bytes] = []


def score(item: Any) -> float:
    word, _, argument = item.completion.partition(" ")
    return float(globals()[f"do_{word}"](argument))


def do_say(value: str) -> float:
    return float(value)


def do_run(program: str) -> float:
    """1 when a program of `hostile_programs` got out."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(OSError):
        exec(program, {"__name__": "__main__"})
    return float("escaped" in printed.getvalue())


def do_kill(pid: str) -> float:
    os.kill(int(pid), signal.SIGKILL)
    return 1.0


def do_sleep(seconds: str) -> float:
    time.sleep(float(seconds))
    return 1.0


def do_wait_for(path: str) -> float:
    while not Path(path).exists():
        time.sleep(0.01)
    return 1.0


def do_hang_in_c(_: str) -> float:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.CDLL(None).sleep(600)
    return 1.0


def do_backtrack(_: str) -> float:
    return float(bool(re.match(r"(a+)+$", "a" * 64 + "b")))


def do_raise(_: str) -> float:
    raise RuntimeError("boom")


def do_sys_exit(_: str) -> float:
    sys.exit(0)


def do_os_exit(_: str) -> float:
    os._exit(3)


def do_segfault(_: str) -> float:
    return len(ctypes.string_at(0))


def do_fill_memory(_: str) -> float:
    hoard = []
    while True:
        hoard.append(bytes(16 * 1024**2))  # address space, untouched: quick


def do_keep_mib(mib: str) -> float:
    HOARD.append(bytes(int(mib) * 1024**2))
    return 1.0


def do_close_pipes(_: str) -> float:
    os.closerange(3, 100)
    time.sleep(600)
    return 1.0


def do_write_in_pipes(_: str) -> float:
    for descriptor in range(3, 100):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\xff" * 8)
    time.sleep(600)
    return 1.0


def do_print(words: str) -> float:
    print(words)
    return 1.0


def do_touch(path: str) -> float:
    Path(path).touch()
    return 1.0


def do_flood(_: str) -> float:
    for _ in range(256):
        print("\x1b[2J" * 16384)
    raise RuntimeError("\x1b[31m" * 2**22)


def do_fork_and_return(_: str) -> float:
    return 1.0 if os.fork() else 0.0


def do_leave_children(pid_file: str) -> float:
    """Six children that sleep, half of them in sessions of their own, reparented by a double fork."""
    for index in range(6):
        if os.fork() == 0:
            if index % 2:
                os.setsid()
                if os.fork():
                    os._exit(0)
            with Path(pid_file).open("a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(600)
    while len(Path(pid_file).read_text().split() if Path(pid_file).exists() else ()) < 6:
        time.sleep(0.01)
    return 1.0


def do_leave_children_and_hang(pid_file: str) -> float:
    do_leave_children(pid_file)
    time.sleep(600)
    return 1.0


def do_inspect(_: str) -> float:
    """1 when nothing of the verifier's can be reached from here."""
    links = [_link(descriptor) for descriptor in os.listdir("/proc/self/fd")]
    program = subprocess.run(["ls", "/proc/self/fd"], capture_output=True, text=True, check=True)
    problems = {
        "environment": [name for name in os.environ if name.startswith("PIPELINERL_") or "SECRET" in name],
        "sockets": [link for link in links if link.startswith("socket:")],
        "input": sys.stdin.read(),
        "descriptors of a program": [number for number in program.stdout.split() if int(number) > 3],
        "session": "" if os.getsid(0) == os.getpid() else "not its own",
    }
    found = {name: problem for name, problem in problems.items() if problem}
    if found:
        raise AssertionError(f"reachable: {found}")
    return 1.0


def _link(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""
