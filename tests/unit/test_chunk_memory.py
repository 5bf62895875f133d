"""Memory that is used again, never while somebody still looks at it; items made ahead on a thread, in bounded number."""

import threading
import weakref
from contextlib import closing

import pytest
import torch

from pipelinerl.transfer.chunks import ReusedMemory, prefetch


def test_memory_that_nobody_holds_is_used_again_and_the_larger_buffers_are_kept() -> None:
    memory = ReusedMemory(1)
    first = memory.take(64)
    address = first.data_ptr()
    del first
    second = memory.take(32)
    assert second.data_ptr() == address
    assert second.shape == (32,)
    memory = ReusedMemory(1)
    large = memory.take(1 << 20)
    address = large.data_ptr()
    small = memory.take(64)  # while the large one is held
    del large, small
    assert memory.take(64).data_ptr() == address


def test_memory_under_any_view_is_left_to_its_holder_and_apart_from_what_others_hold() -> None:
    memory = ReusedMemory(2)
    taken = memory.take(64)
    kept = taken.view(torch.float32)[3:5].fill_(7.0)
    del taken
    for _ in range(4):
        memory.take(64).fill_(255)
    assert kept.tolist() == [7.0, 7.0]
    memory = ReusedMemory(2)
    held = [memory.take(64).fill_(number) for number in range(5)]
    assert [tensor.unique().tolist() for tensor in held] == [[number] for number in range(5)]


class Item:
    """Can be watched."""


def test_no_more_than_the_buffers_exist_at_a_time() -> None:
    alive: weakref.WeakSet[Item] = weakref.WeakSet()
    most = []

    def make():
        for _ in range(50):
            item = Item()
            alive.add(item)
            most.append(len(alive))
            yield item
            del item

    with closing(prefetch(make(), 3, "test")) as ahead:
        for _ in ahead:
            pass
        assert list(ahead) == []
    assert max(most) <= 3


def test_the_next_item_is_made_while_one_is_in_hand_and_closing_early_ends_the_thread() -> None:
    made = threading.Event()

    def make():
        yield 1
        made.set()
        yield from range(2, 1000)

    ahead = prefetch(make(), 2, "ends-early")
    assert next(ahead) == 1
    assert made.wait(60)
    assert next(ahead) == 2
    ahead.close()
    ahead.close()
    assert not any(thread.name.startswith("ends-early") for thread in threading.enumerate())


def test_an_error_comes_where_the_item_would_have_come() -> None:
    def make():
        yield 1
        raise ValueError("broken")

    with closing(prefetch(make(), 2, "test")) as ahead:
        assert next(ahead) == 1
        with pytest.raises(ValueError, match="broken"):
            next(ahead)
