"""The membership and update state machine: its phases by hand, and its invariants under random schedules."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.weight_sync import coordinator as c

A, B = c.Member("a", "a-1"), c.Member("b", "b-1")
CHECKSUM = 77


def types(actions: list[c.Action]) -> list[type]:
    return [type(action) for action in actions]


def formed(*members: c.Member) -> c.Coordinator:
    """A coordinator that is sending version 1 to `members` in epoch 1."""
    machine = c.Coordinator()
    for member in members:
        assert machine.step(c.MemberUp(member)) == []
    assert machine.step(c.VersionReady(1))[0] == c.FormGroup(1, members)
    assert machine.step(c.GroupBuilt(1)) == []
    for member in members[:-1]:
        assert machine.step(c.MemberJoined(member.actor, 1)) == []
    assert machine.step(c.MemberJoined(members[-1].actor, 1))[0] == c.SendVersion(1, 1)
    return machine


def committing(*members: c.Member) -> c.Coordinator:
    machine = formed(*members)
    machine.step(c.BytesSent(1, 1, CHECKSUM))
    for member in members:
        actions = machine.step(c.MemberStaged(member.actor, 1, 1, CHECKSUM))
    assert actions[0] == c.SendCommit(1, 1)
    return machine


def answer(machine: c.Coordinator, version: int, member: c.Member) -> list[c.Action]:
    """All bytes of `version` are sent to the one member of the epoch, which stages and serves them."""
    machine.step(c.BytesSent(machine.epoch, version, CHECKSUM))
    machine.step(c.MemberStaged(member.actor, machine.epoch, version, CHECKSUM))
    return machine.step(c.MemberServing(member.actor, machine.epoch, version))


def test_commit_waits_for_every_member_and_for_the_senders_checksum() -> None:
    machine = formed(A, B)
    assert machine.step(c.MemberStaged("a", 1, 1, CHECKSUM)) == []
    assert machine.step(c.MemberStaged("b", 1, 1, CHECKSUM)) == []
    assert machine.step(c.BytesSent(1, 1, CHECKSUM))[0] == c.SendCommit(1, 1)


def test_served_when_all_serve_and_the_group_is_used_again() -> None:
    machine = committing(A, B)
    assert machine.step(c.MemberServing("a", 1, 1)) == []
    assert machine.step(c.MemberServing("b", 1, 1)) == [c.VersionServed(1, 1, ("a", "b"))]
    assert machine.step(c.VersionReady(2))[0] == c.SendVersion(1, 2)


def test_a_wrong_checksum_evicts_and_the_same_version_is_sent_again() -> None:
    machine = formed(A, B)
    machine.step(c.BytesSent(1, 1, CHECKSUM))
    actions = machine.step(c.MemberStaged("a", 1, 1, CHECKSUM + 1))
    assert types(actions) == [c.Evicted, c.SendAbort, c.FormGroup, c.SetDeadline]
    assert actions[2] == c.FormGroup(2, (B,))
    machine.step(c.GroupBuilt(2))
    assert machine.step(c.MemberJoined("b", 2))[0] == c.SendVersion(2, 1)


def test_a_dead_member_while_committing_does_not_stop_the_others() -> None:
    machine = committing(A, B)
    machine.step(c.MemberServing("a", 1, 1))
    assert machine.step(c.MembersDown(("b",))) == [
        c.Evicted("b", 1, "left, or its heartbeat stopped"),
        c.VersionServed(1, 1, ("a",)),
    ]
    assert machine.step(c.VersionReady(2))[0] == c.FormGroup(2, (A,))


def test_the_deadline_evicts_those_who_did_not_answer() -> None:
    machine = formed(A, B)
    token = machine._deadline_token
    machine.step(c.MemberStaged("a", 1, 1, CHECKSUM))
    actions = machine.step(c.DeadlinePassed(token))
    assert actions[0] == c.Evicted("b", 1, "deadline passed while sending")
    assert actions[2] == c.FormGroup(2, (A,))
    assert machine.step(c.DeadlinePassed(token)) == []


def test_an_evicted_member_is_back_when_it_has_shown_that_it_can() -> None:
    machine = formed(A, B)
    machine.step(c.MemberFailed("b", 1, "disk full"))
    machine.step(c.GroupBuilt(2))
    machine.step(c.MemberJoined("a", 2))
    answer(machine, 1, A)
    assert machine.step(c.VersionReady(2))[0] == c.SendVersion(2, 2)
    answer(machine, 2, A)
    assert machine.step(c.MemberReady("b", "b-1")) == []
    assert machine.step(c.VersionReady(3))[0] == c.FormGroup(3, (A, B))


def test_who_stays_broken_while_its_heart_beats_costs_the_others_one_deadline_only() -> None:
    machine = committing(A, B)
    machine.step(c.MemberServing("a", 1, 1))
    actions = machine.step(c.DeadlinePassed(machine._deadline_token))
    assert actions == [c.Evicted("b", 1, "deadline passed while committing"), c.VersionServed(1, 1, ("a",))]
    machine.step(c.MemberUp(B))
    assert machine.step(c.VersionReady(2))[0] == c.FormGroup(2, (A,))


def test_with_nobody_left_the_version_waits_for_the_next_to_register() -> None:
    machine = formed(A)
    actions = machine.step(c.MembersDown(("a",)))
    assert types(actions) == [c.Evicted, c.SendAbort, c.WaitingForMembers]
    assert machine.step(c.MemberUp(B))[0] == c.FormGroup(3, (B,))


def test_those_who_go_together_cost_one_new_epoch() -> None:
    third = c.Member("d", "d-1")
    machine = formed(A, B, third)
    actions = machine.step(c.MembersDown(("b", "d", "never seen")))
    assert types(actions) == [c.Evicted, c.Evicted, c.SendAbort, c.FormGroup, c.SetDeadline]
    assert actions[3] == c.FormGroup(2, (A,))


def test_who_says_that_the_group_broke_is_not_blamed_for_it() -> None:
    machine = formed(A, B)
    actions = machine.step(c.MemberFailed("a", 1, "connection reset", group_broke=True))
    assert types(actions) == [c.SendAbort, c.FormGroup, c.SetDeadline]
    assert actions[1] == c.FormGroup(2, (A, B))


def test_a_group_that_breaks_again_and_again_is_taken_apart() -> None:
    machine = formed(A, B)
    for epoch in range(1, c.MOST_RESTARTS + 1):
        assert types(machine.step(c.TransferFailed(epoch, "cannot be built")))[0] is c.SendAbort
    actions = machine.step(c.TransferFailed(machine.epoch, "cannot be built"))
    assert types(actions) == [c.Evicted, c.Evicted, c.SendAbort, c.WaitingForMembers]
    assert machine.step(c.MemberUp(A))[0] == c.FormGroup(machine.epoch, (A,))


def test_separate_losses_within_one_version_are_not_held_against_the_others() -> None:
    members = tuple(c.Member(name, f"{name}-1") for name in "abcdefgh")
    machine = formed(*members)
    for name in "bcde":
        machine.step(c.TransferFailed(machine.epoch, "connection reset"))
        actions = machine.step(c.TransferFailed(machine.epoch, "one did not come", (name,)))
        assert [action.actor for action in actions if isinstance(action, c.Evicted)] == [name]
    assert set(machine.members) == set("afgh")


def test_a_group_that_was_taken_apart_is_not_tried_so_often_at_the_next_version() -> None:
    machine = formed(A, B)
    for _ in range(c.MOST_RESTARTS + 1):
        machine.step(c.TransferFailed(machine.epoch, "cannot be built"))
    serve_alone(machine, A, 1)
    machine.step(c.MemberReady("b", "b-1"))
    assert machine.step(c.VersionReady(2))[0] == c.FormGroup(machine.epoch, (A, B))
    actions = machine.step(c.TransferFailed(machine.epoch, "cannot be built"))
    assert types(actions) == [c.Evicted, c.Evicted, c.SendAbort, c.WaitingForMembers]


def serve_alone(machine: c.Coordinator, member: c.Member, version: int) -> None:
    assert machine.step(c.MemberUp(member))[0] == c.FormGroup(machine.epoch, (member,))
    epoch = machine.epoch
    machine.step(c.GroupBuilt(epoch))
    machine.step(c.MemberJoined(member.actor, epoch))
    assert answer(machine, version, member)[0] == c.VersionServed(version, epoch, (member.actor,))


def test_a_version_whose_members_all_die_while_they_commit_is_aborted() -> None:
    machine = committing(A)
    assert types(machine.step(c.MembersDown(("a",)))) == [c.Evicted, c.SendAbort, c.WaitingForMembers]


def test_with_only_failed_ones_left_the_one_that_failed_longest_ago_is_tried_first() -> None:
    machine = formed(A, B)
    machine.step(c.MemberFailed("a", 1, "disk full"))
    actions = machine.step(c.MemberFailed("b", 2, "hangs"))
    assert actions[-1] == c.WaitingForMembers(1)
    assert machine.step(c.MemberUp(B)) == []
    assert machine.step(c.MemberUp(A))[0] == c.FormGroup(4, (A,))
    machine.step(c.MemberFailed("a", 4, "disk full"))
    assert machine.step(c.MemberUp(A)) == [], "it is b's turn"
    assert machine.step(c.MemberUp(B))[0] == c.FormGroup(6, (B,))


def causes(actions: list[c.Action]) -> list[str]:
    return [action.cause.value for action in actions if isinstance(action, c.Evicted)]


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (c.MembersDown(("b",)), "heartbeat"),
        (c.MemberUp(c.Member("b", "b-2")), "restarted"),
        (c.MemberFailed("b", 1, "disk full"), "failed"),
        (c.TransferFailed(1, "b did not come", ("b",)), "missing"),
        (c.MembersLeaving((B,), "its pod was deleted", still_running=False), "failed"),
    ],
)
def test_one_that_is_lost_while_sending_is_left_out_of_the_next_epoch(event: c.Event, cause: str) -> None:
    actions = formed(A, B).step(event)
    assert types(actions) == [c.Evicted, c.SendAbort, c.FormGroup, c.SetDeadline]
    assert actions[2] == c.FormGroup(2, (A,))
    assert causes(actions) == [cause]


def test_each_eviction_says_its_cause() -> None:
    late = formed(A, B)
    assert causes(late.step(c.DeadlinePassed(late._deadline_token))) == ["deadline", "deadline"]
    wrong = formed(A, B)
    wrong.step(c.BytesSent(1, 1, CHECKSUM))
    assert causes(wrong.step(c.MemberStaged("a", 1, 1, CHECKSUM + 1))) == ["checksum"]
    broken = formed(A, B)
    for _ in range(c.MOST_RESTARTS):
        broken.step(c.TransferFailed(broken.epoch, "the group broke"))
    assert causes(broken.step(c.TransferFailed(broken.epoch, "the group broke"))) == ["group_broke", "group_broke"]


def test_a_joiner_is_in_the_next_epoch_once_it_serves_a_version() -> None:
    machine = committing(A)
    assert machine.step(c.MemberUp(B)) == []
    machine.step(c.MemberServing("a", 1, 1))
    assert machine.step(c.MemberReady("b", "b-0")) == [], "another process of this name"
    assert machine.step(c.VersionReady(2))[0] == c.SendVersion(1, 2)
    assert machine.step(c.MemberReady("b", "b-1")) == []
    answer(machine, 2, A)
    assert machine.step(c.VersionReady(3))[0] == c.FormGroup(2, (A, B))


def test_newcomers_form_the_epoch_when_there_is_nobody_else() -> None:
    machine = committing(A)
    machine.step(c.MemberServing("a", 1, 1))
    machine.step(c.MemberUp(B))
    machine.step(c.MembersDown(("a",)))
    assert machine.step(c.VersionReady(2))[0] == c.FormGroup(2, (B,))


def test_held_commits_stage_but_do_not_commit_and_outlive_the_deadline() -> None:
    machine = formed(A)
    machine.step(c.HoldCommits(0))
    machine.step(c.BytesSent(1, 1, CHECKSUM))
    assert machine.step(c.MemberStaged("a", 1, 1, CHECKSUM)) == []
    assert types(machine.step(c.DeadlinePassed(machine._deadline_token))) == [c.SetDeadline]
    assert machine.step(c.HoldCommits(None))[0] == c.SendCommit(1, 1)


def test_a_hold_lets_the_measured_version_itself_be_committed() -> None:
    machine = formed(A)
    machine.step(c.HoldCommits(1))
    machine.step(c.BytesSent(1, 1, CHECKSUM))
    assert machine.step(c.MemberStaged("a", 1, 1, CHECKSUM))[0] == c.SendCommit(1, 1)


def test_messages_of_an_old_epoch_change_nothing() -> None:
    machine = formed(A, B)
    machine.step(c.MembersDown(("b",)))
    for event in (c.MemberStaged("a", 1, 1, CHECKSUM), c.BytesSent(1, 1, CHECKSUM), c.TransferFailed(1, "late")):
        assert machine.step(event) == []


def test_two_versions_at_once_are_a_bug_of_ours() -> None:
    machine = formed(A)
    with pytest.raises(AssertionError, match="version 2 offered while 1"):
        machine.step(c.VersionReady(2))


def leaving(*members: c.Member, still_running: bool = True) -> c.MembersLeaving:
    return c.MembersLeaving(members, "its pod is being deleted", still_running)


def left(actor: str, epoch: int = 1) -> c.Evicted:
    return c.Evicted(actor, epoch, "its pod is being deleted", left=True)


def test_one_that_leaves_while_it_receives_is_not_waited_for_and_the_others_keep_their_bytes() -> None:
    machine = formed(A, B)
    machine.step(c.MemberStaged("a", 1, 1, CHECKSUM))
    assert machine.step(leaving(B)) == [left("b")]
    assert types(machine.step(c.BytesSent(1, 1, CHECKSUM))) == [c.SendCommit, c.SetDeadline]
    assert machine.step(c.MembersDown(("b",))) == [], "it has removed its registration now"
    assert machine.step(c.MemberServing("a", 1, 1)) == [c.VersionServed(1, 1, ("a",))]
    assert machine.step(c.VersionReady(2))[0] == c.FormGroup(2, (A,)), "its ranks were in the old group"


def test_the_last_answer_of_one_that_leaves_commits_nothing_and_its_bytes_are_no_longer_checked() -> None:
    machine = formed(A, B)
    machine.step(c.MemberStaged("b", 1, 1, CHECKSUM + 1))
    assert machine.step(leaving(B)) == [left("b")]
    assert machine.step(c.BytesSent(1, 1, CHECKSUM)) == []
    assert machine.step(c.MemberStaged("b", 1, 1, CHECKSUM + 1)) == []
    assert types(machine.step(c.MemberStaged("a", 1, 1, CHECKSUM))) == [c.SendCommit, c.SetDeadline]


def test_a_departure_that_was_all_a_commit_waited_for_commits() -> None:
    machine = formed(A, B)
    machine.step(c.BytesSent(1, 1, CHECKSUM))
    machine.step(c.MemberStaged("a", 1, 1, CHECKSUM))
    assert types(machine.step(leaving(B))) == [c.Evicted, c.SendCommit, c.SetDeadline]


def test_a_group_that_breaks_with_one_that_leaves_is_not_held_against_the_others() -> None:
    third = c.Member("d", "d-1")
    machine = formed(A, B, third)
    machine._breaks = True  # the next break would take the group apart
    machine.step(leaving(B))
    actions = machine.step(c.TransferFailed(1, "connection reset"))
    assert types(actions) == [c.SendAbort, c.FormGroup, c.SetDeadline]
    assert actions[1] == c.FormGroup(2, (A, third))


def test_a_group_that_hangs_on_one_that_left_is_not_held_against_the_others() -> None:
    third = c.Member("d", "d-1")
    machine = formed(A, B, third)
    machine.step(leaving(B))
    machine.step(c.MemberStaged("d", 1, 1, CHECKSUM))
    actions = machine.step(c.DeadlinePassed(machine._deadline_token))
    assert types(actions) == [c.SendAbort, c.FormGroup, c.SetDeadline]
    assert actions[1] == c.FormGroup(2, (A, third))


def test_one_that_left_and_is_gone_before_all_bytes_were_sent_ends_the_transfer_at_once() -> None:
    machine = formed(A, B)
    machine.step(leaving(B))
    actions = machine.step(leaving(B, still_running=False))
    assert types(actions) == [c.SendAbort, c.FormGroup, c.SetDeadline]
    assert actions[1] == c.FormGroup(2, (A,))
    assert machine.step(leaving(B, still_running=False)) == [], "the new group knows nothing of it"


def test_one_that_is_gone_when_all_bytes_were_sent_changes_nothing() -> None:
    machine = formed(A, B)
    machine.step(leaving(B))
    machine.step(c.BytesSent(1, 1, CHECKSUM))
    assert machine.step(leaving(B, still_running=False)) == []
    assert types(machine.step(c.MemberStaged("a", 1, 1, CHECKSUM))) == [c.SendCommit, c.SetDeadline]


def test_a_group_that_is_being_formed_is_formed_anew_without_one_that_leaves() -> None:
    machine = c.Coordinator()
    for member in (A, B):
        machine.step(c.MemberUp(member))
    machine.step(c.VersionReady(1))
    actions = machine.step(leaving(B))
    assert types(actions) == [c.Evicted, c.SendAbort, c.FormGroup, c.SetDeadline]
    assert actions[2] == c.FormGroup(2, (A,))


def test_when_all_leave_the_version_waits_for_the_next() -> None:
    machine = formed(A, B)
    assert types(machine.step(leaving(A, B))) == [c.Evicted, c.Evicted, c.SendAbort, c.WaitingForMembers]
    assert machine.step(c.MemberUp(c.Member("e", "e-1")))[0] == c.FormGroup(3, (c.Member("e", "e-1"),))


def test_one_that_leaves_while_idle_is_out_of_the_next_epoch_and_while_committing_is_not_waited_for() -> None:
    machine = committing(A, B)
    machine.step(c.MemberServing("a", 1, 1))
    assert machine.step(leaving(B)) == [left("b"), c.VersionServed(1, 1, ("a",))]
    assert machine.step(leaving(B)) == []
    assert machine.step(c.VersionReady(2))[0] == c.FormGroup(2, (A,))


def test_the_departure_of_an_old_process_does_not_touch_the_new_one_of_that_name() -> None:
    machine = committing(A, B)
    machine.step(c.MemberServing("a", 1, 1))
    machine.step(c.MemberServing("b", 1, 1))
    assert machine.step(leaving(c.Member("b", "b-0"))) == []
    assert machine.step(c.VersionReady(2))[0] == c.SendVersion(1, 2)


class World:
    """Actors that answer, are slow, die and come back, in an order that a seed decides."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.machine = c.Coordinator()
        self.alive: dict[str, c.Member] = {}
        self.births = 0
        self.pending: list[c.Event] = []
        self.staged: set[tuple[str, int, int]] = set()
        self.epochs: dict[int, tuple[c.Member, ...]] = {}
        self.served: list[int] = []
        self.unproven: set[str] = set()
        self.next_version = 0

    def feed(self, event: c.Event) -> None:
        if isinstance(event, c.MemberStaged):
            self.staged.add((event.actor, event.epoch, event.version))
        if isinstance(event, c.MemberReady) and self.machine.present.get(event.actor, A).process == event.process:
            self.unproven.discard(event.actor)
        for action in self.machine.step(event):
            self.react(action)

    def react(self, action: c.Action) -> None:
        match action:
            case c.FormGroup(epoch, members):
                assert epoch not in self.epochs, "an epoch's membership never changes"
                assert not self.epochs or epoch > max(self.epochs)
                names = {member.actor for member in members}
                assert not names & self.unproven or names <= self.unproven, "who failed or came late holds up others"
                self.epochs[epoch] = members
                self.unproven -= names
                self.pending.append(c.GroupBuilt(epoch))
                self.pending += [c.MemberJoined(m.actor, epoch) for m in members if self.is_alive(m)]
            case c.SendVersion(epoch, version):
                self.pending.append(c.BytesSent(epoch, version, CHECKSUM))
                for member in self.epochs[epoch]:
                    if self.is_alive(member):
                        self.pending.append(c.MemberStaged(member.actor, epoch, version, CHECKSUM))
            case c.SendCommit(epoch, version):
                for member in self.epochs[epoch]:
                    if member.actor in self.machine.members:
                        assert (member.actor, epoch, version) in self.staged, "commit without staged in this epoch"
                    if self.is_alive(member):
                        self.pending.append(c.MemberServing(member.actor, epoch, version))
            case c.Evicted(actor, _, _, left):
                if not left:
                    self.unproven.add(actor)
            case c.SetDeadline(token):
                self.pending.append(c.DeadlinePassed(token))
            case c.VersionServed(version, _, _):
                assert not self.served or version > self.served[-1], "versions go down"
                self.served.append(version)

    def is_alive(self, member: c.Member) -> bool:
        return self.alive.get(member.actor) == member

    def chaos(self) -> None:
        """One random thing happens."""
        choice = self.random.random()
        name = self.random.choice("abc")
        if choice < 0.1:
            self.births += 1
            self.alive[name] = c.Member(name, f"{name}-{self.births}")
            if self.next_version:
                self.unproven.add(name)
            self.feed(c.MemberUp(self.alive[name]))
        elif choice < 0.2 and name in self.alive:
            del self.alive[name]
            if self.random.random() < 0.5:
                self.pending.append(c.MembersDown((name,)))
        elif choice < 0.22 and name in self.alive:
            self.feed(leaving(self.alive.pop(name), still_running=self.random.random() < 0.5))
        elif choice < 0.25 and name in self.machine.members:
            self.feed(c.MemberFailed(name, self.machine.epoch, "disk full"))
        elif choice < 0.3:
            self.feed(c.TransferFailed(self.machine.epoch, "connection reset"))
        elif choice < 0.33 and name in self.alive:
            self.feed(c.MemberReady(name, self.random.choice([self.alive[name].process, "another"])))
        elif choice < 0.35:
            self.feed(c.HoldCommits(self.random.choice([None, self.next_version - 1])))
        elif self.pending:
            self.feed(self.pending.pop(self.random.randrange(len(self.pending))))
        elif self.machine.idle:
            self.offer()

    def offer(self) -> None:
        self.next_version += 1
        self.feed(c.VersionReady(self.next_version))

    def end_faults(self) -> None:
        """The faults end: one actor is alive, heartbeats arrive, everything pending happens."""
        self.feed(c.HoldCommits(None))
        survivor = c.Member("a", "a-last")
        for name in set(self.machine.present) - {"a"}:
            self.feed(c.MembersDown((name,)))
        self.alive = {"a": survivor}
        self.feed(c.MemberUp(survivor))
        for _ in range(200):
            self.feed(c.MemberUp(survivor))
            while self.pending:
                answers = [event for event in self.pending if not isinstance(event, c.DeadlinePassed)]
                event = (answers or self.pending)[0]
                self.pending.remove(event)
                self.feed(event)
            if self.machine.idle:
                return


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 200))
def test_after_any_schedule_one_more_update_reaches_everybody_alive(seed: int, steps: int) -> None:
    world = World(seed)
    for _ in range(steps):
        world.chaos()
    world.end_faults()
    assert world.machine.idle
    world.offer()
    world.end_faults()
    assert world.served[-1] == world.next_version
    assert set(world.machine.members) == {"a"}
