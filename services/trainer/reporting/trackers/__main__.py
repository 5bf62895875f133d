"""`python -m services.trainer.reporting.trackers NAME`: the process of one tracker.

The trainer starts it and writes to its input.

Its settings are those of the tracker's library, in the environment. What the library prints goes nowhere: it may hold secrets.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import TextIO

from services.trainer.reporting.trackers.backends import open_tracker
from services.trainer.reporting.trackers.figures import scrubbed
from services.trainer.reporting.trackers.serving import TrackerServer
from services.trainer.reporting.trackers.tracker import Tracker

NICENESS = 10
"""The trainer goes first."""


def serve(open_this: Callable[[], Tracker]) -> None:
    """Carries out what standard input says, answers on standard output, and ends the process."""
    os.nice(NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the trainer says when it is over
    answers = _answers()

    def answer(error: str | None) -> None:
        print(json.dumps({"error": error}), file=answers, flush=True)

    TrackerServer(open_this).serve(sys.stdin, answer, describe)
    os._exit(0)  # what a library would still do at the interpreter's end may wait for a network


def describe(error: BaseException) -> str:
    return scrubbed(f"{type(error).__name__}: {error}", os.environ)


def _answers() -> TextIO:
    """This process's standard output, for answers alone: what others print there goes nowhere from now on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    return answers


if __name__ == "__main__":
    serve(lambda: open_tracker(sys.argv[1]))
