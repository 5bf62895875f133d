"""Audits of trainers that live, die and start again over an in-memory bus: whatever happens adds up, and what is broken by
hand is found. The trainer is its real books, feeder, intake and checkpoints; weights are a version number.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelinerl.audit import audit as audit_module
from pipelinerl.audit.audit import Audit, audit_files, audit_run, lines
from pipelinerl.audit.journal import JOURNAL, Journal
from pipelinerl.audit.replay import Check
from pipelinerl.commands import replay
from pipelinerl.messages.sequences import VersionSpan, decode_group, encode_sequence
from pipelinerl.rl.ledger import Outcome
from tests.support.memory_bus import MemoryBus
from tests.unit.builders import RUN, make_group, make_sequence
from tests.unit.test_trainer_resume import RECIPE, Life, answer_next, life, publish, roll_back


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "LOOK_AGAIN_S", 0.0)


async def audited(folder: Path, bus: MemoryBus, at_work: bool = False) -> Audit:
    @asynccontextmanager
    async def opened() -> AsyncIterator[MemoryBus]:
        yield bus

    return await audit_run(RUN, folder, opened, lambda: at_work)


def failures(audit: Audit) -> dict[Check, tuple[str, ...]]:
    return {check: tuple(one.examples) for check, one in audit.findings.items() if not one.ok}


MOVES = st.sampled_from(
    [
        *["answer"] * 3, "half", "late", "old", "twice", "read", *["step"] * 2, "checkpoint", "purge", "audit",
        "crash", "torn", "rollback",
    ]
)  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(moves=st.lists(MOVES, max_size=60))
def test_whatever_happens_adds_up_and_no_sequence_is_lost_or_trained_twice_into_the_same_weights(moves: list[str]) -> None:
    with TemporaryDirectory() as folder:
        asyncio.run(history(moves, Path(folder)))


async def history(moves: list[str], folder: Path) -> None:
    async with MemoryBus(RUN) as bus:
        one = Life(folder, bus, RECIPE)
        await one.begin()
        try:
            for move in moves:
                one = await play(move, one, folder)
                note_durable(one, folder)
            await to_the_end(one)  # whatever state it is in
        finally:
            await one.die()
        assert failures(await audited(folder, bus)) == {}
    check_tracker(one)
    check_journal(folder, one)


async def to_the_end(one: Life) -> Life:
    while one.version < RECIPE.trainer.steps:
        await one.idle()
        if not await one.step():
            assert await answer_next(one), "the trainer waits, and there is nothing on the queue"
    await one.idle()
    return one


async def play(move: str, one: Life, folder: Path) -> Life:
    match move:
        case "answer":
            await answer_next(one)
        case "half":
            await answer_next(one, samples=1)
        case "late":
            incarnation = max(1, one.start.lineage.incarnation - 1)
            await answer_next(one, version=max(0, one.version - 1), incarnation=incarnation)
        case "old":
            await answer_next(one, version=0, incarnation=1)
        case "twice":
            await repeat_last(one.bus)
        case "read":
            await one.idle()
        case "step":
            await one.idle()
            if one.version < RECIPE.trainer.steps:
                await one.step()
        case "checkpoint":
            await one.checkpoint()
            one.journal.flush()
        case "purge":
            durable = folder / "durable"
            await one.bus.purge_sequences(int(durable.read_text()) + 1 if durable.is_file() else 1)
        case "audit":
            assert failures(await audited(folder, one.bus, at_work=True)) == {}
        case "crash" | "torn":
            await one.die()
            assert failures(await audited(folder, one.bus)) == {}
            if move == "torn":
                tear(folder / JOURNAL)
                assert failures(await audited(folder, one.bus)) == {}
            one = Life(folder, one.bus, RECIPE)
            await one.begin()
        case "rollback":
            await one.die()
            roll_back(folder, one.version // 2)
            assert failures(await audited(folder, one.bus)) == {}
            one = Life(folder, one.bus, RECIPE)
            await one.begin()
    return one


async def repeat_last(bus: MemoryBus) -> None:
    """The last sequence of the log is stored again, under another message id."""
    info = await bus.sequences_info()
    if info.messages:
        async with bus.read_sequences(info.last_position) as entries:
            entry = await anext(entries)
        await bus.publish_sequence(entry.payload, f"again-{info.last_position}")


def check_tracker(one: Life) -> None:
    ledger, held = one.tracker.ledger, one.intake.held()
    groups = [*(group.sequences for group in held.taken), *held.ready]
    here = {sequence.group_id for group in groups for sequence in group} | set(one.tracker.open_groups)
    assert set(ledger.in_flight()) == {
        f"{group}.{index}" for group in here for index in range(2) if ledger.is_open(f"{group}.{index}")
    }


def check_journal(run_dir: Path, one: Life) -> None:
    audit = audit_files(run_dir)
    assert audit.ok, audit.findings
    assert audit.replay.counts == one.tracker.ledger.counts
    counts, trained = audit.replay.counts, audit.replay.trained_by_version
    assert sorted(trained) == list(range(1, RECIPE.trainer.steps + 1))
    # Two groups of two a step, but for the samples of a trained group that were stale.
    stale = max(0, counts["dropped_stale"] - 2 * one.tracker.lost_groups)
    assert sum(trained.values()) == counts["trained"] == 2 * 2 * RECIPE.trainer.steps - stale


def note_durable(one: Life, folder: Path) -> None:
    """Position of the newest checkpoint: what its trainer may purge up to."""
    written = sorted(folder.glob("checkpoints/step-*/resume/run.json"), key=lambda path: path.stat().st_mtime_ns)
    if written:
        (folder / "durable").write_text(str(json.loads(written[-1].read_text())["position"]))


def tear(journal: Path) -> None:
    """The last bytes never reached the disk, but what a checkpoint or a reservation waited for did."""
    kept = journal.read_bytes()
    synced = max((kept.rfind(b'{"event":"%s"' % kind) for kind in (b"start", b"reserve", b"checkpoint")), default=0)
    end = kept.find(b"\n", synced) + 1
    journal.write_bytes(kept[: end + (len(kept) - end) // 2])


@asynccontextmanager
async def after_a_restart(folder: Path) -> AsyncIterator[tuple[Life, MemoryBus]]:
    """A second incarnation that has trained a version, with sequences in flight in every place where they can be."""
    async with MemoryBus(RUN) as bus:
        async with life(folder, bus) as one:
            await one.train_a_version(answers=3)
            await one.checkpoint()
        async with life(folder, bus) as again:
            await again.train_a_version(answers=1)
            await answer_next(again)
            await answer_next(again, samples=1)
            await again.idle()
            again.journal.flush()
            yield again, bus


def note(one: Life, event: dict[str, Any]) -> None:
    one.journal.write(event)
    one.journal.flush()


async def test_what_is_reserved_may_be_out_there_unless_the_run_has_ended(tmp_path: Path) -> None:
    async with after_a_restart(tmp_path) as (again, bus):
        note(again, {"event": "reserve", "groups": 80})
        await publish(bus, make_group(77), 1, VersionSpan(1, 0, 2, 2))
        assert failures(await audited(tmp_path, bus, at_work=True)) == {}
        assert failures(await audited(tmp_path, bus)) == {}
        note(again, {"event": "end", "version": 2, "finished": True})
        assert failures(await audited(tmp_path, bus)) == {Check.UNKNOWN: ("g00000077.1",)}
        with (tmp_path / JOURNAL).open("ab") as journal:
            journal.write(b"damaged\n")
        await publish(bus, make_group(99), 1, VersionSpan(1, 0, 2, 2))
        assert set(failures(await audited(tmp_path, bus))) == {Check.JOURNAL, Check.UNKNOWN}


async def test_messages_that_repeat_or_cannot_be_read_are_counted_and_no_contradiction(tmp_path: Path) -> None:
    async with after_a_restart(tmp_path) as (_, bus):
        message = encode_sequence(make_sequence(make_group(0), 0))
        for again_id in ("later-1", "later-2"):
            await bus.publish_sequence(message, again_id)
        await bus.publish_sequence(b"\xff\xff", "noise")
        audit = await audited(tmp_path, bus, at_work=True)
        assert (failures(audit), audit.streams and audit.streams.repeated) == ({}, 2)
        text = "\n".join(lines(audit))
        assert "2 of them repeat a sequence, which is trained only once" in text
        assert "1 of them cannot be read: positions 14" in text


async def test_an_unreadable_message_accounts_for_the_sequence_that_it_was_published_as(tmp_path: Path) -> None:
    async with MemoryBus(RUN) as bus, life(tmp_path, bus) as one:
        await one.idle()
        delivery = await bus.next_prompt(timeout_s=1)
        group = decode_group(delivery.payload)
        await publish(bus, group, 0, VersionSpan(0, 0, 2, 1))
        await bus.publish_sequence(b"\xff", group.sequence_id(1))
        await delivery.ack()
        one.journal.flush()
        assert failures(await audited(tmp_path, bus, at_work=True)) == {}


async def acknowledge_without_storing(bus: MemoryBus) -> str:
    """An actor that breaks its word: takes a group and acknowledges it with one of its two sequences stored."""
    delivery = await bus.next_prompt(timeout_s=1)
    group = decode_group(delivery.payload)
    await publish(bus, group, 0, VersionSpan(0, 0, 2, 1))
    await delivery.ack()
    return group.sequence_id(1)


@pytest.mark.parametrize("at_work", [True, False])
async def test_a_sequence_in_flight_that_is_lost(tmp_path: Path, at_work: bool) -> None:
    async with MemoryBus(RUN) as bus, life(tmp_path, bus) as one:
        await one.train_a_version()
        lost = await acknowledge_without_storing(bus)
        await one.idle()
        one.journal.flush()
        assert failures(await audited(tmp_path, bus, at_work)) == {Check.LOST: (lost,)}


async def test_groups_that_a_dead_trainer_did_not_publish_wait_for_the_next(tmp_path: Path) -> None:
    async with MemoryBus(RUN) as bus:
        async with life(tmp_path, bus) as one:
            await one.idle()
        while (delivery := await bus.next_prompt(timeout_s=0.002)) is not None:
            await delivery.ack()  # as if PROMPTS had been lost with its disk
        audit = await audited(tmp_path, bus)
        assert (failures(audit), len(audit.waiting)) == ({}, 12)
        assert "12 sequences in flight will be published by the trainer" in "\n".join(lines(audit))
        trained_since = await audited(tmp_path, bus, at_work=True)
        assert failures(trained_since) == {}, "a trainer that has just started may not have come to it yet"
        async with life(tmp_path, bus) as again:
            note(again, {"event": "end", "version": 0, "finished": False})
            audit = await audited(tmp_path, bus, at_work=True)
            assert (failures(audit), audit.waiting) == ({}, []), "it has published them"


async def test_the_newest_group_may_be_on_its_way_to_the_stream(tmp_path: Path) -> None:
    async with MemoryBus(RUN) as bus, life(tmp_path, bus) as one:
        await one.train_a_version()
        await one.idle()
        number = one.feeder.next_group
        note(one, {"event": "reserve", "groups": number + 2})
        one.tracker.issue(make_group(number))
        one.journal.flush()
        audit = await audited(tmp_path, bus, at_work=True)
        assert (failures(audit), audit.waiting) == ({}, [f"g{number:08d}.0", f"g{number:08d}.1"])
        one.tracker.issue(make_group(number + 1))
        one.journal.flush()
        audit = await audited(tmp_path, bus, at_work=True)
        assert failures(audit) == {Check.LOST: (f"g{number:08d}.0", f"g{number:08d}.1")}


async def test_what_moved_between_two_looks_is_not_called_lost(tmp_path: Path) -> None:
    """What seems lost at the first look was trained, and purged, by the second."""
    async with MemoryBus(RUN) as bus, life(tmp_path, bus) as one:
        await one.train_a_version()
        one.journal.flush()
        for _ in range(2):
            await answer_next(one)
        await one.idle()
        looks = 0

        @asynccontextmanager
        async def moving() -> AsyncIterator[MemoryBus]:
            nonlocal looks
            looks += 1
            if looks == 1:  # after the journal was read: a step, not yet in the file, and its sequences purged
                assert await one.step()
                await bus.purge_sequences(9)
            yield bus
            one.journal.flush()

        audit = await audit_run(RUN, tmp_path, moving, lambda: True)
        assert (failures(audit), looks) == ({}, 2)


class Killed(BaseException):
    """Ends a command where it stands."""


@contextmanager
def killed_before(step: int) -> Iterator[None]:
    """Raise `Killed` in place of the change with this number, of those that a rollback makes in the run's folder."""
    numbers = count()

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **options: Any) -> Any:
            if next(numbers) == step:
                raise Killed
            return change(*args, **options)

        return made

    with ExitStack() as stack:
        for owner, name in ((Path, "rename"), (Path, "mkdir"), (Journal, "write"), (Journal, "sync"), (replay, "write_whole")):
            stack.enter_context(patch.object(owner, name, counted(getattr(owner, name))))
        yield


@pytest.mark.parametrize("again", [True, False], ids=["another rollback", "a resume"])
@pytest.mark.parametrize("to", [1, 2], ids=["without a checkpoint", "with a checkpoint"])
async def test_a_rollback_that_is_killed_has_happened_or_has_not(tmp_path: Path, to: int, again: bool) -> None:
    starts = set[int]()
    for step in count():
        folder = tmp_path / str(step)
        async with MemoryBus(RUN) as bus:
            async with life(folder, bus) as one:
                for version in range(1, 5):
                    await one.train_a_version(answers=3)
                    await answer_next(one, samples=1)  # half of a group, which is purged when a checkpoint holds it
                    await one.idle()
                    if version in (2, 3):
                        await one.checkpoint()
                        await bus.purge_sequences(one.intake.position + 1)
            (folder / "summary.json").write_text("{}")
            was_killed = True
            with suppress(Killed), killed_before(step):
                roll_back(folder, to)
                was_killed = False
            assert failures(await audited(folder, bus)) == {}
            if again:
                roll_back(folder, to)
                assert failures(await audited(folder, bus)) == {}
            async with MemoryBus(RUN) if again else nullcontext(bus) as bus_now:  # NATS may have lost everything
                one = Life(folder, bus_now, RECIPE)
                await one.begin()
                starts.add(one.version)
                assert one.version in ({to} if again or not was_killed else {to, 3})
                try:
                    await one.checkpoint()
                    assert min(one.loop.checkpoints.positions.values()) >= 0 or one.version == 3, "old logs can be purged"
                    one = await to_the_end(one)
                finally:
                    await one.die()
                assert failures(await audited(folder, bus_now)) == {}
            assert one.tracker.ledger.reasons(Outcome.FAILED) == {}, "every group in flight was published again"
        check_tracker(one)
        check_journal(folder, one)
        if not was_killed:
            break
    assert step > 5
    assert starts == {to} if again else {to, 3}
