"""Items made ahead on a thread of their own while the caller works on earlier ones, in bounded number.

It knows nothing of what the items are, and has no timeout: making one item must itself be bounded.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class _End:
    """The last thing that the thread says. `error`: what ended the making, if it was not the end of the items."""

    error: BaseException | None = None


class Ahead(Generic[_Item]):
    """An iterator over `items`, advanced on a thread; close it, or use it as a context, whatever happens.

    At most `buffers` (≥ 2) items exist at a time: the one handed out last and those made or being made beyond it. An error
    of `items` is raised where the item would have come.
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

    def __enter__(self) -> Ahead[_Item]:
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
