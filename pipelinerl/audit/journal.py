"""The run's journal, `ledger.jsonl`: an append-only file. Each line is an event, such as the issue or the end of a sequence.

docs/run-directory.md lists the kinds of events with their fields. A last line without a line end does not count.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pipelinerl.errors import FieldError, UserError

JOURNAL = "ledger.jsonl"

Event = dict[str, Any]


class Journal(ExitStack):
    """Writer of the journal, as a context manager. Its lock on the file is shared, or exclusive with `alone`. Raises
    `FieldError` if another process's lock excludes this one, or, with `alone`, if the file system has no locks."""

    def __init__(self, path: Path, *, alone: bool = False) -> None:
        super().__init__()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.enter_context(path.open("ab"))
        try:
            fcntl.flock(self._file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError as error:
            if alone or isinstance(error, BlockingIOError):  # some network file systems have no locks
                self.close()
                fix = "a trainer or a rollback of this run may be using it; wait until it ends, or stop it"
                raise FieldError("RUN", str(path), f"cannot be locked ({error.strerror}); {fix}") from error
        self.size = sum(len(line) for _, line in read_lines(path))  # a truncated last line is dropped
        """Size in bytes, including events that are not flushed yet: the offset of the next event."""
        self._file.truncate(self.size)

    def write(self, event: Mapping[str, Any]) -> None:
        self.size += self._file.write(json.dumps(event, separators=(",", ":")).encode() + b"\n")

    def flush(self) -> None:
        """Make the events survive the death of this process."""
        self._file.flush()

    def sync(self) -> None:
        """Make the events survive the death of this machine. May be called on any thread."""
        self._file.flush()
        os.fsync(self._file.fileno())


def read_events(path: Path) -> Iterator[tuple[int, Event]]:
    """Yield (byte offset, event) in order; nothing without a file. Raises `UserError` if a whole line is not an event."""
    for offset, line in read_lines(path):
        event = parse_event(line)
        if event is None:
            fix = "restore the file from a copy, or start a new run"
            raise UserError(f"{path}: the line at byte {offset} is not an event: {line[:80]!r}; {fix}")
        yield offset, event


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset, line) of each whole line. A last line that was cut off is skipped."""
    if not path.is_file():
        return
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield offset, line
            offset += len(line)


def parse_event(line: bytes) -> Event | None:
    """Return the event in a line, or None if the line is not a valid event."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def reserved_groups(path: Path) -> int:
    """Return n if the group numbers from 0 to n - 1 are reserved. Groups with these numbers may be on the streams."""
    return max((event["groups"] for _, event in read_events(path) if event["event"] == "reserve"), default=0)
