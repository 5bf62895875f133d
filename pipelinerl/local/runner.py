"""One run on this machine, from NATS to report: starts the services in order, follows them, stops them in order.

Order of start: NATS, initial model, verifier, actors, trainer. Order of stop: trainer, actors, verifier, NATS. Whatever
of these dies is started again (`supervisor.py`, `supervised_nats.py`), until the trainer's summary says that the run is
finished. Trains nothing itself, and knows nothing of how the trained model fares: `ending.py` writes what remains of a run.
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
from pipelinerl.local.actors import ActorPool, read_wish
from pipelinerl.local.ending import Ending
from pipelinerl.local.following import background, follow_trainer, watch_actors
from pipelinerl.local.metrics import RunnerMetrics, living_names, runner_http
from pipelinerl.local.nats import NAME as NATS
from pipelinerl.local.nats import NatsServer, SupervisedNats
from pipelinerl.local.processes import Launch, ServiceProcess
from pipelinerl.local.progress import Display, RunState
from pipelinerl.local.services import ServiceCommands, ServiceLaunches, available_cores, initial_model, plan_threads
from pipelinerl.local.supervisor import RestartPolicy, RestartsInARow, StopBudget, SupervisedService
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import recipe_yaml
from pipelinerl.run_dir import RunDir, newest_checkpoint, write_json, write_whole
from pipelinerl.run_summary import is_finished, kept_records, read_jsonl, read_summary
from pipelinerl.service.address import ServiceAddress
from pipelinerl.telemetry.metrics import RunRegistry

_VERIFIER_READY_S = 120.0
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

    def __post_init__(self) -> None:
        self._started_s = time.monotonic()
        self._state = RunState(self.run_dir.name, self.recipe.trainer.steps)
        self._registry = RunRegistry(self.run_dir.name)
        self._metrics = RunnerMetrics(self._registry, lambda: living_names(self.run_dir))
        self._budget = StopBudget(time.monotonic)
        self._pids: dict[str, int] = {}
        self._killers: list[Callable[[], None]] = []
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
        self._catch_up(ending)
        return ending

    async def _work(self) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(background(self._refresh()))
            await stack.enter_async_context(runner_http(self.run_dir, self._registry, self.metrics_port))
            nats = await stack.enter_async_context(self._nats())
            self._launches = replace(self._launches, nats_url=nats.url)
            model_dir = await initial_model(self.recipe, self._launches, self._process, self._state.on_phase)
            verifier, address = await stack.enter_async_context(self._verifier())
            actors = await stack.enter_async_context(self._actors(address, model_dir))
            trainer = await stack.enter_async_context(self._trainer(address, model_dir, actors))
            await stack.enter_async_context(background(watch_actors(lambda: actors.services, self._state)))
            await self._until_trained(trainer, verifier, actors, nats)

    async def _until_trained(
        self,
        trainer: SupervisedService,
        verifier: SupervisedService,
        actors: ActorPool,
        nats: SupervisedNats,
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
            wish = read_wish(self.run_dir)
            self._metrics.actors_wanted.set(self.recipe.actor.count if wish is None else wish)
            if wish is not None and wish != len(actors.services) and not self._over:
                self._note(f"scaling from {len(actors.services)} to {wish} actors")
                try:
                    await actors.scale(wish, _SCALED_GRACE_S)
                except ServiceError as error:
                    self._note(f"not scaled to {wish} actors, trying again: {error}")
            await asyncio.sleep(_REFRESH_S)

    # Services as context managers: started on the way in, stopped within their share of the time on the way out.

    @asynccontextmanager
    async def _nats(self) -> AsyncIterator[SupervisedNats]:
        self._state.on_phase("starting nats-server")
        log = self.run_dir.log(NATS).resolve()
        nats = SupervisedNats(
            NatsServer(self.run_dir.nats_store.resolve(), log_file=log),
            log,
            self.run_dir.address(NATS),
            RestartsInARow(self.policy, lambda: self._state.furthest),
            on_start=lambda pid: self._record(NATS, pid, lambda: _kill(pid)),
            on_end=lambda problem, delay_s: self._on_end(NATS, problem, delay_s),
        )
        try:
            await nats.start()
            yield nats
        finally:
            await nats.stop(self._budget.grace_s(NATS))

    @asynccontextmanager
    async def _verifier(self) -> AsyncIterator[tuple[SupervisedService, str]]:
        self._state.on_phase("starting the verifier")
        service = self._supervised(self._launches.verifier())
        try:
            process = await service.start()
            address = await process.ready(_VERIFIER_READY_S)
            service.launch = self._launches.verifier(again=address)
            yield service, address.grpc
        finally:
            await service.stop(self._budget.grace_s("verifier"))

    @asynccontextmanager
    async def _actors(self, verifier: str, model_dir: str) -> AsyncIterator[ActorPool]:
        pool = ActorPool(
            lambda number: self._supervised(self._launches.actor(number, verifier, model_dir)), self._note, self._forget
        )
        try:
            wish = read_wish(self.run_dir)  # of a run that is resumed
            await pool.scale(self.recipe.actor.count if wish is None else wish, _SCALED_GRACE_S)
            yield pool
        finally:
            await pool.stop(self._budget.grace_s("actor"))

    @asynccontextmanager
    async def _trainer(self, verifier: str, model_dir: str, actors: ActorPool) -> AsyncIterator[SupervisedService]:
        """Each start is one from the newest checkpoint, and waits for as many actors as there are then."""

        def prepare() -> None:
            service.launch = self._launches.trainer(verifier, model_dir, len(actors.services), self._trainer_address)
            self.run_dir.summary.unlink(missing_ok=True)  # of the process before

        service = self._supervised(
            self._launches.trainer(verifier, model_dir), before_start=prepare, progress=lambda: self._state.furthest
        )
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
        self._record(launch.name, process.pid, process.kill)
        try:
            yield process
        finally:
            await process.terminate(self._budget.grace_s(kind) if process.returncode is None else _ENDED_GRACE_S)
            if not (self._over or self._budget.started):  # the run goes on without it
                self._forget(launch.name)

    def _supervised(
        self,
        launch: Launch,
        before_start: Callable[[], None] = lambda: None,
        progress: Callable[[], int] = lambda: 0,
    ) -> SupervisedService:
        return SupervisedService(
            launch,
            on_start=lambda process: self._record(process.name, process.pid, process.kill),
            on_end=lambda died, delay_s: self._on_end(died.name, str(died), delay_s),
            wanted=lambda: not self._finished(),
            policy=self.policy,
            before_start=before_start,
            progress=progress,
        )

    # What is written down and shown while the run goes on.

    def _record(self, name: str, pid: int, kill: Callable[[], None]) -> None:
        self._pids[name] = pid
        self._killers.append(kill)
        write_json(self.run_dir.pids, self._pids)

    def _forget(self, name: str) -> None:
        del self._pids[name]
        write_json(self.run_dir.pids, self._pids)

    def _on_end(self, name: str, problem: str, delay_s: float) -> None:
        self._state.on_restart(name)
        self._metrics.restarts(name)
        where = ""
        if name == TRAINER:
            version = newest_checkpoint(self.run_dir.path) or 0
            self._state.rewind(version)
            where = f", and goes on from version {version}"
        self._note(f"{problem}\n{name} is started again in {delay_s:g} s{where}")

    def _trainer_up(self, address: ServiceAddress) -> None:
        """Its page is where this says from now on, also after restarts that can have the same port."""
        self._trainer_address, link = address, f"http://{address.http}/"
        if self.page_port is not None and link != self._state.page:
            self._state.page = link
            self._note(f"Live page: {link}")

    def _finished(self) -> bool:
        """The trainer has said so: it removes nothing after that, and needs nobody any more."""
        return self._over or is_finished(read_summary(self.run_dir.summary))

    def _catch_up(self, ending: Ending) -> None:
        """Steps that the trainer took but could no longer tell are in its file."""
        for record in kept_records(read_jsonl(self.run_dir.metrics)):
            if (record.get("step") or 0) > self._state.step:
                self._state.on_step(record, ending.wall_s)
        self._state.on_end(ending.how)
        self._show()

    async def _refresh(self) -> None:
        while True:
            self._show()
            await asyncio.sleep(_REFRESH_S)

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
            for kill in self._killers:
                kill()
        elif not self._budget.started:
            self._state.on_phase("stopping; Ctrl-C again to kill at once")
            self._note("stopping; Ctrl-C again to kill at once")
            self._budget.start()
            work.cancel()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _only_ours(group: ExceptionGroup) -> PipelineRLError:
    """The first error of ours in the group. Raises the group when it holds anything else: that is a bug of ours."""
    ours, others = group.split(PipelineRLError)
    if ours is None or others is not None:
        raise group
    leaf: BaseException = ours
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    assert isinstance(leaf, PipelineRLError)
    return leaf
