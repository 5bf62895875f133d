"""Who has come and gone, which actors get a side group, and which ranks of a transfer group are whose."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.kube.client import Pod
from pipelinerl.kube.pods import KnownPods, PodEnd
from services.trainer.weight_sync.coordinator import (
    Coordinator,
    FormGroup,
    Member,
    MembersDown,
    MembersLeaving,
    MemberUp,
    VersionReady,
)
from services.trainer.weight_sync.membership import (
    MOST_REMEMBERED,
    MOST_RESTED,
    Action,
    BeginSide,
    Departures,
    EndSide,
    Joining,
    MemberChange,
    MembershipLog,
)
from services.trainer.weight_sync.session import actors_of, epoch_members

IN_POD = Member("a", "a-1", pod_uid="u1")
NAMELESS = Member("a", "a-1")


def deletion(uid: str = "u1", name: str = "a", *, still_running: bool = True) -> PodEnd:
    return PodEnd(name, uid, "its pod is being deleted", still_running)


def test_a_pod_that_ends_takes_its_process_along_for_good() -> None:
    departures = Departures()
    assert not departures.has_left(IN_POD)
    assert departures.leaving(deletion(), {"a": IN_POD}) == MembersLeaving((IN_POD,), "its pod is being deleted", True)
    assert departures.has_left(IN_POD)
    assert not departures.has_left(Member("a", "a-2", pod_uid="u2")), "a new pod of the same name"


def test_the_end_of_one_that_was_told_to_end_is_told_too_and_once() -> None:
    departures = Departures()
    departures.leaving(deletion(), {"a": IN_POD})
    gone = deletion(still_running=False)
    assert departures.leaving(gone, {}) == MembersLeaving((IN_POD,), "its pod is being deleted", False)
    assert departures.leaving(gone, {}) is None
    assert departures.has_left(IN_POD)


def test_a_pod_that_may_only_have_been_relabelled_leaves_and_comes_back_with_its_heartbeat() -> None:
    pods, departures = KnownPods(), Departures()
    pods.listed([Pod("a", "u1")])
    end = pods.changed(Pod("a", "u1", deleted=True))
    assert end is not None
    assert departures.leaving(end, {"a": IN_POD}) == MembersLeaving(
        (IN_POD,), "its pod was deleted, or relabelled", False
    )
    assert not departures.has_left(IN_POD)
    pods.listed([Pod("a", "u1", terminating=True)])
    end = pods.changed(Pod("a", "u1", deleted=True))
    assert end is not None
    departures.leaving(end, {})
    assert departures.has_left(IN_POD)


def test_a_registration_that_comes_after_the_pods_end_is_too_late() -> None:
    departures = Departures()
    assert departures.leaving(deletion(), {}) is None
    assert departures.has_left(IN_POD)


def test_a_container_that_starts_again_in_its_pod_has_not_left() -> None:
    departures = Departures()
    departures.leaving(deletion("u9", "b"), {"a": IN_POD})
    assert not departures.has_left(Member("a", "a-2", pod_uid="u1"))


def test_an_old_pods_end_does_not_touch_the_new_pod_of_that_name() -> None:
    departures = Departures()
    assert departures.leaving(deletion("u0", still_running=False), {"a": IN_POD}) is None
    assert not departures.has_left(IN_POD)


def test_an_actor_is_known_by_its_uid_whatever_its_name() -> None:
    renamed = Member("actor-0", "p", pod_uid="u1")
    assert Departures().leaving(deletion(), {"actor-0": renamed, "a": Member("a", "q", pod_uid="u2")}) == (
        MembersLeaving((renamed,), "its pod is being deleted", True)
    )


def test_one_that_does_not_know_its_uid_is_known_by_its_name_and_its_process() -> None:
    departures = Departures()
    assert departures.leaving(deletion(), {"a": NAMELESS}) == MembersLeaving(
        (NAMELESS,), "its pod is being deleted", True
    )
    assert departures.has_left(NAMELESS)
    assert not departures.has_left(Member("a", "a-2"))
    assert not departures.has_left(Member("b", "b-1")), "an empty uid is nobody's"


def test_what_is_remembered_is_bounded() -> None:
    departures = Departures()
    for number in range(MOST_REMEMBERED + 1):
        departures.leaving(deletion(f"u{number}"), {})
    assert not departures.has_left(Member("a", "p", pod_uid="u0"))
    assert departures.has_left(Member("a", "p", pod_uid="u1"))


def test_an_arrival_is_told_once_and_again_after_an_eviction() -> None:
    log = MembershipLog()
    log.registered(IN_POD)
    assert log.served(IN_POD, 1, 0) == [MemberChange("joined", IN_POD, 1, 0)]
    assert log.served(IN_POD, 1, 1) == []
    assert log.put_out("a", 2, 1, "too slow", left=False) == [MemberChange("evicted", IN_POD, 2, 1, "too slow")]
    assert log.served(IN_POD, 3, 2) == [MemberChange("joined", IN_POD, 3, 2)]
    again = Member("a", "a-2", pod_uid="u1")
    log.registered(again)
    assert log.served(again, 4, 3) == [MemberChange("joined", again, 4, 3)]


def test_a_departure_is_told_once_by_the_epoch_or_by_the_registration() -> None:
    log = MembershipLog()
    log.registered(IN_POD)
    log.served(IN_POD, 1, 0)
    assert log.put_out("a", 1, 0, "its pod", left=True) == [MemberChange("left", IN_POD, 1, 0, "its pod")]
    assert log.gone("a", 1, 0, "its pod", left=True) == []
    log.registered(IN_POD)
    log.served(IN_POD, 2, 1)
    assert log.gone("a", 2, 1, "stopped", left=False) == [MemberChange("evicted", IN_POD, 2, 1, "stopped")]
    assert log.gone("a", 2, 1, "stopped", left=False) == []


def test_one_that_never_served_is_told_of_when_an_epoch_puts_it_out_and_not_when_it_goes() -> None:
    log = MembershipLog()
    log.registered(IN_POD)
    assert log.put_out("a", 1, -1, "did not come", left=False) == [
        MemberChange("evicted", IN_POD, 1, -1, "did not come")
    ]
    assert log.gone("a", 1, -1, "stopped", left=False) == []
    assert log.put_out("a", 1, -1, "unknown", left=False) == []


A, B, C = Member("a", "a-1"), Member("b", "b-1"), Member("c", "c-1")


def serving(*members: Member, version: int = 3, most_at_once: int = 4) -> Joining:
    """The epoch of `members` serves `version`."""
    joining = Joining(most_at_once)
    for member in members:
        assert joining.up(member) == []
    assert joining.formed(members) == []
    assert joining.served(version, [member.actor for member in members]) == []
    return joining


def test_before_the_first_version_there_is_nothing_to_bring() -> None:
    joining = Joining()
    assert joining.up(A) == []
    assert joining.up(B) == []


def test_a_joiner_is_brought_to_the_served_version_at_once_and_only_once() -> None:
    joining = serving(A)
    assert joining.up(B) == [BeginSide(B, 3)]
    assert joining.up(B) == []
    assert joining.side_served("b", 3) == []
    assert joining.up(B) == []


def test_a_version_that_was_served_meanwhile_is_brought_too() -> None:
    joining = serving(A)
    joining.up(B)
    assert joining.served(4, ["a"]) == []
    assert joining.side_served("b", 3) == [BeginSide(B, 4)]


def test_an_epoch_that_takes_it_ends_its_side_group() -> None:
    joining = serving(A)
    joining.up(B)
    assert joining.formed([A, B]) == [EndSide("b")]
    assert joining.served(4, ["a", "b"]) == []
    assert joining.up(B) == []


def test_whoever_was_put_out_is_tried_again_when_its_heart_beats() -> None:
    joining = serving(A, B)
    assert joining.left("b") == []
    assert joining.served(4, ["a"]) == []
    assert joining.up(A) == []
    assert joining.up(B) == [BeginSide(B, 4)]
    assert joining.side_failed("b") == []
    assert joining.up(A) == []
    assert joining.up(B) == [], "the second time it rests for two heartbeats"
    assert joining.up(B) == [BeginSide(B, 4)]


def test_whoever_fails_again_and_again_is_tried_less_and_less_often() -> None:
    joining = serving(A)
    assert joining.up(B) == [BeginSide(B, 3)]
    beats = []
    for _ in range(7):
        assert joining.side_failed("b") == []
        beats.append(1)
        while not joining.up(B):
            beats[-1] += 1
    assert beats == [1, 2, 4, 8, MOST_RESTED, MOST_RESTED, MOST_RESTED]
    joining.side_served("b", 3)
    joining.served(4, ["a"])
    assert joining.on_side == {"b"}
    assert joining.side_failed("b") == []
    assert joining.up(B) == [BeginSide(B, 4)], "once it has served, it is trusted again"


def test_a_new_process_serves_nothing_yet() -> None:
    joining = serving(A, B)
    again = Member("b", "b-2")
    assert joining.up(again) == [BeginSide(again, 3)]
    assert joining.up(Member("b", "b-3")) == [EndSide("b"), BeginSide(Member("b", "b-3"), 3)]


def test_a_new_process_that_the_epoch_has_taken_already_gets_no_side_group() -> None:
    joining = serving(A, B)
    again = Member("b", "b-2")
    assert joining.left("b") == []
    assert joining.formed([A, again]) == [], "the coordinator hears of a registration first"
    assert joining.up(again) == []


def test_one_that_leaves_frees_its_place() -> None:
    joining = serving(A, most_at_once=1)
    assert joining.up(B) == [BeginSide(B, 3)]
    assert joining.up(C) == []
    assert joining.down("b") == [EndSide("b"), BeginSide(C, 3)]


def test_missing_ranks_are_those_of_their_actors() -> None:
    members = (Member("a", "a-1", ranks=2), Member("b", "b-1"), Member("c", "c-1", ranks=4))
    assert actors_of((1, 2, 3), members) == ("a", "b")
    assert actors_of((7,), members) == ("c",)
    assert actors_of((), members) == ()


@given(st.data())
def test_under_any_schedule_no_member_of_the_epoch_is_on_the_side_and_nobody_twice(data: st.DataObject) -> None:
    joining, served, most = Joining(most_at_once=2), -1, 2
    running: dict[str, int] = {}
    epoch: set[str] = set()
    processes = dict.fromkeys("abcd", 1)

    def perform(actions: list[Action]) -> None:
        for action in actions:
            match action:
                case BeginSide(member, version):
                    assert member.actor not in running
                    assert member.actor not in epoch
                    assert version == served
                    running[member.actor] = version
                case EndSide(actor):
                    del running[actor]
        assert len(running) <= most
        assert joining.on_side == set(running)

    for _ in range(data.draw(st.integers(1, 40))):
        actor = data.draw(st.sampled_from("abcd"))
        event = data.draw(st.sampled_from(["up", "restart", "down", "form", "left", "serve", "done", "fail"]))
        if event in ("up", "restart"):
            if event == "restart":
                processes[actor] += 1
                epoch.discard(actor)
            perform(joining.up(Member(actor, f"{actor}-{processes[actor]}")))
        elif event == "down":
            epoch.discard(actor)
            perform(joining.down(actor))
        elif event == "form":
            epoch = set(data.draw(st.sets(st.sampled_from("abcd"))))
            perform(joining.formed([Member(name, f"{name}-{processes[name]}") for name in sorted(epoch)]))
        elif event == "left":
            epoch.discard(actor)
            perform(joining.left(actor))
        elif event == "serve":
            served += 1
            perform(joining.served(served, sorted(epoch)))
        elif actor in running:
            version = running.pop(actor)
            perform(joining.side_served(actor, version) if event == "done" else joining.side_failed(actor))


tensor_parallel_sizes = st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=20)


def members_of(sizes: list[int]) -> tuple[Member, ...]:
    return tuple(Member(f"actor-{index}", "p", ranks) for index, ranks in enumerate(sizes))


@given(tensor_parallel_sizes)
def test_every_rank_of_a_group_belongs_to_exactly_one_process(sizes) -> None:
    laid_out = epoch_members(members_of(sizes))
    # A vLLM worker's rank in the group is its actor's first rank plus its own rank in the actor (worker.py).
    ranks = [0] + [member.first_rank + worker for member in laid_out for worker in range(member.ranks)]

    assert ranks == list(range(1 + sum(sizes)))


@given(tensor_parallel_sizes, st.data())
def test_ranks_stay_without_gaps_when_actors_leave(sizes, data) -> None:
    coordinator, members = Coordinator(), members_of(sizes)
    leaving = data.draw(st.sets(st.sampled_from(members), max_size=len(members) - 1))
    for member in members:
        coordinator.step(MemberUp(member))
    for member in leaving:
        coordinator.step(MembersDown((member.actor,)))

    [formed] = [action for action in coordinator.step(VersionReady(1)) if isinstance(action, FormGroup)]
    laid_out = epoch_members(formed.members)
    assert {member.actor for member in laid_out} == {member.actor for member in members if member not in leaving}
    taken = [member.first_rank + worker for member in laid_out for worker in range(member.ranks)]
    assert taken == list(range(1, 1 + sum(member.ranks for member in members if member not in leaving)))
