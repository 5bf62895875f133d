"""The ledger derived again from a run directory: hand-written journals that add up, and one contradiction of each kind."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.audit.audit import Audit, as_json, audit_files, audit_run, lines, trained_per_version
from pipelinerl.audit.journal import JOURNAL
from pipelinerl.audit.replay import Check, split_id
from pipelinerl.rl.ledger import SequenceTracker, ledger_counts
from tests.unit.builders import make_group
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


def test_the_summary_of_a_trainer_that_ended_says_the_same_and_that_of_the_one_before_nothing(tmp_path: Path) -> None:
    write(tmp_path, *OPENING, *FIRST_STEP, close("failed", "1.0", reason="engine"), end(1, finished=False))
    told = {
        "sequences": ledger_counts(issued=6, trained=3, failed=1, in_flight=2),
        "sequence_reasons": {"failed": {"engine": 1}},
        "policy_version": 1,
    }
    summary = tmp_path / "summary.json"
    summary.write_text(json.dumps(told))
    assert failures(audit_files(tmp_path)) == {}
    summary.write_text(json.dumps({**told, "policy_version": 2, "sequence_reasons": {}}))
    assert failures(audit_files(tmp_path))[Check.SUMMARY][0] == 2
    summary.write_text(json.dumps({**told, "sequences": {}, "sequence_reasons": None}))
    assert failures(audit_files(tmp_path)) == {}, "the runner's, out of metrics.jsonl"
    write(tmp_path, *OPENING, *FIRST_STEP, end(1, finished=False), start(2))
    (tmp_path / "summary.json").write_text('{"sequences": {}, "sequence_reasons": {}, "policy_version": 7}')
    assert failures(audit_files(tmp_path)) == {}


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


def test_ids_that_name_no_sample() -> None:
    assert split_id("g00000012.3") == ("g00000012", 3)
    assert {split_id(name) for name in ("", "g1", "g1.", "g1.x", "g1.-1", "g1.65536", "g1.123456", "g1.²")} == {("", 0)}


# What is said


async def audit_of(folder: Path) -> Audit:
    return await audit_run("unit", folder, None, lambda: False)


async def test_the_report_has_the_equation_with_its_numbers(tmp_path: Path) -> None:
    write(tmp_path, *OPENING, *FIRST_STEP, mark("1"), *SECOND_STEP, start(2, version=1, keep="1"),
          close("dropped_stale", "2.0", "2.1", reason="lag above max_lag"), close("trained", version=2),
          step(2, issued=6, trained=3, dropped_stale=2, in_flight=1))  # fmt: skip
    audit = await audit_of(tmp_path)
    text = "\n".join(lines(audit))
    assert "unit: stopped before its end, 2 starts, version 2" in text
    assert "issued 6 = trained 3 + dropped stale 2 + dropped filtered 0 + failed 0 + in flight 1" in text
    assert "dropped stale: lag above max_lag  2" in text
    assert "incarnation 2 continued from version 1; undone: 1 steps, " in text
    assert "sequences per version: min 0, median 1.5, max 3" in text
    assert "ok      no sequence is trained twice into the same weights" in text
    assert "-       every sequence in flight can be found: the streams were not read" in text
    assert text.endswith(f"every check that ran passed; skipped: 4 of {len(audit.findings)}")


async def test_a_failure_is_shown_with_examples_and_makes_the_verdict(tmp_path: Path) -> None:
    write(tmp_path, *OPENING, *(close("failed", f"9.{n}", reason="x") for n in range(8)))
    audit = await audit_of(tmp_path)
    text = "\n".join(lines(audit))
    assert "FAILED  no sequence ends that was not issued: 8\n            g00000009.0 ends as failed" in text
    assert "g00000009.4" in text
    assert "g00000009.5" not in text
    assert text.endswith("1 of 15 checks FAILED")
    assert not audit.ok


async def test_every_version_on_request(tmp_path: Path) -> None:
    events = [start(), reserve(40)]
    for number in range(30):
        trained = close("trained", f"{number}.0", version=number + 1)
        trained["ids"] = [f"g{number:08d}.0"] * (number != 7)
        before = number + (number < 7)
        counts = {"issued": number + 1, "trained": before, "in_flight": int(number >= 7)}
        events += [issue(number, 1), trained, step(number + 1, **counts)]
    audit = await audit_of(write(tmp_path, *events))
    assert audit.ok
    assert trained_per_version(audit) == {version: int(version != 8) for version in range(1, 31)}
    assert "    version 8: 0" in list(lines(audit))
    assert "version 30: 1" in "\n".join(lines(audit, versions=True))
    told = as_json(audit, versions=True)
    assert (told["ok"], told["trained_per_version"]["each"]["8"]) == (True, 0)
    assert json.loads(json.dumps(told)) == told
