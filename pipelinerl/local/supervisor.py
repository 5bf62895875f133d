"""How long each service may take to stop, so that all of them together stop in time. Pure but for the clock it is given.

Keeps one service running: a process that ends is started again, a bounded number of times, each time later.

Like a pod of a Deployment: an exit code of 0 is no reason to stay away. Only its owner's `stop`, or the run's end, is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pipelinerl.local.processes import Launch, ServiceDied, ServiceProcess
from pipelinerl.service.lifecycle import EXIT_USER_ERROR

STOP_WITHIN_S = 12.0
"""Of the 15 s a user waits at most after Ctrl-C; the rest is for summary and report."""

_RESERVED_S = {"warmstart": 8.0, "trainer": 5.0, "actor": 2.5, "verifier": 1.0, "nats": 0.0}
"""What must be left for those that stop later."""


class StopBudget:
    """Shares `within_s` seconds, from the first call of `start` on, among services that stop one after the other."""

    def __init__(self, clock_s: Callable[[], float], within_s: float = STOP_WITHIN_S) -> None:
        self._clock_s, self._within_s = clock_s, within_s
        self._deadline_s: float | None = None

    @property
    def started(self) -> bool:
        return self._deadline_s is not None

    def start(self) -> None:
        """Starts the clock; later calls change nothing."""
        if self._deadline_s is None:
            self._deadline_s = self._clock_s() + self._within_s

    def grace_s(self, kind: str) -> float:
        """Seconds that `trainer`, `actor`, `verifier` or `nats` gets before it is killed. Starts the clock."""
        self.start()
        assert self._deadline_s is not None
        return max(0.2, self._deadline_s - self._clock_s() - _RESERVED_S[kind])


@dataclass(frozen=True)
class RestartPolicy:
    """When to start a service again. Pure."""

    limit: int = 5
    """Restarts in a row at most."""
    limit_unserved: int = 1
    """The same for a service that has never come up: what it lacks will hardly come by itself."""
    first_delay_s: float = 1.0
    factor: float = 2.0
    stable_s: float = 600.0
    """A process that lived that long is forgiven what came before."""

    def delay_s(self, restarts: int, exit_code: int, served: bool) -> float | None:
        """Wait before restart number `restarts + 1` in a row; None when there is to be none."""
        limit = self.limit if served else self.limit_unserved
        if restarts >= limit or exit_code == EXIT_USER_ERROR:
            return None
        return self.first_delay_s * self.factor**restarts


class RestartsInARow:
    """Counts deaths in a row for a `RestartPolicy`. Pure.

    `progress()` is a number that grows where the run gets on: past a death at which it stood higher than at any before, the
    count begins again, so that what dies at ever the same place is given up and what is killed now and then is not.
    """

    def __init__(self, policy: RestartPolicy, progress: Callable[[], int] = lambda: 0) -> None:
        self._policy, self._progress = policy, progress
        self._furthest = progress()
        self.count = 0

    def next_delay_s(self, lived_s: float, exit_code: int, served: bool) -> float | None:
        """After one more death: the wait before the next start, None when there is to be none."""
        reached = self._progress()
        if lived_s >= self._policy.stable_s or reached > self._furthest:
            self.count = 0
        self._furthest = max(self._furthest, reached)
        delay_s = self._policy.delay_s(self.count, exit_code, served)
        self.count += 1
        return delay_s


class SupervisedService:
    """A service that is restarted when it ends: `start`, then `keep`, then `stop`.

    `on_start` hears of every started process, `on_end` of every one that ended and the seconds until the next;
    `before_start` prepares for one. Once the service is not `wanted` any more (the run is over) a process that ends is let
    go. `progress`: see `RestartsInARow`.
    """

    def __init__(
        self,
        launch: Launch,
        on_start: Callable[[ServiceProcess], None],
        on_end: Callable[[ServiceDied, float], None],
        wanted: Callable[[], bool] = lambda: True,
        policy: RestartPolicy | None = None,
        before_start: Callable[[], None] = lambda: None,
        progress: Callable[[], int] = lambda: 0,
    ) -> None:
        self.launch = launch
        """What the next start uses."""
        self._on_start, self._on_end, self._wanted = on_start, on_end, wanted
        self._before_start = before_start
        self._row = RestartsInARow(policy or RestartPolicy(), progress)
        self._process: ServiceProcess | None = None
        self._started = asyncio.Event()
        self._stopping = False

    @property
    def name(self) -> str:
        return self.launch.name

    @property
    def process(self) -> ServiceProcess | None:
        """The newest process; None before `start`."""
        return self._process

    async def start(self) -> ServiceProcess:
        """Raises `ServiceError` when the command cannot be executed."""
        self._before_start()
        self._process = await ServiceProcess.start(self.launch)
        self._on_start(self._process)
        self._started.set()
        self._started = asyncio.Event()
        return self._process

    async def next_process(self, after: ServiceProcess | None) -> ServiceProcess:
        """The newest process once it is another than `after`."""
        while self._process is None or self._process is after:
            await self._started.wait()
        return self._process

    async def keep(self) -> None:
        """Waits for the process to end and starts the next one, until it is stopped or not wanted any more.

        Raises the last `ServiceDied` when the policy allows no further restart.
        """
        clock_s = asyncio.get_running_loop().time
        served = False
        while True:
            assert self._process is not None, "start() comes first"
            started_s = clock_s()
            code = await self._process.wait()
            if self._may_end():
                return
            await self._process.kill_and_wait()  # what it left behind would hold its ports and its cores
            served = served or self.launch.address_file.is_file()
            delay_s = self._row.next_delay_s(clock_s() - started_s, code, served)
            if delay_s is None:
                raise self._process.died()
            self._on_end(self._process.died(), delay_s)
            await asyncio.sleep(delay_s)
            if self._may_end():
                return
            await self.start()

    async def stop(self, grace_s: float) -> None:
        """No more restarts; terminates the process, if there is one."""
        self._stopping = True
        if self._process is not None:
            await self._process.terminate(grace_s)

    def _may_end(self) -> bool:
        return self._stopping or not self._wanted()
