"""Memory that is used again, and never while somebody still looks at it."""

from __future__ import annotations

import torch

from pipelinerl.transfer.buffers import ReusedMemory


def test_memory_that_nobody_holds_is_used_again() -> None:
    memory = ReusedMemory(1)
    first = memory.take(64)
    address = first.data_ptr()
    del first
    second = memory.take(32)
    assert second.data_ptr() == address
    assert second.shape == (32,)


def test_memory_under_any_view_is_left_to_its_holder() -> None:
    memory = ReusedMemory(2)
    taken = memory.take(64)
    kept = taken.view(torch.float32)[3:5].fill_(7.0)
    del taken
    for _ in range(4):
        memory.take(64).fill_(255)
    assert kept.tolist() == [7.0, 7.0]


def test_all_that_is_handed_out_at_one_time_is_apart() -> None:
    memory = ReusedMemory(2)
    held = [memory.take(64).fill_(number) for number in range(5)]
    assert [tensor.unique().tolist() for tensor in held] == [[number] for number in range(5)]


def test_the_larger_buffers_are_kept() -> None:
    memory = ReusedMemory(1)
    large = memory.take(1 << 20)
    address = large.data_ptr()
    small = memory.take(64)  # while the large one is held
    del large, small
    assert memory.take(64).data_ptr() == address
