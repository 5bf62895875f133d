"""Who gets a side group, and when: by hand, and its promises under random schedules."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.weight_sync.coordinator import Member
from services.trainer.weight_sync.membership import (
    MOST_RESTED,
    Action,
    BeginSide,
    EndSide,
    Joining,
)
from services.trainer.weight_sync.session import actors_of

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
