"""Derive a run's ledger again from its journal, checkpoints and streams, and report every contradiction.

The audit only reads, and trusts none of the trainer's own counts. While the run is live, sequences end during the audit. The
journal is therefore read only up to its length at the start, and the audit is repeated if a sequence seems lost.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.proto import parse_length_prefixed

from pipelinerl.audit.journal import JOURNAL, parse_event, read_lines
from pipelinerl.audit.replay import Check, CheckResult, Findings, History, Replay, events, group_number, read_history, split_id
from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.link import is_stream_missing
from pipelinerl.bus.protocol import LogEntry, StreamInfo, group_id_of
from pipelinerl.errors import BusError, MessageError, counted
from pipelinerl.local.progress import number
from pipelinerl.messages.sequences import decode_sequence
from pipelinerl.rl.ledger import Ledger, LedgerViolation, Outcome
from pipelinerl.run_dir import NOTHING_THERE, read_json, trainer_starts
from pipelinerl.run_summary import read_jsonl
from pipelinerl.v1 import sequence_pb2

LOOK_AGAIN_S = 2.0
OpenStreams = Callable[[], AbstractAsyncContextManager[Bus]]
"""Connects to the run's streams. Raises `BusError` if NATS does not answer."""
_QUIET_S = 2.0
"""Seconds without a message after which the audit checks whether the remaining messages were purged."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint without its tensors. `position`: the position up to which the trainer had read SEQUENCES. `held`: sequences
    in flight that the trainer had already received, failed ones included."""

    folder: Path
    version: int
    journal_bytes: int
    position: int
    next_group: int
    ledger: Ledger
    held: frozenset[str]


def _read_checkpoints(folder: Path, findings: Findings) -> list[Checkpoint]:
    """Return the resumable checkpoints, ordered by their journal length. An unreadable checkpoint becomes a finding."""
    found = []
    for resume in sorted(folder.glob("step-*/resume")):
        try:
            found.append(_read_checkpoint(resume))
        except FileNotFoundError:  # the trainer may be removing this checkpoint
            continue
        except (OSError, ValueError, KeyError, TypeError, DecodeError, LedgerViolation) as error:
            findings.add(Check.CHECKPOINTS, f"{resume.parent.name} cannot be read: {error!r}")
    return sorted(found, key=lambda checkpoint: checkpoint.journal_bytes)


def _read_checkpoint(resume: Path) -> Checkpoint:
    content = json.loads((resume / "run.json").read_text(encoding="utf-8"))
    held = [one["id"] for one in content["held"]["open"] if "failure" in one]
    with (resume / "sequences.pb").open("rb") as file:
        while (message := parse_length_prefixed(sequence_pb2.Sequence, file)) is not None:
            held.append(str(message.sequence_id))
    numbers = {name: content[name] for name in ("journal_bytes", "position", "next_group")}
    ledger = Ledger.from_state(content["tracker"]["ledger"])
    return Checkpoint(resume.parent, content["policy_version"], **numbers, ledger=ledger, held=frozenset(held))


def _differences(checkpoint: Checkpoint, replay: Replay) -> Iterator[str]:
    """Yield each difference between a checkpoint and `replay`, which has replayed the journal up to `journal_bytes`."""
    ledger = checkpoint.ledger
    told = {"version": checkpoint.version, "groups issued": checkpoint.next_group, **ledger.counts}
    derived = {"version": replay.version, "groups issued": replay.next_group, **replay.counts}
    for outcome in Outcome:
        told |= {f"{outcome.value}: {reason}": count for reason, count in ledger.reasons(outcome).items()}
        derived |= {f"{outcome.value}: {reason}": count for reason, count in replay.reasons[outcome].items()}
    for name in dict.fromkeys([*told, *derived]):
        if told.get(name, 0) != derived.get(name, 0):
            yield f"{name} {told.get(name, 0)}, the journal has {derived.get(name, 0)}"
    here, there = set(ledger.in_flight()), {f"{group}.{sample}" for group, sample in replay.in_flight()}
    if here != there:
        yield f"in flight only in the checkpoint: {_some(here - there)}; only in the journal: {_some(there - here)}"
    if elsewhere := checkpoint.held - here:
        yield f"holds sequences that are not in flight: {_some(elsewhere)}"


def _some(ids: set[str] | frozenset[str]) -> str:
    return ", ".join([*sorted(ids)[:3], *(["..."] if len(ids) > 3 else [])]) or "none"


@dataclass
class StreamLook:
    """Contents of the streams. `info`: state of SEQUENCES. `durable`: a restart skips SEQUENCES up to this position."""

    info: StreamInfo
    durable: int
    messages: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    """Position in SEQUENCES of the first readable message of each sequence, by sequence id."""
    repeated: int = 0
    """Number of messages that repeat an earlier sequence. The trainer ignores such messages."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """Message id of each unreadable message, by its position in SEQUENCES. A message's id is its sequence's id."""
    prompts: frozenset[str] = frozenset()
    dead_letters: int = 0

    def add(self, position: int, sequence_id: str) -> None:
        self.repeated += sequence_id in self.positions or sequence_id in self.unreadable.values()
        self.positions.setdefault(sequence_id, position)

    def trained_below(self, replay: Replay) -> int:
        """Return how many trained sequences have a message that no restart reads: its position is at most `durable`."""
        below = (name for name, position in self.positions.items() if position <= self.durable)
        return sum(replay.was_trained(*split_id(sequence_id)) for sequence_id in below)


@dataclass
class Audit:
    findings: Findings
    history: History
    replay: Replay
    checkpoint: Checkpoint | None = None
    """The newest checkpoint, from which a restart would continue."""
    stepped: bool = False
    """True if the latest trainer has taken a step or ended. A trainer republishes missing groups before its first step."""
    run: str = ""
    at_work: bool = False
    """True if the run goes on, and a trainer may have issued or ended sequences during the audit."""
    streams: StreamLook | None = None
    """Contents of the streams; None if they were not read."""
    waiting: list[str] = field(default_factory=list)
    """Sequences in flight whose group the trainer will publish, either now or at its next start."""
    lost: list[str] = field(default_factory=list)
    """Sequences in flight, except `waiting`, that are neither on the streams nor in the newest checkpoint."""

    @property
    def ended(self) -> bool:
        """True if the run finished, instead of being stopped."""
        return self.history.end is not None and self.history.end.get("finished") is True

    @property
    def ok(self) -> bool:
        return all(result.ok for result in self.findings.values())

    @property
    def state(self) -> str:
        if not self.history.starts:
            return "no trainer has started"
        return "ended" if self.ended else "goes on" if self.at_work else "stopped before its end"


def audit_files(run_dir: Path) -> Audit:
    """Audit the files alone. Raises `OSError` if the journal or metrics.jsonl exists but cannot be read."""
    findings, journal = Findings(), run_dir / JOURNAL
    audit = Audit(findings, read_history(journal, findings), Replay(findings))
    checkpoints = _read_checkpoints(run_dir / "checkpoints", findings)
    _replay(journal, audit, checkpoints)
    audit.checkpoint = checkpoints[-1] if checkpoints else None
    _check_lineage(run_dir / "lineage.json", audit)
    _check_tokens(run_dir / "metrics.jsonl", audit)
    _check_summary(run_dir / "summary.json", audit)
    return audit


def _replay(journal: Path, audit: Audit, checkpoints: list[Checkpoint]) -> None:
    """Replay the events that no restart undid, and compare each checkpoint with the replay at its `journal_bytes`."""
    history, replay, findings = audit.history, audit.replay, audit.findings
    starts = {start.offset: start for start in history.starts}
    waiting = deque[Checkpoint]()
    for one in checkpoints:
        if history.counts(one.journal_bytes):
            waiting.append(one)
        else:
            what = "the journal is shorter" if one.journal_bytes > history.size else "a restart undid this part"
            problem = f"was written at byte {one.journal_bytes} of the journal, but {what}"
            findings.add(Check.CHECKPOINTS, f"{one.folder.name}: {problem}")

    def compare_up_to(offset: int) -> None:
        while waiting and waiting[0].journal_bytes <= offset:
            checkpoint = waiting.popleft()
            for problem in _differences(checkpoint, replay):
                findings.add(Check.CHECKPOINTS, f"{checkpoint.folder.name}: {problem}")

    for offset, event, undone_by in events(journal, history, findings):
        replay.reserve(event)
        if undone_by is not None:
            undone_by.undo(event)
            continue
        compare_up_to(offset)
        if start := starts.get(offset):
            if start.version != replay.version:
                claim = f"incarnation {start.incarnation} claims to go on from version {start.version}"
                findings.add(Check.RESTARTS, f"{claim}, but the journal is at {replay.version}")
            audit.stepped = False
        else:
            replay.apply(offset, event)
            audit.stepped = audit.stepped or event["event"] in ("step", "end")
    compare_up_to(history.size)


def _check_lineage(path: Path, audit: Audit) -> None:
    """Check that lineage.json lists each start in the journal, which may lack the start of a trainer that died early."""
    history, findings, known = audit.history, audit.findings, trainer_starts(path.parent)
    if not read_json(path):
        if history.starts:
            findings.add(Check.RESTARTS, f"{path.name} is missing")
        return
    if known and not history.size:
        findings[Check.JOURNAL].skipped = "no trainer has written to it yet"
    last = 0
    for start in history.starts:
        told = known[start.incarnation - 1] if 0 < start.incarnation <= len(known) else None
        if told != start.version:
            problem = f"incarnation {start.incarnation} began from version {start.version}, but {path.name} says {told}"
            findings.add(Check.RESTARTS, problem)
        if start.incarnation <= last:
            findings.add(Check.RESTARTS, f"incarnation {start.incarnation} follows incarnation {last}")
        last = start.incarnation


def _check_tokens(path: Path, audit: Audit) -> None:
    """Check that the token count in each step's record equals the journal's."""
    known = audit.replay.tokens_by_version
    steps = [record for record in read_jsonl(path) if isinstance(record.get("step"), int) and record["step"] in known]
    if not steps:
        audit.findings[Check.TOKENS].skipped = "no step is recorded with its tokens"
    for record in steps:
        version, told = record["step"], record.get("tokens_trained")
        if version <= audit.replay.version and told != known[version]:
            audit.findings.add(Check.TOKENS, f"version {version}: {told} tokens, the journal has {known[version]}")


def _check_summary(path: Path, audit: Audit) -> None:
    """Check the trainer's summary. One by the local runner has no `sequence_reasons`, and is skipped."""
    summary, replay = read_json(path), audit.replay
    if audit.history.end is None or summary.get("sequence_reasons") is None:
        audit.findings[Check.SUMMARY].skipped = "no trainer has written a summary at its end"
        return
    for name, derived in [
        ("sequences", replay.counts),
        ("sequence_reasons", {outcome.value: dict(counts) for outcome, counts in replay.reasons.items() if counts}),
        ("policy_version", replay.version),
    ]:
        if summary.get(name) != derived:
            audit.findings.add(Check.SUMMARY, f"{name} {summary.get(name)}, the journal has {derived}")


async def audit_run(run: str, run_dir: Path, open_streams: OpenStreams | None, at_work: Callable[[], bool]) -> Audit:
    """Audit a run: its files and, if `open_streams` is given, its streams. `at_work()` returns whether a trainer of the run is
    alive. In a live run, a sequence counts as lost only if a second audit misses it, too."""
    audit = await _audit_once(run, run_dir, open_streams, at_work)
    if audit.lost and audit.at_work:
        await asyncio.sleep(LOOK_AGAIN_S)
        before = set(audit.lost)
        audit = await _audit_once(run, run_dir, open_streams, at_work)
        audit.lost = [sequence_id for sequence_id in audit.lost if sequence_id in before]
    for sequence_id in audit.lost:
        audit.findings.add(Check.LOST, sequence_id)
    return audit


async def _audit_once(run: str, run_dir: Path, open_streams: OpenStreams | None, at_work: Callable[[], bool]) -> Audit:
    working = at_work()  # asked first, because a trainer may move sequences and end while the files are read
    audit = await asyncio.to_thread(audit_files, run_dir)
    audit.run, audit.at_work = run, working and not audit.ended
    if open_streams is None:
        _skip_streams(audit, "the streams were not read")
        return audit
    try:
        async with open_streams() as bus:
            audit.streams = seen = await _look(bus, audit.checkpoint.position if audit.checkpoint else 0)
    except BusError as error:
        if is_stream_missing(error) and not (audit.history.starts or read_json(run_dir / "lineage.json")):
            _skip_streams(audit, "no trainer has started: there are no streams yet")
        else:
            audit.findings.add(Check.LOST, f"the streams cannot be read: {error}")
        return audit
    if _unknown_messages(audit, seen):
        # Groups reserved since the journal was read may be on the streams, too.
        for _, line in read_lines(run_dir / JOURNAL):
            audit.replay.reserve(parse_event(line) or {})
    for sequence_id in _unknown_messages(audit, seen):
        audit.findings.add(Check.UNKNOWN, sequence_id)
    _find_missing(audit, seen)
    return audit


def _skip_streams(audit: Audit, why: str) -> None:
    for check in (Check.UNKNOWN, Check.LOST):
        audit.findings[check].skipped = why


async def _look(bus: Bus, durable: int) -> StreamLook:
    """Read SEQUENCES up to its current end, PROMPTS before and after that, and the number of dead letters."""
    prompts_before = await bus.pending_prompts()
    info = await bus.sequences_info()
    seen = StreamLook(info, info.last_position if durable == NOTHING_THERE else durable)
    async for entry in _entries(bus, info.last_position):
        seen.messages += 1
        try:
            seen.add(entry.position, decode_sequence(entry.payload, expected_run=bus.run).sequence_id)
        except MessageError:
            seen.unreadable[entry.position] = entry.msg_id
    seen.prompts = frozenset(map(group_id_of, (*prompts_before, *await bus.pending_prompts())))
    seen.dead_letters = len(await bus.dead_letters())
    return seen


async def _entries(bus: Bus, last: int) -> AsyncIterator[LogEntry]:
    if (await bus.sequences_info()).first_position > last:
        return
    async with bus.read_sequences(1) as entries:
        while True:
            try:
                async with asyncio.timeout(_QUIET_S):
                    entry = await anext(entries)
            except TimeoutError:
                if (await bus.sequences_info()).first_position > last:
                    return  # purged while we read
                continue
            if entry.position <= last:
                yield entry
            if entry.position >= last:
                return


def _unknown_messages(audit: Audit, seen: StreamLook) -> list[str]:
    """Return the sequences in SEQUENCES that were never issued. Until the run has ended, leave out those of reserved groups,
    because the trainer may publish a group before the journal records its issue."""
    replay, unknown = audit.replay, []
    reserved = 0 if audit.ended else replay.reserved
    for sequence_id in seen.positions:
        group, sample = split_id(sequence_id)
        may_be_issued = 0 <= group_number(group) < reserved and not replay.was_issued(group, 0)
        if not (replay.was_issued(group, sample) or may_be_issued):
            unknown.append(sequence_id)
    return unknown


def _find_missing(audit: Audit, seen: StreamLook) -> None:
    """Divide missing sequences into `waiting`, whose group will still be published, and `lost`. A running trainer publishes its
    newest group, and a restarted one every missing group."""
    replay, held = audit.replay, audit.checkpoint.held if audit.checkpoint else ()
    stored = {*seen.positions, *seen.unreadable.values(), *held}
    above = {split_id(name)[0] for name, position in seen.positions.items() if position > seen.durable}
    starting = not audit.stepped or not (audit.at_work or audit.ended)
    for group, sample in replay.in_flight():
        sequence_id = f"{group}.{sample}"
        if group in seen.prompts or sequence_id in stored:
            continue
        unpublished = replay.is_newest_and_untouched(group)
        (audit.waiting if unpublished or (starting and group not in above) else audit.lost).append(sequence_id)


# --- the report


def trained_per_version(audit: Audit) -> dict[int, int]:
    trained = audit.replay.trained_by_version
    return {version: trained.get(version, 0) for version in range(1, audit.replay.version + 1)}


def as_json(audit: Audit, versions: bool = False) -> dict[str, Any]:
    """Return the audit as JSON-compatible data. `versions`: include the number of trained sequences of every version."""
    replay, trained = audit.replay, trained_per_version(audit)
    seen = audit.streams
    return {
        "run": audit.run,
        "state": audit.state,
        "ok": audit.ok,
        "version": replay.version,
        "sequences": replay.counts,
        "trained": {"branches": replay.trained_branches, "tokens": sum(replay.tokens_by_version.values())},
        "reasons": {outcome.value: dict(replay.reasons[outcome]) for outcome in Outcome},
        "restarts": [
            {"incarnation": one.incarnation, "version": one.version, **one.undid} for one in audit.history.starts[1:]
        ],
        "trained_per_version": {
            "min": min(trained.values(), default=0),
            "median": median(trained.values()) if trained else 0,
            "max": max(trained.values(), default=0),
            **({"each": {str(version): count for version, count in trained.items()}} if versions else {}),
        },
        "streams": None if seen is None else {
            "messages": seen.messages,
            "first_position": seen.info.first_position,
            "last_position": seen.info.last_position,
            "durable_position": seen.durable,
            "repeated": seen.repeated,
            "unreadable": list(seen.unreadable),
            "trained_and_not_purged": seen.trained_below(replay),
            "groups_on_prompts": len(seen.prompts),
            "dead_letters": seen.dead_letters,
            "waiting_to_be_published": len(audit.waiting),
        },
        "checks": [
            {"check": check.value, "ok": one.ok, "problems": one.count, "examples": one.examples, "skipped": one.skipped}
            for check, one in audit.findings.items()
        ],
    }  # fmt: skip


_OUTLIERS = 10


def lines(audit: Audit, versions: bool = False) -> Iterator[str]:
    """Yield the report's lines. `versions`: show the number of trained sequences of every version, not only unusual numbers."""
    replay = audit.replay
    yield f"{audit.run}: {audit.state}, {counted(len(audit.history.starts), 'start')}, version {number(replay.version)}"
    yield ""
    counts = replay.counts
    ended = " + ".join(f"{name.replace('_', ' ')} {number(count)}" for name, count in counts.items() if name != "issued")
    yield f"  issued {number(counts['issued'])} = {ended}"
    if replay.trained_branches:
        tokens = sum(replay.tokens_by_version.values())
        yield f"    trained: {number(tokens)} sampled tokens in {number(replay.trained_branches)} branches"
    for outcome in Outcome:
        for reason, count in replay.reasons[outcome].most_common():
            yield f"    {outcome.value.replace('_', ' ')}: {reason}  {number(count)}"
    for one in audit.history.starts[1:]:
        undid = (
            f"{one.undid['steps']} steps, {number(one.undid['groups'])} issued groups, {number(one.undid['trained'])} trained "
            f"sequences, {number(one.undid['ended_otherwise'])} sequences that ended otherwise"
        )
        yield f"  incarnation {one.incarnation} continued from version {one.version}; undone: {undid}"
    yield from _versions(trained_per_version(audit), versions)
    yield from _streams(audit)
    yield ""
    for check, result in audit.findings.items():
        yield from _check(check, result)
    yield ""
    failed = sum(not result.ok for result in audit.findings.values())
    skipped = sum(bool(result.skipped) for result in audit.findings.values())
    if failed:
        yield f"{failed} of {len(audit.findings)} checks FAILED"
    else:
        told = f"every check that ran passed; skipped: {skipped} of {len(audit.findings)}"
        yield told if skipped else "everything adds up"


def _versions(trained: Mapping[int, int], every: bool) -> Iterator[str]:
    if not trained:
        return
    middle = median(trained.values())
    low, high = min(trained.values()), max(trained.values())
    yield f"  sequences per version: min {low}, median {middle:g}, max {high}"
    unusual = [version for version, count in trained.items() if count != middle]
    furthest = sorted(unusual, key=lambda version: -abs(trained[version] - middle))
    shown = list(trained) if every else sorted(furthest[:_OUTLIERS])
    if shown:
        more = "" if every or len(unusual) <= _OUTLIERS else f", and {len(unusual) - _OUTLIERS} more"
        yield "    " + ", ".join(f"version {version}: {trained[version]}" for version in shown) + more


def _streams(audit: Audit) -> Iterator[str]:
    seen = audit.streams
    if seen is None:
        return
    yield (
        f"  SEQUENCES holds {number(seen.messages)} messages, positions {number(seen.info.first_position)} to "
        f"{number(seen.info.last_position)}; a restart needs none up to {number(seen.durable)}"
    )
    unreadable = ", ".join(map(str, list(seen.unreadable)[:_OUTLIERS]))
    for count, what in [
        (seen.repeated, "of them repeat a sequence, which is trained only once"),
        (len(seen.unreadable), f"of them cannot be read: positions {unreadable}"),
        (seen.trained_below(audit.replay), "of them belong to trained sequences, and a restart does not need them"),
        (seen.dead_letters, "prompt groups are in the dead-letter stream"),
        (len(audit.waiting), "sequences in flight will be published by the trainer, now or at its next start"),
    ]:
        if count:
            yield f"    {number(count)} {what}"
    yield f"  PROMPTS holds {number(len(seen.prompts))} groups"


def _check(check: Check, result: CheckResult) -> Iterator[str]:
    if result.skipped and result.ok:
        yield f"  -       {check}: {result.skipped}"
    elif result.ok:
        yield f"  ok      {check}"
    else:
        yield f"  FAILED  {check}: {number(result.count)}"
        yield from (f"            {example}" for example in result.examples)
        if result.count > len(result.examples):
            yield "            ..."
