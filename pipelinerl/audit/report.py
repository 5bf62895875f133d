"""Render an audit as text or JSON: the equation with its numbers, outcomes, events that restarts undid, and the checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from pipelinerl.audit.audit import Audit
from pipelinerl.audit.replay import Check, CheckResult
from pipelinerl.errors import counted
from pipelinerl.local.progress import number
from pipelinerl.rl.ledger import Outcome


def trained_per_version(audit: Audit) -> dict[int, int]:
    """Return the number of sequences trained into each version that counts."""
    trained = audit.replay.trained_by_version
    return {version: trained.get(version, 0) for version in range(1, audit.replay.version + 1)}


def as_json(audit: Audit, versions: bool = False) -> dict[str, Any]:
    """Return the audit as JSON. `versions`: include the count of every version."""
    replay, trained = audit.replay, trained_per_version(audit)
    seen = audit.streams
    return {
        "run": audit.run,
        "state": audit.state,
        "ok": audit.ok,
        "version": replay.version,
        "sequences": replay.counts.as_dict(),
        "trained": {"branches": replay.trained_branches, "tokens": sum(replay.tokens_by_version.values())},
        "reasons": {outcome.value: dict(replay.reasons[outcome]) for outcome in Outcome},
        "restarts": [
            {"incarnation": one.incarnation, "version": one.version, **one.undid} for one in audit.restarts
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
    """Yield the lines of the report. `versions`: list every version's count instead of the unusual ones."""
    replay = audit.replay
    yield f"{audit.run}: {audit.state}, {counted(len(audit.history.starts), 'start')}, version {number(replay.version)}"
    yield ""
    yield f"  {equation(replay.counts.as_dict())}"
    if replay.trained_branches:
        tokens = sum(replay.tokens_by_version.values())
        yield f"    trained: {number(tokens)} sampled tokens in {number(replay.trained_branches)} branches"
    for outcome in Outcome:
        for reason, count in replay.reasons[outcome].most_common():
            yield f"    {outcome.value.replace('_', ' ')}: {reason}  {number(count)}"
    for one in audit.restarts:
        undid = (
            f"{one.undid['steps']} steps, {number(one.undid['trained'])} sequences trained, "
            f"{number(one.undid['ended_otherwise'])} ended otherwise, {number(one.undid['groups'])} groups issued"
        )
        yield f"  incarnation {one.incarnation} continued from version {one.version} and undid {undid}"
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
        told = f"all checks that were made passed; {skipped} of {len(audit.findings)} checks were skipped"
        yield told if skipped else "everything adds up"


def equation(counts: Mapping[str, int]) -> str:
    """Return the ledger's equation, such as `issued 24 = trained 16 + dropped stale 0 + dropped filtered 0 + failed 0 + in
    flight 8`."""
    ended = " + ".join(f"{name.replace('_', ' ')} {number(count)}" for name, count in counts.items() if name != "issued")
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
        f"  SEQUENCES holds {number(seen.messages)} messages, positions {number(seen.info.first_position)} to "
        f"{number(seen.info.last_position)}; durable up to {number(seen.durable)}"
    )
    unreadable = ", ".join(map(str, list(seen.unreadable)[:_OUTLIERS]))
    for count, what in [
        (seen.repeated, "of them repeat a sequence, which is trained once"),
        (len(seen.unreadable), f"of them cannot be read: positions {unreadable}"),
        (seen.trained_below(audit.replay), "of them may be purged"),
        (seen.dead_letters, "prompt groups are in the dead-letter stream"),
        (len(audit.waiting), "sequences in flight are published by the trainer, now or at its next start"),
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
