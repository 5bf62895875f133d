"""The part of an audit that needs no streams: journal, lineage, checkpoints and summary of a run directory.

Two passes over the journal, each a line at a time. The folder may belong to a run that goes on: what is judged is the journal
as long as it was at the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelinerl.algorithms.ledger import Outcome
from pipelinerl.audit.checkpoints import Checkpoint, compare, read_checkpoints
from pipelinerl.audit.findings import Check, Findings
from pipelinerl.audit.history import Event, History, events, read_history
from pipelinerl.audit.replay import Replay
from pipelinerl.journal import JOURNAL

CHECKPOINTS, LINEAGE, SUMMARY = "checkpoints", "lineage.json", "summary.json"


@dataclass
class Undone:
    """What a restart undid of the books: groups issued, sequences that had ended, steps."""

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
    waiting = _those_that_count(checkpoints, history, findings)
    checkpoint = next(waiting, None)
    for offset, event, undone_by in events(journal, history, findings):
        if event["event"] == "reserve":
            replay.reserve(event)
        if undone_by is not None:
            found.restarts[undone_by].add(event)
            continue
        while checkpoint is not None and checkpoint.journal_bytes <= offset:
            compare(checkpoint, replay, findings)
            checkpoint = next(waiting, None)
        start = starts.get(offset)
        if start is not None:
            replay.start(start.version, start.incarnation)
            found.stepped = False
        else:
            replay.apply(offset, event)
            found.stepped = found.stepped or event["event"] in ("step", "end")
    while checkpoint is not None:
        compare(checkpoint, replay, findings)
        checkpoint = next(waiting, None)


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
