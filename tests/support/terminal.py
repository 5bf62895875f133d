"""A program in a pseudo-terminal, as a person uses it."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_WITHIN_S = 300.0
_IN_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def say(self, text: str) -> None:
        os.write(self.process.stdin.fileno(), text.encode())

    def until(self, text: str) -> str:
        """What is shown until and with `text`. Fails when the program ends before."""
        shown, end_s = "", time.monotonic() + _WITHIN_S
        while not shown.endswith(text):
            assert select.select([self.process.stdout], [], [], end_s - time.monotonic())[0], shown
            read = os.read(self.process.stdout.fileno(), 1)
            assert read, shown
            shown += read.decode(errors="replace")
        return shown.replace("\r", "")


@contextmanager
def terminal(*command: str) -> Iterator[Terminal]:
    """Without line editing, whose escape sequences depend on the machine."""
    environment = {**os.environ, "TERM": "dumb"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", _IN_TERMINAL, *command], env=environment, **pipes) as process:
        try:
            yield Terminal(process)
        finally:
            process.kill()
