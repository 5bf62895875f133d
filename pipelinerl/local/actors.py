"""How many actors a running local run should have: a file in its run directory, written by `pipelinerl scale`.

The file is the wish, `pids.json` and the actors' own answers are what there is; like the replicas of a Deployment.

The actors of a local run: as many as asked for, each kept running, more or fewer of them while the run goes on.

What a Deployment does in a cluster. An actor that cannot be kept running is given up with a note; the run ends when that is
so of every one there is. With zero actors asked for the trainer waits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from itertools import count as numbers

from pipelinerl.errors import FieldError
from pipelinerl.local.processes import ServiceDied, lives, read_pids
from pipelinerl.local.supervisor import SupervisedService
from pipelinerl.run_dir import RunDir, write_json

MOST_ACTORS = 64
"""On one machine; more is a slip of the finger."""


def check_count(count: int) -> int:
    """Raises `FieldError`."""
    if not 0 <= count <= MOST_ACTORS:
        raise FieldError("N", count, f"a run on one machine has 0 to {MOST_ACTORS} actors")
    return count


def write_wish(run_dir: RunDir, count: int) -> None:
    write_json(run_dir.scale, {"actors": check_count(count)})


def read_wish(run_dir: RunDir) -> int | None:
    """None when nobody has asked, or what is there is not ours."""
    try:
        count = json.loads(run_dir.scale.read_bytes())["actors"]
        return check_count(count) if isinstance(count, int) else None
    except (OSError, ValueError, LookupError, TypeError, FieldError):
        return None


def running_pids(run_dir: RunDir) -> dict[str, int]:
    """Name and pid of the run's processes. Raises `FieldError` when no run is going on there."""
    where = str(run_dir.path)
    try:
        pids = read_pids(run_dir)
    except FileNotFoundError:
        raise FieldError("--run-dir", where, "is not the folder of a run: it has no pids.json") from None
    except (OSError, ValueError) as error:
        raise FieldError("--run-dir", where, f"its pids.json cannot be read: {error}") from error
    if not any(lives(pid, run_dir.path) for pid in pids.values()):
        raise FieldError("--run-dir", where, "the run has ended; start it again, or name one that goes on")
    return pids


class ActorPool:
    """`make` prepares the service of actor number i; `note` hears what a person should; `on_gone` the names scaled away."""

    def __init__(
        self,
        make: Callable[[int], SupervisedService],
        note: Callable[[str], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self._make, self._note, self._on_gone = make, note, on_gone
        self._services: dict[int, SupervisedService] = {}
        self._kept: dict[int, asyncio.Task[None]] = {}
        self._given_up: set[int] = set()
        self._leaving: list[SupervisedService] = []
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def services(self) -> list[SupervisedService]:
        """Those asked for, by number; they may be starting or given up."""
        return [service for _, service in sorted(self._services.items())]

    async def scale(self, count: int, grace_s: float) -> None:
        """Starts or stops actors until there are `count`: those given up go first, then the highest numbers; the lowest
        free ones come.

        Returns when those to be stopped have ended (`grace_s` after SIGTERM at most) and the others are started, which is
        not yet serving. Raises `ServiceError` when one cannot be executed.
        """
        given_up = self._given_up & set(self._services)
        surplus = sorted(set(self._services) - given_up)[count:]
        await asyncio.gather(*(self._remove(number, grace_s) for number in (*given_up, *surplus)))
        free = (number for number in numbers() if number not in self._services)
        for number in [next(free) for _ in range(count - len(self._services))]:
            service = self._make(number)
            await service.start()
            self._services[number] = service
            if self._tasks is not None:
                self._keep(number)

    async def keep(self) -> None:
        """Restarts those that end. Runs until cancelled; raises the last `ServiceDied` when every actor is given up."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for number in self._services:
                    self._keep(number)
                await asyncio.Event().wait()
        finally:
            self._tasks = None

    async def stop(self, grace_s: float) -> None:
        """Those that are being scaled away included."""
        await asyncio.gather(*(service.stop(grace_s) for service in (*self._services.values(), *self._leaving)))

    def _keep(self, number: int) -> None:
        assert self._tasks is not None
        self._kept[number] = self._tasks.create_task(self._keep_running(number))

    async def _keep_running(self, number: int) -> None:
        try:
            await self._services[number].keep()
        except ServiceDied as died:
            self._given_up.add(number)
            if self._given_up >= set(self._services):
                raise
            self._note(f"{died.name} is given up: {died}")

    async def _remove(self, number: int, grace_s: float) -> None:
        service = self._services.pop(number)
        self._given_up.discard(number)
        kept = self._kept.pop(number, None)
        self._leaving.append(service)
        await service.stop(grace_s)
        self._leaving.remove(service)
        if kept is not None:
            kept.cancel()  # it may be waiting for its next restart
            await asyncio.wait({kept})
        self._on_gone(service.name)
