"""What the live page shows, ready as text: the trainer's event loop writes here, the HTTP server's thread reads.

Bounded whatever readers do and however long the run is: records are thinned, and of the samples the first and the newest stay.
There is no queue for each reader. A reader has a position in the steps that are kept; one that is further behind, or was
connected to an earlier trainer, is told to fetch everything anew. Opens no socket. What the keys of the page's object mean:
`pipelinerl.page.data`, which makes the same object of a finished run.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Generic, TypeVar

from pipelinerl.page.data import MAX_RECORDS, NEWEST, SAMPLES_SHOWN, shown_record, shown_sample
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import recipe_yaml
from pipelinerl.rl.lag import LAG_BUCKETS
from services.trainer.records import to_json

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


Record = Mapping[str, Any]
NEWEST_OF_A_KIND = SAMPLES_SHOWN // 2
"""Held-out samples, and as many trained ones, that stay beside the first of the run."""
_TIMES_KEPT = 256


class RunHistory:
    """The run so far, as the page's views draw it. `limit`: records and evaluations after which the older ones are thinned."""

    def __init__(self, limit: int = MAX_RECORDS) -> None:
        self._records: ThinnedSeries[dict[str, Any]] = ThinnedSeries(limit, NEWEST)
        self._heldout: ThinnedSeries[dict[str, Any]] = ThinnedSeries(limit, 1)
        self._times_s: dict[int, float | None] = {0: 0.0}
        self._lags: Counter[int] = Counter()
        self._ess: dict[str, tuple[float, int]] = {}
        """Sum and number of steps, by lag bucket."""
        self._early: list[dict[str, Any]] = []
        self._late = {kind: deque[dict[str, Any]](maxlen=NEWEST_OF_A_KIND) for kind in (True, False)}

    def add(self, record: Record, samples: Iterable[Record] = ()) -> dict[str, Any]:
        """One more step and the samples since the one before. Returns what a page that has the rest needs to hear."""
        shown = shown_record(record)
        self._records.add(shown)
        self._remember_time(record)
        self._add_up(record)
        point = self._heldout_point(record)
        if point is not None:
            self._heldout.add(point)
        fresh = [self._add_sample(sample) for sample in samples]
        return {"record": shown, "heldout": point, "samples": fresh, **self._totals()}

    def add_samples(self, samples: Iterable[Record]) -> None:
        """Of before."""
        for sample in samples:
            self._add_sample(sample)

    def data(self) -> dict[str, Any]:
        """All of it; nothing in it changes any more."""
        late = [sample for kind in (True, False) for sample in self._late[kind]]
        return {
            "records": self._records.items(),
            "heldout": self._heldout.items(),
            "samples": {"early": list(self._early), "late": [one for one in late if one not in self._early]},
            **self._totals(),
        }

    def _totals(self) -> dict[str, Any]:
        return {
            "lag_totals": {str(lag): self._lags[lag] for lag in sorted(self._lags)},
            "ess_by_lag": {label: total / steps for label, (total, steps) in sorted(self._ess.items(), key=_by_lag)},
        }

    def _remember_time(self, record: Record) -> None:
        self._times_s[record["step"]] = record.get("time_s")
        while len(self._times_s) > _TIMES_KEPT:
            self._times_s.pop(next(iter(self._times_s)))

    def _add_up(self, record: Record) -> None:
        for lag, tokens in (record.get("lag_histogram") or {}).items():
            self._lags[int(lag)] += tokens
        for label, ess in (record.get("ess_by_lag") or {}).items():
            total, steps = self._ess.get(label, (0.0, 0))
            if ess is not None:
                self._ess[label] = (total + ess, steps + 1)

    def _heldout_point(self, record: Record) -> dict[str, Any] | None:
        """At the policy version that was measured, not at the step that it ended in."""
        if record.get("heldout_accuracy") is None:
            return None
        version = record.get("heldout_version", record["step"])
        time_s = self._times_s.get(version, record.get("time_s"))
        return {"step": version, "time_s": time_s, "accuracy": record["heldout_accuracy"]}

    def _add_sample(self, sample: Record) -> dict[str, Any]:
        shown = shown_sample(sample)
        if len(self._early) < SAMPLES_SHOWN and (not self._early or shown["step"] <= self._early[0]["step"] + 1):
            self._early.append(shown)
        self._late[bool(shown["heldout"])].append(shown)
        return shown


def _by_lag(item: tuple[str, Any]) -> int:
    """Place of a bucket's label among all of them."""
    return LAG_BUCKETS.index(item[0]) if item[0] in LAG_BUCKETS else len(LAG_BUCKETS)


MOST_PENDING = 16
"""Samples between two steps; the newest are kept."""
STEPS_KEPT = 256
"""Step events that a reader who was away can still catch up with."""
MOST_READERS = 32
HEARTBEAT_S = 15.0
RETRY_MS = 1000
"""After which a browser that lost its connection tries again."""


class PageBoard:
    """`begin` comes before `step`; all but the writing methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._about: Mapping[str, Any] = {"run": ""}
        self._history = RunHistory()
        self._anew()
        self._state: dict[str, Any] = {"phase": "starting"}
        self._state_number = 0
        self._samples: deque[Mapping[str, Any]] = deque(maxlen=MOST_PENDING)
        """Since the last step."""
        self._readers: set[PageReader] = set()
        self._closed = False
        self._cached: tuple[object, str] = (None, "")

    def _anew(self) -> None:
        self._token = secrets.token_hex(4)
        self._count = 0
        self._steps: deque[tuple[int, str]] = deque(maxlen=STEPS_KEPT)

    # --- written by the trainer --------------------------------------------------------------------------------------

    def begin(self, about: Mapping[str, Any], records: Iterable[Mapping[str, Any]], samples: Iterable[Any]) -> None:
        """The run is known: what does not change of it (`about`), its steps so far and their samples."""
        history = RunHistory()
        for record in records:
            history.add(record)
        history.add_samples(samples)
        with self._lock:
            self._about, self._history = dict(about), history
            self._anew()
        self._wake()

    def sample(self, sample: Mapping[str, Any]) -> None:
        """Shown with the next step."""
        self._samples.append(sample)

    def step(self, record: Mapping[str, Any]) -> None:
        """One optimizer step, with the samples since the one before."""
        samples = list(self._samples)
        self._samples.clear()
        with self._lock:
            news = self._history.add(record, samples)
            self._count += 1
            self._steps.append((self._count, to_json(news)))
        self._wake()

    def state(self, state: Mapping[str, Any]) -> None:
        """What is true now. Readers hear of it when it has changed."""
        with self._lock:
            if state == self._state:
                return
            self._state = dict(state)
            self._state_number += 1
        self._wake()

    def close(self) -> None:
        """Every reader is told to come back later, and let go."""
        with self._lock:
            self._closed = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            readers = list(self._readers)
        for reader in readers:
            reader.wake()

    # --- read by the HTTP server -------------------------------------------------------------------------------------

    def history(self) -> str:
        """JSON of everything so far, and the `position` from which a reader goes on."""
        with self._lock:
            key = (self._token, self._count, self._state_number)
            if self._cached[0] == key:
                return self._cached[1]
            position = f"{self._token}-{self._count}"
            data = {**self._about, **self._history.data(), "state": self._state, "position": position}
        text = to_json(data)
        with self._lock:
            self._cached = (key, text)
        return text

    def open(self, position: str) -> PageReader | None:
        """A reader of what comes after `position`; None when there are too many, or the trainer ends. On an event loop."""
        reader = PageReader(self, position)
        with self._lock:
            if self._closed or len(self._readers) >= MOST_READERS:
                return None
            self._readers.add(reader)
        return reader

    def drop(self, reader: PageReader) -> None:
        with self._lock:
            self._readers.discard(reader)

    @property
    def num_readers(self) -> int:
        with self._lock:
            return len(self._readers)

    def news(self, position: tuple[str, int], state_number: int) -> News:
        """What a reader who knows the run up to there has not heard."""
        with self._lock:
            token, count = position
            oldest = self._steps[0][0] if self._steps else self._count + 1
            known = token == self._token and oldest - 1 <= count <= self._count
            steps = [(f"{token}-{number}", text) for number, text in self._steps if number > count] if known else []
            state = to_json(self._state) if state_number != self._state_number else None
            return News(not known, steps, state, (self._token, self._count), self._state_number, self._closed)


@dataclass(frozen=True)
class News:
    """`behind`: steps are missing in between. Otherwise `steps` as (position, JSON), and the state if there is another one."""

    behind: bool
    steps: list[tuple[str, str]]
    state: str | None
    position: tuple[str, int]
    state_number: int
    closed: bool

    def frames(self) -> list[str]:
        """As server-sent events."""
        if self.behind:
            return [frame("reset", "{}")]
        told = [frame("step", text, number) for number, text in self.steps]
        return told if self.state is None else [*told, frame("state", self.state)]


class PageReader:
    """One connection. Belongs to the event loop that it was made on, but for `wake`."""

    def __init__(self, board: PageBoard, position: str) -> None:
        self._board, self._position = board, parsed(position)
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()

    def wake(self) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(self._changed.set)

    def close(self) -> None:
        self._board.drop(self)

    async def frames(self) -> AsyncIterator[str]:
        """Server-sent events, until the trainer ends or the reader has to fetch everything anew."""
        yield f"retry: {RETRY_MS}\n\n"
        state_number = -1
        while True:
            self._changed.clear()
            news = self._board.news(self._position, state_number)
            for one in news.frames():
                yield one
            if news.behind or news.closed:
                return
            self._position, state_number = news.position, news.state_number
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._changed.wait()
            except TimeoutError:
                yield ": still here\n\n"


def frame(event: str, data: str, position: str = "") -> str:
    """One server-sent event. `data` has no line breaks: JSON without indentation."""
    number = f"id: {position}\n" if position else ""
    return f"event: {event}\n{number}data: {data}\n\n"


def parsed(position: str) -> tuple[str, int]:
    """Of what a browser says; ("", -1), which nobody is at, where it is not of this shape."""
    token, _, count = position[:64].partition("-")
    return (token, int(count)) if count.isascii() and count.isdigit() else ("", -1)


_TAIL_BYTES = 1 << 20
_FIRST_LINES = 16


def about(run: str, recipe: Recipe, run_dir: Path) -> dict[str, Any]:
    """What does not change of a run while a trainer is up, for `PageBoard.begin`."""
    return {
        "run": run,
        "description": recipe.description or recipe.name,
        "mode": recipe.mode,
        "total_steps": recipe.trainer.steps,
        "max_lag": recipe.algorithm.max_lag,
        "recipe": recipe_yaml(recipe),
        "run_dir": str(run_dir),
    }


def ends_of(path: Path) -> Iterator[dict[str, Any]]:
    """The first and the last objects of a .jsonl file of any length; no file is no objects."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for _, line in zip(range(_FIRST_LINES), file, strict=False):
            yield from _object(line)
        begin = file.tell()
        file.seek(max(begin, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        if file.tell() > begin:
            file.readline()  # begins in the middle of a line
        for line in file:
            yield from _object(line)


def _object(line: bytes) -> Iterator[dict[str, Any]]:
    try:
        value = json.loads(line)
    except ValueError:  # the end of a trainer that was killed
        return
    if isinstance(value, dict) and isinstance(value.get("step"), int):
        yield value
