"""Faults in whole runs: real services, vLLM and nats-server under the local runner, hit at chosen points, one after another.

A run gets a list of faults; each waits for its point, is done to the process and everything it started, and counts as
survived when the run has come further than it was before and the service that was hit works again. In the end the run comes
to its last step, and its books add up (`pipelinerl audit`).
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil

from pipelinerl.bus.jetstream import Bus, connect
from pipelinerl.bus.permissions import ADMIN
from pipelinerl.commands.run import resume
from pipelinerl.errors import ServiceError
from pipelinerl.local.ending import Ending
from pipelinerl.local.processes import Restarts, session_pids
from pipelinerl.local.progress import open_display
from pipelinerl.local.runner import LocalRun
from pipelinerl.local.services import COMMANDS
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.run_dir import RunDir, create_run_dir
from pipelinerl.service.grpc import open_channel
from pipelinerl.service.retry import Backoff
from pipelinerl.service.settings import read_address
from pipelinerl.v1 import actor_pb2, actor_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from tests.faults.slow import talks
from tests.support.machine import usual_open_files
from tests.support.runs import write_tiny_recipe

SERVICES = ("trainer", "actor-0", "verifier", "nats")
RANK_1 = "rank 1"
"""Of a trainer with several; it may stand for a service in a fault."""
POINTS = ("idle", "generating", "verifying", "publishing", "optimizer step", "checkpoint write", "weight update")
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP", "restart")
FROZEN_S, HURRY_S = 20.0, 1.0
STEPS_BETWEEN = 3
SURVIVE_WITHIN_S = 600.0
"""Far above what any fault may cost: reached only by something that waits for ever."""
LOOK_S = 0.005
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fault:
    """`restart`: told to stop, and killed a second later, as by somebody who has no patience."""

    service: str
    signal: str
    point: str


@dataclass(frozen=True)
class Survived:
    fault: Fault
    step: int
    """The last one before."""
    seconds: float
    """Until a new process of the service worked and a later step was taken; of a frozen one, from when it went on."""


def some_faults(seed: int) -> list[Fault]:
    """One for each service, in any order; signals and points from the seed."""
    chosen = random.Random(seed)
    services = chosen.sample(SERVICES, len(SERVICES))
    points = chosen.sample(POINTS[1:], len(SERVICES))
    return [Fault(service, chosen.choice(SIGNALS), point) for service, point in zip(services, points, strict=True)]


def write_recipe(folder: Path, model: Path, num_faults: int, changes: Mapping[str, Any] = {}) -> Path:
    """A run with room for that many faults, a checkpoint every third step, and rewards that take their time. A third of the
    groups are episodes of three turns."""
    fire: dict[str, Any] = {
        "task": {"heldout_problems": 4},
        "reward": {"scorer": "tests.faults.slow:score", "answer_pattern": ""},
        "trainer": {"steps": (num_faults + 1) * (STEPS_BETWEEN + 5), "learning_rate": 1e-4},
        "weights": {"probe_every": 5, "deadline_s": 15},
        "evaluation": {"every_steps": 0},
        "checkpoint": {"every_steps": 3},
    }
    for section, fields in changes.items():
        fire[section] = {**fire.get(section, {}), **fields} if isinstance(fields, Mapping) else fields
    return write_tiny_recipe(model, folder, fire, tasks=[{"name": "sums", "weight": 2}, talks()])


@contextlib.asynccontextmanager
async def local_run(
    folder: Path, recipe_file: Path, commands: Mapping[str, tuple[str, ...]] = COMMANDS, resumed: RunDir | None = None
) -> AsyncIterator[tuple[RunDir, asyncio.Task[Ending], StringIO]]:
    """A run under the local runner, in this process; it is interrupted where the block ends before the run does."""
    if resumed is not None:
        recipe, run_dir = resume(resumed)[0], resumed
    else:
        recipe = load_recipe(str(recipe_file))
        run_dir = create_run_dir(recipe.name, datetime.now(), path=folder / "Läufe 数" / "run")
    out = StringIO()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with usual_open_files(), open_display(out) as display:
        restarts = Restarts(limit=100, limit_unserved=100, backoff=Backoff(0.5, 0.5))
        runner = LocalRun(recipe, run_dir, display, commands, environment=environment, restarts=restarts)
        running = asyncio.create_task(runner.run())
        try:
            yield run_dir, running, out
        finally:
            if not running.done():
                await interrupt(running)


async def run_under_fire(
    folder: Path,
    recipe_file: Path,
    faults: Sequence[Fault],
    commands: Mapping[str, tuple[str, ...]] = COMMANDS,
    *,
    interrupted: bool = False,
) -> tuple[RunDir, list[Survived]]:
    """A run with these faults to its last step or, with `interrupted`, to a Ctrl-C after the last fault.

    Raises `AssertionError` when it does not survive a fault, or does not end well.
    """
    async with local_run(folder, recipe_file, commands) as (run_dir, running, out):
        hitting = asyncio.create_task(_hit_all(run_dir, faults))
        await asyncio.wait((running, hitting), return_when=asyncio.FIRST_COMPLETED)
        assert hitting.done(), f"the run ended before all faults were done: {out.getvalue()}"
        survived = hitting.result()
        ending = await (interrupt(running) if interrupted else asyncio.wait_for(running, SURVIVE_WITHIN_S))
    assert ending is not None, out.getvalue()
    assert ending.exit_code == (130 if interrupted else 0), f"{ending.error}\n{out.getvalue()}"
    return run_dir, survived


async def interrupt(running: asyncio.Task[Ending]) -> Ending | None:
    """Ctrl-C, the runner's own way to end."""
    os.kill(os.getpid(), signal.SIGINT)
    with contextlib.suppress(BaseException):
        return await asyncio.wait_for(running, SURVIVE_WITHIN_S)
    return None


def pids_of(run_dir: RunDir) -> dict[str, int]:
    found: dict[str, int] = json.loads(run_dir.pids.read_bytes())
    return found


async def _hit_all(run_dir: RunDir, faults: Sequence[Fault]) -> list[Survived]:
    return [await _hit(run_dir, fault) for fault in faults]


async def _hit(run_dir: RunDir, fault: Fault) -> Survived:
    watcher = Watcher(run_dir)
    async with _in_time(f"{fault}: its point did not come"):
        await watcher.at(fault.point)
    service = "trainer" if fault.service == RANK_1 else fault.service
    step, pid = watcher.step(), pids_of(run_dir)[service]
    await _strike(fault, _pid_of_rank_1(pid) if fault.service == RANK_1 else pid)
    began_s = time.monotonic()
    async with _in_time(f"{fault}: the run did not go on from step {step}"):
        while fault.signal != "SIGSTOP" and pids_of(run_dir).get(service, pid) == pid:
            await asyncio.sleep(0.05)
        while not (watcher.step() > step and await watcher.serving(service)):
            await asyncio.sleep(0.05)
        seconds = time.monotonic() - began_s
        while watcher.step() < step + STEPS_BETWEEN:
            await asyncio.sleep(0.05)
    return Survived(fault, step, seconds)


@contextlib.asynccontextmanager
async def _in_time(failure: str):  # type: ignore[no-untyped-def]
    try:
        async with asyncio.timeout(SURVIVE_WITHIN_S):
            yield
    except TimeoutError:
        raise AssertionError(failure) from None


async def _strike(fault: Fault, pid: int) -> None:
    match fault.signal:
        case "SIGKILL":
            _signal_all(pid, signal.SIGKILL)
        case "SIGTERM":
            os.kill(pid, signal.SIGTERM)
        case "SIGSTOP":
            _signal_all(pid, signal.SIGSTOP)
            await asyncio.sleep(FROZEN_S)  # it is this long that it stands still
            _signal_all(pid, signal.SIGCONT)
        case "restart":
            os.kill(pid, signal.SIGTERM)
            await asyncio.sleep(HURRY_S)
            _signal_all(pid, signal.SIGKILL)


def _signal_all(pid: int, number: signal.Signals) -> None:
    for each in {pid, *session_pids(pid)}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)


def _pid_of_rank_1(trainer: int) -> int:
    """`trainer`: pid of the process that started the ranks."""
    ranks = psutil.Process(trainer).children(recursive=True)
    return next(rank.pid for rank in ranks if rank.environ().get("RANK") == "1")


class Watcher:
    """When a running system is at a certain point, seen from outside: its servers, its files, its streams. Changes nothing."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir

    async def at(self, point: str) -> None:
        """Returns when the run is there; all points but the idle one come after a first step."""
        while point != "idle" and not self.step():
            await asyncio.sleep(LOOK_S * 10)
        if point == "publishing":  # others of the batch are on their way
            async with self._bus() as bus:
                before = (await bus.sequences_info()).last_position
                while (await bus.sequences_info()).last_position == before:
                    await asyncio.sleep(0)
        elif point == "weight update":
            async with self._bus() as bus, bus.watch_control(["announce"]) as messages:
                await anext(messages)  # the last one
                await anext(messages)
        elif point == "verifying":
            known: float | None = None
            while (count := await self._verifier("requests_total")) is None or known is None or count <= known:
                known = count if count is not None else known
                await asyncio.sleep(LOOK_S)
        else:
            is_there, look_s = {
                "idle": (lambda: self._trainer_is(trainer_pb2.TRAINER_PHASE_WAITING_FOR_ACTORS), LOOK_S),
                "generating": (self._generates, LOOK_S),
                "optimizer step": (lambda: self._trainer_is(trainer_pb2.TRAINER_PHASE_TRAINING), 0.0),
                "checkpoint write": (self._writes_checkpoint, 0.0),
            }[point]
            while not await is_there():
                await asyncio.sleep(look_s)

    def step(self) -> int:
        path = self.run_dir.metrics
        lines = path.read_bytes().splitlines() if path.is_file() else []
        for line in reversed(lines):
            with contextlib.suppress(ValueError):  # it is being written
                return int(json.loads(line)["step"])
        return 0

    async def serving(self, name: str) -> bool:
        if name.startswith("actor"):
            state = await self._actor(name)
            return state is not None and state.phase == actor_pb2.ACTOR_PHASE_SERVING
        if name == "trainer":
            return await self._trainer() is not None
        if name == "verifier":
            return await self._verifier("workers") is not None
        return self.run_dir.address("nats").is_file()

    async def _trainer_is(self, phase: trainer_pb2.TrainerPhase) -> bool:
        status = await self._trainer()
        return status is not None and status.phase == phase

    async def _generates(self) -> bool:
        state = await self._actor("actor-0")
        return state is not None and state.sequences_in_progress > 0

    async def _writes_checkpoint(self) -> bool:
        return any(self.run_dir.checkpoints.glob(".step-*"))

    def _bus(self) -> contextlib.AbstractAsyncContextManager[Bus]:
        url = str(json.loads(self.run_dir.address("nats").read_bytes())["url"])
        own = self.run_dir.credentials
        return connect(url, self.run_dir.name, name="test", credentials=own.nats(ADMIN), tls_dir=own.tls_dir)

    def _channel(self, name: str) -> grpc.aio.Channel:
        return open_channel(read_address(self.run_dir.address(name)).grpc, self.run_dir.credentials.tls_dir)

    # None while they do not answer, or have not written their address:

    async def _trainer(self) -> trainer_pb2.TrainerStatus | None:
        with contextlib.suppress(grpc.aio.AioRpcError, ServiceError):
            async with self._channel("trainer") as channel:
                stub = trainer_pb2_grpc.TrainerServiceStub(channel)
                return await stub.GetStatus(trainer_pb2.GetStatusRequest(), timeout=2)
        return None

    async def _actor(self, name: str) -> actor_pb2.ActorState | None:
        with contextlib.suppress(grpc.aio.AioRpcError, ServiceError):
            async with self._channel(name) as channel:
                stub = actor_pb2_grpc.ActorServiceStub(channel)
                return await stub.GetState(actor_pb2.GetStateRequest(), timeout=2)
        return None

    async def _verifier(self, metric: str) -> float | None:
        with contextlib.suppress(httpx.HTTPError, ServiceError):
            address = read_address(self.run_dir.address("verifier"))
            async with httpx.AsyncClient(timeout=2) as client:
                text = (await client.get(f"http://{address.http}/metrics")).text
            found = re.findall(rf"^pipelinerl_verifier_{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
            return sum(float(value) for value in found)
        return None
