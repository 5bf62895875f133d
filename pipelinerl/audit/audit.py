"""A whole audit: files first, then streams, and a second look where a run that goes on may have moved between the two.

Then what a person reads, or a program: the equation with its numbers, where sequences ended, what restarts undid, the checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pipelinerl.audit.files import FilesAudit, audit_files
from pipelinerl.audit.journal import JOURNAL, reserved_groups
from pipelinerl.audit.replay import Check, CheckResult
from pipelinerl.audit.streams import RunState, StreamLook, look, lost_sequences, unknown_messages
from pipelinerl.bus.protocol import Bus
from pipelinerl.errors import BusError
from pipelinerl.local.progress import number
from pipelinerl.rl.ledger import Outcome

LOOK_AGAIN_S = 2.0
OpenStreams = Callable[[], AbstractAsyncContextManager[Bus]]


@dataclass
class Audit:
    """What was found. `streams` None: they were not looked at."""

    run: str
    files: FilesAudit
    run_state: RunState
    streams: StreamLook | None = None
    waiting: list[str] = field(default_factory=list)
    """In flight, and published by the next trainer that starts, or just now."""

    @property
    def checks(self) -> list[CheckResult]:
        return self.files.findings.results()

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def state(self) -> str:
        if not self.files.history.starts:
            return "no trainer has started"
        return "ended" if self.run_state.ended else "goes on" if self.run_state.at_work else "stopped before its end"


async def audit_run(
    run: str,
    run_dir: Path,
    open_streams: OpenStreams | None,
    at_work: Callable[[], bool],
    *,
    again_s: float = LOOK_AGAIN_S,
) -> Audit:
    """`at_work()`: whether a trainer of the run lives. Without `open_streams` the files alone are judged.

    What seems lost in a run that goes on is called so only when a second look finds it neither ended nor anywhere.
    """
    audit, lost = await _audit_once(run, run_dir, open_streams, at_work)
    if lost and audit.run_state.at_work:
        await asyncio.sleep(again_s)
        before = set(lost)
        audit, lost = await _audit_once(run, run_dir, open_streams, at_work)
        lost = [sequence_id for sequence_id in lost if sequence_id in before]
    for sequence_id in lost:
        audit.files.findings.add(Check.LOST, sequence_id)
    return audit


async def _audit_once(
    run: str, run_dir: Path, open_streams: OpenStreams | None, at_work: Callable[[], bool]
) -> tuple[Audit, list[str]]:
    """The audit, and the sequences that seem lost."""
    working = at_work()  # before the files are read: one that ends meanwhile has moved things
    files = await asyncio.to_thread(audit_files, run_dir)
    run_state = RunState(working and not files.ended, files.ended, not files.stepped)
    audit = Audit(run, files, run_state)
    if open_streams is None:
        files.findings.skip("the streams were not looked at", Check.UNKNOWN, Check.LOST)
        return audit, []
    checkpoint = files.checkpoint
    try:
        async with open_streams() as bus:
            seen = await look(bus, checkpoint.position if checkpoint else 0)
    except BusError as error:
        files.findings.add(Check.LOST, f"the streams cannot be read: {error}")
        return audit, []
    audit.streams = seen
    if unknown_messages(seen, files.replay, run_state):
        # What was reserved since the journal was read may be out there too.
        files.replay.reserve({"groups": await asyncio.to_thread(reserved_groups, run_dir / JOURNAL)})
    for sequence_id in unknown_messages(seen, files.replay, run_state):
        files.findings.add(Check.UNKNOWN, sequence_id)
    lost, audit.waiting = lost_sequences(seen, files.replay, checkpoint.held if checkpoint else (), run_state)
    return audit, lost


def trained_per_version(audit: Audit) -> dict[int, int]:
    """Sequences trained into each version that counts."""
    trained = audit.files.replay.trained_by_version
    return {version: trained.get(version, 0) for version in range(1, audit.files.replay.version + 1)}


def as_json(audit: Audit, versions: bool = False) -> dict[str, Any]:
    """`versions`: every version's count too."""
    replay, trained = audit.files.replay, trained_per_version(audit)
    seen = audit.streams
    return {
        "run": audit.run,
        "state": audit.state,
        "ok": audit.ok,
        "version": replay.version,
        "sequences": replay.counts.as_dict(),
        "reasons": {outcome.value: dict(replay.reasons[outcome]) for outcome in Outcome},
        "restarts": [vars(restart) for restart in audit.files.restarts],
        "trained_per_version": {
            "min": min(trained.values(), default=0),
            "median": median(trained.values()) if trained else 0,
            "max": max(trained.values(), default=0),
            **({"each": {str(version): count for version, count in trained.items()}} if versions else {}),
        },
        "streams": None if seen is None else {
            "messages": seen.messages,
            "first_position": seen.first_position,
            "last_position": seen.last_position,
            "durable_position": seen.durable,
            "repeated": seen.repeated,
            "unreadable": list(seen.unreadable),
            "trained_and_not_purged": seen.trained_below(replay),
            "groups_on_prompts": len(seen.prompts),
            "dead_letters": seen.dead_letters,
            "waiting_to_be_published": len(audit.waiting),
        },
        "checks": [
            {"check": one.check.value, "ok": one.ok, "problems": one.count, "examples": one.examples,
             "skipped": one.skipped}
            for one in audit.checks
        ],
    }  # fmt: skip


_OUTLIERS = 10


def lines(audit: Audit, versions: bool = False) -> Iterator[str]:
    """`versions`: every version's count instead of the unusual ones'."""
    replay = audit.files.replay
    yield f"{audit.run}: {audit.state}, {1 + len(audit.files.restarts)} incarnation(s), version {number(replay.version)}"
    yield ""
    yield f"  {equation(replay.counts.as_dict())}"
    for outcome in Outcome:
        for reason, count in replay.reasons[outcome].most_common():
            yield f"    {outcome.value.replace('_', ' ')}: {reason}  {number(count)}"
    for one in audit.files.restarts:
        undid = (
            f"{one.steps} steps, {number(one.trained)} sequences trained, {number(one.ended_otherwise)} ended otherwise, "
            f"{number(one.groups)} groups issued"
        )
        yield f"  incarnation {one.incarnation} went on from version {one.version} and undid {undid}"
    yield from _versions(trained_per_version(audit), versions)
    yield from _streams(audit)
    yield ""
    for check in audit.checks:
        yield from _check(check)
    yield ""
    failed = sum(not check.ok for check in audit.checks)
    skipped = sum(bool(check.skipped) for check in audit.checks)
    if failed:
        yield f"{failed} of {len(audit.checks)} checks FAILED"
    else:
        yield f"what was looked at adds up; {skipped} checks were not made" if skipped else "everything adds up"


def equation(counts: Mapping[str, int]) -> str:
    """`issued 24 = trained 16 + dropped stale 0 + dropped filtered 0 + failed 0 + in flight 8`"""
    ended = " + ".join(
        f"{name.replace('_', ' ')} {number(count)}" for name, count in counts.items() if name != "issued"
    )
    return f"issued {number(counts['issued'])} = {ended}"


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
        f"  SEQUENCES holds {number(seen.messages)} messages, positions {number(seen.first_position)} to "
        f"{number(seen.last_position)}; durable up to {number(seen.durable)}"
    )
    unreadable = ", ".join(map(str, list(seen.unreadable)[:_OUTLIERS]))
    for count, what in [
        (seen.repeated, "of them repeat a sequence: recognised, and trained once"),
        (len(seen.unreadable), f"of them cannot be read: positions {unreadable}"),
        (seen.trained_below(audit.files.replay), "of them may be purged"),
        (seen.dead_letters, "prompt groups are in the dead-letter stream"),
        (len(audit.waiting), "sequences in flight are published by the trainer, now or at its next start"),
    ]:
        if count:
            yield f"    {number(count)} {what}"
    yield f"  PROMPTS holds {number(len(seen.prompts))} groups"


def _check(result: CheckResult) -> Iterator[str]:
    if result.skipped and result.ok:
        yield f"  -       {result.check}: {result.skipped}"
    elif result.ok:
        yield f"  ok      {result.check}"
    else:
        yield f"  FAILED  {result.check}: {number(result.count)}"
        yield from (f"            {example}" for example in result.examples)
        if result.count > len(result.examples):
            yield "            ..."
