"""Replay a run's journal to find the events that still count, their totals, and contradictions within the journal.

Each restart undoes the events after the checkpoint from which it continues. `read_history` finds the starts of trainers.
`events` then yields each event with the start that undid it, or None. `Replay.apply` takes the events that were not undone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from pipelinerl.audit.journal import Event, parse_event, read_lines
from pipelinerl.messages.sequences import MAX_SAMPLES
from pipelinerl.rl.ledger import Outcome, ledger_counts

_EXAMPLES = 5


class Check(StrEnum):
    """Invariants that the audit checks, in the words of its report."""

    JOURNAL = "the journal can be read"
    RESTARTS = "every start continues from the version that it states"
    ISSUED_ONCE = "no sequence is issued twice"
    ISSUED_FIRST = "no sequence ends that was not issued"
    ENDED_ONCE = "no sequence ends twice"
    TRAINED_ONCE = "no sequence is trained twice into the same weights"
    EQUATION = "the trainer's counts at every step are those of the journal"
    VERSIONS = "every version was made once, in order"
    GROUPS = "group numbers have no gap, and each was reserved first"
    POSITIONS = "the position in SEQUENCES never goes back from one checkpoint to the next"
    CHECKPOINTS = "every checkpoint's ledger agrees with the journal"
    TOKENS = "every step trained as many tokens as its sequences sampled, over all branches"
    SUMMARY = "summary.json has the numbers of the journal"
    UNKNOWN = "SEQUENCES holds no sequence that was never issued"
    LOST = "every sequence in flight can be found"


@dataclass
class CheckResult:
    """Number of problems that a check found, and the first few of them. `skipped`: why the check was skipped, if it was."""

    count: int = 0
    examples: list[str] = field(default_factory=list)
    skipped: str = ""

    @property
    def ok(self) -> bool:
        return self.count == 0


class Findings(dict[Check, CheckResult]):
    def __init__(self) -> None:
        super().__init__({check: CheckResult() for check in Check})

    def add(self, check: Check, problem: str, times: int = 1) -> None:
        result = self[check]
        result.count += times
        if len(result.examples) < _EXAMPLES:
            result.examples.append(problem)


class Replay:
    """The ledger's state, derived from the events of the journal."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._samples: dict[str, int] = {}  # number of samples by group, in order of issue
        self._open: dict[str, int] = {}  # bit i: sample i is in flight
        self._trained: dict[str, int] = {}  # bit i: sample i was trained
        self._issued = 0
        self._closed = Counter[str]()  # ended sequences by outcome
        self.reasons: dict[Outcome, Counter[str]] = {outcome: Counter() for outcome in Outcome}
        self.version = 0
        self.trained_by_version = Counter[int]()
        self.tokens_by_version = Counter[int]()
        """By version: number of sampled tokens, over all branches, in the step that made the version."""
        self.trained_branches = 0
        self.reserved = 0
        self.next_group = 0

    @property
    def counts(self) -> dict[str, int]:
        return ledger_counts(issued=self._issued, in_flight=self._issued - self._closed.total(), **self._closed)

    def was_issued(self, group: str, sample: int) -> bool:
        return 0 <= sample < self._samples.get(group, 0)

    def was_trained(self, group: str, sample: int) -> bool:
        return bool(self._trained.get(group, 0) >> sample & 1)

    def is_newest_and_untouched(self, group: str) -> bool:
        """Return whether the group was issued last and every sample of it is in flight."""
        return group == next(reversed(self._samples), "") and self._open.get(group) == (1 << self._samples[group]) - 1

    def in_flight(self) -> Iterator[tuple[str, int]]:
        """Yield (group, sample) of each sequence in flight, in order of issue."""
        for group, mask in self._open.items():
            for sample in range(self._samples[group]):
                if mask >> sample & 1:
                    yield group, sample

    def apply(self, offset: int, event: Event) -> None:
        """Apply one event that no restart undid. `offset`: the byte of the journal at which it begins, for findings."""
        kind = event["event"]
        try:
            if kind == "issue":
                self._issue(event["group"], event["samples"])
            elif kind == "close":
                self._close(Outcome(event["outcome"]), event)
            elif kind == "step":
                self._step(int(event["version"]), event["counts"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._findings.add(Check.JOURNAL, f"byte {offset}: {kind} lacks a valid field: {error!r}")

    def reserve(self, event: Event) -> None:
        """If the event is `reserve`, record its group numbers, even if a restart undid it: the groups may be on streams."""
        if event.get("event") == "reserve" and isinstance(groups := event.get("groups"), int):
            self.reserved = max(self.reserved, groups)

    def _issue(self, group: str, samples: int) -> None:
        if samples < 1:
            raise ValueError(f"{samples} samples")
        number = group_number(group)
        if number > self.next_group:
            missing = number - self.next_group
            self._findings.add(Check.GROUPS, f"{missing} missing before {group}", times=missing)
        elif number < 0:
            self._findings.add(Check.GROUPS, f"{group!r} has no number")
        if number >= self.reserved:
            self._findings.add(Check.GROUPS, f"{group} was issued without being reserved")
        self.next_group = max(self.next_group, number + 1)
        if group in self._samples:
            self._findings.add(Check.ISSUED_ONCE, f"{group}", times=samples)
            return
        self._samples[group] = samples
        self._open[group] = (1 << samples) - 1
        self._issued += samples

    def _close(self, outcome: Outcome, event: Event) -> None:
        ended = sum(self._end(sequence_id, outcome) for sequence_id in event["ids"])
        self._closed[outcome.value] += ended
        if reason := event.get("reason"):
            self.reasons[outcome][reason] += ended
        if outcome is Outcome.TRAINED:
            version = event.get("version")
            made = self.version + 1 if version is None else version
            if made != self.version + 1:
                self._findings.add(Check.VERSIONS, f"version {made} was trained after version {self.version}")
            self.trained_by_version[made] += ended
            if "tokens" in event and version is not None:
                self.tokens_by_version[version] += event["tokens"]
                self.trained_branches += event["branches"]

    def _end(self, sequence_id: str, outcome: Outcome) -> int:
        """Record the end of a sequence and return 1, or add a finding and return 0 if it was not in flight."""
        group, sample = split_id(sequence_id)
        mask, bit = self._open.get(group, 0), 1 << sample
        if not mask & bit:
            if not self.was_issued(group, sample):
                self._findings.add(Check.ISSUED_FIRST, f"{sequence_id} ends as {outcome}")
            elif outcome is Outcome.TRAINED and self.was_trained(group, sample):
                self._findings.add(Check.TRAINED_ONCE, f"{sequence_id} into version {self.version + 1}")
            else:
                self._findings.add(Check.ENDED_ONCE, f"{sequence_id} ends again, as {outcome}")
            return 0
        if outcome is Outcome.TRAINED:
            self._trained[group] = self._trained.get(group, 0) | bit
        if mask == bit:
            del self._open[group]
        else:
            self._open[group] = mask ^ bit
        return 1

    def _step(self, version: int, counts: Mapping[str, int]) -> None:
        if version != self.version + 1:
            self._findings.add(Check.VERSIONS, f"version {version} follows version {self.version}")
        self.version = version
        wrong = [
            f"{name} {counts.get(name)} stated, {count} derived"
            for name, count in self.counts.items()
            if counts.get(name) != count
        ]
        if wrong:
            self._findings.add(Check.EQUATION, f"version {version}: {', '.join(wrong)}")


def split_id(sequence_id: str) -> tuple[str, int]:
    """Return the group and the sample index. If the id names no sample, return ("", 0), which matches no sample."""
    group, _, index = sequence_id.rpartition(".")
    named = index.isdecimal() and len(index) <= 5 and int(index) < MAX_SAMPLES
    return (group, int(index)) if named else ("", 0)


def group_number(group: str) -> int:
    """Return the number in a group's id, such as 12 for `g12`, or -1 if the id has no number."""
    digits = group.removeprefix("g")
    return int(digits) if digits.isdecimal() and digits != group else -1


_OF_INTEREST = re.compile(rb'\{"event": ?"(start|checkpoint|position|end)"')


@dataclass
class Start:
    """A trainer's start from `version`, at byte `offset` of the journal. It undid the events in bytes [keep, offset). `undid`
    counts their steps, issued groups and ended sequences."""

    offset: int
    keep: int
    incarnation: int
    version: int
    undid: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("steps", "groups", "trained", "ended_otherwise"), 0))

    def undo(self, event: Event) -> None:
        kind, ids = event["event"], event.get("ids")
        self.undid["steps"] += kind == "step"
        self.undid["groups"] += kind == "issue"
        if kind == "close" and isinstance(ids, list):
            self.undid["trained" if event.get("outcome") == Outcome.TRAINED else "ended_otherwise"] += len(ids)


@dataclass
class History:
    """The trainer's starts in the first `size` bytes of a journal. These bytes end with a whole line."""

    starts: list[Start] = field(default_factory=list)
    size: int = 0
    end: Event | None = None
    """The journal's last event if its kind is `end`; otherwise None."""

    def undone_by(self, offset: int) -> Start | None:
        """Return the start that undid the event at byte `offset`, or None."""
        return next((start for start in self.starts if start.keep <= offset < start.offset), None)

    def counts(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` is 0, or the journal is that long and no start undid the event that ends there."""
        return num_bytes == 0 or (0 < num_bytes <= self.size and self.undone_by(num_bytes - 1) is None)


def read_history(path: Path, findings: Findings) -> History:
    """Read the starts from the whole lines that the file has now. If there is no file, the history is empty."""
    history = History()
    floor, positions = 0, dict[int, int]()  # positions in SEQUENCES: the lowest still allowed, and each checkpoint's by version
    for offset, line in read_lines(path):
        event = parse_event(line) if _OF_INTEREST.match(line) else None
        history.end = None
        try:
            if event is None:
                pass  # `events` reports lines without an event
            elif event["event"] == "end":
                history.end = event
            elif event["event"] == "checkpoint":
                version, position = int(event["version"]), int(event["position"])
                if position < floor:
                    problem = f"the checkpoint of version {version} is at position {position}, after one at {floor}"
                    findings.add(Check.POSITIONS, problem)
                positions[version] = position
                floor = max(position, floor)
            elif event["event"] == "position":
                floor = int(event["position"])
            else:
                start = Start(offset, int(event["keep"]), int(event["incarnation"]), int(event["version"]))
                keeps = f"incarnation {start.incarnation} keeps {start.keep} bytes, which end"
                if not history.counts(start.keep):
                    findings.add(Check.RESTARTS, f"{keeps} in an undone part or beyond the file")
                if not _ends_a_line(path, start.keep):
                    findings.add(Check.RESTARTS, f"{keeps} within a line")
                floor = positions.get(start.version, 0)
                history.starts.append(start)
        except (KeyError, TypeError, ValueError) as error:
            kind = event["event"] if event else ""
            findings.add(Check.JOURNAL, f"byte {offset}: {kind} lacks a valid field: {error!r}")
        history.size = offset + len(line)
    return history


def events(path: Path, history: History, findings: Findings) -> Iterator[tuple[int, Event, Start | None]]:
    """From the trainer's first start on, yield each event's offset, the event, and the start that undid it, or None. A line
    before that start is a finding. A later line without an event is a finding if no start undid it."""
    first = history.starts[0].offset if history.starts else history.size
    for offset, line in read_lines(path):
        if offset >= history.size:
            return
        undone_by, event = history.undone_by(offset), parse_event(line)
        if offset < first:
            findings.add(Check.JOURNAL, f"byte {offset}: before any start")
        elif event is not None:
            yield offset, event, undone_by
        elif undone_by is None:
            findings.add(Check.JOURNAL, f"byte {offset}: no event: {line[:60]!r}")


def _ends_a_line(path: Path, num_bytes: int) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, num_bytes - 1))
        return num_bytes <= 0 or file.read(1) == b"\n"
