"""Which rank of a transfer group belongs to whom, for actors of several tensor-parallel sizes. No GPU, no collective."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.weight_sync.coordinator import (
    Coordinator,
    FormGroup,
    Member,
    MembersDown,
    MemberUp,
    VersionReady,
)
from services.trainer.weight_sync.session import epoch_members

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
