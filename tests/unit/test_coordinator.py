"""The membership and update state machine by hand. Under random histories, together with its actors: tests/faults."""

from typing import Any

import pytest

from pipelinerl.v1.control_pb2 import Abort, Announce, Commit, EpochJoined, Serving, Staged
from services.trainer.weight_sync import coordinator as c

MEMBERS = {name: c.Member(name, f"{name}-1") for name in "abcdefgh"}
A, B, D = MEMBERS["a"], MEMBERS["b"], MEMBERS["d"]
CHECKSUM = 77
LATE = c.DeadlinePassed()


def joined(actor: str, epoch: int = 1) -> EpochJoined:
    return EpochJoined(actor=actor, epoch=epoch)


def staged(actor: str, epoch: int = 1, version: int = 1, checksum: int = CHECKSUM) -> Staged:
    return Staged(actor=actor, epoch=epoch, version=version, checksum=checksum)


def serving(actor: str, epoch: int = 1, version: int = 1) -> Serving:
    return Serving(actor=actor, epoch=epoch, version=version)


def failed(actor: str, epoch: int = 1, *, group_broke: bool = False) -> Abort:
    return Abort(actor=actor, epoch=epoch, reason="disk full", group_broke=group_broke)


def sent(epoch: int = 1, version: int = 1) -> Staged:
    return staged(c.TRAINER, epoch, version)


def down(*actors: str) -> c.MembersLeaving:
    return c.MembersLeaving.unregistered(*actors)


def leaving(*members: c.Member, still_running: bool = True) -> c.MembersLeaving:
    return c.MembersLeaving(members, "its pod is being deleted", still_running)


def broke(epoch: int, *missing: str) -> c.TransferFailed:
    return c.TransferFailed(epoch, "connection reset", missing)


def told(actions: list[c.Action]) -> str:
    words = []
    for action in actions:
        match action:
            case c.FormGroup(_, ()):
                words.append("wait")
            case c.FormGroup(epoch, members):
                words.append(f"form {epoch} of {''.join(member.actor for member in members)}")
            case Announce():
                words.append(f"send {action.version} in {action.epoch}")
            case Commit():
                words.append(f"commit {action.version} in {action.epoch}")
            case Abort():
                words.append("abort")
            case c.Evicted(actor, _, _, cause):
                words.append(f"evict {actor}: {cause.value}" if cause else f"{actor} left")
            case c.VersionServed(version, _, members):
                words.append(f"served {version} by {''.join(members)}")
    return ", ".join(words)


Line = tuple[c.Event, str]


def play(machine: c.Coordinator, *lines: Line) -> None:
    for number, (event, expected) in enumerate(lines):
        assert told(machine.step(event)) == expected, f"line {number}: {event}"


def sending(*members: c.Member) -> c.Coordinator:
    machine, names = c.Coordinator(), "".join(member.actor for member in members)
    play(machine, *((c.MemberUp(member), "") for member in members))
    play(machine, (c.VersionReady(1), f"form 1 of {names}"), (joined(c.TRAINER, 1), ""))
    play(machine, *((joined(name), "") for name in names[:-1]), (joined(names[-1]), "send 1 in 1"))
    return machine


def committing(*members: c.Member) -> c.Coordinator:
    machine = sending(*members)
    play(machine, (sent(), ""), *((staged(member.actor), "") for member in members[:-1]))
    play(machine, (staged(members[-1].actor), "commit 1 in 1"))
    return machine


def forming(*members: c.Member) -> c.Coordinator:
    machine = c.Coordinator()
    for member in members:
        machine.step(c.MemberUp(member))
    machine.step(c.VersionReady(1))
    return machine


def update(actor: str, epoch: int, version: int) -> list[Line]:
    return [
        (sent(epoch, version), ""),
        (staged(actor, epoch, version), f"commit {version} in {epoch}"),
        (serving(actor, epoch, version), f"served {version} by {actor}"),
    ]


def formed(actor: str, epoch: int, version: int) -> list[Line]:
    return [(joined(c.TRAINER, epoch), ""), (joined(actor, epoch), f"send {version} in {epoch}")]


APART = "evict a: group_broke, evict b: group_broke, abort, wait"
SCENARIOS: dict[str, tuple[Any, ...]] = {
    "a commit waits for all and for the sender's checksum; served when all serve; the group is used again": (
        sending, "ab", (c.MemberUp(A), ""), (staged("a"), ""), (staged("b"), ""), (joined("b"), ""),
        (sent(), "commit 1 in 1"), (serving("a"), ""), (serving("b"), "served 1 by ab"), (broke(1), ""), (LATE, ""),
        (c.MemberReady("never seen", "x"), ""), (c.VersionReady(2), "send 2 in 1"),
    ),
    "a wrong checksum evicts, and the same version is sent again": (
        sending, "ab", (sent(), ""), (staged("a", checksum=CHECKSUM + 1), "evict a: checksum, abort, form 2 of b"),
        *formed("b", 2, 1),
    ),
    "a version whose members all die while they commit is aborted": (
        committing, "a", (down("a"), "evict a: heartbeat, abort, wait"),
    ),
    "the deadline evicts those who did not answer": (
        sending, "ab", (staged("a"), ""), (sent(), ""), (LATE, "evict b: deadline, abort, form 2 of a"),
        *formed("a", 2, 1),
    ),
    "an evicted member is back when it has shown that it can": (
        sending, "ab", (failed("b"), "evict b: failed, abort, form 2 of a"), *formed("a", 2, 1), *update("a", 2, 1),
        (c.VersionReady(2), "send 2 in 2"), *update("a", 2, 2), (c.MemberReady("b", "b-1"), ""),
        (c.VersionReady(3), "form 3 of ab"),
    ),
    "with nobody left the version waits for the next to register": (
        sending, "a", (down("a"), "evict a: heartbeat, abort, wait"), (c.MemberUp(B), "form 3 of b"),
    ),
    "those who go together cost one new epoch": (
        sending, "abd", (down("b", "d", "never seen"), "evict b: heartbeat, evict d: heartbeat, abort, form 2 of a"),
    ),
    "who says that the group broke is not blamed for it": (
        sending, "ab", (failed("a", group_broke=True), "abort, form 2 of ab"),
    ),
    "a group that breaks again and again is taken apart, and at the next version at once": (
        sending, "ab", *((broke(epoch), f"abort, form {epoch + 1} of ab") for epoch in range(1, c.MOST_RESTARTS + 1)),
        (broke(4), APART), (c.MemberUp(A), "form 6 of a"), *formed("a", 6, 1), *update("a", 6, 1),
        (c.MemberReady("b", "b-1"), ""), (c.VersionReady(2), "form 7 of ab"), (broke(7), APART),
        (c.MemberUp(A), "form 9 of a"), *formed("a", 9, 2), *update("a", 9, 2), (c.MemberReady("b", "b-1"), ""),
        (c.VersionReady(3), "form 10 of ab"), (joined("b", 10), ""), *formed("a", 10, 3), (sent(10, 3), ""),
        (staged("a", 10, 3), ""), (staged("b", 10, 3), "commit 3 in 10"), (serving("a", 10, 3), ""),
        (serving("b", 10, 3), "served 3 by ab"), (c.VersionReady(4), "send 4 in 10"), (broke(10), "abort, form 11 of ab"),
    ),
    "with only failed ones left, the one that failed longest ago is tried first": (
        sending, "ab", (failed("a"), "evict a: failed, abort, form 2 of b"),
        (failed("b", 2), "evict b: failed, abort, wait"), (c.MemberUp(B), ""), (c.MemberUp(A), "form 4 of a"),
        (failed("a", 4), "evict a: failed, abort, wait"), (c.MemberUp(A), ""), (c.MemberUp(B), "form 6 of b"),
    ),
    "nobody is blamed for what is late at the trainer": (
        forming, "ab", (joined("a"), ""), (joined("b"), ""), (LATE, "abort, form 2 of ab"), (joined("a", 2), ""),
        *formed("b", 2, 1), (staged("a", 2), ""), (staged("b", 2), ""), (LATE, "abort, form 3 of ab"),
    ),
    "all who are late are evicted": (
        sending, "ab", (LATE, "evict a: deadline, evict b: deadline, abort, wait"),
    ),
    "a joiner is in the next epoch once it serves a version": (
        committing, "a", (c.MemberUp(B), ""), (serving("a"), "served 1 by a"), (c.MemberReady("b", "b-0"), ""),
        (c.VersionReady(2), "send 2 in 1"), (c.MemberReady("b", "b-1"), ""), *update("a", 1, 2),
        (c.VersionReady(3), "form 2 of ab"), (broke(2), "abort, form 3 of ab"),
    ),
    "newcomers form the epoch when there is nobody else": (
        committing, "a", (serving("a"), "served 1 by a"), (c.MemberUp(B), ""), (down("a"), "evict a: heartbeat"),
        (c.VersionReady(2), "form 2 of b"), *formed("b", 2, 2), *update("b", 2, 2), (c.MemberUp(D), ""),
        (c.VersionReady(3), "send 3 in 2"),
    ),
    "held commits stage but do not commit, and outlive the deadline": (
        sending, "a", (c.HoldCommits(0), ""), (sent(), ""), (staged("a"), ""), (LATE, ""),
        (c.HoldCommits(None), "commit 1 in 1"),
    ),
    "a hold lets the measured version itself be committed": (
        sending, "a", (c.HoldCommits(1), ""), (sent(), ""), (staged("a"), "commit 1 in 1"),
    ),
    "messages of an old epoch change nothing": (
        sending, "ab", (down("b"), "evict b: heartbeat, abort, form 2 of a"), (staged("a"), ""), (sent(), ""),
        (broke(1), ""), (failed("a"), ""),
    ),
    "one that leaves while it receives is not waited for, and the others keep their bytes": (
        sending, "ab", (staged("a"), ""), (leaving(B), "b left"), (sent(), "commit 1 in 1"), (down("b"), ""),
        (serving("a"), "served 1 by a"), (c.VersionReady(2), "form 2 of a"),
    ),
    "the last answer of one that leaves commits nothing, and its bytes are no longer checked": (
        sending, "ab", (staged("b", checksum=CHECKSUM + 1), ""), (leaving(B), "b left"), (sent(), ""),
        (staged("b", checksum=CHECKSUM + 1), ""), (staged("a"), "commit 1 in 1"),
    ),
    "one that failed and is gone is not waited for": (
        sending, "ab", (failed("a"), "evict a: failed, abort, form 2 of b"),
        (failed("b", 2), "evict b: failed, abort, wait"), (down("a"), ""), (c.MemberUp(B), "form 4 of b"),
    ),
    "a departure that was all a commit waited for commits": (
        sending, "ab", (sent(), ""), (staged("a"), ""), (leaving(B), "b left, commit 1 in 1"),
    ),
    "a group that hangs on one that left is not held against the others": (
        sending, "abd", (leaving(B), "b left"), (staged("d"), ""), (LATE, "abort, form 2 of ad"),
    ),
    "one that left and is gone before all bytes were sent ends the transfer at once, and only once": (
        sending, "ab", (leaving(B), "b left"), (leaving(B), ""), (leaving(D, still_running=False), ""),
        (leaving(B, still_running=False), "abort, form 2 of a"),
        (leaving(B, still_running=False), ""),
    ),
    "one that is gone when all bytes were sent changes nothing": (
        sending, "ab", (leaving(B), "b left"), (sent(), ""), (leaving(B, still_running=False), ""),
        (staged("a"), "commit 1 in 1"), (leaving(B, still_running=False), ""),
    ),
    "a group that is being formed is formed anew without one that leaves": (
        forming, "ab", (leaving(B), "b left, abort, form 2 of a"),
    ),
    "when all leave, the version waits for the next": (
        sending, "ab", (leaving(A, B), "a left, b left, abort, wait"), (c.MemberUp(D), "form 3 of d"),
    ),
    "the departure of an old process does not touch the new one of that name": (
        committing, "ab", (serving("a"), ""), (serving("b"), "served 1 by ab"), (leaving(c.Member("b", "b-0")), ""),
        (c.VersionReady(2), "send 2 in 1"),
    ),
    **{
        f"a commit does not wait for one that is lost, nor does the next epoch: {told_of}": (
            committing, "ab", (serving("a"), ""), (event, f"{told_of}, served 1 by a"), (c.MemberUp(B), ""),
            (c.VersionReady(2), "form 2 of a"),
        )
        for event, told_of in [
            (down("b"), "evict b: heartbeat"), (LATE, "evict b: deadline"), (leaving(B), "b left"),
            (failed("b", group_broke=True), "evict b: failed"),
        ]
    },
    **{
        f"one that is lost while sending is left out of the next epoch: {told_of}": (
            sending, "ab", (event, f"{told_of}, abort, form 2 of a"),
        )
        for event, told_of in [
            (down("b"), "evict b: heartbeat"), (c.MemberUp(c.Member("b", "b-2")), "evict b: restarted"),
            (failed("b"), "evict b: failed"), (broke(1, "b"), "evict b: missing"),
            (leaving(B, still_running=False), "b left"),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenario: str) -> None:
    begin, members, *lines = SCENARIOS[scenario]
    play(begin(*(MEMBERS[name] for name in members)), *lines)


def test_separate_losses_within_one_version_are_not_held_against_the_others() -> None:
    machine = sending(*MEMBERS.values())
    for name in "bcde":
        machine.step(broke(machine.epoch))
        assert told(machine.step(broke(machine.epoch, name))).startswith(f"evict {name}: missing, abort, form")
    assert set(machine.members) == set("afgh")


def test_two_versions_at_once_are_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError, match="version 2 offered while 1"):
        sending(A).step(c.VersionReady(2))


def test_members_have_time_as_long_as_there_is_progress_at_the_pace_of_most() -> None:
    machine = sending(*MEMBERS.values())
    assert machine.due_s(60, 500, []) == 500, "chunks are being sent"
    machine.step(sent())
    assert machine.due_s(60, 500, [300]) == 360
    assert machine.due_s(60, 500, [300, 350]) == 410
    assert machine.due_s(60, 500, [300, 350, 405, 460]) == 520
    assert machine.due_s(60, 100, [300, 350, 395]) == 400, "in all they have 100 s after the first"
    assert machine.due_s(60, 500, [300, 301, 302, 303, 304]) == 364, "4 times the median would be 1208"
    machine = committing(*MEMBERS.values())
    assert machine.due_s(60, 500, []) == 60
    assert machine.due_s(60, 500, [1, 2, 3, 4, 58]) == 60, "most took 3 s, and 4 times that is less than 60"
    assert machine.due_s(60, 500, [20, 22, 25, 30, 80]) == 100, "most took 25 s"
    assert forming(A, B).due_s(60, 500, [10, 12]) == 60
