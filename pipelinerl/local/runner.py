"""One run on this machine, from NATS to report: starts the services in order, follows them, stops them in order.

Order of start: NATS, initial model, verifier, actors, trainer. Order of stop: trainer, actors, verifier, NATS. An actor
or verifier that dies is started again (`supervisor.py`); the trainer's or NATS's death ends the run. Trains nothing
itself, and knows nothing of how the trained model fares: `ending.py` writes what remains of a run.
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

from pipelinerl.config.load import recipe_yaml
from pipelinerl.config.recipe import Recipe
from pipelinerl.errors import PipelineRLError, ServiceError
from pipelinerl.local.actors import ActorPool
from pipelinerl.local.ending import Ending
from pipelinerl.local.initial_model import initial_model
from pipelinerl.local.nats_server import NatsServer
from pipelinerl.local.process import Launch, ServiceDied, ServiceProcess, log_tail
from pipelinerl.local.progress import Display
from pipelinerl.local.progress_view import RunState
from pipelinerl.local.run_dir import RunDir, write_json
from pipelinerl.local.scaling import read_wish
from pipelinerl.local.services import ServiceCommands, ServiceLaunches
from pipelinerl.local.stop_budget import StopBudget
from pipelinerl.local.summary import read_jsonl
from pipelinerl.local.supervisor import RestartPolicy, SupervisedService
from pipelinerl.local.threads import available_cores, plan_threads
from pipelinerl.local.watch import background, follow_trainer, pid_ended, watch_actors

_VERIFIER_READY_S = 120.0
_REFRESH_S = 0.5
_SCALED_GRACE_S = 15.0
"""For an actor that is scaled away: it hands over what is finished."""
_ENDED_GRACE_S = 1.0
"""For what a process that ended by itself left behind: the clock of the orderly stop does not start for that."""
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

    def __post_init__(self) -> None:
        self._started_s = time.monotonic()
        self._state = RunState(self.run_dir.name, self.recipe.trainer.steps)
        self._budget = StopBudget(time.monotonic)
        self._pids: dict[str, int] = {}
        self._killers: list[Callable[[], None]] = []
        self._interrupts = 0
        self._over = False
        threads = plan_threads(
            available_cores(),
            self.recipe.actor.count,
            self.recipe.trainer.threads * self.recipe.trainer.nproc,
            self.recipe.actor.engine.threads,
        )
        self._launches = ServiceLaunches(self.recipe, self.run_dir, threads, self.environment, self.commands)

    async def run(self) -> Ending:
        """Waits for the run's end and says how it ended; by then every process is gone. Raises only for our own bugs."""
        self.run_dir.recipe.write_text(recipe_yaml(self.recipe), encoding="utf-8")
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
            nats = await stack.enter_async_context(self._nats())
            self._launches = replace(self._launches, nats_url=nats.url)
            model_dir = await initial_model(self.recipe, self._launches, self._process, self._state.on_phase)
            verifier, address = await stack.enter_async_context(self._verifier())
            actors = await stack.enter_async_context(self._actors(address, model_dir))
            launch = self._launches.trainer(address, model_dir)
            trainer = await stack.enter_async_context(self._process("trainer", launch))
            await stack.enter_async_context(background(watch_actors(lambda: actors.services, self._state)))
            await self._until_trained(trainer, verifier, actors, nats)

    async def _until_trained(
        self,
        trainer: ServiceProcess,
        verifier: SupervisedService,
        actors: ActorPool,
        nats: NatsServer,
    ) -> None:
        """Waits for the trainer's end. Raises `ServiceError` when it failed, or when what it needs is gone for good."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._follow(trainer)),
                group.create_task(self._watch_nats(nats)),
                group.create_task(verifier.keep()),
                group.create_task(actors.keep()),
                group.create_task(self._scale(actors)),
            ]
            code = await trainer.wait()
            self._over = True
            for task in tasks:
                task.cancel()
        if code != 0:
            raise trainer.died()

    async def _follow(self, trainer: ServiceProcess) -> None:
        with contextlib.suppress(ServiceDied):  # `_until_trained` says so, with the exit code
            await follow_trainer(trainer, self._state, self._elapsed_s)

    async def _watch_nats(self, nats: NatsServer) -> None:
        await pid_ended(nats.pid)
        log = self.run_dir.log("nats")
        raise ServiceError(f"nats-server ended while the run went on; end of {log}:\n{log_tail(log)}")

    async def _scale(self, actors: ActorPool) -> None:
        """Brings the actors to the number that `pipelinerl scale` asks for."""
        while True:
            wish = read_wish(self.run_dir)
            if wish is not None and wish != len(actors.services) and not self._finished():
                self._note(f"scaling from {len(actors.services)} to {wish} actors")
                try:
                    await actors.scale(wish, _SCALED_GRACE_S)
                except ServiceError as error:
                    self._note(f"not scaled to {wish} actors, trying again: {error}")
            await asyncio.sleep(_REFRESH_S)

    # Services as context managers: started on the way in, stopped within their share of the time on the way out.

    @asynccontextmanager
    async def _nats(self) -> AsyncIterator[NatsServer]:
        self._state.on_phase("starting nats-server")
        async with NatsServer(self.run_dir.nats_store, log_file=self.run_dir.log("nats").resolve()) as server:
            pid = server.pid
            self._record("nats", pid, lambda: _kill(pid))
            try:
                yield server
            finally:
                server.stop_timeout_s = self._budget.grace_s("nats")

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
            await pool.scale(self.recipe.actor.count, _SCALED_GRACE_S)
            yield pool
        finally:
            await pool.stop(self._budget.grace_s("actor"))

    @asynccontextmanager
    async def _process(self, kind: str, launch: Launch) -> AsyncIterator[ServiceProcess]:
        """A process that is not restarted: the trainer, and what builds the initial model."""
        process = await ServiceProcess.start(launch)
        self._record(launch.name, process.pid, process.kill)
        try:
            yield process
        finally:
            await process.terminate(self._budget.grace_s(kind) if process.returncode is None else _ENDED_GRACE_S)
            if not (self._over or self._budget.started):  # the run goes on without it
                self._forget(launch.name)

    def _supervised(self, launch: Launch) -> SupervisedService:
        return SupervisedService(
            launch,
            on_start=lambda process: self._record(process.name, process.pid, process.kill),
            on_end=self._on_death,
            wanted=lambda: not self._finished(),
            policy=self.policy,
        )

    # What is written down and shown while the run goes on.

    def _record(self, name: str, pid: int, kill: Callable[[], None]) -> None:
        self._pids[name] = pid
        self._killers.append(kill)
        write_json(self.run_dir.pids, self._pids)

    def _forget(self, name: str) -> None:
        del self._pids[name]
        write_json(self.run_dir.pids, self._pids)

    def _on_death(self, died: ServiceDied, delay_s: float) -> None:
        self._state.on_restart(died.name)
        self._note(f"{died}\n{died.name} is started again in {delay_s:g} s")

    def _finished(self) -> bool:
        return self._over or self._state.step >= self._state.total_steps

    def _catch_up(self, ending: Ending) -> None:
        """Steps that the trainer took but could no longer tell are in its file."""
        for record in read_jsonl(self.run_dir.metrics):
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
