"""From the SEQUENCES log to batches of complete groups.

`Intake.run` consumes the log from a position, checks every sequence and produces ready groups; it waits for actors.
`take_batch` consumes ready groups, drops what is too old for the version that asks, and waits until a batch is full; the
feeder, by issuing lost groups again, unblocks it. Every sequence that leaves here without being trained is closed in the
tracker. What has arrived and has no outcome yet can be taken along into a checkpoint (`held`, `restore`).

`StreamUpkeep`, every few seconds, purges from SEQUENCES what nobody will read again, has a checkpoint written where the log
fills up before one is due, and looks for prompt groups that nobody works on: taken off PROMPTS although samples of them never
came. What it ends goes through `Intake`, so that the feeder issues another group.

`LossStreak` counts groups lost one after another: when it goes on for too long, nothing will ever be trained, and the run says
so. What was stale when its turn came does not count: newer versions end that by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.protocol import LogEntry, StreamInfo, group_id_of
from pipelinerl.errors import BusError, MessageError, ServiceError, UserError
from pipelinerl.messages.sequences import Sequence, decode_sequence, sequence_id_in
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.feeding import FeederBound
from pipelinerl.rl.grouping import CompletedGroup, all_equal, group_advantages, smallest_group, untrainable_reason
from pipelinerl.rl.lag import FIRST_INCARNATION, Lineage, stale_reason
from pipelinerl.rl.ledger import Outcome
from pipelinerl.service.retry import retry_forever
from pipelinerl.telemetry.metrics import short_reason
from services.trainer.data.tracker import SequenceTraces, SequenceTracker
from services.trainer.learn.batch import TrainingGroup

log = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0
LOST_AFTER_S = 60.0
GROUP_LOST = "prompt group lost"
FULL_SHARE = 0.5
"""Of a log's limit: fuller than this, it should become shorter."""


STEPS_IN_A_ROW, FEWEST_IN_A_ROW = 10, 200
"""Without `trainer.give_up_after_groups`: so many optimizer steps' worth of groups, and so many groups at least."""
_FIXES = {
    "equal rewards": "turn algorithm.filter_equal_rewards off, start from a better policy, or choose easier problems",
    "reward_": "read in the trainer's log what the reward function said, and correct it or choose another reward.scorer",
    "verifier_refused": "look at the verifier's log",
    "engine": "look at the actors' logs",
    "too_large": "raise max_payload of nats-server, or lower sampling.max_tokens",
    "prompt_too_long": "give trainer and actors the same model.max_context",
    "longer than the context": "give trainer and actors the same model.max_context",
    "token outside the vocabulary": "give trainer and actors the same model and tokenizer",
    "prompt group lost": "look at the actors' logs: they could not read the prompts, or somebody purges the streams",
    "unreadable": "run trainer and actors of the same release",
}
"""What a user can do about a reason of the ledger (docs/errors.md), by its beginning."""
_ANY_FIX = "read the warnings in the trainer's log"


def most_lost_in_a_row(recipe: Recipe) -> int:
    """Groups, after which the run is given up."""
    groups_per_step = recipe.trainer.batch_size // recipe.sampling.group_size
    return recipe.trainer.give_up_after_groups or max(STEPS_IN_A_ROW * groups_per_step, FEWEST_IN_A_ROW)


class LossStreak:
    """`limit`: groups in a row that may be lost."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_groups = 0
        self._reasons: Counter[str] = Counter()

    def good(self) -> None:
        """A group arrived that can be trained on."""
        self._num_groups = 0
        self._reasons.clear()

    def lost(self, reasons: Iterable[str]) -> None:
        """A group arrived of which nothing can be trained on. `reasons`: as the ledger counts them."""
        self._num_groups += 1
        self._reasons.update(reasons)

    @property
    def verdict(self) -> str:
        """What to tell the user when the limit is reached; "" before."""
        if self._num_groups < self._limit:
            return ""
        (reason, count), *_ = self._reasons.most_common(1) or [("unknown", 0)]
        fix = next((fix for beginning, fix in _FIXES.items() if reason.startswith(beginning)), _ANY_FIX)
        return (
            f"the last {self._num_groups} prompt groups were lost and none between them could be trained on; most "
            f"frequent reason: {reason} ({count} of {self._reasons.total()}). To repair it, {fix}. A run that "
            "needs more patience sets trainer.give_up_after_groups"
        )


@dataclass(frozen=True)
class HeldSequences:
    """All that has arrived and has no outcome yet, by how far it has come. The objects are never changed."""

    taken: tuple[TrainingGroup, ...] = ()
    """For the next step, or the phase under way."""
    ready: tuple[CompletedGroup, ...] = ()
    open: tuple[Sequence, ...] = ()
    """Of groups that are not complete; failed ones too."""


class Intake:
    """`on_loss` is called when a group was lost, so that the feeder looks again."""

    def __init__(
        self,
        bus: Bus,
        recipe: Recipe,
        tracker: SequenceTracker,
        bound: FeederBound,
        *,
        vocab_size: int,
        on_loss: Callable[[], None],
        lineage: Lineage = FIRST_INCARNATION,
        traces: SequenceTraces | None = None,
    ) -> None:
        self._bus, self._recipe, self._tracker, self._bound = bus, recipe, tracker, bound
        self._lineage, self._traces = lineage, traces or SequenceTraces()
        self._vocab_size, self._on_loss = vocab_size, on_loss
        self._ready: deque[CompletedGroup] = deque()
        self._changed = asyncio.Condition()
        self._shuffler = random.Random(recipe.seed)
        self._phase: list[TrainingGroup] = []
        """Taken for the step or phase that comes next."""
        self._handed_out: list[TrainingGroup] = []
        """What `take_batch` gave last."""
        self.position = 0
        """Of the last message read; the next start reads from the one after."""
        self._streak = LossStreak(most_lost_in_a_row(recipe))
        self.tokens_arrived = 0
        self.tokens_arrived_here = 0
        """Since this start, where `tokens_arrived` goes on from the checkpoint's: a counter of a process begins at 0."""
        self.bad_messages = 0

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    async def run(self) -> None:
        """Runs until cancelled. Raises `UserError` when one group after another is lost."""
        async with AsyncExitStack() as stack:
            entries = await retry_forever(
                lambda: stack.enter_async_context(self._bus.read_sequences(self.position + 1)), "read the sequences"
            )
            async for entry in entries:
                self.position = entry.position
                sequence = self._read(entry)
                if sequence is not None:
                    if self._tracker.ledger.is_open(sequence.sequence_id):
                        self._traces.received(entry, sequence)
                    await self._add(sequence)

    async def take_batch(self, version: int) -> list[TrainingGroup]:
        """Exactly `groups_per_step` groups, fresh enough for `version`; in conventional mode a shuffled phase's share."""
        num_groups, grown = self._bound.groups_before_step(version), False
        while len(self._phase) < num_groups:
            self._phase.append(await self._take_group(version))
            grown = True
        if grown and self._recipe.mode == "conventional":
            self._shuffler.shuffle(self._phase)
        self._handed_out = self._phase[: self._bound.groups_per_step]
        self._phase = self._phase[self._bound.groups_per_step :]
        return self._handed_out

    def held(self) -> HeldSequences:
        """Between two steps: what came of the last batch must be in the tracker."""
        is_open = self._tracker.ledger.is_open
        handed_out = [group for group in self._handed_out if is_open(group.sequences[0].sequence_id)]
        return HeldSequences((*handed_out, *self._phase), tuple(self._ready), self._tracker.groups.held())

    def restore(self, held: HeldSequences, position: int) -> None:
        """Takes over what another intake held, whose tracker is ours now; the log is read from after `position`."""
        self._phase, self.position = list(held.taken), position
        self._ready.extend(held.ready)
        for sequence in held.open:
            completed = self._tracker.groups.add(sequence)
            assert completed is None, f"group {sequence.group_id} was held as incomplete"

    async def fail_missing(self, group_id: str, failure: str) -> None:
        """Ends the samples of an open group that did not come and never will; its others are trained where they can."""
        for sequence in self._tracker.missing(group_id, self._bus.run, failure):
            await self._add(sequence)

    def _read(self, entry: LogEntry) -> Sequence | None:
        """None for what is not ours to count: of no sample that is still to come."""
        try:
            sequence = decode_sequence(entry.payload, expected_run=self._bus.run)
        except MessageError as error:
            names = (entry.msg_id, sequence_id_in(entry.payload, run=self._bus.run))
            return self._set_aside(f"message {entry.position} of the sequence log", names, f"unreadable: {error}")
        reason = untrainable_reason(sequence, self._recipe.model.max_context, self._vocab_size)
        return replace(sequence, failure=reason) if reason else sequence

    def _set_aside(self, what: str, sequence_ids: tuple[str, ...], failure: str) -> Sequence | None:
        """Counts a bad message, and returns what ends the sample that one of the ids names, where it is still to come:
        it was published as this one, and nothing else will be."""
        self.bad_messages += 1
        log.error("%s is set aside: %s", what, failure)
        found = (self._tracker.missing_sample(sequence_id, self._bus.run, failure) for sequence_id in sequence_ids)
        return next((sequence for sequence in found if sequence is not None), None)

    async def _add(self, sequence: Sequence) -> None:
        try:
            group = self._tracker.arrive(sequence)
        except MessageError as error:
            name = sequence.sequence_id
            failed = self._set_aside(f"sequence {name}", (name,), f"contradicts its group: {error}")
            if failed is None:
                return
            sequence, group = failed, self._tracker.arrive(failed)
        self.tokens_arrived += sequence.num_completion_tokens
        self.tokens_arrived_here += sequence.num_completion_tokens
        if sequence.failure:
            log.warning("sequence %s failed: %s", sequence.sequence_id, sequence.failure)
        if group is not None and self._keep(group):
            async with self._changed:
                self._ready.append(group)
                self._changed.notify_all()

    def _keep(self, group: CompletedGroup) -> bool:
        """False for a group that was lost. Raises `UserError` when too many were, with no good one between them."""
        algorithm = self._recipe.algorithm
        if len(group.sequences) < smallest_group(algorithm.advantage):
            self._lose(group.sequences, Outcome.FAILED, "group incomplete")
            self._streak.lost(short_reason(sequence.failure) for sequence in group.failed)
        elif algorithm.filter_equal_rewards and all_equal(group.rewards):
            self._lose(group.sequences, Outcome.DROPPED_FILTERED, "equal rewards")
            self._streak.lost(["equal rewards"])
        else:
            self._streak.good()
            return True
        if self._streak.verdict:
            raise UserError(self._streak.verdict)
        return False

    async def _take_group(self, version: int) -> TrainingGroup:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._ready)
                group = self._fresh(self._ready.popleft(), version)
            if group is not None:
                return group

    def _fresh(self, group: CompletedGroup, version: int) -> TrainingGroup | None:
        """The group without its stale members; None when nothing of it is left."""
        algorithm = self._recipe.algorithm
        advantages = group_advantages(group.rewards, algorithm.advantage, algorithm.normalize_std)
        kept = []
        for position, sequence in enumerate(group.sequences):
            reason = stale_reason(sequence.spans, version, algorithm.max_lag, self._lineage)
            if reason is None:
                kept.append(position)
            else:
                self._tracker.close([sequence], Outcome.DROPPED_STALE, reason.value)
        if not kept:
            self._lose((), Outcome.DROPPED_STALE, "")
            return None
        return TrainingGroup(tuple(group.sequences[position] for position in kept), advantages[kept])

    def _lose(self, sequences: tuple[Sequence, ...], outcome: Outcome, reason: str) -> None:
        self._tracker.lose(sequences, outcome, reason)
        self._on_loss()


class StreamUpkeep:
    """Keeps the run's streams short and notices what was lost on them. `on_look` hears what is seen of `prompts` and
    `sequences`.

    `checkpoint` writes one; `readable_from(filling)`: lowest position of the log that may be read again, by the newest
    checkpoint alone where the log is `filling` up.

    An actor acknowledges a group when all its sequences are stored, and an acknowledged group leaves the queue. So once
    a group has left it, and the log has been read up to where it ended at that time, what did not come never will.
    `lost_after_s` is on top of that. A group that was handed over is on the queue again, at another position.
    """

    def __init__(
        self,
        bus: Bus,
        tracker: SequenceTracker,
        intake: Intake,
        readable_from: Callable[[bool], int],
        checkpoint: Callable[[], Awaitable[None]],
        *,
        on_look: Callable[[str, StreamInfo], None] = lambda stream, info: None,
        every_s: float = LOOK_EVERY_S,
        lost_after_s: float = LOST_AFTER_S,
    ) -> None:
        self._bus, self._tracker, self._intake = bus, tracker, intake
        self._readable_from, self._checkpoint = readable_from, checkpoint
        self._on_look, self._every_s, self._lost_after_s = on_look, every_s, lost_after_s
        self._purged_below = 1
        self._gone: dict[str, tuple[float, int]] = {}
        """When a group was first missed, and the end of the log then."""

    async def run(self) -> None:
        """Runs until cancelled. Raises `UserError` where `Intake` does."""
        while True:
            try:
                prompts, sequences = await self._bus.prompts_info(), await self._bus.sequences_info()
                self._on_look("prompts", prompts)
                self._on_look("sequences", sequences)
                await self._purge(sequences)
                await self._look_for_lost_groups(prompts)
            except BusError as error:
                log.info("the streams are looked after later: %s", error)
            await asyncio.sleep(self._every_s)

    async def _purge(self, sequences: StreamInfo) -> None:
        limits = self._bus.limits
        bytes_share = sequences.bytes / limits.sequences_max_bytes
        messages_share = sequences.messages / limits.sequences_max_messages
        filling = max(bytes_share, messages_share) > FULL_SHARE  # on its way to refuse the next sequence
        if filling:
            try:
                await self._checkpoint()
            except ServiceError as error:
                log.error("SEQUENCES is more than half full, and stays so: %s", error)
        readable_from = self._readable_from(filling)
        if readable_from > self._purged_below:
            await self._bus.purge_sequences(readable_from)
            self._purged_below = readable_from

    async def _look_for_lost_groups(self, prompts: StreamInfo) -> None:
        gone = self._tracker.gone_from_queue(prompts.first_position)
        if gone:
            still_there = {group_id_of(msg_id): at for msg_id, at in (await self._bus.pending_prompts()).items()}
            for group_id in set(gone) & set(still_there):
                self._tracker.published(group_id, still_there[group_id])
            gone = tuple(group_id for group_id in gone if group_id not in still_there)
        log_end = (await self._bus.sequences_info()).last_position if gone else 0
        now_s = asyncio.get_running_loop().time()
        self._gone = {group_id: self._gone.get(group_id, (now_s, log_end)) for group_id in gone}
        for group_id, (since_s, end) in self._gone.items():
            if now_s - since_s >= self._lost_after_s and self._intake.position >= end:
                log.error("group %s left the queue, and not all of its sequences came", group_id)
                await self._intake.fail_missing(group_id, GROUP_LOST)
