"""Memory that is used again, and items made ahead: both in bounded number, for whatever moves chunk after chunk."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

_HELD_BY_NOBODY = 2
"""References to an array in the list, as `sys.getrefcount` sees them: the list's and its own argument's."""


class ReusedMemory:
    """Host memory that is used again once nobody holds a tensor in it: new pages cost more than the bytes put into them.

    Each buffer is a NumPy array. A tensor over it, and every view of that tensor, shares one storage, which holds one reference
    to the array; so the array's reference count says whether anybody still looks at the memory, whoever made the views. What is
    still held is left to its holder and replaced. Device memory is not handled: torch's allocator keeps it itself.
    `most`: buffers kept, the larger ones first. Not thread-safe.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._buffers: list[np.ndarray] = []

    def take(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes], contents undefined. Nobody else has it as long as a view of it lives."""
        for index in range(len(self._buffers)):
            if sys.getrefcount(self._buffers[index]) == _HELD_BY_NOBODY and self._buffers[index].nbytes >= num_bytes:
                return torch.from_numpy(self._buffers[index])[:num_bytes]
        buffer = np.empty(num_bytes, np.uint8)
        self._buffers.append(buffer)
        self._buffers.sort(key=lambda kept: kept.nbytes)
        del self._buffers[: -self._most]  # who holds one of these keeps it
        return torch.from_numpy(buffer)


_Item = TypeVar("_Item")


@dataclass(frozen=True)
class _End:
    """The last thing that the thread says. `error`: what ended the making, if it was not the end of the items."""

    error: BaseException | None = None


class Prefetcher(Generic[_Item]):
    """An iterator over `items`, advanced on a thread; close it, or use it as a context, whatever happens.

    At most `buffers` (≥ 2) items exist at a time: the one handed out last and those made or being made beyond it. An error
    of `items` is raised where the item would have come. There is no timeout: making one item must itself be bounded.
    """

    def __init__(self, items: Iterable[_Item], buffers: int, name: str) -> None:
        assert buffers >= 2, "the one in hand and one that is being made"
        self._items = iter(items)
        self._free = threading.Semaphore(buffers)
        self._ready: queue.SimpleQueue[_Item | _End] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._in_hand = False
        self._thread = threading.Thread(target=self._make, name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[_Item]:
        return self

    def __next__(self) -> _Item:
        item = self._ready.get()
        if isinstance(item, _End):
            self._ready.put(item)  # for whoever asks again
            if item.error is not None:
                raise item.error
            raise StopIteration
        if self._in_hand:
            self._free.release()  # only now: the caller may have kept the item before until it got this one
        self._in_hand = True
        return item

    def __enter__(self) -> Prefetcher[_Item]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Returns when the thread has ended: after the item it is making. Idempotent."""
        self._closed.set()
        self._free.release()
        self._thread.join()

    def _make(self) -> None:
        try:
            while True:
                self._free.acquire()
                if self._closed.is_set():
                    self._ready.put(_End())
                    return
                self._ready.put(next(self._items))
        except StopIteration:
            self._ready.put(_End())
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: the error goes to whoever iterates
            self._ready.put(_End(error))
