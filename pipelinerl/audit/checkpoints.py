"""What the run's checkpoints say of the ledger, and whether it is what the journal says of the same moment.

Reads run.json and the ids in sequences.pb; tensors are the trainer's business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError
from google.protobuf.proto import parse_length_prefixed

from pipelinerl.algorithms.ledger import Ledger, LedgerViolation, Outcome
from pipelinerl.audit.findings import Check, Findings
from pipelinerl.audit.replay import Replay
from pipelinerl.v1 import sequence_pb2


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint's books. `position`: of the last message of SEQUENCES that they know; `held`: sequences in flight that
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
    return Checkpoint(
        resume.parent,
        content["policy_version"],
        content["journal_bytes"],
        content["position"],
        content["next_group"],
        Ledger.from_state(content["books"]["ledger"]),
        frozenset((*failed, *_ids(resume / "sequences.pb"))),
    )


def compare(checkpoint: Checkpoint, replay: Replay, findings: Findings) -> None:
    """`replay`: at the checkpoint's length of the journal."""
    for problem in _differences(checkpoint, replay):
        findings.add(Check.CHECKPOINTS, f"{checkpoint.folder.name}: {problem}")


def _differences(checkpoint: Checkpoint, replay: Replay) -> Iterator[str]:
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


def _ids(path: Path) -> list[str]:
    """Of length-delimited messages."""
    with path.open("rb") as file:
        ids = []
        while (message := parse_length_prefixed(sequence_pb2.Sequence, file)) is not None:
            ids.append(str(message.sequence_id))
        return ids
