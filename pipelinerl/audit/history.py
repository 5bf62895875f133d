"""Which parts of a run's journal still count: every restart undid what came after the checkpoint that it went on from.

Finds the parts in one pass over the file, and then gives the events one by one with what became of them. Judges nothing of
the events themselves: that is `replay.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelinerl.audit.replay import Check, Findings

Event = dict[str, Any]
_KIND = re.compile(rb'\{"event": ?"(\w+)"')
_OF_INTEREST = frozenset((b"start", b"checkpoint", b"position", b"end"))


@dataclass(frozen=True)
class Start:
    """A trainer that started: which, from which version, and the bytes of the journal that counted for it."""

    offset: int
    incarnation: int
    version: int
    keep: int


@dataclass(frozen=True)
class Part:
    """Bytes [begin, end) of the journal. `undone_by`: number of the start in `History.starts`; None = they count."""

    begin: int
    end: int
    undone_by: int | None = None


@dataclass
class History:
    """A journal's parts, in order and without overlap, up to `size` bytes."""

    starts: list[Start] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    size: int = 0
    positions: dict[int, int] = field(default_factory=dict)
    """Position in SEQUENCES of the checkpoint that became durable last, by version."""
    end: Event | None = None
    """The last event, if the last trainer left an `end`."""

    def counts(self, offset: int) -> bool:
        """Whether the journal's first `offset` bytes end in what counts."""
        return offset == 0 or any(part.begin < offset <= part.end for part in self.parts if part.undone_by is None)


def read_history(path: Path, findings: Findings) -> History:
    """Of the whole lines that the file has now. No file is an empty history."""
    history = History()
    kept: list[Part] = []
    undone: list[Part] = []
    floor = 0
    for offset, line in _lines(path):
        history.size = offset + len(line)
        match = _KIND.match(line)
        history.end = None
        if match is None or match[1] not in _OF_INTEREST:
            continue
        event = parse(line)
        if event is None:
            continue  # said when it is replayed
        try:
            if event["event"] == "end":
                history.end = event
            elif event["event"] == "checkpoint":
                floor = _checkpoint(history, event, floor, findings)
            elif event["event"] == "position":
                floor = int(event["position"])
            else:
                start = Start(offset, int(event["incarnation"]), int(event["version"]), int(event["keep"]))
                floor = history.positions.get(start.version, 0)
                kept = _cut(kept, start, len(history.starts), undone, findings)
                history.starts.append(start)
        except (KeyError, TypeError, ValueError) as error:
            findings.add(Check.JOURNAL, f"byte {offset}: {event['event']} without what it needs: {error!r}")
    _check_line_ends(path, history.starts, findings)
    kept = [Part(part.begin, min(part.end, history.size)) for part in kept]
    history.parts = sorted((*kept, *undone), key=lambda part: part.begin)
    return history


def events(path: Path, history: History, findings: Findings) -> Iterator[tuple[int, Event, int | None]]:
    """(offset, event, number of the start that undid it) of every event. A line that is none is a finding where it counts."""
    parts = iter(history.parts)
    part = next(parts, None)
    for offset, line in _lines(path):
        if offset >= history.size:
            return
        while part is not None and offset >= part.end:
            part = next(parts, None)
        if part is None or offset < part.begin:
            findings.add(Check.JOURNAL, f"byte {offset}: before any start")
            continue
        event = parse(line)
        if event is not None:
            yield offset, event, part.undone_by
        elif part.undone_by is None:
            findings.add(Check.JOURNAL, f"byte {offset}: no event: {line[:60]!r}")


def parse(line: bytes) -> Event | None:
    """None for what is no event."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of whole lines; the last one may have been cut off."""
    if not path.is_file():
        return
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield offset, line
            offset += len(line)


def _check_line_ends(path: Path, starts: list[Start], findings: Findings) -> None:
    if not any(start.keep for start in starts):
        return
    with path.open("rb") as file:
        for start in starts:
            file.seek(max(0, start.keep - 1))
            if start.keep and file.read(1) != b"\n":
                problem = f"incarnation {start.incarnation} keeps {start.keep} bytes, which end within a line"
                findings.add(Check.RESTARTS, problem)


def _cut(kept: list[Part], start: Start, number: int, undone: list[Part], findings: Findings) -> list[Part]:
    """What counts after a start: what it keeps of that which counted before, and what follows it."""
    keep = start.keep
    whole = keep == 0 or any(part.begin < keep <= min(part.end, start.offset) for part in kept)
    if not whole:
        problem = f"incarnation {start.incarnation} keeps {keep} bytes, which end in what was undone or not there yet"
        findings.add(Check.RESTARTS, problem)
    for part in kept:
        end = min(part.end, start.offset)
        if end > max(part.begin, keep):
            undone.append(Part(max(part.begin, keep), end, number))
    cut = [Part(part.begin, min(part.end, keep, start.offset)) for part in kept if part.begin < keep]
    return [*cut, Part(start.offset, _OPEN_END)]


_OPEN_END = 1 << 62


def _checkpoint(history: History, event: Event, floor: int, findings: Findings) -> int:
    version, position = int(event["version"]), int(event["position"])
    if position < floor:
        problem = f"the checkpoint of version {version} is at position {position}, after one at {floor}"
        findings.add(Check.POSITIONS, problem)
    history.positions[version] = position
    return max(position, floor)
