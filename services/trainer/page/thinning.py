"""A series that never grows beyond a bound: a long one is thinned evenly. Pure; says nothing about what is in it."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ThinnedSeries(Generic[Item]):
    """Of all that was added, evenly spaced ones and all of the last `newest`: at most 2 · `limit` + `newest`."""

    def __init__(self, limit: int, newest: int) -> None:
        self._limit, self._stride, self._count = limit, 1, 0
        self._kept: list[Item] = []
        """Numbers 0, stride, 2 · stride, …"""
        self._newest: deque[Item] = deque(maxlen=newest)

    def add(self, item: Item) -> None:
        if self._count % self._stride == 0:
            self._kept.append(item)
        self._count += 1
        self._newest.append(item)
        if len(self._kept) >= 2 * self._limit:
            self._kept = self._kept[::2]
            self._stride *= 2

    def items(self) -> list[Item]:
        """In order of adding; a list of the caller's own."""
        before = self._count - len(self._newest)
        return self._kept[: -(-before // self._stride)] + list(self._newest)
