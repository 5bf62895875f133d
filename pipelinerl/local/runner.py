"""One run on this machine, from NATS to the trainer's end: starts the services in order, follows them, stops them in order.

Order of start: NATS, initial model, verifier, actors, trainer. Order of stop: trainer, actors, verifier, NATS. Whatever of
these dies is started again, until the trainer's summary says that the run is finished. Trains nothing itself, and writes
nothing of how the run went: `ending` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace

from pipelinerl.errors import PipelineRLError, ServiceError
from pipelinerl.local.ending import Ending
from pipelinerl.local.following import background, follow_trainer, watch_actors
from pipelinerl.local.metrics import RunnerMetrics, runner_http
from pipelinerl.local.nats import NAME as NATS
from pipelinerl.local.nats import NatsServer
from pipelinerl.local.processes import Launch, ServiceDied, ServiceProcess, living_names
from pipelinerl.local.progress import Display, RunState
from pipelinerl.local.services import ServiceCommands, ServiceLaunches, available_cores, initial_model, plan_threads
from pipelinerl.local.supervisor import STOP_WITHIN_S, ActorPool, RestartPolicy, StopBudget, SupervisedService
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import recipe_yaml
from pipelinerl.run_dir import RunDir, newest_checkpoint, read_scale, write_json, write_whole
from pipelinerl.run_summary import is_finished, kept_records, read_jsonl, read_summary
from pipelinerl.service.address import ServiceAddress
from pipelinerl.telemetry.metrics import RunRegistry

_NATS_READY_S, _VERIFIER_READY_S = 10.0, 120.0
_REFRESH_S = 0.5
_SCALED_GRACE_S = 15.0
"""For an actor that is scaled away: it hands over what is finished."""
_ENDED_GRACE_S = 1.0
"""For what a process that ended by itself left behind: the clock of the orderly stop does not start for that."""
TRAINER = "trainer"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class LocalRun:
    """The processes of one run. `run` starts all of them and ends all of them, whatever happens.

    `environment` is what the services inherit; `commands` and `policy` are for tests that put other programs in place.
    """

    recipe: Recipe
    run_dir: RunDir
    display: Display
    commands: ServiceCommands = field(default_factory=ServiceCommands)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    page_port: int | None = 0
    """See `ServiceLaunches`."""
    metrics_port: int = 0
    """Where the runner answers /metrics and /targets on this machine; 0 = any free port."""
    refresh_s: float = _REFRESH_S
    """Between two looks at how many actors are asked for, and between two drawings of the progress."""
    stop_within_s: float = STOP_WITHIN_S
    """After the first Ctrl-C."""

    def __post_init__(self) -> None:
        self._started_s = time.monotonic()
        self._state = RunState(self.run_dir.name, self.recipe.trainer.steps)
        self._registry = RunRegistry(self.run_dir.name)
        self._metrics = RunnerMetrics(self._registry, lambda: living_names(self.run_dir))
        self._budget = StopBudget(time.monotonic, self.stop_within_s)
        self._pids: dict[str, int] = {}
        self._started: list[ServiceProcess] = []
        self._interrupts = 0
        self._over = False
        self._trainer_address: ServiceAddress | None = None
        threads = plan_threads(
            available_cores(),
            self.recipe.actor.count,
            self.recipe.trainer.threads * self.recipe.trainer.nproc,
            self.recipe.actor.engine.threads,
        )
        self._launches = ServiceLaunches(
            self.recipe, self.run_dir, threads, self.environment, self.commands, page_port=self.page_port
        )

    async def run(self) -> Ending:
        """Waits for the run's end and says how it ended; by then every process is gone. Raises only for our own bugs."""
        write_whole(self.run_dir.recipe, recipe_yaml(self.recipe))
        work = asyncio.ensure_future(self._work())
        error: PipelineRLError | None = None
        with self._signals(work):
            try:
                await work
            except asyncio.CancelledError:
                if not self._interrupts:
                    raise
            except PipelineRLError as raised:
                error = raised
            except ExceptionGroup as raised:
                error = _only_ours(raised)
        ending = Ending(self._elapsed_s(), dict(self._state.restarts), bool(self._interrupts), error)
        for record in kept_records(read_jsonl(self.run_dir.metrics)):  # steps that the trainer could no longer tell of
            if (record.get("step") or 0) > self._state.step:
                self._state.on_step(record, ending.wall_s)
        self._state.on_end(ending.how)
        self._show()
        return ending

    async def _work(self) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(background(self._refresh()))
            await stack.enter_async_context(runner_http(self.run_dir, self._registry, self.metrics_port))
            nats = await stack.enter_async_context(self._nats())
            model_dir = await initial_model(self.recipe, self._launches, self._process, self._set_phase)
            verifier, address = await stack.enter_async_context(self._verifier())
            actors = await stack.enter_async_context(self._actors(address, model_dir))
            trainer = await stack.enter_async_context(self._trainer(address, model_dir, actors))
            await stack.enter_async_context(background(watch_actors(lambda: actors.services, self._state)))
            await self._until_trained(trainer, verifier, actors, nats)

    async def _until_trained(
        self, trainer: SupervisedService, verifier: SupervisedService, actors: ActorPool, nats: SupervisedService
    ) -> None:
        """Waits for the run's end. Raises `ServiceError` when a service is gone for good, or the trainer ended in an error."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(follow_trainer(trainer, self._state, self._elapsed_s, self._trainer_up)),
                group.create_task(nats.keep()),
                group.create_task(verifier.keep()),
                group.create_task(actors.keep()),
                group.create_task(self._scale(actors)),
            ]
            await trainer.keep()
            self._over = True
            for task in tasks:
                task.cancel()
        if trainer.process is not None and (trainer.process.returncode or 0) > 0:
            raise trainer.process.died()

    async def _scale(self, actors: ActorPool) -> None:
        """Brings the actors to the number that `pipelinerl scale` asks for."""
        while True:
            wanted = self._actors_wanted()
            self._metrics.actors_wanted.set(wanted)
            if wanted != len(actors.services) and not self._over:
                self._note(f"scaling from {len(actors.services)} to {wanted} actors")
                try:
                    await actors.scale(wanted, _SCALED_GRACE_S)
                except ServiceError as error:
                    self._note(f"not scaled to {wanted} actors, trying again: {error}")
            await asyncio.sleep(self.refresh_s)

    def _actors_wanted(self) -> int:
        asked = read_scale(self.run_dir)
        return self.recipe.actor.count if asked is None else asked

    # Services as context managers: started on the way in, stopped within their share of the time on the way out.

    @asynccontextmanager
    async def _nats(self) -> AsyncIterator[SupervisedService]:
        """Comes back on its port, with its streams. While it is away the services wait and reconnect; what they hold they
        keep. The address file says where it is, for as long as it runs."""
        self._set_phase("starting nats-server")
        server = NatsServer(self.run_dir.nats_store.resolve(), log_file=self.run_dir.log(NATS).resolve())
        service = self._supervised(NATS, lambda: self._launches.nats(server.prepare()), follows_run=True)
        try:
            process = await service.start()

            async def reachable() -> str | None:
                return server.url_of(process.pid)

            url = await process.until(reachable, _NATS_READY_S, "is not ready")
            server.port = int(url.rpartition(":")[2])
            self._launches = replace(self._launches, nats_url=url)
            self._announce_nats()
            yield service
        finally:
            await service.stop(self._budget.grace_s(NATS))
            self.run_dir.address(NATS).unlink(missing_ok=True)

    def _announce_nats(self) -> None:
        """Once it is known where it is: its port stays."""
        if self._launches.nats_url:
            write_json(self.run_dir.address(NATS), {"url": self._launches.nats_url})

    @asynccontextmanager
    async def _verifier(self) -> AsyncIterator[tuple[SupervisedService, str]]:
        self._set_phase("starting the verifier")
        address: ServiceAddress | None = None
        service = self._supervised("verifier", lambda: self._launches.verifier(again=address))
        try:
            process = await service.start()
            address = await process.ready(_VERIFIER_READY_S)
            yield service, address.grpc
        finally:
            await service.stop(self._budget.grace_s("verifier"))

    @asynccontextmanager
    async def _actors(self, verifier: str, model_dir: str) -> AsyncIterator[ActorPool]:
        def make(number: int) -> SupervisedService:
            return self._supervised(f"actor-{number}", lambda: self._launches.actor(number, verifier, model_dir))

        pool = ActorPool(make, self._note, self._forget)
        try:
            await pool.scale(self._actors_wanted(), _SCALED_GRACE_S)
            yield pool
        finally:
            await pool.stop(self._budget.grace_s("actor"))

    @asynccontextmanager
    async def _trainer(self, verifier: str, model_dir: str, actors: ActorPool) -> AsyncIterator[SupervisedService]:
        """Each start is one from the newest checkpoint, and waits for as many actors as there are then."""

        def prepare() -> Launch:
            self.run_dir.summary.unlink(missing_ok=True)  # of the process before
            return self._launches.trainer(verifier, model_dir, len(actors.services), self._trainer_address)

        service = self._supervised(TRAINER, prepare, follows_run=True)
        try:
            await service.start()
            yield service
        finally:
            ended = service.process is None or service.process.returncode is not None
            await service.stop(_ENDED_GRACE_S if ended else self._budget.grace_s("trainer"))

    @asynccontextmanager
    async def _process(self, kind: str, launch: Launch) -> AsyncIterator[ServiceProcess]:
        """A process that is not restarted: what builds the initial model."""
        process = await ServiceProcess.start(launch)
        self._on_start(process)
        try:
            yield process
        finally:
            await process.terminate(self._budget.grace_s(kind) if process.returncode is None else _ENDED_GRACE_S)
            if not (self._over or self._budget.started):  # the run goes on without it
                self._forget(launch.name)

    def _supervised(
        self,
        name: str,
        prepare: Callable[[], Launch],
        follows_run: bool = False,
    ) -> SupervisedService:
        """`follows_run`: its restarts are forgiven when the run gets further, not only when it lives long."""
        return SupervisedService(
            name,
            prepare,
            self._on_start,
            self._on_end,
            wanted=lambda: not self._finished(),
            policy=self.policy,
            progress=(lambda: self._state.furthest) if follows_run else (lambda: 0),
        )

    # What is written down and shown while the run goes on.

    def _on_start(self, process: ServiceProcess) -> None:
        self._pids[process.name] = process.pid
        self._started.append(process)
        write_json(self.run_dir.pids, self._pids)
        if process.name == NATS:
            self._announce_nats()

    def _forget(self, name: str) -> None:
        del self._pids[name]
        write_json(self.run_dir.pids, self._pids)

    def _on_end(self, died: ServiceDied, delay_s: float) -> None:
        self._state.restarts[died.name] += 1
        self._metrics.on_restart(died.name)
        where = ""
        if died.name == NATS:
            self.run_dir.address(NATS).unlink(missing_ok=True)
        if died.name == TRAINER:
            version = newest_checkpoint(self.run_dir.path) or 0
            self._state.rewind(version)
            where = f", and goes on from version {version}"
        self._note(f"{died}\n{died.name} is started again in {delay_s:g} s{where}")

    def _trainer_up(self, address: ServiceAddress) -> None:
        """Its page is where this says from now on, also after restarts that can have the same port."""
        self._trainer_address, link = address, f"http://{address.http}/"
        if self.page_port is not None and link != self._state.page:
            self._state.page = link
            self._note(f"Live page: {link}")

    def _finished(self) -> bool:
        """By the trainer's summary: after it the trainer changes nothing, and needs no other service."""
        return self._over or is_finished(read_summary(self.run_dir.summary))

    def _set_phase(self, phase: str) -> None:
        self._state.phase = phase

    async def _refresh(self) -> None:
        while True:
            self._show()
            await asyncio.sleep(self.refresh_s)

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone; the run goes on
            self.display.note(text)

    def _show(self) -> None:
        with contextlib.suppress(OSError):
            self.display.show(self._state, self._elapsed_s())

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    # Signals.

    @contextmanager
    def _signals(self, work: asyncio.Future[None]) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, work)
        try:
            yield
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, work: asyncio.Future[None]) -> None:
        """The first stops the run in order (or is too late: it is stopping already), the second kills what is left."""
        self._interrupts += 1
        if self._interrupts > 1:
            for process in self._started:
                process.kill()
        elif not self._budget.started:
            self._set_phase("stopping; Ctrl-C again to kill at once")
            self._note(self._state.phase)
            self._budget.start()
            work.cancel()


def _only_ours(group: ExceptionGroup) -> PipelineRLError:
    """The first of our own errors in the group. Raises the group when it holds anything else, which is a bug."""
    ours, others = group.split(PipelineRLError)
    if ours is None or others is not None:
        raise group
    leaf: BaseException = ours
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    assert isinstance(leaf, PipelineRLError)
    return leaf
