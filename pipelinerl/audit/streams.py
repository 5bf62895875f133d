"""What a run's streams hold, compared with its ledger: unknown messages, repeats, and sequences that are lost.

`look` reads, takes and purges nothing; the rest is pure. A message that cannot be read is counted and is no contradiction: the
trainer sets it aside as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field

from pipelinerl.audit.replay import Replay, group_number, split_id
from pipelinerl.bus.protocol import Bus, LogEntry, group_id_of
from pipelinerl.errors import MessageError
from pipelinerl.messages.sequences import decode_sequence

_QUIET_S = 2.0
"""Without a message for that long: was the rest purged meanwhile?"""


@dataclass
class StreamLook:
    """What was seen. `durable`: position of the newest checkpoint, up to which messages may be purged."""

    durable: int = 0
    first_position: int = 1
    last_position: int = 0
    messages: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    """Of the first readable message of each sequence."""
    repeated: int = 0
    """Messages beyond the first of their sequence: an actor's repetition, which the trainer recognises."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """By position: the id that it was published under. Nothing else of that sequence will come."""
    prompts: frozenset[str] = frozenset()
    """Groups on PROMPTS."""
    dead_letters: int = 0

    def add(self, position: int, sequence_id: str) -> None:
        self.repeated += sequence_id in self.positions or sequence_id in self.unreadable.values()
        self.positions.setdefault(sequence_id, position)

    def trained_below(self, replay: Replay) -> int:
        """Messages that may be purged: of sequences that were trained, up to the newest checkpoint's position."""
        below = (name for name, position in self.positions.items() if position <= self.durable)
        return sum(replay.was_trained(*split_id(sequence_id)) for sequence_id in below)


async def look(bus: Bus, durable: int) -> StreamLook:
    """SEQUENCES up to its present end, and what is on PROMPTS before or after that. Raises `BusError`."""
    prompts_before = await bus.pending_prompts()
    info = await bus.sequences_info()
    seen = StreamLook(durable, info.first_position, info.last_position)
    async for entry in _entries(bus, info.last_position):
        seen.messages += 1
        try:
            seen.add(entry.position, decode_sequence(entry.payload, expected_run=bus.run).sequence_id)
        except MessageError:
            seen.unreadable[entry.position] = entry.msg_id
    seen.prompts = frozenset(group_id_of(prompt.msg_id) for prompt in (*prompts_before, *await bus.pending_prompts()))
    seen.dead_letters = len(await bus.dead_letters())
    return seen


async def _entries(bus: Bus, last: int) -> AsyncIterator[LogEntry]:
    """What the log holds up to position `last`."""
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


@dataclass(frozen=True)
class RunState:
    """`at_work`: a trainer may be moving things just now; `ended`: the run came to its own end; `adopting`: the trainer may
    not have taken over yet what the one before left."""

    at_work: bool
    ended: bool
    adopting: bool = False


def unknown_messages(seen: StreamLook, replay: Replay, state: RunState) -> list[str]:
    """Sequences in the log that were never issued, nor could have been: what was reserved may be out there unless the run
    came to its end."""
    reserved = 0 if state.ended else replay.reserved
    unknown = []
    for sequence_id in seen.positions:
        group, sample = split_id(sequence_id)
        may_be_issued = 0 <= group_number(group) < reserved and not replay.knows(group)
        if not (replay.was_issued(group, sample) or may_be_issued):
            unknown.append(sequence_id)
    return unknown


def lost_sequences(
    seen: StreamLook, replay: Replay, held: Collection[str], state: RunState
) -> tuple[list[str], list[str]]:
    """Sequences in flight that are neither in the log, nor in the newest checkpoint (`held`), nor on PROMPTS: (lost, yet to
    be published).

    The newest group may be on its way to PROMPTS. A trainer that starts publishes each group again of which the streams show
    nothing, so that those only wait for it.
    """
    lost: list[str] = []
    waiting: list[str] = []
    stored = {*seen.positions, *seen.unreadable.values(), *held}
    above = {split_id(name)[0] for name, position in seen.positions.items() if position > seen.durable}
    for group, sample in replay.in_flight():
        sequence_id = f"{group}.{sample}"
        if group in seen.prompts or sequence_id in stored:
            continue
        unpublished = group == replay.newest_group and replay.untouched(group)
        next_start = (state.adopting or not (state.at_work or state.ended)) and group not in above
        (waiting if unpublished or next_start else lost).append(sequence_id)
    return lost, waiting
