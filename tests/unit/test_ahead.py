import gc
import threading
import weakref

import pytest

from pipelinerl.transfer.buffers import Prefetcher


class Item:
    """Can be watched."""


def test_items_come_in_order_and_end() -> None:
    with Prefetcher(range(100), 3, "test") as ahead:
        assert list(ahead) == list(range(100))
        assert list(ahead) == []


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

    with Prefetcher(make(), 3, "test") as ahead:
        for _ in ahead:
            gc.collect()
    assert max(most) <= 3


def test_the_next_item_is_made_while_one_is_in_hand() -> None:
    made = threading.Event()

    def make():
        yield 1
        made.set()
        yield 2

    with Prefetcher(make(), 2, "test") as ahead:
        assert next(ahead) == 1
        assert made.wait(10)


def test_an_error_comes_where_the_item_would_have_come() -> None:
    def make():
        yield 1
        raise ValueError("broken")

    with Prefetcher(make(), 2, "test") as ahead:
        assert next(ahead) == 1
        for _ in range(2):
            with pytest.raises(ValueError, match="broken"):
                next(ahead)


def test_closing_early_ends_the_thread() -> None:
    ahead = Prefetcher(iter(range(1000)), 2, "ends-early")
    assert next(ahead) == 0
    ahead.close()
    ahead.close()
    assert not any(thread.name == "ends-early" for thread in threading.enumerate())
