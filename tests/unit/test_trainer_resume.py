"""A trainer that dies and starts again: what it takes over from its checkpoint and from the streams, and what it never does.

The trainer here is its tracker, feeder and intake over an in-memory bus, with the real files; weights are a version number.
"""

import asyncio
import json
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from pipelinerl.audit.audit import audit_files
from pipelinerl.audit.journal import JOURNAL, Journal, read_events, reserved_groups
from pipelinerl.commands.replay import rollback
from pipelinerl.errors import FieldError, ServiceError, UserError
from pipelinerl.local.ending import report_of
from pipelinerl.messages.sequences import PromptGroup, VersionSpan, decode_group, encode_group, encode_sequence
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.groups import Lineage
from pipelinerl.rl.ledger import Outcome, SequenceTracker
from pipelinerl.run_dir import RunDir, recipe_changes_of
from pipelinerl.v1 import sequence_pb2
from services.trainer.checkpoint.checkpointer import WriteTensors, WrittenCheckpoint, write_checkpoint
from services.trainer.checkpoint.files import replacing, tidy
from services.trainer.checkpoint.run_state import (
    find_start,
    journaled_state,
    load_run_state,
    note_training_began,
    read_lineage,
    write_lineage,
)
from services.trainer.data.intake import HeldSequences
from services.trainer.learn.batch import TrainingGroup
from services.trainer.reporting.page import about
from tests.support.memory_bus import MemoryBus
from tests.unit.builders import RUN, make_episode, make_group, make_recipe, make_sequence
from tests.unit.trainer_fakes import FakePolicy, make_run, make_run_state, tensors_of

RECIPE = make_recipe(record=True, trainer={"steps": 6, "batch_size": 4, "tokens_per_microbatch": 64}, algorithm={"max_lag": 2})
PHASES = make_recipe(mode="conventional", algorithm={"max_lag": None, "conventional_g": 2})
"""Four steps in two phases of two, of two groups each."""


class Life:
    """One incarnation of the trainer, from its start to its death; its actors are played by the test."""

    def __init__(self, run_dir: Path, bus: MemoryBus, recipe: Recipe) -> None:
        self.run_dir, self.bus, self.stack = run_dir, bus, ExitStack()
        self.start = find_start(run_dir, RUN, recipe)
        write_lineage(run_dir, RUN, self.start.lineage, recipe, self.start.changes)
        self.policy = FakePolicy(run_dir)
        self.run = make_run(self.stack, run_dir, bus, recipe, self.start, policy=self.policy)
        self.tracker, self.feeder, self.intake = self.run.tracker, self.run.feeder, self.run.intake
        self.loop, self.journal = self.run.loop, self.run.loop.journal
        self.run.updater.served_version = self.loop.version
        self.tasks: list[asyncio.Task[None]] = []
        self.published_again = 0

    @property
    def version(self) -> int:
        return self.loop.version

    async def begin(self) -> None:
        self.published_again = await self.loop.take_over()
        self.tasks = [asyncio.create_task(self.feeder.run()), asyncio.create_task(self.intake.run())]

    async def idle(self) -> None:
        end = (await self.bus.sequences_info()).last_position
        self.feeder.look_again()
        while self.feeder.room.allowance > 0 or self.intake.position < end:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)

    async def step(self) -> list[str]:
        taking = asyncio.create_task(self.intake.take_batch(self.version))
        for _ in range(50):  # all that it may need is here already
            await asyncio.sleep(0)
        if not taking.done():
            taking.cancel()
            with suppress(asyncio.CancelledError):
                await taking
            return []
        self.feeder.begin_step(wait_share=0.0, for_max_lag=False)
        self.loop.version += 1
        self.intake.close(taking.result(), self.version, skipped=False)
        self.policy.version = self.run.updater.served_version = self.version
        self.feeder.look_again()
        return [group.sequences[0].group_id for group in taking.result()]

    async def train_a_version(self, answers: int = 2) -> None:
        await self.idle()
        for _ in range(answers):
            await answer_next(self)
        await self.idle()
        assert await self.step()

    async def checkpoint(self) -> None:
        await self.loop.checkpoints.write(anew=True)

    async def die(self) -> None:
        self.journal.flush()
        self.loop.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.stack.close()


@asynccontextmanager
async def life(run_dir: Path, bus: MemoryBus, recipe: Recipe = RECIPE) -> AsyncIterator[Life]:
    one = Life(run_dir, bus, recipe)
    try:
        await one.begin()
        yield one
    finally:
        await one.die()


async def answer_next(one: Life, version: int | None = None, *, samples: int = 2, incarnation: int | None = None) -> str:
    """Takes a group off PROMPTS, publishes `samples` of it, acknowledges a whole one; its id, "" when there is none."""
    delivery = await one.bus.next_prompt(timeout_s=0.002)
    if delivery is None:
        return ""
    group = decode_group(delivery.payload, expected_run=RUN)
    missing = [index for index in range(group.num_samples) if index not in group.done_samples]
    made_by = one.start.lineage.incarnation if incarnation is None else incarnation
    span = VersionSpan(one.version if version is None else version, 0, 2, made_by)
    for index in missing[:samples]:
        await publish(one.bus, group, index, span)
    if samples >= len(missing):
        await delivery.ack()
    else:
        await delivery.give_back()
    return group.group_id


async def publish(bus: MemoryBus, group: PromptGroup, index: int, span: VersionSpan) -> None:
    sequence = make_sequence(group, index, reward=float(index), spans=(span,))
    await bus.publish_sequence(encode_sequence(sequence), sequence.sequence_id)


def roll_back(run_dir: Path, version: int) -> None:
    """What `pipelinerl rollback` does, while no trainer lives, but without tensors."""

    def computed(run: RunDir, recipe: Recipe, **options: object) -> int:
        assert options == {"last": version, "checkpoint": True}
        write_checkpoint(run.path, sys.maxsize, lambda _: None, journaled_state(run.path, RUN, version, recipe))
        return 0

    with patch("pipelinerl.commands.replay._compute", computed), suppress(FieldError):  # it is the newest one already
        assert rollback(Namespace(run=run_dir, to=version)) == 0


async def test_an_actor_answers_only_for_groups_that_it_was_handed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What it makes up for others is refused, and ends a sample only where it took the id that NATS knows repetitions by."""
    async with MemoryBus(RUN) as bus:
        async with life(tmp_path, bus) as one:
            await one.idle()
            first, second = [decode_group((await bus.next_prompt(1.0)).payload) for _ in range(2)]
            span, before = VersionSpan(0, 0, 2, 1), one.tracker.ledger.counts
            for number, token in enumerate((b"", bytes(16), second.token, first.token[:15])):
                forged = replace(make_sequence(first, 0, reward=500.0, spans=(span,)), group_token=token, actor="mallory")
                await bus.publish_sequence(encode_sequence(forged), f"made-up-{number}")
            endless = replace(first, group_id="g" + "9" * 5000)
            await bus.publish_sequence(encode_sequence(make_sequence(endless, 0, spans=(span,))), "made-up-number")
            for group in (first, endless):
                nameless = sequence_pb2.Sequence(run=RUN, sequence_id=group.sequence_id(1), behaviour_logprobs=b"x")
                await bus.publish_sequence(nameless.SerializeToString(), f"made-up-unreadable-{len(group.group_id)}")
            await one.idle()
            assert (one.intake.bad_messages, one.tracker.ledger.counts) == (7, before)
            assert "actor 'mallory' did not receive group 'g00000000'" in caplog.text
            taken = replace(make_sequence(second, 0, reward=500.0, spans=(span,)), group_token=first.token)
            await bus.publish_sequence(encode_sequence(taken), second.sequence_id(0))
            for group in (first, second):
                for index in range(2):
                    await publish(bus, group, index, span)
            await answer_next(one)
            await one.idle()
            assert await one.step() == [first.group_id, "g00000002"]
            assert one.tracker.ledger.reasons(Outcome.FAILED) == {"forged": 1, "group incomplete": 1}
            await one.checkpoint()
            key = (tmp_path / "group-key.json").read_bytes()
            assert (tmp_path / "group-key.json").stat().st_mode & 0o777 == 0o600
        async with life(tmp_path, bus) as again:
            assert again.feeder.tokens.of(first.group_id) == first.token
            assert (tmp_path / "group-key.json").read_bytes() == key
        (tmp_path / "group-key.json").write_text("{}")
        broken = Life(tmp_path, bus, RECIPE)
        with pytest.raises(UserError, match=r"group-key.json does not contain a valid group key: .*remove it"):
            await broken.begin()
        await broken.die()


async def test_a_phase_has_its_order_whenever_the_trainer_starts_again(tmp_path: Path) -> None:
    async def trained(restart_at: int) -> list[list[str]]:
        """The groups of each step; a trainer ends at version `restart_at`."""
        steps: list[list[str]] = []
        async with MemoryBus(RUN) as bus:
            for end in sorted({restart_at, 4}):
                async with life(tmp_path / f"restarted-at-{restart_at}", bus, PHASES) as one:
                    while len(steps) < end:
                        await one.idle()
                        while await answer_next(one):
                            pass
                        await one.idle()
                        steps.append(await one.step())
                    await one.checkpoint()
        return steps

    without = await trained(4)
    assert [len(groups) for groups in without] == [2] * 4
    assert await trained(2) == without, "between two phases"
    assert await trained(3) == without, "within a phase"


async def test_new_streams_are_noticed_and_what_was_on_the_old_ones_is_issued_again(tmp_path: Path) -> None:
    async with MemoryBus(RUN) as bus, life(tmp_path, bus) as one:
        await one.idle()
        await answer_next(one)
        await answer_next(one, samples=1)
        await one.idle()
        await one.checkpoint()
    async with MemoryBus(RUN) as bus, life(tmp_path, bus) as again:
        assert again.intake.position == 0
        assert again.published_again == 5
        done = {}
        while (delivery := await bus.next_prompt(timeout_s=0.002)) is not None:
            group = decode_group(delivery.payload)
            done[group.group_id] = group.done_samples
            await delivery.ack()
        assert sorted(done.values()) == [(), (), (), (), (0,)]


async def test_a_version_without_a_checkpoint_has_the_state_that_the_journal_tells(tmp_path: Path) -> None:
    """A sample of a group that waits for the next step has ended already, and more groups are issued later."""
    async with MemoryBus(RUN) as bus:
        async with life(tmp_path, bus) as one:
            await one.idle()
            for _ in range(2):
                await answer_next(one)
            third = decode_group((delivery := await bus.next_prompt(1.0)).payload)
            for index, version in enumerate((9, 0)):  # version 9 does not exist
                await publish(bus, third, index, VersionSpan(version, 0, 2, 1))
            await delivery.ack()
            await answer_next(one)
            await one.idle()
            batch, following = await one.intake.take_batch(0), await one.intake.take_batch(0)
            one.intake.close(batch, 1, skipped=False)
            tracker = one.tracker
            at_version_1 = tracker.ledger.to_state(), tracker.issued_groups, tracker.lost_groups
            one.run.updater.served_version = one.loop.version = one.policy.version = 1
            one.intake.close(following, 2, skipped=False)
            one.run.updater.served_version = one.loop.version = one.policy.version = 2
            await one.train_a_version()
            await one.checkpoint()
        assert reserved_groups(tmp_path / JOURNAL) > at_version_1[1]
        with pytest.raises(FieldError, match="choose an earlier version"):
            journaled_state(tmp_path, RUN, 4, RECIPE)
        roll_back(tmp_path, 1)
        assert audit_files(tmp_path).ok
        async with life(tmp_path, bus) as again:
            assert (again.version, again.start.lineage.starts) == (1, (0, 1))
            tracker = again.tracker
            assert (tracker.ledger.to_state(), tracker.issued_groups, tracker.lost_groups) == at_version_1
            assert again.published_again == len(tracker.open_groups) == at_version_1[1] - 2, "and none of the later ones"
            assert again.intake.held() == HeldSequences(), "what has ended is not in flight"
            assert (await again.run.loop.checkpoints.write(anew=True)).version == 1
            assert await answer_next(again, samples=1) == third.group_id
            await again.idle()
            assert tracker.ledger.reasons(Outcome.FAILED) == {"group incomplete": 1}, "one of two samples is left"
            await again.train_a_version(answers=2)
        assert audit_files(tmp_path).ok


@pytest.mark.parametrize("issued", [False, True])
async def test_groups_answered_or_handed_over_after_a_checkpoint_are_not_taken_for_lost(tmp_path: Path, issued: bool) -> None:
    """Whether they were issued before the checkpoint or after it."""
    async with MemoryBus(RUN) as bus:
        async with life(tmp_path, bus) as one:
            if issued:
                await one.idle()
            await one.checkpoint()
            await one.idle()
            await answer_next(one)
            delivery = await bus.next_prompt(timeout_s=1)
            group = decode_group(delivery.payload)
            await bus.publish_prompt(encode_group(group), f"{group.group_id}/actor-0-x")
            await delivery.ack()
        async with life(tmp_path, bus) as again:
            assert (again.tracker.issued_groups, again.published_again) == (6, 0)
            await again.idle()
            assert len(again.intake.ready) == 1


def test_what_is_held_comes_back_from_disk(tmp_path: Path) -> None:
    one, two, three = make_group(1), make_group(2), make_group(3, num_samples=3)
    mixed = make_sequence(one, 0, spans=(VersionSpan(3, 0, 1, 1), VersionSpan(4, 1, 2, 2)))
    taken = TrainingGroup((mixed,), np.array([0.1 + 0.2]))
    failed = replace(make_sequence(three, 1, completion=(), spans=()), failure="engine: gone", task="")
    ready = (make_sequence(two, 0), make_episode(two, 1))
    held = HeldSequences((taken,), (ready,), (make_sequence(three, 0), failed))
    make_run_state(5, SequenceTracker(), held=held).save(tmp_path)
    state = load_run_state(tmp_path)
    assert state.tracker == SequenceTracker().to_state()
    assert state.policy_version == 5
    assert state.held.taken[0].advantages.tolist() == [0.1 + 0.2]
    assert state.held.taken[0].sequences[0].spans == mixed.spans
    assert state.held.taken[0].sequences[0].behaviour_logprobs.tolist() == mixed.behaviour_logprobs.tolist()
    assert [s.sequence_id for s in state.held.ready[0]] == ["g00000002.0", "g00000002.1"]
    assert encode_sequence(state.held.ready[0][1]) == encode_sequence(ready[1])
    assert len(state.held.ready[0][1].all_branches) == 2
    found = [(s.sequence_id, s.failure, s.group_size) for s in state.held.open]
    assert found == [("g00000003.0", "", 3), ("g00000003.1", "engine: gone", 3)]


def test_a_checkpoint_that_is_not_whole_says_which_and_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "step-5" / "resume"
    folder.mkdir(parents=True)
    with pytest.raises(ServiceError, match=r"step-5 cannot be read.*Restore it, or remove it"):
        load_run_state(folder)
    make_run_state(5, SequenceTracker()).save(folder)
    (folder / "run.json").write_text('{"format": 99}')
    with pytest.raises(ServiceError, match="another version of pipelinerl"):
        load_run_state(folder)


def refused(error: type[Exception], said: str, run_dir: Path, recipe: Recipe = RECIPE) -> None:
    with pytest.raises(error, match=said):
        find_start(run_dir, RUN, recipe)


def test_a_recipe_that_changed_too_much_is_refused_with_the_difference(tmp_path: Path) -> None:
    for began_s in (100.0, 101.0):  # a restart does not make a run without a checkpoint young
        write_lineage(tmp_path, RUN, Lineage((0,)), RECIPE)
        note_training_began(tmp_path, began_s)
    assert find_start(tmp_path, RUN, RECIPE).saved_at_s == 100.0
    refused(UserError, r"seed: 0 → 7", tmp_path, RECIPE.model_copy(update={"seed": 7}))  # before the first checkpoint, too
    recipe = make_recipe(checkpoint={"every_steps": 1})
    write(tmp_path, 2, recipe=recipe.model_dump(mode="json"))
    longer = make_recipe(trainer={"steps": 9, "batch_size": 4, "tokens_per_microbatch": 64})
    assert find_start(tmp_path, RUN, longer).version == 2
    warmer = make_recipe(sampling={"group_size": 2, "max_tokens": 16, "temperature": 0.5})
    refused(UserError, r"sampling\.temperature: 1\.0 → 0\.5", tmp_path, warmer)


async def test_a_changed_learning_rate_is_recorded_in_journal_lineage_and_page(tmp_path: Path) -> None:
    fields = {"record": True, "trainer": {"steps": 6, "batch_size": 4, "tokens_per_microbatch": 64, "learning_rate": 1e-3}}
    rate, lag = "trainer.learning_rate: 1e-06 → 0.001", "algorithm.max_lag: 2 → 3"
    changed = make_recipe(**fields, algorithm={"max_lag": 3})
    async with MemoryBus(RUN) as bus:
        for recipe in (RECIPE, make_recipe(**fields, algorithm={"max_lag": 2}), changed):
            async with life(tmp_path, bus, recipe) as one:
                assert one.start.saved_at_s == (one.start.folder.stat().st_mtime if one.start.folder else None)
                await one.train_a_version()
                await one.checkpoint()
    starts = [event for _, event in read_events(tmp_path / JOURNAL) if event["event"] == "start"]
    assert [event.get("changes") for event in starts] == [None, [rate], [lag]]
    recorded = [f"version 1: {rate}", f"version 2: {lag}"]
    assert recipe_changes_of(tmp_path) == about(RUN, changed, tmp_path)["changes"] == recorded
    assert all(f'"{change}"' in report_of(tmp_path).replace("\\u2192", "→") for change in recorded)


@pytest.mark.parametrize("lost", ["lineage.json", "ledger.jsonl", "half of ledger.jsonl", "checkpoints"])
async def test_a_folder_that_lacks_something_is_not_taken_for_a_new_run(tmp_path: Path, lost: str) -> None:
    async with MemoryBus(RUN) as bus, life(tmp_path, bus) as one:
        await one.train_a_version()
        await one.checkpoint()
    if lost == "checkpoints":
        shutil.rmtree(tmp_path / lost)
    elif lost.startswith("half"):
        os.truncate(tmp_path / JOURNAL, 100)
    else:
        (tmp_path / lost).unlink()
    refused(FieldError, f"{lost.rpartition(' ')[2]}.* restore (it|that|the file)", tmp_path)


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    write_lineage(tmp_path, "other", Lineage((0, 4)), RECIPE)
    assert read_lineage(tmp_path, "other") == Lineage((0, 4))
    refused(FieldError, "is the folder of run 'other'", tmp_path)
    for malformed in ("[]", *(json.dumps({"run": RUN, "starts": starts, "recipe": {}}) for starts in ([], [3], [0, -1]))):
        (tmp_path / "lineage.json").write_text(malformed)
        refused(UserError, "lacks the run's name, recipe or trainer starts", tmp_path)


def write(run_dir: Path, version: int, tensors: WriteTensors | None = None, **state: Any) -> WrittenCheckpoint:
    run_state = make_run_state(version, SequenceTracker(), **state)
    return write_checkpoint(run_dir, 2, tensors or tensors_of(version), run_state)


def test_a_checkpoint_that_fails_half_way_or_is_never_finished_leaves_the_one_before(tmp_path: Path) -> None:
    write_lineage(tmp_path, RUN, Lineage((0,)), RECIPE)
    write(tmp_path, 1)

    def half(folder: Path) -> None:
        (folder / "half").write_text("half")
        shutil.copytree(folder, folder.with_name(f"{folder.name}7"))  # as of a process that is killed now
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write(tmp_path, 2, half)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    assert find_start(tmp_path, RUN, make_recipe()).version == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]
    for version in (9, 10, 100):
        write(tmp_path, version)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-10", "step-100"}, "the newest two"


def test_a_folder_is_replaced_whole_and_what_a_killed_trainer_left_is_removed_or_put_back(tmp_path: Path) -> None:
    def names(folder: Path) -> list[str]:
        return sorted(path.name for path in folder.iterdir())

    for text in ("old", "whole"):
        with replacing(tmp_path / "checkpoint") as partial:
            partial.mkdir()
            (partial / "model").write_text(text)
    assert (names(tmp_path), names(tmp_path / "checkpoint")) == (["checkpoint"], ["model"])
    for between_two_renames in (False, True):
        (tmp_path / ".checkpoint.partial-17").mkdir()
        if between_two_renames:
            (tmp_path / "checkpoint").rename(tmp_path / ".checkpoint.old-17")
        else:
            (tmp_path / ".checkpoint.old-17").mkdir()
            (tmp_path / "summary.json.partial").touch()
        tidy(tmp_path)
        assert names(tmp_path) == ["checkpoint", "summary.json.partial"]
        assert (tmp_path / "checkpoint/model").read_text() == "whole"
    tidy(tmp_path / "checkpoints")


def test_a_line_that_was_cut_off_does_not_count_and_the_next_one_does(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    with Journal(path) as journal:
        journal.write({"event": "reserve", "groups": 3})
        journal.flush()
        assert journal.size == path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"event":"reserve","grou')
    assert [event["groups"] for _, event in read_events(path)] == [3]
    with Journal(path) as journal:
        assert journal.size > 0
        journal.write({"event": "reserve", "groups": 5})
    assert [event["groups"] for _, event in read_events(path)] == [3, 5]
    assert reserved_groups(path) == 5
    assert reserved_groups(tmp_path / "none") == 0
