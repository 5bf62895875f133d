"""Which parts of a run's journal still count: every restart undid what came after the checkpoint that it went on from.

One pass over the file finds the starts; a second gives the events one by one with what became of them. Nothing here judges the
events themselves: that is `replay.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from pipelinerl.audit.journal import Event, parse_event, read_lines
from pipelinerl.audit.replay import Check, Findings

_KIND = re.compile(rb'\{"event": ?"(\w+)"')
_OF_INTEREST = frozenset((b"start", b"checkpoint", b"position", b"end"))


@dataclass(frozen=True)
class Start:
    """A trainer that started: which, from which version, and the bytes of the journal that counted for it."""

    offset: int
    incarnation: int
    version: int
    keep: int


@dataclass
class History:
    """The starts in a journal's first `size` bytes, which are whole lines."""

    starts: list[Start] = field(default_factory=list)
    size: int = 0
    positions: dict[int, int] = field(default_factory=dict)
    """Position in SEQUENCES of the checkpoint that became durable last, by version."""
    end: Event | None = None
    """The last event, if the last trainer left an `end`."""

    def undone_by(self, offset: int) -> int | None:
        """Index of the start that undid the byte at `offset`; None when it counts."""
        return next((n for n, start in enumerate(self.starts) if start.keep <= offset < start.offset), None)

    def counts(self, num_bytes: int) -> bool:
        """Whether the journal's first `num_bytes` bytes end in what counts."""
        return num_bytes == 0 or (0 < num_bytes <= self.size and self.undone_by(num_bytes - 1) is None)


def read_history(path: Path, findings: Findings) -> History:
    """Of the whole lines that the file has now. No file is an empty history."""
    history = History()
    floor = 0
    for offset, line in read_lines(path):
        match = _KIND.match(line)
        event = parse_event(line) if match is not None and match[1] in _OF_INTEREST else None
        history.end = None
        try:
            if event is None:
                pass  # what is no event is found when it is replayed
            elif event["event"] == "end":
                history.end = event
            elif event["event"] == "checkpoint":
                version, position = int(event["version"]), int(event["position"])
                if position < floor:
                    problem = f"the checkpoint of version {version} is at position {position}, after one at {floor}"
                    findings.add(Check.POSITIONS, problem)
                history.positions[version] = position
                floor = max(position, floor)
            elif event["event"] == "position":
                floor = int(event["position"])
            else:
                start = Start(offset, int(event["incarnation"]), int(event["version"]), int(event["keep"]))
                if not history.counts(start.keep):
                    ends = "which end in what was undone or not there yet"
                    findings.add(Check.RESTARTS, f"incarnation {start.incarnation} keeps {start.keep} bytes, {ends}")
                floor = history.positions.get(start.version, 0)
                history.starts.append(start)
        except (KeyError, TypeError, ValueError) as error:
            kind = event["event"] if event else ""
            findings.add(Check.JOURNAL, f"byte {offset}: {kind} without what it needs: {error!r}")
        history.size = offset + len(line)
    _check_line_ends(path, history.starts, findings)
    return history


def events(path: Path, history: History, findings: Findings) -> Iterator[tuple[int, Event, int | None]]:
    """(offset, event, index of the start that undid it) of every event. A line that is none is a finding where it counts."""
    edges = {0, history.size, *(edge for start in history.starts for edge in (start.keep, start.offset))}
    parts = pairwise(sorted(edges))
    end, undone_by = 0, None
    first = history.starts[0].offset if history.starts else history.size
    for offset, line in read_lines(path):
        if offset >= history.size:
            return
        while offset >= end:
            begin, end = next(parts)
            undone_by = history.undone_by(begin)
        event = parse_event(line)
        if offset < first:
            findings.add(Check.JOURNAL, f"byte {offset}: before any start")
        elif event is not None:
            yield offset, event, undone_by
        elif undone_by is None:
            findings.add(Check.JOURNAL, f"byte {offset}: no event: {line[:60]!r}")


def _check_line_ends(path: Path, starts: list[Start], findings: Findings) -> None:
    kept = [start for start in starts if start.keep]
    if not kept:
        return
    with path.open("rb") as file:
        for start in kept:
            file.seek(start.keep - 1)
            if file.read(1) != b"\n":
                problem = f"incarnation {start.incarnation} keeps {start.keep} bytes, which end within a line"
                findings.add(Check.RESTARTS, problem)
