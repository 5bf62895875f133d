"""The ledger derived again from a run directory: hand-written journals that add up, and one contradiction of each kind. Audits
of trainers that live, die and start again over an in-memory bus: whatever happens adds up, and what is broken by hand is found.
That trainer is its real books, feeder, intake and checkpoints; weights are a version number.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
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
from pipelinerl.audit.replay import Check, split_id
from pipelinerl.commands import replay
from pipelinerl.messages.sequences import VersionSpan, decode_group
from pipelinerl.rl.ledger import Outcome, SequenceTracker, ledger_counts
from tests.support.memory_bus import MemoryBus
from tests.unit.builders import RUN, make_group
from tests.unit.test_trainer_resume import RECIPE, Life, answer_next, life, publish, roll_back
from tests.unit.trainer_fakes import make_run_state

Event = dict[str, Any]


def start(incarnation: int = 1, version: int = 0, keep: int | str = 0) -> Event:
    return {"event": "start", "incarnation": incarnation, "version": version, "keep": keep}


def reserve(groups: int) -> Event:
    return {"event": "reserve", "groups": groups}


def issue(number: int, samples: int = 2, version: int = 0) -> Event:
    return {"event": "issue", "group": f"g{number:08d}", "samples": samples, "version": version}


def close(outcome: str, *ids: str, **more: Any) -> Event:
    return {"event": "close", "outcome": outcome, **more, "ids": [f"g0000000{one}" for one in ids]}


def step(version: int, **counts: int) -> Event:
    return {"event": "step", "version": version, "counts": ledger_counts(**counts)}


def durable(version: int, position: int) -> Event:
    return {"event": "checkpoint", "version": version, "position": position}


def end(version: int, finished: bool = True) -> Event:
    return {"event": "end", "version": version, "finished": finished}


def mark(name: str) -> Event:
    return {"mark": name}


def write(folder: Path, *events: Event | bytes) -> Path:
    """A journal and the lineage of its starts; bytes are written as they are."""
    journal, starts, marks = b"", [], dict[str, int]()
    for event in events:
        if isinstance(event, bytes):
            journal += event
        elif "mark" in event:
            marks[event["mark"]] = len(journal)
        else:
            if event.get("event") == "start":
                event = {**event, "keep": marks.get(event.get("keep"), event.get("keep"))}
                starts.append(event["version"])
            journal += json.dumps(event, separators=(",", ":")).encode() + b"\n"
    (folder / JOURNAL).write_bytes(journal)
    (folder / "lineage.json").write_text(json.dumps({"run": "unit", "starts": starts}))
    return folder


def failures(found: Audit) -> dict[Check, tuple[int, str]]:
    """Failed checks: number of problems and the first one."""
    return {check: (one.count, one.examples[0]) for check, one in found.findings.items() if not one.ok}


def failed(folder: Path, *events: Event | bytes) -> dict[Check, tuple[int, str]]:
    return failures(audit_files(write(folder, *events)))


OPENING = (start(), reserve(4), issue(0), issue(1), issue(2))
FIRST_STEP = (close("trained", "0.0", "0.1", "1.1", version=1), step(1, issued=6, trained=3, in_flight=3))


def test_a_run_that_adds_up(tmp_path: Path) -> None:
    found = audit_files(
        write(
            tmp_path,
            *OPENING,
            *FIRST_STEP,
            close("failed", "1.0", reason="engine"),
            close("dropped_filtered", "2.0", "2.1", reason="equal rewards"),
            issue(3, version=1),
            close("trained", "3.1", version=2),
            step(2, issued=8, trained=4, dropped_filtered=2, failed=1, in_flight=1),
            end(2),
        )
    )
    assert (failures(found), found.ended) == ({}, True)
    assert found.replay.counts == ledger_counts(issued=8, trained=4, dropped_filtered=2, failed=1, in_flight=1)
    assert list(found.replay.in_flight()) == [("g00000003", 0)]
    assert found.replay.trained_by_version == {1: 3, 2: 1}
    assert {outcome.value: dict(reasons) for outcome, reasons in found.replay.reasons.items()} == {
        "trained": {}, "dropped_stale": {}, "dropped_filtered": {"equal rewards": 2}, "failed": {"engine": 1},
    }  # fmt: skip


SECOND_STEP = (close("trained", "2.0", version=2), step(2, issued=6, trained=4, in_flight=2))


@pytest.mark.parametrize(
    ("events", "counts", "undid"),
    [
        (  # what a restart undid does not count
            [*OPENING, *FIRST_STEP, mark("1"), {"event": "checkpoint", "version": 1, "position": 4},
             close("failed", "1.0", reason="engine"), close("trained", "2.0", "2.1", version=2),
             step(2, issued=6, trained=5, failed=1), issue(3, version=2),
             start(2, version=1, keep="1"), issue(3, version=1), close("trained", "2.0", "1.0", version=2),
             step(2, issued=8, trained=5, in_flight=3)],
            ledger_counts(issued=8, trained=5, in_flight=3),
            [(2, 1, 1, 1, 2, 1)],
        ),
        (  # version 1 is kept; 2 is made, undone, made again; then the newest checkpoint is gone and all begins at 1 again
            [*OPENING, *FIRST_STEP, mark("1"), *SECOND_STEP, mark("2"), close("trained", "2.1", version=3),
             step(3, issued=6, trained=5, in_flight=1), start(2, version=2, keep="2"), close("trained", "1.0", version=3),
             step(3, issued=6, trained=5, in_flight=1), mark("3"), start(3, version=3, keep="3"),
             close("failed", "2.1", reason="engine"), start(4, version=1, keep="1"), *SECOND_STEP],
            ledger_counts(issued=6, trained=4, in_flight=2),
            [(2, 2, 1, 0, 1, 0), (3, 3, 0, 0, 0, 0), (4, 1, 2, 0, 2, 1)],
        ),
        (  # a start without a checkpoint undoes everything
            [*OPENING, *FIRST_STEP, start(2), issue(0), issue(1)],
            ledger_counts(issued=4, in_flight=4),
            [(2, 0, 1, 3, 3, 0)],
        ),
        (  # a line that was cut off does not count
            [*OPENING, b'{"event":"issue","group":"g0000'], ledger_counts(issued=6, in_flight=6), [],
        ),
        (  # a line that is no event is nobody's business where it was undone
            [*OPENING, *FIRST_STEP, mark("1"), b"garbage\n", start(2, version=1, keep="1")],
            ledger_counts(issued=6, trained=3, in_flight=3),
            [(2, 1, 0, 0, 0, 0)],
        ),
        ([], ledger_counts(), []),  # no trainer has started
    ],
)  # fmt: skip
def test_histories_with_restarts(
    tmp_path: Path, events: list[Event | bytes], counts: dict[str, int], undid: list[tuple[int, ...]]
) -> None:
    """`undid`: incarnation, version, steps, groups, trained, ended otherwise."""
    found = audit_files(write(tmp_path, *events))
    assert (failures(found), found.replay.counts) == ({}, counts)
    assert [(one.incarnation, one.version, *one.undid.values()) for one in found.history.starts[1:]] == undid


AGAIN = "g00000000.0"


@pytest.mark.parametrize(
    ("events", "check", "count", "said"),
    [
        ([issue(1)], Check.ISSUED_ONCE, 2, "g00000001"),
        ([close("failed", "0.0", reason="engine")], Check.ENDED_ONCE, 1, f"{AGAIN} ends again, as failed"),
        ([close("trained", "0.0", version=2)], Check.TRAINED_ONCE, 1, f"{AGAIN} into version 2"),
        ([close("dropped_stale", "7.0", "0.9", reason="x")], Check.ISSUED_FIRST, 2, "g00000007.0 ends as dropped_stale"),
        ([close("failed", "x", "1.70000", reason="x")], Check.ISSUED_FIRST, 2, " ends as failed"),
        ([step(3, issued=6, trained=3, in_flight=3)], Check.VERSIONS, 1, "version 3 follows version 1"),
        ([step(1, issued=6, trained=3, in_flight=3)], Check.VERSIONS, 1, "version 1 follows version 1"),
        ([close("trained", "2.0", version=5)], Check.VERSIONS, 1, "version 5 was trained after version 1"),
        ([step(2, issued=6, trained=4, in_flight=2)], Check.EQUATION, 1, "trained 4 stated, 3 derived, in_flight 2 stated"),
        ([{"event": "step", "version": 2, "counts": {}}], Check.EQUATION, 1, "issued None stated, 6 derived"),
        ([reserve(9), issue(5)], Check.GROUPS, 2, "2 missing before g00000005"),
        ([issue(3), issue(4)], Check.GROUPS, 1, "g00000004 was issued without being reserved"),
        ([{"event": "issue", "group": "other", "samples": 1}], Check.GROUPS, 1, "'other' has no number"),
        ([{"event": "issue", "samples": 1}], Check.JOURNAL, 1, "issue lacks a valid field"),
        ([{"event": "step", "version": None, "counts": {}}], Check.JOURNAL, 1, "step lacks a valid field"),
        ([{"event": "close", "outcome": "eaten", "ids": []}], Check.JOURNAL, 1, "close lacks a valid field"),
        ([{"event": "start", "version": 1}], Check.JOURNAL, 1, "start lacks a valid field"),
        ([start(2, version=0, keep=10)], Check.RESTARTS, 1, "keeps 10 bytes"),
        ([start(1, version=0, keep=0)], Check.RESTARTS, 1, "incarnation 1 follows incarnation 1"),
        ([mark("1"), start(2, version=2, keep="1")], Check.RESTARTS, 1, "from version 2, but the journal is at 1"),
        ([mark("1"), *SECOND_STEP, mark("2"), start(2, version=1, keep="1"), start(3, version=2, keep="2")],
         Check.RESTARTS, 1, "which end in an undone part"),
        ([b"\x00\xff nothing\n[1]\n"], Check.JOURNAL, 2, "no event"),
        ([durable(1, 12), durable(2, 11)], Check.POSITIONS, 1, "version 2 is at position 11, after one at 12"),
    ],
)  # fmt: skip
def test_each_contradiction_is_found(tmp_path: Path, events: Iterable[Event], check: Check, count: int, said: str) -> None:
    found = failed(tmp_path, *OPENING, *FIRST_STEP, *events)
    assert check in found, found
    assert found[check][0] >= count
    assert said in found[check][1]


def test_one_contradiction_is_one_finding_and_events_before_any_start_are_one(tmp_path: Path) -> None:
    assert list(failed(tmp_path, *OPENING, *FIRST_STEP, close("failed", "0.0", reason="engine"))) == [Check.ENDED_ONCE]
    assert failed(tmp_path, issue(0), start())[Check.JOURNAL] == (1, "byte 0: before any start")


def test_a_lineage_that_says_otherwise(tmp_path: Path) -> None:
    write(tmp_path, *OPENING)
    (tmp_path / "lineage.json").write_text('{"run": "unit", "starts": [0, 5]}')
    assert failures(audit_files(tmp_path)) == {}, "the second trainer died before it wrote to the journal"
    for content in ('{"starts": [3]}', '{"starts": []}', '{"starts": null}'):
        (tmp_path / "lineage.json").write_text(content)
        assert Check.RESTARTS in failures(audit_files(tmp_path))
    (tmp_path / "lineage.json").unlink()
    assert failures(audit_files(tmp_path)) == {Check.RESTARTS: (1, "lineage.json is missing")}


def test_positions_go_back_to_those_of_an_older_checkpoint(tmp_path: Path) -> None:
    again = start(2, version=1, keep="1")
    written = [*OPENING, *FIRST_STEP, mark("1"), durable(1, 10), durable(2, 30), again, durable(2, 12)]
    assert failed(tmp_path, *written) == {}


# Checkpoints: what a trainer's own code writes, beside a journal that its own books wrote.


RESUME = Path("checkpoints", "step-0", "resume")


def checkpointed(folder: Path, *later: Event | bytes, **changes: Any) -> Path:
    """A run that issued two groups and wrote a checkpoint, with `changes` in its run.json; `later`: in the journal after it."""
    events: list[Event | bytes] = [start(), reserve(100)]
    books = SequenceTracker(lambda event: events.append(dict(event)))
    for number in range(2):
        books.issue(make_group(number))
    write(folder, *events)
    (folder / RESUME).mkdir(parents=True)
    size = (folder / JOURNAL).stat().st_size
    make_run_state(0, books, journal_bytes=size, next_group=2, position=7).save(folder / RESUME)
    run_state = folder / RESUME / "run.json"
    run_state.write_text(json.dumps({**json.loads(run_state.read_text()), **changes}))
    return write(folder, *events, *later)


def test_checkpoints_are_compared_with_the_journal_at_their_length(tmp_path: Path) -> None:
    found = audit_files(checkpointed(tmp_path, issue(2)))
    assert failures(found) == {}
    assert (found.checkpoint.version, found.checkpoint.position, len(found.checkpoint.ledger.in_flight())) == (0, 7, 4)


@pytest.mark.parametrize(
    ("change", "later", "said"),
    [
        ({"next_group": 3}, [], "step-0: groups issued 3, the journal has 2"),
        ({"policy_version": 4}, [], "step-0: version 4, the journal has 0"),
        ({"journal_bytes": 10_000}, [], "step-0: was written at byte 10000 of the journal, but the journal is shorter"),
        ({"journal_bytes": 60}, [start(2)], "step-0: was written at byte 60 of the journal, but a restart undid this part"),
    ],
)
def test_a_checkpoint_that_says_otherwise(tmp_path: Path, change: dict[str, Any], later: list[Event], said: str) -> None:
    assert failures(audit_files(checkpointed(tmp_path, *later, **change))) == {Check.CHECKPOINTS: (1, said)}


def test_a_checkpoint_with_other_sequences_in_flight(tmp_path: Path) -> None:
    run_state = checkpointed(tmp_path) / RESUME / "run.json"
    content = json.loads(run_state.read_text())
    content["tracker"]["ledger"]["in_flight"][0] = "g00000009.0"
    content["held"]["open"] = [{"id": "g00000008.0", "failure": "engine", "group_size": 2}]
    run_state.write_text(json.dumps(content))
    found = audit_files(tmp_path).findings[Check.CHECKPOINTS].examples
    assert "in flight only in the checkpoint: g00000009.0; only in the journal: g00000000.0" in found[0]
    assert "holds sequences that are not in flight: g00000008.0" in found[1]


def test_a_damaged_checkpoint_is_named_and_one_of_weights_alone_is_not(tmp_path: Path) -> None:
    (checkpointed(tmp_path) / RESUME / "sequences.pb").write_bytes(b"\xff\xff\xff")
    (tmp_path / "checkpoints" / "step-9").mkdir()
    assert failures(audit_files(tmp_path))[Check.CHECKPOINTS][1].startswith("step-0 cannot be read")


def test_every_step_trained_the_tokens_of_all_branches(tmp_path: Path) -> None:
    """Three episodes of five branches, whose 40 sampled tokens the step had; the record of a later step is of no concern."""
    trained = ({**FIRST_STEP[0], "branches": 4, "tokens": 33}, close("trained", version=1, branches=1, tokens=7))
    write(tmp_path, *OPENING, *trained, FIRST_STEP[1])
    metrics = tmp_path / "metrics.jsonl"
    for tokens in (40, 38):
        metrics.write_text(f'{{"step":1,"tokens_trained":{tokens}}}\n{{"step":2,"tokens_trained":5}}\n{{"st')
        found = audit_files(tmp_path)
        problem = {Check.TOKENS: (1, f"version 1: {tokens} tokens, the journal has 40")}
        assert failures(found) == (problem if tokens == 38 else {})
    assert "    trained: 40 sampled tokens in 5 branches" in lines(found)
    metrics.unlink()
    assert audit_files(tmp_path).findings[Check.TOKENS].skipped


def test_the_summary_of_a_trainer_that_ended_says_the_same_and_that_of_the_one_before_nothing(tmp_path: Path) -> None:
    ended = [*OPENING, *FIRST_STEP, close("failed", "1.0", reason="engine"), end(1, finished=False)]
    write(tmp_path, *ended)
    counts = ledger_counts(issued=6, trained=3, failed=1, in_flight=2)
    told = {"sequences": counts, "sequence_reasons": {"failed": {"engine": 1}}, "policy_version": 1}
    of_the_runner = told | {"sequences": {}, "sequence_reasons": None}  # out of metrics.jsonl
    wrong = told | {"policy_version": 2, "sequence_reasons": {}}
    for summary, problems in ((told, 0), (wrong, 2), (of_the_runner, 0)):
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        assert [count for count, _ in failures(audit_files(tmp_path)).values()] == [problems] * bool(problems)
    write(tmp_path, *ended, start(2))
    (tmp_path / "summary.json").write_text(json.dumps(wrong))
    assert failures(audit_files(tmp_path)) == {}


def test_ids_that_name_no_sample() -> None:
    assert split_id("g00000012.3") == ("g00000012", 3)
    assert {split_id(name) for name in ("", "g1", "g1.", "g1.x", "g1.-1", "g1.65536", "g1.123456", "g1.²")} == {("", 0)}


async def test_the_report_has_the_equation_with_its_numbers_and_shows_failures_with_examples(tmp_path: Path) -> None:
    write(tmp_path, *OPENING, *FIRST_STEP, mark("1"), *SECOND_STEP, start(2, version=1, keep="1"),
          close("dropped_stale", "2.0", "2.1", reason="lag above max_lag"), close("trained", version=2),
          step(2, issued=6, trained=3, dropped_stale=2, in_flight=1))  # fmt: skip
    audit = await audit_run("unit", tmp_path, None, lambda: False)
    text = "\n".join(lines(audit))
    assert "issued 6 = trained 3 + dropped stale 2 + dropped filtered 0 + failed 0 + in flight 1" in text
    assert "dropped stale: lag above max_lag  2" in text
    assert "incarnation 2 continued from version 1; undone: 1 steps, " in text
    assert "sequences per version: min 0, median 1.5, max 3" in text
    assert "-       every sequence in flight can be found: the streams were not read" in text
    assert text.endswith(f"every check that ran passed; skipped: 4 of {len(audit.findings)}")
    write(tmp_path, *OPENING, *(close("failed", f"9.{n}", reason="x") for n in range(8)))
    audit = await audit_run("unit", tmp_path, None, lambda: False)
    text = "\n".join(lines(audit))
    assert "FAILED  no sequence ends that was not issued: 8\n            g00000009.0 ends as failed" in text
    assert (text.count(" ends as failed"), text.endswith("1 of 15 checks FAILED"), audit.ok) == (5, True, False)


# Histories


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "LOOK_AGAIN_S", 0.0)


async def audited(folder: Path, bus: MemoryBus, at_work: bool = False) -> Audit:
    @asynccontextmanager
    async def opened() -> AsyncIterator[MemoryBus]:
        yield bus

    return await audit_run(RUN, folder, opened, lambda: at_work)


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
        assert failures(await audited(tmp_path, bus)) == {Check.UNKNOWN: (1, "g00000077.1")}
        with (tmp_path / JOURNAL).open("ab") as journal:
            journal.write(b"damaged\n")
        await publish(bus, make_group(99), 1, VersionSpan(1, 0, 2, 2))
        assert set(failures(await audited(tmp_path, bus))) == {Check.JOURNAL, Check.UNKNOWN}


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


@pytest.mark.parametrize("at_work", [True, False])
async def test_a_sequence_in_flight_that_is_lost(tmp_path: Path, at_work: bool) -> None:
    """An actor that breaks its word: takes a group and acknowledges it with one of its two sequences stored."""
    async with MemoryBus(RUN) as bus, life(tmp_path, bus) as one:
        await one.train_a_version()
        delivery = await bus.next_prompt(timeout_s=1)
        group = decode_group(delivery.payload)
        await publish(bus, group, 0, VersionSpan(0, 0, 2, 1))
        await delivery.ack()
        await one.idle()
        one.journal.flush()
        assert failures(await audited(tmp_path, bus, at_work)) == {Check.LOST: (1, group.sequence_id(1))}


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
        assert failures(audit) == {Check.LOST: (2, f"g{number:08d}.0")}


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
