"""Items waiting for a worker. Bounded; an item whose caller has gone is passed over."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pipelinerl.errors import PipelineRLError
from pipelinerl.v1 import verifier_pb2


class QueueFull(PipelineRLError):
    """Attributes: `num_items` that do not fit beside `waiting` ones in `capacity`."""

    def __init__(self, num_items: int, waiting: int, capacity: int) -> None:
        self.num_items, self.waiting, self.capacity = num_items, waiting, capacity
        super().__init__(f"{num_items} items do not fit: {waiting} of max_queue = {capacity} are waiting")


@dataclass(eq=False)
class Job:
    """One item on its way. Its future gets one result, the first; the future is cancelled when the caller leaves."""

    item: verifier_pb2.VerifyItem
    on_result: Callable[[verifier_pb2.VerifyResult], None] = lambda result: None
    future: asyncio.Future[verifier_pb2.VerifyResult] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    deaths: int = 0
    """Workers that died on it."""
    is_queued: bool = False

    def settle(self, result: verifier_pb2.VerifyResult) -> None:
        if not self.future.done():
            self.future.set_result(result)
            self.on_result(result)

    @property
    def is_wanted(self) -> bool:
        """Somebody waits for it, and it is not in the queue."""
        return not (self.future.done() or self.is_queued)


class JobQueue:
    """First in, first out; what is put back comes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._jobs: deque[Job] = deque()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, jobs: Sequence[Job]) -> None:
        """All or none of them. Raises `QueueFull`."""
        if len(self._jobs) + len(jobs) > self.capacity:
            self._drop_abandoned()
        if len(self._jobs) + len(jobs) > self.capacity:
            raise QueueFull(len(jobs), len(self._jobs), self.capacity)
        self._enter(jobs)
        self._jobs.extend(jobs)

    def put_back(self, jobs: Sequence[Job]) -> None:
        """Jobs that were taken before, those still wanted; they always fit."""
        wanted = [job for job in jobs if job.is_wanted]
        self._enter(wanted)
        self._jobs.extendleft(reversed(wanted))

    async def take(self, share_of: int, most: int) -> list[Job]:
        """Waits for jobs; takes one `share_of`-th of what waits, at most `most`, at least one.

        A job that a worker died on comes alone, so that the next death has one possible cause.
        """
        while True:
            while not self._jobs:
                self._filled.clear()
                await self._filled.wait()
            wanted = min(most, -(-len(self._jobs) // share_of))
            if chunk := list(self._pop(wanted)):
                return chunk

    def _pop(self, wanted: int) -> Iterable[Job]:
        taken = 0
        while self._jobs and taken < wanted:
            if self._jobs[0].deaths and taken:
                return
            job = self._jobs.popleft()
            job.is_queued = False
            if job.future.done():
                continue
            taken += 1
            yield job
            if job.deaths:
                return

    def _enter(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.is_queued = True
        self._filled.set()

    def _drop_abandoned(self) -> None:
        self._jobs = deque(job for job in self._jobs if not job.future.done())
