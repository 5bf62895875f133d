"""Who has come and gone: pods that end, late heartbeats, new pods of an old name, and what is told of it."""

from __future__ import annotations

from pipelinerl.kube.client import Pod, PodChange
from pipelinerl.kube.pods import KnownPods, PodEnd
from services.trainer.weight_sync.coordinator import Member, MembersLeaving
from services.trainer.weight_sync.membership import (
    MOST_REMEMBERED,
    Departures,
    MemberChange,
    MembershipLog,
)

A = Member("a", "a-1", pod_uid="u1")
NAMELESS = Member("a", "a-1")


def deletion(uid: str = "u1", name: str = "a", *, still_running: bool = True) -> PodEnd:
    return PodEnd(name, uid, "its pod is being deleted", still_running)


def test_a_pod_that_ends_takes_its_process_along_for_good() -> None:
    departures = Departures()
    assert not departures.has_left(A)
    assert departures.leaving(deletion(), {"a": A}) == MembersLeaving((A,), "its pod is being deleted", True)
    assert departures.has_left(A)
    assert not departures.has_left(Member("a", "a-2", pod_uid="u2")), "a new pod of the same name"


def test_the_end_of_one_that_was_told_to_end_is_told_too_and_once() -> None:
    departures = Departures()
    departures.leaving(deletion(), {"a": A})
    gone = deletion(still_running=False)
    assert departures.leaving(gone, {}) == MembersLeaving((A,), "its pod is being deleted", False)
    assert departures.leaving(gone, {}) is None
    assert departures.has_left(A)


def test_a_pod_that_may_only_have_been_relabelled_leaves_and_comes_back_with_its_heartbeat() -> None:
    pods, departures = KnownPods(), Departures()
    pods.listed([Pod("a", "u1")])
    end = pods.changed(PodChange("DELETED", Pod("a", "u1"), "9"))
    assert end is not None
    assert departures.leaving(end, {"a": A}) == MembersLeaving((A,), "its pod was deleted, or relabelled", False)
    assert not departures.has_left(A)
    pods.listed([Pod("a", "u1", terminating=True)])
    end = pods.changed(PodChange("DELETED", Pod("a", "u1"), "10"))
    assert end is not None
    departures.leaving(end, {})
    assert departures.has_left(A)


def test_a_registration_that_comes_after_the_pods_end_is_too_late() -> None:
    departures = Departures()
    assert departures.leaving(deletion(), {}) is None
    assert departures.has_left(A)


def test_a_container_that_starts_again_in_its_pod_has_not_left() -> None:
    departures = Departures()
    departures.leaving(deletion("u9", "b"), {"a": A})
    assert not departures.has_left(Member("a", "a-2", pod_uid="u1"))


def test_an_old_pods_end_does_not_touch_the_new_pod_of_that_name() -> None:
    departures = Departures()
    assert departures.leaving(deletion("u0", still_running=False), {"a": A}) is None
    assert not departures.has_left(A)


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
    attendance = MembershipLog()
    attendance.registered(A)
    assert attendance.served(A, 1, 0) == [MemberChange("joined", A, 1, 0)]
    assert attendance.served(A, 1, 1) == []
    assert attendance.put_out("a", 2, 1, "too slow", left=False) == [MemberChange("evicted", A, 2, 1, "too slow")]
    assert attendance.served(A, 3, 2) == [MemberChange("joined", A, 3, 2)]
    again = Member("a", "a-2", pod_uid="u1")
    attendance.registered(again)
    assert attendance.served(again, 4, 3) == [MemberChange("joined", again, 4, 3)]


def test_a_departure_is_told_once_by_the_epoch_or_by_the_registration() -> None:
    attendance = MembershipLog()
    attendance.registered(A)
    attendance.served(A, 1, 0)
    assert attendance.put_out("a", 1, 0, "its pod", left=True) == [MemberChange("left", A, 1, 0, "its pod")]
    assert attendance.gone("a", 1, 0, "its pod", left=True) == []
    attendance.registered(A)
    attendance.served(A, 2, 1)
    assert attendance.gone("a", 2, 1, "stopped", left=False) == [MemberChange("evicted", A, 2, 1, "stopped")]
    assert attendance.gone("a", 2, 1, "stopped", left=False) == []


def test_one_that_never_served_is_told_of_when_an_epoch_puts_it_out_and_not_when_it_goes() -> None:
    attendance = MembershipLog()
    attendance.registered(A)
    assert attendance.put_out("a", 1, -1, "did not come", left=False) == [
        MemberChange("evicted", A, 1, -1, "did not come")
    ]
    assert attendance.gone("a", 1, -1, "stopped", left=False) == []
    assert attendance.put_out("a", 1, -1, "unknown", left=False) == []
