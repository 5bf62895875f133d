"""An audit for a person: the equation with its numbers, where sequences ended, what restarts undid, and the checks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from pipelinerl.algorithms.ledger import Outcome
from pipelinerl.audit.audit import Audit, trained_per_version
from pipelinerl.audit.findings import CheckResult
from pipelinerl.audit.streams import trained_below
from pipelinerl.local.text import number

_OUTLIERS = 10


def lines(audit: Audit, versions: bool = False) -> Iterator[str]:
    """`versions`: every version's count instead of the unusual ones'."""
    replay = audit.files.replay
    yield f"{audit.run}: {audit.state}, {1 + len(audit.files.restarts)} incarnation(s), version {number(replay.version)}"
    yield ""
    yield f"  {equation(replay.counts.as_dict())}"
    yield from _outcomes(audit)
    yield from _restarts(audit)
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


def _outcomes(audit: Audit) -> Iterator[str]:
    for outcome in Outcome:
        for reason, count in audit.files.replay.reasons[outcome].most_common():
            yield f"    {outcome.value.replace('_', ' ')}: {reason}  {number(count)}"


def _restarts(audit: Audit) -> Iterator[str]:
    for one in audit.files.restarts:
        undid = (
            f"{one.steps} steps, {number(one.trained)} sequences trained, {number(one.ended_otherwise)} ended otherwise, "
            f"{number(one.groups)} groups issued"
        )
        yield f"  incarnation {one.incarnation} went on from version {one.version} and undid {undid}"


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
    for count, what in [
        (seen.repeated, "of them repeat a sequence: recognised, and trained once"),
        (len(seen.unreadable), f"of them cannot be read: positions {', '.join(map(str, seen.unreadable[:_OUTLIERS]))}"),
        (trained_below(seen, audit.files.replay), "of them may be purged"),
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
