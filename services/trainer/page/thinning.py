"""A series that never grows beyond a bound: a long one is thinned evenly. Pure; says nothing about what is in it."""

from __future__ import annotations

from typing import Generic, TypeVar

Item = TypeVar("Item")


class ThinnedSeries(Generic[Item]):
    """Of all that was added, evenly spaced ones and the newest: at most 2 · `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit, self._stride, self._count = limit, 1, 0
        self._kept: list[Item] = []
        self._newest: list[Item] = []
        """The newest, where it is not among the kept ones."""

    def add(self, item: Item) -> None:
        due = self._count % self._stride == 0
        self._count += 1
        self._newest = [] if due else [item]
        if not due:
            return
        self._kept.append(item)
        if len(self._kept) >= 2 * self._limit:
            self._kept, self._newest = self._kept[::2], [item]
            self._stride *= 2

    def items(self) -> list[Item]:
        """In order of adding; a list of the caller's own."""
        return self._kept + self._newest
