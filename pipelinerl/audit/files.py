"""The part of an audit that needs no streams: journal, lineage, checkpoints and summary of a run directory.

Two passes over the journal, each a line at a time. The folder may belong to a run that goes on: what is judged is the journal
as long as it was at the beginning. Of checkpoints, run.json and the ids in sequences.pb are read; tensors are the trainer's
business.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.proto import parse_length_prefixed

from pipelinerl.audit.journal import JOURNAL, Event
from pipelinerl.audit.replay import Check, Findings, History, Replay, events, read_history
from pipelinerl.rl.ledger import Ledger, LedgerViolation, Outcome
from pipelinerl.v1 import sequence_pb2


@dataclass(frozen=True)
class Checkpoint:
    """What one checkpoint says. `position`: of the last message of SEQUENCES that they know; `held`: sequences in flight that
    it holds by itself, or knows to have failed."""

    folder: Path
    version: int
    journal_bytes: int
    position: int
    next_group: int
    ledger: Ledger
    held: frozenset[str]


def read_checkpoints(folder: Path, findings: Findings) -> list[Checkpoint]:
    """Those of the run, by their length of the journal. One that cannot be read is a finding; one that vanishes meanwhile
    (another took its place) is left out, and so is one that holds weights alone."""
    found = []
    for resume in sorted(folder.glob("step-*/resume")):
        try:
            found.append(read_checkpoint(resume))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, DecodeError, LedgerViolation) as error:
            findings.add(Check.CHECKPOINTS, f"{resume.parent.name} cannot be read: {error!r}")
    return sorted(found, key=lambda checkpoint: checkpoint.journal_bytes)


def read_checkpoint(resume: Path) -> Checkpoint:
    """Raises what reading a damaged file raises."""
    content = json.loads((resume / "run.json").read_text(encoding="utf-8"))
    failed = [one["id"] for one in content["held"]["open"] if "failure" in one]
    held = []
    with (resume / "sequences.pb").open("rb") as file:
        while (message := parse_length_prefixed(sequence_pb2.Sequence, file)) is not None:
            held.append(str(message.sequence_id))
    return Checkpoint(
        resume.parent,
        content["policy_version"],
        content["journal_bytes"],
        content["position"],
        content["next_group"],
        Ledger.from_state(content["books"]["ledger"]),
        frozenset((*failed, *held)),
    )


def _differences(checkpoint: Checkpoint, replay: Replay) -> Iterator[str]:
    """`replay`: at the checkpoint's length of the journal."""
    ledger = checkpoint.ledger
    numbers: list[tuple[str, object, object]] = [
        ("version", checkpoint.version, replay.version),
        ("groups issued", checkpoint.next_group, replay.next_group),
        *_pairs("", ledger.counts.as_dict(), replay.counts.as_dict()),
    ]
    for outcome in Outcome:
        numbers += _pairs(f"{outcome.value}: ", ledger.reasons(outcome), replay.reasons[outcome])
    yield from (f"{name} {told}, the journal {derived}" for name, told, derived in numbers if told != derived)
    told, derived = set(ledger.in_flight()), {f"{group}.{sample}" for group, sample in replay.in_flight()}
    if told != derived:
        yield f"in flight there and not in the journal: {_some(told - derived)}; the other way round: {_some(derived - told)}"
    elsewhere = checkpoint.held - told
    if elsewhere:
        yield f"holds sequences that are not in flight: {_some(elsewhere)}"


def _pairs(prefix: str, told: Mapping[str, int], derived: Mapping[str, int]) -> list[tuple[str, object, object]]:
    return [(prefix + name, told.get(name, 0), derived.get(name, 0)) for name in dict.fromkeys([*told, *derived])]


def _some(ids: set[str] | frozenset[str], most: int = 3) -> str:
    shown = sorted(ids)[:most]
    return ", ".join([*shown, *(["..."] if len(ids) > most else [])]) or "none"


CHECKPOINTS, LINEAGE, SUMMARY = "checkpoints", "lineage.json", "summary.json"


@dataclass
class Undone:
    """What a restart undid of the ledger: groups issued, sequences that had ended, steps."""

    incarnation: int
    version: int
    """It went on from."""
    steps: int = 0
    groups: int = 0
    trained: int = 0
    ended_otherwise: int = 0

    def add(self, event: Event) -> None:
        kind, ids = event["event"], event.get("ids")
        self.steps += kind == "step"
        self.groups += kind == "issue"
        number = len(ids) if isinstance(ids, list) else 0
        if kind == "close" and event.get("outcome") == Outcome.TRAINED:
            self.trained += number
        elif kind == "close":
            self.ended_otherwise += number


@dataclass
class FilesAudit:
    """`checkpoint`: the newest that a restart would go on from."""

    findings: Findings
    history: History
    replay: Replay
    restarts: list[Undone] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    stepped: bool = False
    """The last trainer that started has taken a step, or ended."""

    @property
    def ended(self) -> bool:
        """The run came to its own end."""
        return self.history.end is not None and self.history.end.get("finished") is True


def audit_files(run_dir: Path) -> FilesAudit:
    """Raises `OSError` where a file is there and cannot be read."""
    findings = Findings()
    journal = run_dir / JOURNAL
    history = read_history(journal, findings)
    found = FilesAudit(findings, history, Replay(findings))
    found.restarts = [Undone(start.incarnation, start.version) for start in history.starts]
    checkpoints = read_checkpoints(run_dir / CHECKPOINTS, findings)
    _replay(journal, found, checkpoints)
    del found.restarts[:1]  # the first start is none
    found.checkpoint = checkpoints[-1] if checkpoints else None
    _check_lineage(run_dir / LINEAGE, found)
    _check_summary(run_dir / SUMMARY, found)
    return found


def _replay(journal: Path, found: FilesAudit, checkpoints: list[Checkpoint]) -> None:
    """Applies every event that counts, and compares each checkpoint when its moment comes."""
    history, replay, findings = found.history, found.replay, found.findings
    starts = {start.offset: start for start in history.starts}
    waiting = deque(_those_that_count(checkpoints, history, findings))

    def compare_up_to(offset: int) -> None:
        while waiting and waiting[0].journal_bytes <= offset:
            checkpoint = waiting.popleft()
            for problem in _differences(checkpoint, replay):
                findings.add(Check.CHECKPOINTS, f"{checkpoint.folder.name}: {problem}")

    for offset, event, undone_by in events(journal, history, findings):
        if event["event"] == "reserve":
            replay.reserve(event)
        if undone_by is not None:
            found.restarts[undone_by].add(event)
            continue
        compare_up_to(offset)
        start = starts.get(offset)
        if start is not None:
            replay.start(start.version, start.incarnation)
            found.stepped = False
        else:
            replay.apply(offset, event)
            found.stepped = found.stepped or event["event"] in ("step", "end")
    compare_up_to(history.size)


def _those_that_count(checkpoints: list[Checkpoint], history: History, findings: Findings) -> Iterator[Checkpoint]:
    for checkpoint in checkpoints:
        if history.counts(checkpoint.journal_bytes):
            yield checkpoint
        else:
            where = "is not there" if checkpoint.journal_bytes > history.size else "was undone"
            problem = (
                f"{checkpoint.folder.name}: byte {checkpoint.journal_bytes} of the journal, where it was taken, {where}"
            )
            findings.add(Check.CHECKPOINTS, problem)


def _check_lineage(path: Path, found: FilesAudit) -> None:
    """Every start in the journal is one that lineage.json knows; one that died before it wrote there left none."""
    content = read_json(path)
    if content is None:
        if found.history.starts:
            found.findings.add(Check.RESTARTS, f"there is no {path.name}")
        return
    known: list[int] = content.get("starts", [])
    if known and not found.history.size:
        found.findings.skip("no trainer has written to it yet", Check.JOURNAL)
    last = 0
    for start in found.history.starts:
        told = known[start.incarnation - 1] if 0 < start.incarnation <= len(known) else None
        if told != start.version:
            problem = f"incarnation {start.incarnation} began from version {start.version}, {path.name} says {told}"
            found.findings.add(Check.RESTARTS, problem)
        if start.incarnation <= last:
            found.findings.add(Check.RESTARTS, f"incarnation {start.incarnation} after incarnation {last}")
        last = start.incarnation


def _check_summary(path: Path, found: FilesAudit) -> None:
    """The trainer's own summary, once it has ended. One that the runner wrote in its place knows no reasons."""
    summary, findings, replay = read_json(path), found.findings, found.replay
    if found.history.end is None or summary is None or summary.get("sequence_reasons") is None:
        findings.skip("no trainer has ended and left one", Check.SUMMARY)
        return
    reasons = {outcome.value: dict(replay.reasons[outcome]) for outcome in Outcome if replay.reasons[outcome]}
    for name, told, derived in [
        ("sequences", summary.get("sequences"), replay.counts.as_dict()),
        ("sequence_reasons", summary.get("sequence_reasons"), reasons),
        ("policy_version", summary.get("policy_version"), replay.version),
    ]:
        if told != derived:
            findings.add(Check.SUMMARY, f"{name} {told}, the journal {derived}")


def read_json(path: Path) -> Mapping[str, Any] | None:
    """None for what is not there or no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None
