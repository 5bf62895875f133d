"""How a group without GPUs passes bytes from rank to rank: real Gloo between threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from pipelinerl.errors import TransferError
from pipelinerl.service.lifecycle import on_thread
from pipelinerl.transfer.group import PIECE_BYTES, GroupStore, WeightGroup
from pipelinerl.transfer.manifest import GroupFailed, GroupSpec, Kept

SOON_S = 60.0
LARGE = 20 * PIECE_BYTES
"""More than two ranks hold in the kernel's buffers."""


def spec(store: GroupStore, rank: int, world: int, name: str = "epoch-1", kept: Kept | None = None) -> GroupSpec:
    return GroupSpec(store.own_address, name, rank, world, "gloo", "127.0.0.1", kept or Kept())


def at_once(do: Callable[[int], Any], *ranks: int) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(do, ranks))


def connected(store: GroupStore, world: int, name: str = "epoch-1") -> list[WeightGroup]:
    return at_once(lambda rank: WeightGroup.connect(spec(store, rank, world, name), SOON_S), *range(world))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_all_ranks_get_the_senders_bytes_at_every_size(world: int) -> None:
    groups = connected(GroupStore(), world)
    sizes = (1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES + 7)
    random = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    for sent in (*random, torch.tensor(3.5), torch.arange(6.0).view(2, 3), torch.randn(3, PIECE_BYTES).bfloat16()):
        tensors = [sent.clone() if rank == 0 else torch.zeros_like(sent) for rank in range(world)]
        at_once(lambda rank, tensors=tensors: groups[rank].broadcast(tensors[rank], SOON_S), *range(world))
        assert all(torch.equal(tensor, sent) for tensor in tensors)


def test_memory_may_be_overwritten_as_soon_as_a_broadcast_returns() -> None:
    groups = connected(GroupStore(), 4)

    def pass_on(rank: int) -> list[tuple[int, int]]:
        buffer, arrived = torch.zeros(LARGE, dtype=torch.uint8), []
        for number in range(1, 6):
            if rank == 0:
                buffer.fill_(number)
            groups[rank].broadcast(buffer, SOON_S)
            arrived.append((int(buffer.min()), int(buffer.max())))
            buffer.fill_(99)
        return arrived

    assert at_once(pass_on, 0, 1, 2, 3) == [[(number, number) for number in range(1, 6)]] * 4


def leave_by_error(group: WeightGroup, stall_timeout_s: float) -> TransferError | None:
    """Broadcast again and again, and leave the group at the first error, as sender and receivers do."""
    try:
        for _ in range(8):
            group.broadcast(torch.zeros(LARGE, dtype=torch.uint8), stall_timeout_s)
    except TransferError as error:
        group.close()
        return error
    return None


def test_a_rank_in_the_middle_that_ends_fails_all_others_at_once() -> None:
    """The kernel closes a killed process's connections as `close` does. Gloo misses that about once in ten times, and then the
    stall timeout ends the wait with a `DeadlineExceeded`."""

    def ends() -> list[type]:
        groups = connected(GroupStore(), 5)
        at_once(lambda rank: groups[rank].broadcast(torch.zeros(LARGE, dtype=torch.uint8), SOON_S), 0, 1, 2, 3, 4)
        failing = [on_thread("rank", lambda rank=rank: leave_by_error(groups[rank], 5.0)) for rank in (0, 1, 3, 4)]
        groups[2].close()
        return [type(error.result(SOON_S)) for error in failing]

    assert any(ends() == [GroupFailed] * 4 for _ in range(10))


def test_a_silent_rank_in_the_middle_fails_all_others_within_the_stall_timeout() -> None:
    groups = connected(GroupStore(), 5)
    failing = [on_thread("rank", lambda rank=rank: leave_by_error(groups[rank], 0.5)) for rank in (0, 1, 3, 4)]
    assert all(isinstance(error.result(SOON_S), GroupFailed) for error in failing)


@pytest.mark.parametrize(
    ("kept", "first"),
    [
        ((Kept("1:8/m", 3), Kept("1:8/m", 5)), 3),
        ((Kept("1:8/m", 3), Kept()), 0),
        ((Kept("1:8/m", 3), Kept("1:9/m", 5)), 0),
        ((Kept("1:8/n", 3), Kept("1:8/n", 5)), 0),
    ],
)
def test_ranks_agree_on_the_first_chunk_that_one_of_them_lacks(kept: tuple[Kept, Kept], first: int) -> None:
    store = GroupStore()
    held = (Kept(), *kept)
    groups = at_once(lambda rank: WeightGroup.connect(spec(store, rank, 3, kept=held[rank]), SOON_S), 0, 1, 2)
    assert [group.first_chunk("1:8/m") for group in groups] == [first] * 3
