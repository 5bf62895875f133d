"""The membership and update state machine by hand, who has come and gone, and which actors get a side group. Under random
histories, together with its actors: tests/faults."""

from typing import Any

import pytest

from pipelinerl.kube.client import PodEnd
from pipelinerl.v1.control_pb2 import Abort, Announce, Commit, EpochJoined, Serving, Staged
from services.trainer.weight_sync import coordinator as c
from services.trainer.weight_sync.membership import (
    MOST_IN_SIDE_GROUP,
    MOST_REMEMBERED,
    MOST_SIDE_GROUPS,
    MOST_WAIT_HEARTBEATS,
    MemberChange,
    Roster,
)
from services.trainer.weight_sync.updater import actors_of, coalesce_departures

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
    "a joiner is in the next epoch once it serves a version": (
        committing, "a", (c.MemberUp(B), ""), (serving("a"), "served 1 by a"), (c.MemberReady("b", "b-0"), ""),
        (c.VersionReady(2), "send 2 in 1"), (c.MemberReady("b", "b-1"), ""), *update("a", 1, 2),
        (c.VersionReady(3), "form 2 of ab"), (broke(2), "abort, form 3 of ab"),
    ),
    "held commits stage but do not commit, and outlive the deadline": (
        sending, "a", (c.HoldCommits(0), ""), (sent(), ""), (staged("a"), ""), (LATE, ""),
        (c.HoldCommits(None), "commit 1 in 1"),
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
    "a group that is being formed is formed anew without one that leaves": (
        forming, "ab", (leaving(B), "b left, abort, form 2 of a"),
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


# --- the roster

IN_POD = c.Member("a", "a-1", pod_uid="u1")


def deletion(uid: str = "u1", name: str = "a", *, still_running: bool = True) -> PodEnd:
    return PodEnd(name, uid, "its pod is being deleted", still_running)


RENAMED, OTHER = c.Member("actor-0", "p", pod_uid="u1"), c.Member("a", "q", pod_uid="u2")


@pytest.mark.parametrize(
    ("end", "present", "departure", "left", "not_left"),
    [
        (deletion(), [IN_POD], leaving(IN_POD), [IN_POD], [c.Member("a", "a-2", pod_uid="u2")]),
        (deletion(), [], None, [IN_POD], []),  # a registration that comes later is too late
        (deletion("u9", "b"), [IN_POD], None, [], [c.Member("a", "a-2", pod_uid="u1")]),  # another pod's end
        (deletion("u0", still_running=False), [IN_POD], None, [], [IN_POD]),  # an old pod of that name
        (deletion(), [RENAMED, OTHER], leaving(RENAMED), [RENAMED], [OTHER]),  # known by its uid, whatever its name
        (deletion(), [A], None, [], [A]),  # an empty uid is nobody's
    ],
)
def test_a_pods_end_is_the_departure_of_its_process_and_of_nobody_else(end, present, departure, left, not_left) -> None:
    roster = Roster()
    assert roster.leaving(end, {member.actor: member for member in present}) == departure
    assert all(roster.has_left(member) for member in left)
    assert not any(roster.has_left(member) for member in not_left)


def test_an_end_is_told_once_and_a_pod_that_was_only_relabelled_comes_back_with_its_heartbeat() -> None:
    roster = Roster()
    for number in range(MOST_REMEMBERED + 1):
        roster.leaving(deletion(f"before{number}"), {})
    assert not roster.has_left(c.Member("a", "p", pod_uid="before0")), "what is remembered is bounded"
    roster.leaving(deletion(), {"a": IN_POD})
    gone = deletion(still_running=False)
    assert roster.leaving(gone, {}) == leaving(IN_POD, still_running=False)
    assert roster.leaving(gone, {}) is None
    assert roster.has_left(IN_POD)
    roster, why = Roster(), "its pod was deleted, or relabelled"
    relabelled = PodEnd("a", "u1", why, still_running=False, final=False)
    assert roster.leaving(relabelled, {"a": IN_POD}) == c.MembersLeaving((IN_POD,), why, False)
    assert not roster.has_left(IN_POD)
    roster.leaving(PodEnd("a", "u1", "its pod was deleted", still_running=False), {})
    assert roster.has_left(IN_POD)


def put_out(roster: Roster, actor: str) -> list[str]:
    return [change.kind for change in roster.put_out(c.Evicted(actor, 1, "too slow"), 3)]


def gone(roster: Roster, actor: str) -> list[str]:
    return [change.kind for change in roster.gone(actor, 1, 3, "stopped", left=False)]


def serves(roster: Roster, *members: c.Member, version: int = 3) -> list[MemberChange]:
    return roster.served(members, 1, version)


def test_arrivals_and_roster_are_told_once() -> None:
    roster, again = Roster(), c.Member("a", "a-2")
    assert put_out(roster, "a") == [], "nobody knows it"
    roster.up(A)
    assert put_out(roster, "a") == ["evicted"], "whether it served anything or not"
    assert not roster.have_served([A])
    assert serves(roster, A) == [MemberChange("joined", A, 1, 3)]
    assert roster.have_served([A])
    assert not roster.have_served([A, B]), "b is not registered"
    assert serves(roster, A, version=4) == []
    late = c.Evicted("a", 2, "too slow", cause=c.EvictionCause.DEADLINE)
    assert roster.put_out(late, 4) == [MemberChange("evicted", A, 2, 4, "too slow", c.EvictionCause.DEADLINE)]
    assert [change.kind for change in serves(roster, A, version=5)] == ["joined"]
    roster.up(again)
    assert not roster.have_served([again])
    assert serves(roster, A, version=6) == [], "that process is no longer there"
    assert serves(roster, again, version=6) == [MemberChange("joined", again, 1, 6)]
    assert roster.put_out(c.Evicted("a", 2, "its pod", None), 6) == [MemberChange("left", again, 2, 6, "its pod")]
    assert gone(roster, "a") == [], "an epoch has put it out before"
    roster.up(A)
    assert gone(roster, "a") == [], "it never served"
    roster.up(A)
    serves(roster, A)
    assert roster.gone("a", 2, 3, "stopped", left=False) == [MemberChange("evicted", A, 2, 3, "stopped")]
    assert gone(roster, "a") == []


class Run:
    """The epoch of `members` serves version 3. Side groups run as the roster says."""

    def __init__(self, *members: c.Member) -> None:
        self.roster, self.version, self.sides = Roster(), 3, list[dict[str, c.Member]]()
        self.epoch = {member.actor for member in members}
        for member in members:
            self.roster.up(member)
        serves(self.roster, *members)

    def up(self, *members: c.Member) -> tuple[list[str], list[str]]:
        """Heartbeats; then the actors that leave their side groups, and the processes of each group that begins."""
        for member in members:
            self.roster.up(member)
        ended = [member.actor for side in self.sides for member in self.roster.outdated(side, self.epoch)]
        for actor in ended:
            self._leaves_side(actor)
        begun = self.roster.side_groups(self.version, self.epoch, self.sides)
        self.sides += [{member.actor: member for member in group} for group in begun]
        return ended, [" ".join(member.process for member in group) for group in begun]

    def side_fails(self, member: c.Member) -> None:
        self._leaves_side(member.actor)
        self.roster.side_failed(member)

    def side_serves(self, member: c.Member, version: int) -> None:
        self._leaves_side(member.actor)
        serves(self.roster, member, version=version)

    def _leaves_side(self, actor: str) -> None:
        for side in self.sides:
            side.pop(actor, None)
        self.sides = [side for side in self.sides if side]


def test_a_joiner_is_brought_to_the_served_version_at_once_and_to_one_that_was_served_meanwhile() -> None:
    run = Run()
    run.version = -1
    assert run.up(A, B) == ([], []), "before the first version there is nothing to bring"
    assert run.roster.serving(-1) == {}
    run = Run(A)
    assert run.up(B) == ([], ["b-1"])
    assert run.up(B) == ([], [])
    assert list(run.roster.serving(3)) == ["a"]
    run.version = 4
    serves(run.roster, A, version=4)
    assert run.up() == ([], [])
    run.side_serves(B, 3)
    assert run.up() == ([], ["b-1"])
    run.side_serves(B, 4)
    assert run.up() == ([], [])
    assert run.roster.serving(4) == {"a": A, "b": B}


def test_a_side_group_ends_with_its_process_and_when_the_epoch_takes_it() -> None:
    run, again = Run(A), c.Member("b", "b-2")
    run.up(B)
    assert run.up(again) == (["b"], ["b-2"])
    run.epoch.add("b")
    assert run.up(again) == (["b"], [])
    run.epoch.clear()
    gone(run.roster, "a")
    assert run.up() == ([], ["b-2"])
    gone(run.roster, "b")
    assert run.up() == (["b"], [])


def test_newcomers_share_a_side_group_and_one_that_leaves_it_does_not_end_it() -> None:
    run = Run(A)
    crowd = [c.Member(f"c{number}", f"p{number}") for number in range(MOST_IN_SIDE_GROUP + 1)]
    assert run.up(*crowd) == ([], [" ".join(member.process for member in crowd[:-1])])
    assert run.up() == ([], [f"p{MOST_IN_SIDE_GROUP}"]), "beside the first group"
    gone(run.roster, "c1")
    assert run.up(c.Member("c2", "again")) == (["c1", "c2"], ["again"])
    assert [len(side) for side in run.sides] == [MOST_IN_SIDE_GROUP - 2, 1, 1]
    run.up(c.Member("late", "p"))
    assert (len(run.sides), run.up(c.Member("later", "p"))) == (MOST_SIDE_GROUPS, ([], []))


def test_actors_that_failed_get_side_groups_of_their_own_and_leave_one_to_newcomers() -> None:
    run = Run(A)
    failing = [c.Member(f"f{number}", f"p{number}") for number in range(MOST_SIDE_GROUPS + 1)]
    assert len(run.up(*failing)[1]) == 1
    for member in failing:
        run.side_fails(member)
    assert run.up(*failing, B) == ([], ["b-1", "p0", "p1", "p2"])
    run.side_serves(B, 3)
    assert run.up(*failing) == ([], [])
    assert run.up(c.Member("d", "d-1")) == ([], ["d-1"])
    run.side_serves(failing[0], 3)
    run.side_serves(c.Member("d", "d-1"), 3)
    assert run.up() == ([], ["p3"])


def test_whoever_was_put_out_is_tried_again_less_and_less_often_until_it_serves() -> None:
    run = Run(A, B)
    run.epoch.discard("b")
    put_out(run.roster, "b")
    run.version = 4
    assert run.up(A) == ([], []), "it rests until its heart beats"
    beats = []
    for _ in range(7):
        beats.append(1)
        while not run.up(B)[1]:
            beats[-1] += 1
        run.side_fails(B)
    assert beats == [1, 2, 4, 8, MOST_WAIT_HEARTBEATS, MOST_WAIT_HEARTBEATS, MOST_WAIT_HEARTBEATS]
    while not run.up(B)[1]:
        pass
    run.side_serves(B, 4)
    run.version = 5
    assert run.up()[1] == ["b-1"]
    run.side_fails(B)
    assert run.up(B)[1] == ["b-1"], "once it has served, it is trusted again"


def test_missing_ranks_are_those_of_their_actors() -> None:
    members = (c.Member("a", "a-1", ranks=2), c.Member("b", "b-1"), c.Member("c", "c-1", ranks=4))
    assert actors_of((1, 2, 3), members) == ("a", "b")
    assert actors_of((7,), members) == ("c",)
    assert actors_of((), members) == ()


def test_departures_of_one_kind_in_a_row_are_taken_together() -> None:
    events = [down("b"), down("d"), joined("a"), down("e"), leaving(A)]
    expected = [down("b", "d"), joined("a"), down("e"), leaving(A)]
    assert [event for _, event in coalesce_departures([(None, event) for event in events])] == expected
