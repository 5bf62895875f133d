"""What a run's streams hold, compared with its ledger: strangers, repeats, and sequences in flight that are nowhere.

`look` reads, takes and purges nothing; the rest is pure. A message that cannot be read is counted and is no contradiction: the
trainer sets it aside as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field

from pipelinerl.audit.replay import Replay, group_number, samples_in, split_id
from pipelinerl.bus.protocol import Bus, LogEntry, group_id_of
from pipelinerl.errors import MessageError
from pipelinerl.messages.sequences import decode_sequence

_QUIET_S = 2.0
"""Without a message for that long: was the rest purged meanwhile?"""

Masks = dict[str, int]
"""Bit i of a group's number: its sample i."""


@dataclass
class StreamLook:
    """What was seen. `durable`: position of the newest checkpoint, up to which messages may be purged."""

    durable: int = 0
    first_position: int = 1
    last_position: int = 0
    below: Masks = field(default_factory=dict)
    """Sequences up to `durable`."""
    above: Masks = field(default_factory=dict)
    messages: int = 0
    repeated: int = 0
    """Messages beyond the first of their sequence: an actor's repetition, which the trainer recognises."""
    unreadable: list[int] = field(default_factory=list)
    """Positions."""
    named: Masks = field(default_factory=dict)
    """Sequences that an unreadable message was published as: nothing else of them will come."""
    prompts: frozenset[str] = frozenset()
    """Groups on PROMPTS."""
    dead_letters: int = 0

    def add(self, position: int, sequence_id: str) -> None:
        group, sample = split_id(sequence_id)
        self.repeated += self.stored(group, sample)
        masks = self.below if position <= self.durable else self.above
        masks[group] = masks.get(group, 0) | 1 << sample

    def add_unreadable(self, position: int, msg_id: str) -> None:
        self.unreadable.append(position)
        group, sample = split_id(msg_id)
        self.named[group] = self.named.get(group, 0) | 1 << sample

    def stored(self, group: str, sample: int) -> bool:
        """Whether a message of the sequence was seen, readable or not."""
        mask = self.below.get(group, 0) | self.above.get(group, 0) | self.named.get(group, 0)
        return bool(mask >> sample & 1)


async def look(bus: Bus, durable: int) -> StreamLook:
    """SEQUENCES up to its present end, and what is on PROMPTS before or after that. Raises `BusError`."""
    prompts_before = await bus.pending_prompts()
    info = await bus.sequences_info()
    seen = StreamLook(durable, info.first_position, info.last_position)
    async for entry in _entries(bus, info.last_position):
        seen.messages += 1
        try:
            sequence_id = decode_sequence(entry.payload, expected_run=bus.run).sequence_id
        except MessageError:
            seen.add_unreadable(entry.position, entry.msg_id)
        else:
            seen.add(entry.position, sequence_id)
    prompts = {group_id_of(prompt.msg_id) for prompt in (*prompts_before, *await bus.pending_prompts())}
    seen.prompts = frozenset(prompts)
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
class Standing:
    """How the run stands, for judging what is nowhere. `at_work`: a trainer may be moving things just now; `ended`: it came
    to its own end; `adopting`: it may not have taken over yet what the one before left."""

    at_work: bool
    ended: bool
    adopting: bool = False


def strangers(seen: StreamLook, replay: Replay, standing: Standing) -> list[str]:
    """Sequences in the log that were never issued, nor could have been: what was reserved may be out there unless the run
    came to its end."""
    reserved = 0 if standing.ended else replay.reserved
    return [
        f"{group}.{sample}"
        for masks in (seen.below, seen.above)
        for group, mask in masks.items()
        for sample in samples_in(mask)
        if not replay.was_issued(group, sample)
        and not (0 <= group_number(group) < reserved and not replay.knows(group))
    ]


def nowhere(seen: StreamLook, replay: Replay, held: Collection[str], standing: Standing) -> tuple[list[str], list[str]]:
    """Sequences in flight that are neither in the log, nor in the newest checkpoint (`held`), nor on PROMPTS: (lost, yet to
    be published).

    The newest group may be on its way to PROMPTS. A trainer that starts publishes each group again of which the streams show
    nothing, so that those only wait for it.
    """
    lost: list[str] = []
    waiting: list[str] = []
    for group, sample in replay.in_flight():
        if group in seen.prompts or seen.stored(group, sample) or f"{group}.{sample}" in held:
            continue
        unpublished = group == replay.newest_group and replay.untouched(group)
        next_start = (standing.adopting or not (standing.at_work or standing.ended)) and group not in seen.above
        (waiting if unpublished or next_start else lost).append(f"{group}.{sample}")
    return lost, waiting


def trained_below(seen: StreamLook, replay: Replay) -> int:
    """Messages that may be purged: of sequences that were trained, up to the newest checkpoint's position."""
    return sum(replay.was_trained(group, sample) for group, mask in seen.below.items() for sample in samples_in(mask))
