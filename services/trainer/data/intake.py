"""Turn the SEQUENCES log into batches of complete groups.

`Intake.run` reads the log, checks every sequence and produces ready groups. `take_batch` drops sequences that are too old for
the requested version, and waits until a batch is full. The feeder replaces lost groups. After too many consecutive lost groups,
the run ends with an error. Stale groups do not count, because newer versions sample the groups that replace them.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.protocol import LogEntry
from pipelinerl.errors import FieldError, MessageError, UserError
from pipelinerl.messages.sequences import FinishReason, Sequence, decode_sequence, remains_of_sequence
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl import groups
from pipelinerl.rl.ledger import SKIPPED, Outcome, SequenceTracker
from pipelinerl.service.logs import AGGREGATED
from pipelinerl.service.retry import retry_forever
from pipelinerl.telemetry.metrics import MOST_REASONS, short_reason
from services.trainer.data.feeder import Feeder
from services.trainer.data.traces import SequenceTraces
from services.trainer.learn.batch import TrainingGroup

log = logging.getLogger(__name__)

STEPS_IN_A_ROW, FEWEST_IN_A_ROW = 10, 200
"""Default of `trainer.give_up_after_groups`: the number of groups in `STEPS_IN_A_ROW` steps, but at least `FEWEST_IN_A_ROW`."""
MOST_IN_VAIN = 16
"""The run ends if a task's first `MOST_IN_VAIN + sampling.group_size` rewards all time out. This applies neither to tasks with
a judge nor to a trainer that resumed from a checkpoint."""
_FIXES = {
    "equal rewards": "turn algorithm.filter_equal_rewards off, start from a better policy, or choose easier problems",
    "reward_": "correct the reward function, or choose another reward.scorer; the trainer's log has each error",
    "episode_timeout": "raise task.episode_timeout_s or task.answer_timeout_s, or make the environment faster",
    "episode_": "correct the environment or agent; the verifier's log has its output",
    "no_turns": "have the environment or agent request at least one turn from its endpoint (OPENAI_BASE_URL)",
    "verifier_refused": "look at the verifier's log",
    "engine": "look at the actors' logs",
    "too_large": "raise max_payload of nats-server, or lower sampling.max_tokens",
    "prompt_too_long": "give trainer and actors the same model.max_context",
    "longer than the context": "give trainer and actors the same model.max_context",
    "token outside the vocabulary": "give trainer and actors the same model and tokenizer",
    "prompt group lost": "look in the actors' logs for unreadable prompts, and check whether anybody purges the streams",
    "actor_quarantined": "check the actors that the trainer's log names, or raise weights.verify_logprobs",
    "forged": "run trainer and actors of the same release. If you already do, an actor forges answers: check who has its login",
    "unreadable": "run trainer and actors of the same release",
}
"""Advice, by the beginning of the reason why groups were lost (docs/errors.md lists the reasons)."""


def lost_groups_message(num_groups: int, reasons: Counter[str], failures: Mapping[str, str]) -> str:
    """Return the error message after too many consecutive lost groups. `failures`: an example message by reason."""
    (reason, count), *_ = reasons.most_common(1) or [("unknown", 0)]
    example = f", the first: {failures[reason].partition(': ')[2]!r}" if reason in failures else ""
    fixes = (fix for beginning, fix in _FIXES.items() if reason.startswith(beginning))
    fix = next(fixes, "read the warnings in the trainer's log")
    return (
        f"the last {num_groups} prompt groups were all lost, so nothing could be trained on; most "
        f"frequent reason: {reason} ({count} of {reasons.total()}){example}. What to do: {fix}. To let "
        "a run continue for longer in this state, raise trainer.give_up_after_groups"
    )


@dataclass(frozen=True)
class HeldSequences:
    """All sequences that have arrived but have no outcome yet, by stage. They are not copied, because nothing modifies them."""

    taken: tuple[TrainingGroup, ...] = ()
    """Groups for the next step, or in conventional mode for the current phase."""
    ready: tuple[tuple[Sequence, ...], ...] = ()
    """Trainable samples of each complete group that waits for a step."""
    open: tuple[Sequence, ...] = ()
    """Samples of incomplete groups, including failed ones."""


class Intake:
    """Reads sequences and builds batches. Token ids must be below `vocab_size`."""

    def __init__(
        self,
        bus: Bus,
        recipe: Recipe,
        tracker: SequenceTracker,
        traces: SequenceTraces,
        feeder: Feeder,
        *,
        vocab_size: int,
        lineage: groups.Lineage = groups.FIRST_INCARNATION,
    ) -> None:
        self._bus, self._recipe, self._feeder = bus, recipe, feeder
        self._tracker, self.traces = tracker, traces
        self._vocab_size, self._lineage = vocab_size, lineage
        self._masked = {name for name, share in recipe.mixture.items() if share.reward.truncated == "mask"}
        """Tasks whose truncated completions are left out of the policy loss."""
        self.ready: deque[tuple[Sequence, ...]] = deque()
        """Trainable samples of each complete group that waits for a step."""
        self._changed = asyncio.Condition()
        self._phase: list[TrainingGroup] = []
        self._handed_out: list[TrainingGroup] = []  # the last batch
        self.position = 0
        """Position of the last message read. A checkpoint stores it, and a restarted trainer reads on from there."""
        self._lost_in_a_row = 0
        self._lost_reasons: Counter[str] = Counter()
        self.tokens_arrived = 0
        self.tokens_arrived_here = 0
        """Tokens that arrived since this trainer started. `tokens_arrived` begins with the checkpoint's number."""
        self.bad_messages = 0
        self.failures: dict[str, str] = {}
        """For each short reason of a failure: the full reason of the first such failure."""
        # For each task without a judge, the number of reward timeouts before its first reward.
        self._in_vain = {name: 0 for name, share in recipe.mixture.items() if share.reward.judge is None}
        self.quarantine = Quarantine(recipe.weights.verify_logprobs)

    async def run(self) -> None:
        """Read the stream SEQUENCES until cancelled. Raises `UserError` if too many consecutive groups are lost."""
        async with AsyncExitStack() as stack:
            entries = await retry_forever(
                lambda: stack.enter_async_context(self._bus.read_sequences(self.position + 1)), "read the sequences"
            )
            async for entry in entries:
                self.position = entry.position
                sequence = self._read(entry)
                if sequence is not None:
                    if self._tracker.ledger.is_open(sequence.sequence_id):
                        self.traces.received(entry, sequence)
                    await self._add(sequence)

    async def take_batch(self, version: int) -> list[TrainingGroup]:
        """Wait until the step from `version` (in conventional mode, its phase) has all groups, and return the step's groups."""
        num_groups, grown = groups.groups_before_step(self._recipe, version), False
        while len(self._phase) < num_groups:
            async with self._changed:
                await self._changed.wait_for(lambda: self.ready)
            if (group := self._fresh(self.ready.popleft(), version)) is None:
                self._feeder.look_again()
                continue
            self._phase.append(group)
            grown = True
        if grown and self._recipe.mode == "conventional":
            random.Random(f"{self._recipe.seed}/{version}").shuffle(self._phase)  # the same order after a restart
        per_step = groups.groups_per_step(self._recipe)
        self._handed_out, self._phase = self._phase[:per_step], self._phase[per_step:]
        return self._handed_out

    def close(self, batch: list[TrainingGroup], version: int, *, skipped: bool) -> None:
        """Close the sequences of the step that produced `version`: as trained, or as failed if the step was skipped."""
        for group in batch:
            if skipped:
                self._tracker.close(group.sequences, Outcome.FAILED, SKIPPED)
            else:
                self._tracker.close(group.sequences, Outcome.TRAINED, version=version)
        self._tracker.end_step(version)

    def held(self) -> HeldSequences:
        """Return the sequences that have arrived but have no outcome yet. Call this between two steps, after `close`."""
        is_open = self._tracker.ledger.is_open
        handed_out = [group for group in self._handed_out if is_open(group.sequences[0].sequence_id)]
        return HeldSequences((*handed_out, *self._phase), tuple(self.ready), self._tracker.held())

    def restore(self, held: HeldSequences, position: int) -> None:
        """Take over the sequences that an earlier intake held when it had read up to `position`. Restore the tracker first."""
        self._in_vain.clear()  # in a resumed run, timeouts may come from a passing outage, which must not end it
        self._phase, self.position = list(held.taken), position
        self.ready.extend(held.ready)
        for sequence in held.open:
            completed = self._tracker.arrive(sequence)
            assert not completed, f"group {sequence.group_id} was held as incomplete"

    async def fail_missing(self, group_id: str, failure: str) -> None:
        """Record the missing samples of an open group as failed. The samples that have arrived are trained on if possible."""
        for sequence in self._tracker.missing(group_id, self._bus.run, failure):
            await self._add(sequence)

    def _read(self, entry: LogEntry) -> Sequence | None:
        """Return the entry's sequence. If it is unusable, return a failed one for the pending sample that it names; None if it
        names none."""
        try:
            sequence = decode_sequence(entry.payload, expected_run=self._bus.run)
        except MessageError as error:
            named, token = remains_of_sequence(entry.payload, run=self._bus.run)
            names = (entry.msg_id, named if self._is_proved(named.rpartition(".")[0], token) else "")
            return self._set_aside(f"message {entry.position} of the sequence log", names, f"unreadable: {error}")
        if not self._is_proved(sequence.group_id, sequence.group_token):
            what = f"actor {sequence.actor!r:.100} did not receive group {sequence.group_id!r:.100}"
            # The sample with this message's id fails, because NATS would drop its true sequence as a duplicate.
            return self._set_aside(f"message {entry.position} of the sequence log", (entry.msg_id,), f"forged: {what}")
        reason = groups.untrainable_reason(sequence, self._recipe.model.max_context, self._vocab_size)
        reason = reason or ("" if sequence.failure else self.quarantine.failure_of(sequence))
        return replace(sequence, failure=reason) if reason else sequence

    def _is_proved(self, group_id: str, token: bytes) -> bool:
        tokens = self._feeder.tokens
        return tokens is None or tokens.prove(group_id, token)

    def _set_aside(self, what: str, sequence_ids: tuple[str, ...], failure: str) -> Sequence | None:
        """Count a bad message. Return a failed sequence for the first of `sequence_ids` that is a pending sample's, or None."""
        self.bad_messages += 1
        log.error("cannot use %s: %s", what, failure, extra=AGGREGATED)
        for sequence_id in sequence_ids:
            for sequence in self._tracker.missing(sequence_id.rpartition(".")[0], self._bus.run, failure):
                if sequence.sequence_id == sequence_id:
                    return sequence
        return None

    async def _add(self, sequence: Sequence) -> None:
        try:
            samples = self._tracker.arrive(sequence)
        except MessageError as error:
            name = sequence.sequence_id
            failed = self._set_aside(f"sequence {name}", (name,), f"contradicts its group: {error}")
            if failed is None:
                return
            sequence, samples = failed, self._tracker.arrive(failed)
        self.tokens_arrived += sequence.num_episode_tokens
        self.tokens_arrived_here += sequence.num_episode_tokens
        if sequence.failure:
            log.warning("sequence %s failed: %s", sequence.sequence_id, sequence.failure)
            if len(self.failures) < MOST_REASONS:
                self.failures.setdefault(short_reason(sequence.failure), sequence.failure)
        self._count_timeout(sequence)
        if samples and (good := self._good(samples)):
            async with self._changed:
                self.ready.append(good)
                self._changed.notify_all()
        self._feeder.look_again()

    def _count_timeout(self, sequence: Sequence) -> None:
        """Count a reward's timeout, and raise `FieldError` if the first rewards of the sequence's task have all timed out."""
        if not sequence.failure:
            self._in_vain.pop(sequence.task, None)
        elif sequence.failure.startswith("reward_timeout") and sequence.task in self._in_vain:
            self._in_vain[sequence.task] += 1
            if self._in_vain[sequence.task] >= (most := MOST_IN_VAIN + self._recipe.sampling.group_size):
                place, share = next((at, one) for at, one in self._recipe.tasks_by_place.items() if one.name == sequence.task)
                slow = f"the first {most} calls of {share.reward.scorer!r} for {share.name} took longer; make it faster"
                raise FieldError(f"{place}reward.timeout_s", share.reward.timeout_s, f"{slow}, or raise this limit")

    def _good(self, samples: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
        """Return a complete group's trainable samples; empty if the group is lost. Raises `UserError` after too many lost
        groups in a row."""
        algorithm, good = self._recipe.algorithm, tuple(sample for sample in samples if not sample.failure)
        if len(good) < groups.smallest_group(algorithm.advantage):
            self._tracker.lose(good, Outcome.FAILED, "group incomplete")
            self._lost_reasons.update(short_reason(sample.failure) for sample in samples if sample.failure)
        elif algorithm.filter_equal_rewards and groups.equally_right(good):
            self._tracker.lose(good, Outcome.DROPPED_FILTERED, "equal rewards")
            self._lost_reasons["equal rewards"] += 1
        else:
            self._lost_in_a_row = 0
            self._lost_reasons.clear()
            return good
        self._lost_in_a_row += 1
        by_steps = max(STEPS_IN_A_ROW * groups.groups_per_step(self._recipe), FEWEST_IN_A_ROW)
        if self._lost_in_a_row >= (self._recipe.trainer.give_up_after_groups or by_steps):
            raise UserError(lost_groups_message(self._lost_in_a_row, self._lost_reasons, self.failures))
        return ()

    def _fresh(self, sequences: tuple[Sequence, ...], version: int) -> TrainingGroup | None:
        """Close samples that are stale or of quarantined actors. Return the others as a group; None if too few are left."""
        algorithm = self._recipe.algorithm
        if refused := [sequence for sequence in sequences if self.quarantine.failure_of(sequence)]:
            self._tracker.close(refused, Outcome.FAILED, QUARANTINED)
            sequences = tuple(sequence for sequence in sequences if sequence not in refused)
            if len(sequences) < groups.smallest_group(algorithm.advantage):
                self._tracker.lose(sequences, Outcome.FAILED, "group incomplete")
                return None
        rewards = [sequence.reward for sequence in sequences]
        advantages = groups.group_advantages(rewards, algorithm.advantage, algorithm.normalize_std)
        if sequences[0].task in self._masked:  # a truncated sequence counts in the baseline, but gets no gradient
            advantages[[sequence.finish_reason is FinishReason.LENGTH for sequence in sequences]] = 0.0
        kept = []
        for index, sequence in enumerate(sequences):
            spans = tuple(span for branch in sequence.all_branches for span in branch.spans)
            reason = groups.stale_reason(spans, version, algorithm, self._lineage)
            if reason is None:
                kept.append(index)
            else:
                self._tracker.close([sequence], Outcome.DROPPED_STALE, reason.value)
        if not kept:
            self._tracker.lose((), Outcome.DROPPED_STALE, "")
            return None
        return TrainingGroup(tuple(sequences[index] for index in kept), advantages[kept])


FEWEST_TOKENS = 256
"""An actor is checked once this many of its tokens of lag 0 have been counted since its last check."""
QUARANTINED = "actor_quarantined"


class Quarantine:
    """Actors whose log μ does not match the version that they claim. Their sequences fail until the trainer restarts.

    Only tokens of lag 0 are checked: the trainer's current version sampled them, so its log π must equal log μ up to rounding.
    `share`: allowed share of an actor's tokens of lag 0 whose log μ is off by more than `meter.bound_of`; 0 = no quarantine.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._seen, self._off = Counter[str](), Counter[str]()
        self.actors: set[str] = set()

    def failure_of(self, sequence: Sequence) -> str:
        """Return why the sequence must not be trained on; empty if its actor is not in quarantine."""
        return f"{QUARANTINED}: {sequence.actor}" if sequence.actor in self.actors else ""

    def judge(self, tokens: Mapping[str, tuple[int, int]]) -> None:
        """Count one step's tokens of lag 0, and quarantine an actor if too many are beyond the bound. `tokens`: for each actor,
        the number of these tokens, and the number beyond the bound (the figure `LAG_0_TOKENS`)."""
        for actor, (seen, off) in tokens.items():
            self._seen[actor] += seen
            self._off[actor] += off
            if self._seen[actor] >= FEWEST_TOKENS:
                share = self._off.pop(actor, 0) / self._seen.pop(actor)
                if 0 < self._share < share and actor not in self.actors:
                    self.actors.add(actor)
                    log.error(
                        f"actor {actor!r:.100} is quarantined: {share:.0%} of its tokens of lag 0 do not have the "
                        "log-probability that their version gives them; its sequences fail until the trainer restarts"
                    )
