"""One run on this machine: start its services in order, restart them, and stop them in order.

The order is NATS, initial model, verifier, actors, trainer. At the stop, the trainer writes a checkpoint, which may take
minutes. Meanwhile the actors stop, and then the verifier. NATS stops last, because trainer and actors need it.
A run is finished when the trainer's summary says so. Until then, a process that ends is restarted, a limited number of times in
a row. A process that reports a user's mistake is not restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shlex
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pipelinerl.errors import EXIT_FAILURE, FieldError, PipelineRLError, ServiceError, counted
from pipelinerl.initial_model import is_built, is_complete
from pipelinerl.local.ending import Ending
from pipelinerl.local.following import follow_trainer, watch_actors
from pipelinerl.local.metrics import RunnerMetrics, runner_http
from pipelinerl.local.nats import NAME as NATS
from pipelinerl.local.nats import nats_command, nats_reached
from pipelinerl.local.processes import (
    Launch,
    Restarts,
    Service,
    ServiceDied,
    ServiceProcess,
    bound_log,
    http_status,
    kill_session,
    living_names,
    raise_open_files,
    service_of,
)
from pipelinerl.local.progress import Display, RunState, checkpoint_text, duration
from pipelinerl.local.services import (
    COMMANDS,
    ServiceLaunches,
    available_cores,
    initial_model,
    plan_threads,
    private_files,
    restore_compiled,
)
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import recipe_yaml
from pipelinerl.recipe.model_folder import known_parameters
from pipelinerl.rl.groups import narrow_clip_range
from pipelinerl.rl.memory import checkpoint_bytes
from pipelinerl.rl.placement import Placement
from pipelinerl.rl.throughput import too_small_max_lag
from pipelinerl.run_dir import (
    MOST_ACTORS,
    RESERVE_BYTES,
    RunDir,
    free_bytes,
    newest_checkpoint,
    read_json,
    write_json,
    write_whole,
)
from pipelinerl.run_summary import is_finished, read_jsonl
from pipelinerl.service.lifecycle import background, signals_to
from pipelinerl.service.logs import printable
from pipelinerl.service.settings import ServiceAddress, TrainerSettings, read_address
from pipelinerl.service.tls import read_certificates
from pipelinerl.telemetry.metrics import RunRegistry

STOP_WITHIN_S = 12.0
"""Time limit of the stop. The trainer gets additional time for its checkpoint."""
STOP_CHECKPOINT = "PIPELINERL_STOP_CHECKPOINT_S"
_RESERVED_S = {"model": 8.0, "trainer": 5.0, "actor": 2.5, "verifier": 1.0, "nats": 0.0}
"""Seconds of `STOP_WITHIN_S` that a kind of process must leave to the kinds that stop later."""
_VERIFIER_READY_S = 120.0
_DISK_S = 1.0
"""Seconds between two checks of the free disk space."""
_UNLEARNED_STEPS = 5
"""Number of steps without any learning signal after which a warning is printed."""
_HUNG_AFTER = 10
"""A stopping trainer is killed if it neither answers HTTP nor writes its checkpoint for this multiple of `STOP_WITHIN_S`."""
_SCALED_GRACE_S = 15.0
"""Seconds that an actor removed by scaling has to hand over its sequences before it is killed."""
_ENDED_GRACE_S = 1.0
"""At the stop, seconds until the workers of a process that has already ended are killed."""
_LONGEST_FOLDER = 70
"""Maximum length of the path of the temporary folder. It holds vLLM's sockets, whose paths have at most 107 characters."""
TRAINER = "trainer"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def grace_s(kind: str, left_s: float, within_s: float) -> float:
    """Return the seconds (at least 0.2) after which a stopping process is killed: the stop's remaining time `left_s`, minus the
    time reserved for the kinds of processes that stop later. `within_s`: time limit of the whole stop."""
    return max(0.2, left_s - _RESERVED_S[kind] * within_s / STOP_WITHIN_S)


@dataclass
class LocalRun:
    """The processes of one run. `run` starts all of them and always ends all of them. An actor that dies too often is given up,
    that is, not restarted again. The run fails when all actors are given up. With 0 actors, the trainer waits."""

    recipe: Recipe
    run_dir: RunDir
    display: Display
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: COMMANDS)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    restarts: Restarts = field(default_factory=Restarts)
    """Limits of restarts. Each service gets a copy."""
    placement: Placement | None = None
    page_port: int | None = 0
    """`placement`: GPUs of trainer and actors, or None. `page_port`: live page's port; 0 = any free port, None = no page."""
    metrics_port: int = 0
    """Port of /metrics and /targets on this machine; 0 = any free port."""
    refresh_s: float = 0.5
    """Seconds between two updates of the display, and between two checks of the wanted number of actors."""
    reserve_bytes: int = RESERVE_BYTES
    """Bytes that must stay free on the run's disk in addition to the next checkpoint. With fewer, the run fails."""
    stop_within_s: float = STOP_WITHIN_S

    def __post_init__(self) -> None:
        self._started_s = time.monotonic()
        self._state = RunState(self.run_dir.name, self.recipe.trainer.steps)
        self._registry = RunRegistry(self.run_dir.name)
        self._metrics = RunnerMetrics(self._registry, lambda: living_names(self.run_dir))
        self._processes: dict[str, ServiceProcess] = {}
        """The newest process of each name, ended or not."""
        self._actors: dict[int, Service] = {}
        """The run's actors, keyed by their numbers. Some may be starting, or have died too often to be restarted."""
        self._told: set[str] = set()
        """Keys of the printed warnings. Each warning is printed only once."""
        self._interrupts, self._unread = 0, False
        self._stop_by_s: float | None = None
        self._writing_since: tuple[int, float] | None = None
        """Version of the checkpoint that the stop waits for, and the monotonic time at which its writing was noticed."""
        self._making_model = asyncio.Lock()
        self._first_checkpoint = checkpoint_bytes(self.recipe, known_parameters(self.recipe.model))
        given = self.environment.get(STOP_CHECKPOINT) or TrainerSettings.model_fields["stop_checkpoint_s"].default
        try:
            self._checkpoint_within_s = float(given)
        except ValueError:
            raise FieldError(STOP_CHECKPOINT, given, "give a number of seconds") from None
        self._trainer_address: ServiceAddress | None = None
        threads = plan_threads(
            available_cores(),
            self.recipe.actor.number,
            self.recipe.trainer.threads * self.recipe.trainer.ranks,
            self.recipe.actor.engine.threads,
            take_turns=self.recipe.mode == "conventional",
        )
        launches = self.recipe, self.run_dir, threads, self.environment, self.commands, self.page_port, self.placement
        self._launches = ServiceLaunches(*launches)

    async def run(self) -> Ending:
        """Carry out the run, stop every process, and return how the run ended, with its error. Only a bug raises an error."""
        begun = newest_checkpoint(self.run_dir.path) or 0
        for record in read_jsonl(self.run_dir.metrics) if begun else ():
            if (record.get("step") or 0) <= begun:
                self._state.on_step(record, None)
        self._running = asyncio.ensure_future(self._work())
        error: PipelineRLError | None = None
        has_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with signals_to(self._on_signal, (one for one in _STOP_SIGNALS if not (has_nohup and one is signal.SIGHUP))):
            try:
                await self._running
            except asyncio.CancelledError:
                if not self._interrupts:
                    raise
            except (PipelineRLError, OSError, ExceptionGroup) as raised:
                error = self._only_ours(raised)
        ending = Ending(self._elapsed_s(), dict(self._state.restarts), bool(self._interrupts), error, begun, self._unread)
        for record in read_jsonl(self.run_dir.metrics):  # The last steps may not have been reported.
            if (record.get("step") or 0) > self._state.step:
                self._state.on_step(record, ending.wall_s)
        self._state.on_end(ending.how)
        self._show()
        return ending

    async def _work(self) -> None:
        write_whole(self.run_dir.recipe, recipe_yaml(self.recipe))
        self._nats_security = self.run_dir.credentials.make(self.run_dir.name)
        self._certificates = read_certificates(self.run_dir.credentials.tls_dir, "client")
        raise_open_files()
        async with AsyncExitStack() as stack:
            try:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="prl-", ignore_cleanup_errors=True))
            except OSError as error:
                raise ServiceError(f"cannot make a folder for temporary files: {error}; set another TMPDIR") from error
            if (excess := len(folder) - _LONGEST_FOLDER) > 0:
                raise ServiceError(f"{folder} is {excess} characters too long for paths of sockets: set a shorter TMPDIR")
            self._launches.environment = private_files(self.environment, Path(folder))
            await stack.enter_async_context(background(self._refresh()))
            await stack.enter_async_context(runner_http(self.run_dir, self._registry, self.metrics_port))
            stack.push_async_callback(self._stop, NATS)
            stack.push_async_callback(self._stop_services)
            nats = await self._start_nats()
            self._launches.model_dir = await initial_model(self._launches, self._process, self._set_phase)
            verifier = await self._start_verifier()
            await self._scale(self._actors_wanted())
            trainer = Service(TRAINER, self._prepare_trainer, replace(self.restarts))
            await self._until_trained(trainer, verifier, nats)

    async def _until_trained(self, trainer: Service, verifier: Service, nats: Service) -> None:
        """Start the trainer, and keep all services running until the run ends."""
        async with asyncio.TaskGroup() as group:
            watching = watch_actors(self._actors, self._certificates, self._state)
            upkeep = watching, self._keep(nats), self._keep(verifier), self._keep_actors(), self._watch_disk()
            beside = list(map(group.create_task, upkeep))
            await self._engines_measured()
            await self._start(trainer)
            following = follow_trainer(trainer, self._certificates, self._state, self._elapsed_s, self._trainer_up)
            beside.append(group.create_task(following))
            await self._keep(trainer)
            for task in beside:
                task.cancel()
        if trainer.process is not None and (trainer.process.returncode or 0) > 0:
            raise trainer.process.died()

    async def _watch_disk(self) -> None:
        """Raise `ServiceError` as soon as the disk has too little space for another checkpoint."""
        while True:
            next_bytes = self.run_dir.next_checkpoint_bytes(self.recipe.checkpoint.keep, self._first_checkpoint)
            free, needed = free_bytes(self.run_dir.path), self.reserve_bytes + next_bytes
            if free < needed:
                raise ServiceError(
                    f"{self.run_dir.path} is on a disk with {free / 1e6:,.0f} MB free, but the run needs "
                    f"{needed / 1e6:,.0f} MB for a checkpoint and a reserve, so it ends now; free some space and resume the run"
                )
            await asyncio.sleep(_DISK_S)

    # Starting and stopping.

    async def _start_nats(self) -> Service:
        """Start NATS. A restart keeps port and streams, so the services reconnect."""
        self._set_phase("starting nats-server")
        folder, log, port = self.run_dir.nats_store.resolve(), self.run_dir.log(NATS).resolve(), 0

        def prepare() -> Launch:
            command = nats_command(folder, log, port, self._nats_security)
            return Launch(NATS, command, self._launches.environment, log, self.run_dir.address(NATS))

        service = Service(NATS, prepare, replace(self.restarts))
        self._launches.nats_url = await nats_reached(folder, await self._start(service))
        port = int(self._launches.nats_url.rpartition(":")[2])
        write_json(self.run_dir.address(NATS), {"url": self._launches.nats_url})
        return service

    async def _start_verifier(self) -> Service:
        self._set_phase("starting the verifier")
        address: ServiceAddress | None = None
        service = Service("verifier", lambda: self._launches.verifier(again=address), replace(self.restarts))
        address = await (await self._start(service)).ready(_VERIFIER_READY_S)
        self._launches.verifier_address = address.grpc
        self._set_phase("starting trainer and actors")
        return service

    async def _engines_measured(self) -> None:
        """If engines share the trainer's GPU, wait until all have started: a trainer would disturb their memory profiling."""
        if self.placement is None or not self.placement.is_shared:
            return
        self._set_phase("starting the engine, which shares the trainer's GPU")
        while True:
            starting = [service.name for service in self._actors.values() if not service.given_up]
            if all(self.run_dir.address(name).is_file() for name in starting):
                break
            await asyncio.sleep(self.refresh_s)
        self._set_phase("starting the trainer")

    def _prepare_trainer(self) -> Launch:
        self.run_dir.summary.unlink(missing_ok=True)  # This is the previous trainer's summary.
        return self._launches.trainer(len(self._actors), self._trainer_address)

    @asynccontextmanager
    async def _process(self, launch: Launch) -> AsyncIterator[ServiceProcess]:
        try:
            yield await self._start(Service(launch.name, lambda: launch, self.restarts))
        finally:
            await self._stop(launch.name)
            if self._stop_by_s is None:  # The run goes on without this process, so pids.json must not name it.
                self._forget(launch.name)

    async def _stop_services(self) -> None:
        async def beside_the_checkpoint() -> None:
            await self._stop("actor")
            await self._stop("verifier")

        await asyncio.gather(self._stop(TRAINER), beside_the_checkpoint())

    async def _stop(self, kind: str) -> None:
        """Terminate the processes of one kind, such as `actor`, including actors that scaling is removing."""
        running = [process for name, process in self._processes.items() if service_of(name) == kind]
        within_s, beside = _ENDED_GRACE_S, AsyncExitStack()
        if any(process.returncode is None for process in running):
            stop_by_s = self._begin_to_stop()
            if kind == NATS:  # The trainer's checkpoint may have used up the time.
                stop_by_s = max(stop_by_s, time.monotonic() + self.stop_within_s / 4)
            within_s = grace_s(kind, stop_by_s - time.monotonic(), self.stop_within_s)
            if kind == TRAINER and self.run_dir.address(TRAINER).is_file():  # A trainer without an address has nothing to save.
                within_s = self._checkpoint_within_s + self.stop_within_s
                await beside.enter_async_context(background(self._kill_hung(running[0])))
        async with beside:
            await asyncio.gather(*(process.terminate(within_s) for process in running))
        if kind == NATS:
            self.run_dir.address(NATS).unlink(missing_ok=True)

    async def _kill_hung(self, trainer: ServiceProcess) -> None:
        """Kill a trainer that neither answers nor writes its checkpoint, because it would delay the stop by up to an hour."""
        address, written, seen_s = read_address(trainer.launch.address_file).http, None, time.monotonic()
        while (quiet_s := time.monotonic() - seen_s) < _HUNG_AFTER * self.stop_within_s:
            now = self.run_dir.checkpoint_under_way()
            if now != written or await asyncio.to_thread(http_status, address, "/healthz", 2.0) is not None:
                written, seen_s = now, time.monotonic()
            await asyncio.sleep(self.refresh_s)
        self._note(f"the trainer has not answered and has written nothing for {duration(quiet_s)}: it hangs and is killed")
        kill_session(trainer.pid)

    def _begin_to_stop(self) -> float:
        """Begin the stop if it has not begun yet, and return its deadline on the monotonic clock."""
        if self._stop_by_s is None:
            self._stop_by_s = time.monotonic() + self.stop_within_s
            trainer = self._processes.get(TRAINER)
            if self._interrupts or (trainer is not None and trainer.returncode is None):
                self._state.stopping = True
                self._note("stopping; press Ctrl-C again to kill at once, without a checkpoint of the last steps")
        return self._stop_by_s

    def _show_stopping(self) -> None:
        """Show what the stop waits for: first the trainer's current step, then its checkpoint."""
        assert self._stop_by_s is not None, "it stops"
        now_s, trainer = time.monotonic(), self._processes.get(TRAINER)
        if trainer is None or trainer.returncode is not None:
            phase = "stopping"
        elif (under_way := self.run_dir.checkpoint_under_way()) is None:
            passed_s = now_s - self._stop_by_s + self.stop_within_s
            phase = f"stopping: the trainer is finishing its step and then writes a checkpoint ({duration(passed_s)} so far)"
        else:
            version, written = under_way
            if self._writing_since is None or self._writing_since[0] != version:
                self._writing_since = version, now_s
            total = self.run_dir.checkpoint_bytes() or self._first_checkpoint
            phase = f"stopping: {checkpoint_text(version, written, total, now_s - self._writing_since[1])}"
        self._set_phase(phase)

    # Restarts.

    async def _start(self, service: Service) -> ServiceProcess:
        """Start a process of the service, or raise `ServiceError`."""
        if service_of(service.name) in ("actor", TRAINER):
            await self._restore_cache()
        process = self._processes[service.name] = service.process = await ServiceProcess.start(service.prepare())
        self._write_pids()
        if service.name == NATS and self._launches.nats_url:  # a restart keeps the address
            write_json(self.run_dir.address(NATS), {"url": self._launches.nats_url})
        return process

    async def _restore_cache(self) -> None:
        """Recreate cached folders that services need, if they were removed."""
        async with self._making_model:  # Several services may start at once.
            restore_compiled(self._launches.environment)
            model = Path(self._launches.model_dir)
            if is_built(self.recipe.model) and not is_complete(model):
                self._note(f"{model} has been removed: the initial model is made again, because a service needs it to start")
                self._launches.model_dir = await initial_model(self._launches, self._process, self._set_phase)

    async def _keep(self, service: Service) -> None:
        """Restart the service when its process ends, until the run is finished or no restart is left (`ServiceError`)."""
        served = False
        while True:
            assert service.process is not None, "it has been started"
            process, started_s = service.process, time.monotonic()
            code = await process.wait()
            if self._finished():
                return
            await process.kill_and_wait()  # Remaining workers would keep ports and cores.
            served = served or process.launch.address_file.is_file()
            # An actor's restarts in a row are not reset by progress of the run, which other actors may have caused.
            reached = 0 if service_of(service.name) == "actor" else self._state.furthest
            delay_s = service.restarts.next_delay_s(time.monotonic() - started_s, code, served, reached)
            if delay_s is None:
                raise process.died(service.restarts.in_a_row)
            self._on_end(process.died(), delay_s)
            while service.process is process:
                await asyncio.sleep(delay_s)
                if self._finished():
                    return
                try:
                    await self._start(service)
                except ServiceError as error:  # A failed start counts as a death.
                    delay_s = service.restarts.next_delay_s(0.0, EXIT_FAILURE, served)
                    if delay_s is None:
                        raise
                    self._note(f"{error}; trying again in {delay_s:g} s")

    def _on_end(self, died: ServiceDied, delay_s: float) -> None:
        self._state.restarts[died.name] += 1
        self._metrics.restarts.labels(service_of(died.name)).inc()
        where = ""
        if died.name == NATS:
            self.run_dir.address(NATS).unlink(missing_ok=True)
        if died.name == TRAINER:
            version = newest_checkpoint(self.run_dir.path) or 0
            self._state.rewind(version)
            where = f", and continues from version {version}"
        self._note(f"{died}\n{died.name} is started again in {delay_s:g} s{where}")

    def _finished(self) -> bool:
        """Return whether the trainer's summary says that the run is finished, so that no service is needed any longer."""
        return is_finished(read_json(self.run_dir.summary))

    # Actors, whose number can change during the run.

    def _actors_wanted(self) -> int:
        asked = read_json(self.run_dir.scale).get("actors")
        wanted = asked if isinstance(asked, int) and 0 <= asked <= MOST_ACTORS else self.recipe.actor.number
        most = len(self.placement.groups) if self.placement else MOST_ACTORS
        if wanted > most and f"{wanted} actors" not in self._told:
            self._told.add(f"{wanted} actors")
            self._note(f"warning: {wanted} actors are wanted, but the GPUs here suffice only for {counted(most, 'actor')}")
        return min(wanted, most)

    async def _keep_actors(self) -> None:
        """Keep the wanted number of actors running until cancelled. Fails if all died too often, or one cannot be restarted."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                wanted, here = self._actors_wanted(), len(self._actors)
                self._metrics.actors_wanted.set(wanted)
                if wanted != here:
                    self._note(f"scaling from {here} to {counted(wanted, 'actor')}")
                    try:
                        await self._scale(wanted)
                    except ServiceError as error:
                        self._note(f"cannot scale to {counted(wanted, 'actor')}; trying again: {error}")
                for service in self._actors.values():
                    service.keeper = service.keeper or tasks.create_task(self._keep_actor(service))
                await asyncio.sleep(self.refresh_s)

    async def _keep_actor(self, service: Service) -> None:
        try:
            await self._keep(service)
        except ServiceDied as died:
            service.given_up = True
            if all(actor.given_up for actor in self._actors.values()):
                raise
            self._note(f"{died.name} is not restarted again: {died}")

    async def _scale(self, count: int) -> None:
        """Remove actors that died too often, then start or stop actors until there are `count`. Those with the highest numbers
        are stopped, and new ones get the lowest free numbers. Raises `ServiceError` if a process cannot be started."""
        if count == 0:
            command = f"pipelinerl scale actors N --run-dir {shlex.quote(str(self.run_dir.path))}"
            self._note(f"the number of actors is 0: nothing is generated until you run `{command}`")
        ordered = sorted(self._actors, key=lambda number: (self._actors[number].given_up, number))
        least = sum(not actor.given_up for actor in self._actors.values())
        await asyncio.gather(*(self._remove(number) for number in ordered[min(count, least) :]))
        free = sorted(set(range(count)) - self._actors.keys())
        for number in free[: count - len(self._actors)]:
            service = Service(f"actor-{number}", partial(self._launches.actor, number), replace(self.restarts))
            await self._start(service)
            self._actors[number] = service

    async def _remove(self, number: int) -> None:
        service = self._actors.pop(number)
        if service.keeper is not None:
            service.keeper.cancel()
            await asyncio.wait({service.keeper})
        await self._processes[service.name].terminate(_SCALED_GRACE_S)
        self._forget(service.name)

    # Files and display during the run.

    def _write_pids(self) -> None:
        write_json(self.run_dir.pids, {name: process.pid for name, process in self._processes.items()})

    def _forget(self, name: str) -> None:
        self._processes.pop(name, None)
        self._write_pids()

    def _trainer_up(self, address: ServiceAddress) -> None:
        key = self.run_dir.credentials.page_key.read_text()
        self._trainer_address, link = address, f"http://{address.http}/{key}/"
        if self.page_port is not None and link != self._state.page:
            self._state.page = link
            self._note(f"Live page: {link}")

    def _set_phase(self, phase: str) -> None:
        self._state.phase = phase

    async def _refresh(self) -> None:
        while True:
            if self._state.stopping:
                self._show_stopping()
            self._show()
            self._tell_once()
            for name in list(self._processes):
                with contextlib.suppress(OSError):  # There may be no log yet, or the disk may be full.
                    await asyncio.to_thread(bound_log, self.run_dir.log(name))
            await asyncio.sleep(self.refresh_s)

    def _tell_once(self) -> None:
        last, problems = self._state.last, dict[str, FieldError | str | None]()
        log = self.run_dir.log(TRAINER)
        for reason, failure in self._state.failures.items():
            problems[f"failed: {reason}"] = f"a sequence failed: {printable(failure)} (all failures: {log})"
        newest = [step.get("equal_reward_groups") for step in self._state.history][-_UNLEARNED_STEPS:]
        if newest == [1.0] * _UNLEARNED_STEPS and self.recipe.algorithm.advantage != "value":
            problems["equal rewards"] = (
                f"in {_UNLEARNED_STEPS} steps, all completions of each prompt earned the same reward, so nothing is learned; "
                f"see rewards and reasons in {self.run_dir.samples}, and correct the reward or choose other problems"
            )
        if last.get("max_lag_too_small"):
            problems["max_lag"] = too_small_max_lag(self.recipe, last["largest_lag"])
        if last.get("clip_range_cut") is not None:
            problems["clip range"] = narrow_clip_range(self.recipe.algorithm, last["clip_range_cut"])
        for setting in problems.keys() - self._told:
            self._note(f"warning: {problems[setting]}")
        self._told |= problems.keys()

    def _note(self, text: str) -> None:
        with self._perhaps_unread():
            self.display.note(text)

    def _show(self) -> None:
        with self._perhaps_unread():
            self.display.show(self._state, self._elapsed_s())

    @contextmanager
    def _perhaps_unread(self) -> Iterator[None]:
        """Stop the run cleanly if its output is a closed pipe, as after `| head`, and ignore other errors of the output."""
        try:
            yield
        except BrokenPipeError:
            if not self._interrupts and self._stop_by_s is None:
                self._unread = True
                self._on_signal()
        except OSError:
            pass

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    # Signals.

    def _on_signal(self, _: int = 0) -> None:
        """Stop the run cleanly at the first signal, and kill the remaining processes at the second."""
        self._interrupts += 1
        if self._interrupts > 1:
            for process in self._processes.values():
                kill_session(process.pid)
        elif self._stop_by_s is None:
            self._begin_to_stop()
            self._running.cancel()

    def _only_ours(self, raised: Exception) -> PipelineRLError:
        """Return the first error of `raised` as a `PipelineRLError`. If any is neither that nor a full disk, raise `raised`."""
        errors = _leaves(raised)
        if any(not isinstance(one, PipelineRLError) and getattr(one, "errno", None) not in _DISK_FULL for one in errors):
            raise raised
        if isinstance(errors[0], PipelineRLError):
            return errors[0]
        return ServiceError(f"{self.run_dir.path} is on a full disk ({errors[0]}); free some space and resume the run")


def _leaves(error: Exception) -> list[Exception]:
    """Return the errors in an exception group, at any depth; for any other error, the error itself."""
    return [leaf for one in error.exceptions for leaf in _leaves(one)] if isinstance(error, ExceptionGroup) else [error]
