"""The traces of the items of one call, in its gRPC metadata: one call may carry items of many traces.

`traceparent` names the first of them, for whatever on the way knows that header; ours names all, by the item's position.
What does not parse is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipelinerl.tracing.spans import Trace, trace_from

KEY = "pipelinerl-traces"
MOST_ITEMS = 64
"""Of one call: about 60 bytes each, where gRPC takes 8 KiB of metadata. The others' traces end before the call."""
LONGEST_POSITION = 9
"""Digits: more items than any message holds. A number without bound is an error of `int`, not of the caller."""

Metadata = tuple[tuple[str, str], ...]


def metadata_of(traceparents: Sequence[str]) -> Metadata:
    """`traceparents`: of each item, empty where it has none. Nothing where no item has one."""
    traced = [(position, value) for position, value in enumerate(traceparents) if value][:MOST_ITEMS]
    if not traced:
        return ()
    return (("traceparent", traced[0][1]), (KEY, ",".join(f"{position}={value}" for position, value in traced)))


def traces_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[int, Trace]:
    """Traces by position of the item, the sampled ones."""
    values = [value for key, value in metadata or () if key == KEY and isinstance(value, str)]
    pairs = (part.partition("=") for value in values for part in value.split(",")[:MOST_ITEMS])
    found = {int(position): trace_from(value) for position, _, value in pairs if _is_position(position)}
    return {position: trace for position, trace in found.items() if trace is not None}


def _is_position(text: str) -> bool:
    return len(text) <= LONGEST_POSITION and text.isdecimal()
