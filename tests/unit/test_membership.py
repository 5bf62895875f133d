"""Who has come and gone, which actors get a side group, and which ranks of a transfer group are whose."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.kube.client import PodEnd
from services.trainer.weight_sync.coordinator import (
    Coordinator,
    Evicted,
    EvictionCause,
    FormGroup,
    Member,
    MembersLeaving,
    MemberUp,
    VersionReady,
)
from services.trainer.weight_sync.membership import (
    MOST_AT_ONCE,
    MOST_IN_GROUP,
    MOST_REMEMBERED,
    MOST_RESTED,
    MemberChange,
    Roster,
)
from services.trainer.weight_sync.updater import actors_of, epoch_members

IN_POD = Member("a", "a-1", pod_uid="u1")
NAMELESS = Member("a", "a-1")


def deletion(uid: str = "u1", name: str = "a", *, still_running: bool = True) -> PodEnd:
    return PodEnd(name, uid, "its pod is being deleted", still_running)


def leaves(*members: Member, still_running: bool = True) -> MembersLeaving:
    return MembersLeaving(members, "its pod is being deleted", still_running)


RENAMED, OTHER = Member("actor-0", "p", pod_uid="u1"), Member("a", "q", pod_uid="u2")


@pytest.mark.parametrize(
    ("end", "present", "departure", "left", "not_left"),
    [
        (deletion(), [IN_POD], leaves(IN_POD), [IN_POD], [Member("a", "a-2", pod_uid="u2")]),
        (deletion(), [], None, [IN_POD], []),  # a registration that comes later is too late
        (deletion("u9", "b"), [IN_POD], None, [], [Member("a", "a-2", pod_uid="u1")]),  # another pod's end
        (deletion("u0", still_running=False), [IN_POD], None, [], [IN_POD]),  # an old pod of that name
        (deletion(), [RENAMED, OTHER], leaves(RENAMED), [RENAMED], [OTHER]),  # known by its uid, whatever its name
        (deletion(), [NAMELESS], None, [], [NAMELESS]),  # an empty uid is nobody's
    ],
)
def test_a_pods_end_is_the_departure_of_its_process_and_of_nobody_else(end, present, departure, left, not_left) -> None:
    roster = Roster()
    assert roster.leaving(end, {member.actor: member for member in present}) == departure
    assert all(roster.has_left(member) for member in left)
    assert not any(roster.has_left(member) for member in not_left)


def test_an_end_is_told_once_and_a_pod_that_was_only_relabelled_comes_back_with_its_heartbeat() -> None:
    roster = Roster()
    roster.leaving(deletion(), {"a": IN_POD})
    gone = deletion(still_running=False)
    assert roster.leaving(gone, {}) == leaves(IN_POD, still_running=False)
    assert roster.leaving(gone, {}) is None
    assert roster.has_left(IN_POD)
    roster, why = Roster(), "its pod was deleted, or relabelled"
    relabelled = PodEnd("a", "u1", why, still_running=False, final=False)
    assert roster.leaving(relabelled, {"a": IN_POD}) == MembersLeaving((IN_POD,), why, False)
    assert not roster.has_left(IN_POD)
    roster.leaving(PodEnd("a", "u1", "its pod was deleted", still_running=False), {})
    assert roster.has_left(IN_POD)


def test_what_is_remembered_is_bounded() -> None:
    roster = Roster()
    for number in range(MOST_REMEMBERED + 1):
        roster.leaving(deletion(f"u{number}"), {})
    assert not roster.has_left(Member("a", "p", pod_uid="u0"))
    assert roster.has_left(Member("a", "p", pod_uid="u1"))


A, B = Member("a", "a-1"), Member("b", "b-1")


def put_out(roster: Roster, actor: str) -> list[str]:
    return [change.kind for change in roster.put_out(Evicted(actor, 1, "too slow"), 3)]


def gone(roster: Roster, actor: str) -> list[str]:
    return [change.kind for change in roster.gone(actor, 1, 3, "stopped", left=False)]


def serves(roster: Roster, *members: Member, version: int = 3) -> list[MemberChange]:
    return roster.served(members, 1, version)


def test_arrivals_and_roster_are_told_once() -> None:
    roster, again = Roster(), Member("a", "a-2")
    assert put_out(roster, "a") == [], "nobody knows it"
    roster.up(A)
    assert put_out(roster, "a") == ["evicted"], "whether it served anything or not"
    assert serves(roster, A) == [MemberChange("joined", A, 1, 3)]
    assert serves(roster, A, version=4) == []
    late = Evicted("a", 2, "too slow", cause=EvictionCause.DEADLINE)
    assert roster.put_out(late, 4) == [MemberChange("evicted", A, 2, 4, "too slow", EvictionCause.DEADLINE)]
    assert [change.kind for change in serves(roster, A, version=5)] == ["joined"]
    roster.up(again)
    assert serves(roster, A, version=6) == [], "that process is no longer there"
    assert serves(roster, again, version=6) == [MemberChange("joined", again, 1, 6)]
    assert roster.put_out(Evicted("a", 2, "its pod", None), 6) == [MemberChange("left", again, 2, 6, "its pod")]
    assert gone(roster, "a") == [], "an epoch has put it out before"
    roster.up(A)
    assert gone(roster, "a") == [], "it never served"
    roster.up(A)
    serves(roster, A)
    assert roster.gone("a", 2, 3, "stopped", left=False) == [MemberChange("evicted", A, 2, 3, "stopped")]
    assert gone(roster, "a") == []


def test_who_has_served_is_known_by_its_process() -> None:
    roster = Roster()
    roster.up(A)
    assert not roster.have_served([A])
    serves(roster, A, B)
    assert roster.have_served([A])
    assert not roster.have_served([A, B]), "b is not registered"
    roster.up(Member("a", "a-2"))
    assert not roster.have_served([Member("a", "a-2")])


class Run:
    """The epoch of `members` serves version 3. Side groups run as the roster says."""

    def __init__(self, *members: Member) -> None:
        self.roster, self.version, self.sides = Roster(), 3, list[dict[str, Member]]()
        self.epoch = {member.actor for member in members}
        for member in members:
            self.roster.up(member)
        serves(self.roster, *members)

    def up(self, *members: Member) -> tuple[list[str], list[str]]:
        """Heartbeats; then the actors that leave their side groups, and the processes of each group that begins."""
        for member in members:
            self.roster.up(member)
        ended = [member.actor for side in self.sides for member in self.roster.outdated(side, self.epoch)]
        for actor in ended:
            self._leaves_side(actor)
        begun = self.roster.side_groups(self.version, self.epoch, self.sides)
        self.sides += [{member.actor: member for member in group} for group in begun]
        return ended, [" ".join(member.process for member in group) for group in begun]

    def side_fails(self, member: Member) -> None:
        self._leaves_side(member.actor)
        self.roster.side_failed(member)

    def side_serves(self, member: Member, version: int) -> None:
        self._leaves_side(member.actor)
        serves(self.roster, member, version=version)

    def _leaves_side(self, actor: str) -> None:
        for side in self.sides:
            side.pop(actor, None)
        self.sides = [side for side in self.sides if side]


def test_before_the_first_version_there_is_nothing_to_bring_and_nobody_serves() -> None:
    run = Run()
    run.version = -1
    assert run.up(A, B) == ([], [])
    assert run.roster.serving(-1) == {}


def test_a_joiner_is_brought_to_the_served_version_at_once_and_to_one_that_was_served_meanwhile() -> None:
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
    run, again = Run(A), Member("b", "b-2")
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
    crowd = [Member(f"c{number}", f"p{number}") for number in range(MOST_IN_GROUP + 1)]
    assert run.up(*crowd) == ([], [" ".join(member.process for member in crowd[:-1])])
    assert run.up() == ([], [f"p{MOST_IN_GROUP}"]), "beside the first group"
    gone(run.roster, "c1")
    assert run.up(Member("c2", "again")) == (["c1", "c2"], ["again"])
    assert [len(side) for side in run.sides] == [MOST_IN_GROUP - 2, 1, 1]
    run.up(Member("late", "p"))
    assert (len(run.sides), run.up(Member("later", "p"))) == (MOST_AT_ONCE, ([], []))


def test_actors_that_failed_get_side_groups_of_their_own_and_leave_one_to_newcomers() -> None:
    run = Run(A)
    failing = [Member(f"f{number}", f"p{number}") for number in range(MOST_AT_ONCE + 1)]
    assert len(run.up(*failing)[1]) == 1
    for member in failing:
        run.side_fails(member)
    assert run.up(*failing, B) == ([], ["b-1", "p0", "p1", "p2"])
    run.side_serves(B, 3)
    assert run.up(*failing) == ([], [])
    assert run.up(Member("d", "d-1")) == ([], ["d-1"])
    run.side_serves(failing[0], 3)
    run.side_serves(Member("d", "d-1"), 3)
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
    assert beats == [1, 2, 4, 8, MOST_RESTED, MOST_RESTED, MOST_RESTED]
    while not run.up(B)[1]:
        pass
    run.side_serves(B, 4)
    run.version = 5
    assert run.up()[1] == ["b-1"]
    run.side_fails(B)
    assert run.up(B)[1] == ["b-1"], "once it has served, it is trusted again"


def test_missing_ranks_are_those_of_their_actors() -> None:
    members = (Member("a", "a-1", ranks=2), Member("b", "b-1"), Member("c", "c-1", ranks=4))
    assert actors_of((1, 2, 3), members) == ("a", "b")
    assert actors_of((7,), members) == ("c",)
    assert actors_of((), members) == ()


@given(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=20), st.data())
def test_ranks_stay_without_gaps_when_actors_leave(sizes, data) -> None:
    coordinator = Coordinator()
    members = tuple(Member(f"actor-{index}", "p", ranks) for index, ranks in enumerate(sizes))
    leaving = data.draw(st.sets(st.sampled_from(members), max_size=len(members) - 1))
    for member in members:
        coordinator.step(MemberUp(member))
    for member in leaving:
        coordinator.step(MembersLeaving.unregistered(member.actor))

    [formed] = [action for action in coordinator.step(VersionReady(1)) if isinstance(action, FormGroup)]
    laid_out = epoch_members(formed.members)
    assert {member.actor for member in laid_out} == {member.actor for member in members if member not in leaving}
    # A vLLM worker's rank in the group is its actor's first rank plus its own rank in the actor (worker.py).
    taken = [member.first_rank + worker for member in laid_out for worker in range(member.ranks)]
    assert taken == list(range(1, 1 + sum(member.ranks for member in members if member not in leaving)))
