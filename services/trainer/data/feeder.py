"""Issue as many prompt groups as the limits on lag and on samples in flight (`IssueBounds`) allow. Tokenise the prompts.

The limits are checked after a new version, a change of the actors, a lost group, the arrival of a sequence, or the start of an
optimizer step. A group enters the ledger before it is published, so no unknown sequence can arrive. Its number is reserved
on disk even earlier, so a restarted trainer knows which groups may have been published.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pipelinerl.audit.journal import Journal
from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.protocol import group_id_of
from pipelinerl.errors import FieldError, MessageError, PayloadTooLarge, UserError
from pipelinerl.messages.sequences import PromptGroup, SamplingParams, encode_group
from pipelinerl.prompts import answer_end, control_tokens, encoded_prompt
from pipelinerl.recipe.fields import ProblemSet, Recipe
from pipelinerl.rl.groups import IssueBounds, IssuedGroups, IssueRoom
from pipelinerl.rl.ledger import SequenceTracker
from pipelinerl.rl.throughput import recipe_lag
from pipelinerl.service.retry import retry_forever
from pipelinerl.tasks.source import Interleaving, Problem, Split, make_source
from pipelinerl.telemetry.tracing import headers_of, trace_of
from services.trainer.data.traces import SequenceTraces
from services.trainer.weight_sync.updater import WeightUpdater

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


log = logging.getLogger(__name__)


async def scan_in_flight(bus: Bus, position: int) -> tuple[int, dict[str, int], set[str]]:
    """Return (start, prompts, arrived): what an earlier incarnation left on the streams. `position`: last message of SEQUENCES
    that it read before its checkpoint. `start`: position after which to read SEQUENCES. `prompts`: newest position of each
    group on PROMPTS. `arrived`: groups with a sequence after `start`."""
    # An actor stores sequences before it acknowledges their group. Groups that have left PROMPTS are thus in the log read next.
    prompts = {group_id_of(msg_id): at for msg_id, at in (await bus.pending_prompts()).items()}
    log_now = await bus.sequences_info()
    end = log_now.last_position
    if end < position:
        log.error("SEQUENCES ends at %d, before the checkpoint's position %d: it was recreated and is read anew", end, position)
        position = 0
    arrived, position = set[str](), max(position, log_now.first_position - 1)
    if position < end:
        async with bus.read_sequences(position + 1) as entries:
            async for entry in entries:
                arrived.add(entry.msg_id.rpartition(".")[0])
                if entry.position >= end:
                    break
    return position, prompts, arrived


MOST_UNUSABLE_IN_A_ROW = 1000
_TOKEN_BYTES = 16
_GROUP_ID = re.compile(r"g([0-9]{8,18})")


@dataclass(frozen=True)
class GroupTokens:
    """Proofs that an actor received a group. The token of a group is a MAC of its id with the secret `key` (32 bytes)."""

    key: bytes
    first_group: int = 0
    """Number of the first group whose token is checked. Earlier groups may have been issued with another key."""

    def of(self, group_id: str) -> bytes:
        return hmac.digest(self.key, group_id.encode(), "sha256")[:_TOKEN_BYTES]

    def prove(self, group_id: str, token: bytes) -> bool:
        if hmac.compare_digest(token, self.of(group_id)):
            return True
        numbered = _GROUP_ID.fullmatch(group_id)  # an actor may send thousands of digits, which int() refuses
        return numbered is not None and int(numbered[1]) < self.first_group


class Feeder:
    """Issues prompt groups. Group i always has problem i, so `next_group` is the position in the problems."""

    def __init__(
        self,
        bus: Bus,
        recipe: Recipe,
        problems: Callable[[int], PromptGroup],
        tracker: SequenceTracker,
        traces: SequenceTraces,
        updater: WeightUpdater,
        journal: Journal,
    ) -> None:
        self._bus, self._recipe, self._problems = bus, recipe, problems
        self.tracker, self._traces, self._updater, self._journal = tracker, traces, updater, journal
        updater.on_change = self.look_again
        self._look = asyncio.Event()
        self._look.set()
        self._unusable_in_a_row = 0
        self.refused: dict[str, str] = {}
        """For each reason why prompts were left out: its first message."""
        self.bounds = IssueBounds(recipe)
        self.next_group = 0
        self.tokens: GroupTokens | None = None
        """Proofs that an actor received a group. `OptimizerLoop.take_over` sets them. If None, no sequence needs a proof."""

    @property
    def room(self) -> IssueRoom:
        updater = self._updater
        return self.bounds.room(max(0, updater.served_version), updater.num_present, self._unlost, self.tracker.num_waiting)

    @property
    def _unlost(self) -> int:
        return self.tracker.issued_groups - self.tracker.lost_groups

    def begin_step(self, wait_share: float, *, for_max_lag: bool) -> None:
        """Record that a step has its batch, for which it waited `wait_share` of the time since the last step. `for_max_lag`:
        whether `max_lag` caused the wait."""
        open_groups = self.tracker.open_groups
        oldest = int(next(iter(open_groups)).removeprefix("g")) if open_groups else self.next_group
        groups = IssuedGroups(self._unlost, len(open_groups), self.next_group, oldest)
        self.bounds.begin_step(self._updater.num_present, groups, wait_share, for_max_lag=for_max_lag)
        self.look_again()

    def take_figures(self) -> dict[str, Any]:
        """Return a step's figures about sequences. `ended_by_length` counts those trained or stale since the last call."""
        tracker, room = self.tracker, self.room
        return {
            "in_flight": room.in_flight,
            "in_flight_limit": room.limit,
            "held_by_max_lag": room.held_by_max_lag,
            "sequences": tracker.ledger.counts,
            "ended_by_length": tracker.take_ended_by_length(),
            "largest_lag": recipe_lag(self._recipe, self._updater.num_present, tracker.longest_tokens, tracker.mean_tokens),
        }

    def look_again(self) -> None:
        """Have `run` compute again how many groups to issue. Call this if the version, the tracker or a limit changes."""
        self._look.set()

    async def run(self) -> None:
        """Issue groups until cancelled. Raises `UserError` if too many consecutive prompts cannot be used."""
        while True:
            await self._look.wait()
            self._look.clear()
            while (allowance := self.room.allowance) > 0:
                self._journal.write({"event": "reserve", "groups": self.next_group + allowance})
                await asyncio.to_thread(self._journal.sync)
                for _ in range(allowance):
                    if (group := self._open_next()) is not None:
                        await self._send(group, group.group_id)

    async def adopt(self, reserved: int, prompts: Mapping[str, int], arrived: set[str], name: str) -> int:
        """Open the groups of an earlier incarnation, up to the last one on a stream. Publish again the open groups that are on
        no stream, and return their number. Call this before reading the log. `reserved`: number below which all groups were
        reserved. `prompts`, `arrived`: results of `scan_in_flight`. `name`: end of the new message ids."""
        named = (_GROUP_ID.fullmatch(group_id) for group_id in (*prompts, *arrived))
        last = max((int(found[1]) for found in named if found and int(found[1]) < reserved), default=-1)
        while self.next_group <= last:
            self._open_next()
        published = 0
        for group_id, known in list(self.tracker.open_groups.items()):
            if group_id in prompts or group_id in arrived:
                self.tracker.published(group_id, prompts.get(group_id, 0))
            else:
                published += 1
                done = tuple(sorted(known.members))
                group = replace(self._group(int(group_id.removeprefix("g"))), done_samples=done)
                await self._send(group, f"{group_id}/{name}")
        return published

    def _open_next(self) -> PromptGroup | None:
        group = self._group(self.next_group)
        self.next_group += 1
        self.tracker.issue(group)
        tokens, context = len(group.prompt_token_ids), self._recipe.model.max_context
        if tokens >= context:
            self._refuse(group, "prompt too long", f"{tokens} prompt tokens, model.max_context {context}")
            return None
        return group

    async def _send(self, group: PromptGroup, message_id: str) -> None:
        try:
            with self._traces.issue(group, message_id) as span:
                payload, headers = encode_group(group), headers_of(trace_of(span))
                position = await retry_forever(
                    lambda: self._bus.publish_prompt(payload, message_id, headers), f"issue group {group.group_id}"
                )
        except PayloadTooLarge as error:
            self._refuse(group, "prompt group too large", str(error))
        except MessageError as error:
            self._refuse(group, "prompt group invalid", str(error))
        else:
            self.tracker.published(group.group_id, position)
            self._unusable_in_a_row = 0

    def _group(self, number: int) -> PromptGroup:
        group_id = f"g{number:08d}"
        return replace(
            self._problems(number),
            run=self._bus.run,
            group_id=group_id,
            seed=group_seed(self._recipe.seed, number) if self._recipe.sampling.seeded else 0,
            issued_version=max(0, self._updater.served_version),
            token=self.tokens.of(group_id) if self.tokens else b"",
        )

    def _refuse(self, group: PromptGroup, reason: str, detail: str) -> None:
        """Leave out a group that cannot be used. Raises `UserError` after too many in a row."""
        log.warning("leaving out problem %d of %s (%s): %s", group.problem_index, group.task, reason, detail)
        self.tracker.refuse(group, reason)
        self.refused.setdefault(reason, f"{reason}: problem {group.problem_index} of {group.task}: {detail}")
        self._unusable_in_a_row += 1
        if self._unusable_in_a_row < MOST_UNUSABLE_IN_A_ROW:
            return
        count = f"the last {MOST_UNUSABLE_IN_A_ROW} prompts"
        if reason == "prompt too long":
            fix = f"{count} did not fit; raise it, or choose a task with shorter prompts"
            raise FieldError("model.max_context", self._recipe.model.max_context, fix)
        fix = "raise max_payload of nats-server, or shorten the problems" if "too large" in reason else "correct the problems"
        raise UserError(f"task {group.task!r}: {count} could not be published; the last error is: {detail}; {fix}")


def group_seed(run_seed: int, group_number: int) -> int:
    """Return the group's seed, from 1 to 2^62 - 1."""
    return int(np.random.SeedSequence((run_seed, group_number)).generate_state(1, np.uint64)[0] >> 2) or 1


def training_problems(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Callable[[int], PromptGroup]:
    """Return a function that returns the training problem with a given number, encoded by `encode`. Runs with the same seed
    have the same problems. Raises `FieldError` or `UserError` if a task cannot be used."""
    shares = list(recipe.mixture.values())
    sources = [make_source(share.task, recipe.seed) for share in shares]
    interleaving = Interleaving([share.weight for share in shares])

    def problem(number: int) -> PromptGroup:
        position, index = interleaving.place(number)
        return encode(recipe, shares[position], index, sources[position].problem(Split.TRAIN, index), tokenizer)

    return problem


def heldout_problems(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[PromptGroup]:
    """Return the held-out problems of the tasks and of `evaluation.sets`. Accuracy leaves out those with too long a prompt."""
    found = list[PromptGroup]()
    for name, share in recipe.problem_sets.items():
        source = make_source(share.task, recipe.seed, is_trained_on=name in recipe.mixture)
        for index in range(source.num_heldout):
            found.append(encode(recipe, share, index, source.problem(Split.HELDOUT, index), tokenizer))
    return found


def encode(recipe: Recipe, share: ProblemSet, index: int, problem: Problem, tokenizer: PreTrainedTokenizerBase) -> PromptGroup:
    """Return a problem as a prompt group that still lacks run, id, seed and version. `index`: position in the task's split. An
    episode's prompt has no tokens, because the environment makes the prompt. Raises `FieldError` if a chat template is needed
    and the tokenizer has none."""
    config, sampling = share.task, recipe.sampling
    in_chat = config.prompt_style == "chat" or (config.is_episodic and tokenizer.chat_template)
    end = answer_end(tokenizer) if in_chat else None
    text, token_ids = problem.question, list[int]()
    if not config.is_episodic:
        text, token_ids = encoded_prompt(problem, config, tokenizer, control_tokens(tokenizer))
    return PromptGroup(
        run="",
        group_id="",
        problem_index=index,
        task=share.name,
        prompt_token_ids=np.array(token_ids, dtype=np.int32),
        prompt_text=text,
        reference_json=problem.reference_json,
        num_samples=sampling.group_size,
        sampling=SamplingParams(
            sampling.temperature,
            max(1, min(share.max_tokens, recipe.model.max_context - len(token_ids))),  # also used by length penalties
            stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *(() if end is None else (end,))))),
            stop=tuple(sampling.stop),
        ),
        seed=0,
        issued_version=0,
        episodic=config.is_episodic,
    )
