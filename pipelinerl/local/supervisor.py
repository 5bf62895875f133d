"""Keeps the services of a local run going: restarts of one, a pool of actors, and the time all of them have to stop.

Like the pods of a Deployment: a process that ends is started again, a bounded number of times in a row, each time later, and an
exit code of 0 is no reason to stay away. Only `stop`, or the run's end, is. Knows nothing of what a service does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count as numbers

from pipelinerl.errors import ServiceError
from pipelinerl.local.processes import Launch, ServiceDied, ServiceProcess
from pipelinerl.service.lifecycle import EXIT_FAILURE, EXIT_USER_ERROR

log = logging.getLogger(__name__)

STOP_WITHIN_S = 12.0
"""Of the 15 s a user waits at most after Ctrl-C; the rest is for summary and report."""

_RESERVED_S = {"warmstart": 8.0, "trainer": 5.0, "actor": 2.5, "verifier": 1.0, "nats": 0.0}
"""What must be left, of `STOP_WITHIN_S`, for those that stop later."""


class StopBudget:
    """Shares `within_s` seconds, from the first call of `start` on, among services that stop one after the other."""

    def __init__(self, clock_s: Callable[[], float], within_s: float = STOP_WITHIN_S) -> None:
        self._clock_s, self._within_s = clock_s, within_s
        self._deadline_s: float | None = None

    @property
    def started(self) -> bool:
        return self._deadline_s is not None

    def start(self) -> float:
        """Starts the clock; later calls change nothing. Returns the seconds that are left."""
        if self._deadline_s is None:
            self._deadline_s = self._clock_s() + self._within_s
        return self._deadline_s - self._clock_s()

    def grace_s(self, kind: str) -> float:
        """Seconds that `trainer`, `actor`, `verifier` or `nats` gets before it is killed. Starts the clock."""
        return max(0.2, self.start() - _RESERVED_S[kind] * self._within_s / STOP_WITHIN_S)


@dataclass(frozen=True)
class RestartPolicy:
    """When to start a service again."""

    limit: int = 5
    """Restarts in a row at most."""
    limit_unserved: int = 1
    """The same for a service that has never come up: what it lacks will hardly come by itself."""
    first_delay_s: float = 1.0
    factor: float = 2.0
    stable_s: float = 600.0
    """A process that lived that long is forgiven what came before."""


class RestartCounter:
    """Counts deaths in a row for a `RestartPolicy`. Pure.

    `progress()` is a number that grows where the run gets on: past a death at which it stood higher than at any before, the
    count begins again, so that what dies at ever the same place is given up and what is killed now and then is not.
    """

    def __init__(self, policy: RestartPolicy, progress: Callable[[], int] = lambda: 0) -> None:
        self._policy, self._progress = policy, progress
        self._furthest = progress()
        self.restarts = 0

    def next_delay_s(self, lived_s: float, exit_code: int, served: bool) -> float | None:
        """After one more death: the wait before the next start, None when there is to be none."""
        policy, reached = self._policy, self._progress()
        if lived_s >= policy.stable_s or reached > self._furthest:
            self.restarts = 0
        self._furthest = max(self._furthest, reached)
        if self.restarts >= (policy.limit if served else policy.limit_unserved) or exit_code == EXIT_USER_ERROR:
            return None
        self.restarts += 1
        return policy.first_delay_s * policy.factor ** (self.restarts - 1)


class SupervisedService:
    """A service that is restarted when it ends: `start`, then `keep`, then `stop`.

    `prepare` returns what to start, before each start. `on_start` is called with every started process, `on_end` with the
    error of every one that ended and the seconds until the next. Once the service is not `wanted` any more (the run is over)
    a process may end. `progress`: see `RestartCounter`.
    """

    def __init__(
        self,
        name: str,
        prepare: Callable[[], Launch],
        on_start: Callable[[ServiceProcess], None],
        on_end: Callable[[ServiceDied, float], None],
        wanted: Callable[[], bool] = lambda: True,
        policy: RestartPolicy = RestartPolicy(),
        progress: Callable[[], int] = lambda: 0,
    ) -> None:
        self.name, self._prepare = name, prepare
        self.process: ServiceProcess | None = None
        """The newest process; None before `start`."""
        self._on_start, self._on_end, self._wanted = on_start, on_end, wanted
        self._counter = RestartCounter(policy, progress)
        self._started = asyncio.Event()
        self._stopping = False

    async def start(self) -> ServiceProcess:
        """Raises `ServiceError` when the command cannot be executed."""
        self.process = await ServiceProcess.start(self._prepare())
        self._on_start(self.process)
        self._started.set()
        self._started = asyncio.Event()
        return self.process

    async def next_process(self, after: ServiceProcess | None) -> ServiceProcess:
        """The newest process once it is another than `after`."""
        while self.process is None or self.process is after:
            await self._started.wait()
        return self.process

    async def keep(self) -> None:
        """Waits for the process to end and starts the next one, until it is stopped or not wanted any more.

        Raises the last `ServiceDied`, or the `ServiceError` of a start that failed, when the policy allows no further restart.
        """
        clock_s = asyncio.get_running_loop().time
        served = False
        while True:
            assert self.process is not None, "start() comes first"
            started_s = clock_s()
            code = await self.process.wait()
            if self._may_end():
                return
            await self.process.kill_and_wait()  # what it left behind would hold its ports and its cores
            served = served or self.process.launch.address_file.is_file()
            delay_s = self._counter.next_delay_s(clock_s() - started_s, code, served)
            if delay_s is None:
                raise self.process.died(self._counter.restarts)
            self._on_end(self.process.died(), delay_s)
            if not await self._start_again(delay_s, served):
                return

    async def _start_again(self, delay_s: float, served: bool) -> bool:
        """After `delay_s`; False when it may end by then. A failed start counts as a death, and the last one is raised."""
        while True:
            await asyncio.sleep(delay_s)
            if self._may_end():
                return False
            try:
                await self.start()
            except ServiceError as error:
                next_s = self._counter.next_delay_s(0.0, EXIT_FAILURE, served)
                if next_s is None:
                    raise
                delay_s = next_s
                log.warning("%s, trying again in %.1f s", error, delay_s)
            else:
                return True

    async def stop(self, grace_s: float) -> None:
        """No more restarts; terminates the process, if there is one."""
        self._stopping = True
        if self.process is not None:
            await self.process.terminate(grace_s)

    def _may_end(self) -> bool:
        return self._stopping or not self._wanted()


class ActorPool:
    """The actors of a run: as many as asked for, each kept running, more or fewer of them while the run goes on.

    An actor that cannot be kept running is given up with a note; the run ends when all of them are given up. With zero
    actors asked for the trainer waits. `make` prepares the service of actor number i; `note` is called with lines for the
    user, `on_gone` with the names of actors that were scaled away.
    """

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
                self._kept[number] = self._tasks.create_task(self._keep(number))

    async def keep(self) -> None:
        """Restarts those that end. Runs until cancelled; raises the last `ServiceDied` when every actor is given up."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for number in self._services:
                    self._kept[number] = self._tasks.create_task(self._keep(number))
                await asyncio.Event().wait()
        finally:
            self._tasks = None

    async def stop(self, grace_s: float) -> None:
        """Those that are being scaled away included."""
        await asyncio.gather(*(service.stop(grace_s) for service in (*self._services.values(), *self._leaving)))

    async def _keep(self, number: int) -> None:
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
