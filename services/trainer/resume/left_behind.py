"""What an earlier incarnation left on the run's streams: looked up once, before a trainer goes on from a checkpoint.

Reads PROMPTS and what SEQUENCES holds after the checkpoint's position; takes nothing off either. What follows from it is
the feeder's business (`Feeder.adopt`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipelinerl.bus.protocol import Bus
from pipelinerl.bus.subjects import group_id_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeftBehind:
    """`prompts`: groups on PROMPTS and the position of their newest message. `arrived`: groups of which a sequence is in
    the log after `position`, from where it is to be read again."""

    position: int = 0
    prompts: Mapping[str, int] = field(default_factory=dict)
    arrived: frozenset[str] = frozenset()


async def look_for_left_behind(bus: Bus, position: int) -> LeftBehind:
    """`position`: of the last message of SEQUENCES that the checkpoint knows. Raises `BusError`.

    PROMPTS first: an actor stores the sequences of a group before it acknowledges it, so that a group which is not on
    PROMPTS any more is in the log by then.
    """
    prompts = {group_id_of(prompt.msg_id): prompt.position for prompt in await bus.pending_prompts()}
    end = (await bus.sequences_info()).last_position
    if end < position:
        log.error("SEQUENCES ends at %d, before the checkpoint's position %d: the streams are new ones", end, position)
        position = 0
    return LeftBehind(position, prompts, await _groups_between(bus, position, end))


async def _groups_between(bus: Bus, position: int, end: int) -> frozenset[str]:
    """Groups of the messages after `position`, up to `end`, by their ids."""
    first = (await bus.sequences_info()).first_position
    groups: set[str] = set()
    if max(position + 1, first) > end:
        return frozenset()
    async with bus.read_sequences(position + 1) as entries:
        async for entry in entries:
            groups.add(entry.msg_id.rpartition(".")[0])
            if entry.position >= end:
                break
    return frozenset(groups)
