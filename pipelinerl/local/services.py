"""Command, environment variables and threads of each service of a local run. On a cluster, the chart sets them.

This module also starts the process that unpacks or copies the initial policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import math
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipelinerl.bus.permissions import ACTOR, TRAINER
from pipelinerl.initial_model import COMPILED, built_folder, cache_folder, is_built, is_complete, why_unwritable
from pipelinerl.local.processes import Launch, ServiceProcess, log_tail, service_of, why_taken
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.model_folder import model_folder
from pipelinerl.rl.placement import Placement
from pipelinerl.run_dir import RunDir
from pipelinerl.service.lifecycle import background
from pipelinerl.service.settings import ServiceAddress, split_host_port

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_POLL_S = 0.2
PROGRESS = "initial model: "
"""Prefix of log lines with which the process that builds the initial model reports its progress."""


@dataclass(frozen=True)
class ThreadPlan:
    """Numbers of compute threads: `trainer` for all ranks of the trainer together, `engine` for each rank of one actor."""

    trainer: int
    engine: int

    def actor_env(self) -> dict[str, str]:
        """Return environment variables for actor threads. Without `nobind`, vLLM would pin all actors to the same cores."""
        return {**_thread_env(self.engine), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def plan_threads(
    cores: int, num_actors: int, trainer_threads: int = 0, engine_threads: int = 0, *, take_turns: bool = False
) -> ThreadPlan:
    """Divide the cores: half, rounded down, for the trainer, and the rest for the actors, at least 1 for each. Thread counts
    above 0 come from the recipe and do not change; if only `engine_threads` is given, the trainer gets the other cores. With
    `take_turns`, trainer and actors compute at different times: the trainer gets all cores, and the actors divide all cores,
    each keeping one free for the code that feeds the engine."""
    actors = max(1, num_actors)
    if take_turns:
        return ThreadPlan(trainer_threads or cores, engine_threads or max(1, cores // actors - 1))
    left = cores - actors * engine_threads if engine_threads else cores // 2
    trainer = trainer_threads or max(1, left)
    return ThreadPlan(trainer, engine_threads or max(1, (cores - trainer) // actors))


def _thread_env(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def available_cores() -> int:
    """Return how many cores this process may use: the smaller one of its CPU affinity and its cgroup's quota, rounded up."""
    allowed = _allowed_cores()
    if not _CGROUP_QUOTA.is_file():  # there is no cgroup v2
        return allowed
    quota, _, period = _CGROUP_QUOTA.read_text().strip().partition(" ")
    return allowed if quota == "max" else min(allowed, max(1, math.ceil(int(quota) / int(period or 100_000))))


def keep_to_quota(environment: MutableMapping[str, str], processes: int) -> None:
    """If a CPU quota applies, and OMP_NUM_THREADS is not set, set it to each process's share. Torch ignores quotas."""
    if "OMP_NUM_THREADS" not in environment and (cores := available_cores()) < _allowed_cores():
        environment["OMP_NUM_THREADS"] = str(max(1, cores // processes))


def _allowed_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def private_files(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return `environment` with settings that shut out other users. Temporary files are in `folder`, because other users could
    read some in /tmp. Gloo listens on loopback. Torch's compiled code is in the user's cache, if no other user can write
    there."""
    # If there is no such cache, or the user has no name or home, torch compiles at each start.
    with contextlib.suppress(OSError, KeyError, RuntimeError):
        compiled = cache_folder(environment).absolute() / COMPILED
        compiled.mkdir(0o700, parents=True, exist_ok=True)
        about = compiled.stat()
        if about.st_uid == os.getuid() and not about.st_mode & 0o022 and not why_unwritable(compiled):
            (folder / f"torchinductor_{getpass.getuser()}").symlink_to(compiled)
    # By default, Gloo listens on the host name's address, which the network may reach.
    return {**environment, "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder)}


def restore_compiled(environment: Mapping[str, str]) -> None:
    """Recreate the folder for compiled code if it was removed. Torch uses a link to it, and cannot create a link's target."""
    for link in Path(environment["TMPDIR"]).glob("torchinductor_*"):
        with contextlib.suppress(OSError):
            link.readlink().mkdir(0o700, parents=True, exist_ok=True)


COMMANDS = {
    "verifier": (sys.executable, "-m", "services.verifier"),
    "trainer": (sys.executable, "-m", "services.trainer"),
    "actor": (sys.executable, "-m", "services.actor"),
    "model": (sys.executable, "-m", "services.trainer.initial_model"),
}
"""Command of each service, as in its container. `model` unpacks or copies the initial model."""


@dataclass
class ServiceLaunches:
    """Makes the `Launch` of each service except NATS. All services inherit `environment`."""

    recipe: Recipe
    run_dir: RunDir
    threads: ThreadPlan
    environment: Mapping[str, str]
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: COMMANDS)
    page_port: int | None = 0
    """Port of the trainer's live page; 0 = any free port, None = no page."""
    placement: Placement | None = None
    """GPUs of trainer and actors; None = no GPU is used."""
    nats_url: str = ""
    """URL of NATS. The runner sets `nats_url`, `verifier_address` and `model_dir` before it starts actors and trainer."""
    verifier_address: str = ""
    model_dir: str = ""
    """Folder of the initial policy; empty = the services fetch a hub model."""

    def verifier(self, again: ServiceAddress | None = None) -> Launch:
        """Return the verifier's launch. `again`: its address before a restart. It keeps this address, because actors use it."""
        own = self.run_dir.path.resolve()
        # User code must not read this folder. By default, runs/ also holds other runs with their secrets.
        private = own.parent if own.parent.name == "runs" else own
        settings = {"workers": "2", "private_dir": str(private)}
        if self.run_dir.modules.is_dir():
            settings["reward_modules"] = str(self.run_dir.modules.resolve())
        if again is not None:
            settings |= {"grpc_port": _port(again.grpc), "http_port": _port(again.http)}
        launch = self._launch("verifier", settings, _thread_env(1))
        if not (code := self.recipe.user_code):
            return launch
        suspect = f"its processes run {', '.join(code)}, which may have sent this signal; reward.sandbox: true prevents that"
        return replace(launch, suspect=suspect)

    def trainer(self, actors: int, again: ServiceAddress | None = None) -> Launch:
        """Return the trainer's launch. `again`: its address before a restart. A live page keeps that port if it is free."""
        port = str(self.page_port or 0)
        if again is not None and self.page_port is not None:  # Open pages ask the previous port.
            port = "0" if why_taken(int(_port(again.http))) else _port(again.http)
        settings = {
            "run_dir": str(self.run_dir.path.resolve()),
            "expected_actors": str(actors),
            "page": "false" if self.page_port is None else "true",
            "page_key": str(self.run_dir.credentials.page_key.resolve()),
            "http_port": port,
        }
        threads = _thread_env(max(1, self.threads.trainer // self.recipe.trainer.ranks))  # threads of each rank
        turns = self.recipe.actor.colocate
        gpus = self.placement.trainer_environment(self.environment, takes_turns=turns) if self.placement else {}
        return self._launch("trainer", self._policy_settings(TRAINER) | settings, threads | gpus)

    def actor(self, index: int) -> Launch:
        gpus = self.placement.environment(self.placement.groups[index]) if self.placement else {}
        settings = {**self._policy_settings(ACTOR), "verifier": self.verifier_address}
        return self._launch(f"actor-{index}", settings, self.threads.actor_env() | gpus)

    def initial_model(self, cache: Path) -> Launch:
        settings = {"model_cache": str(cache.resolve()), "run_dir": str(self.run_dir.path.resolve())}
        return self._launch("model", {**settings, "model_dir": ""}, {})

    def _policy_settings(self, user: str) -> dict[str, str]:
        credentials = self.run_dir.credentials
        login, trusted = str(credentials.nats(user).resolve()), str(credentials.tls_dir.resolve())
        nats = {"nats_url": self.nats_url, "nats_credentials": login, "nats_tls_dir": trusted}
        turn = {"gpu_turn": str(self.run_dir.path.resolve() / ".gpu-turn")} if self.recipe.actor.colocate else {}
        return {**nats, **turn, "model_dir": self.model_dir}

    def _launch(self, name: str, settings: Mapping[str, str], threads: Mapping[str, str]) -> Launch:
        address_file = self.run_dir.address(name).resolve()
        common = {
            "run": self.run_dir.name,
            "recipe": str(self.run_dir.recipe.resolve()),
            "instance": name,
            "address_file": str(address_file),
            "tls_dir": str(self.run_dir.credentials.tls_dir.resolve()),
        }
        own = {f"PIPELINERL_{key.upper()}": value for key, value in {**common, **settings}.items()}
        environment = {**self.environment, **threads, **own}
        return Launch(name, self.commands[service_of(name)], environment, self.run_dir.log(name), address_file)


def _port(address: str) -> str:
    return str(split_host_port(address)[1])


async def initial_model(
    launches: ServiceLaunches,
    run_process: Callable[[Launch], AbstractAsyncContextManager[ServiceProcess]],
    report: Callable[[str], None],
) -> str:
    """Return the folder of the initial policy; "" for a hub model, which the services fetch. If the folder must be built, a
    process started by `run_process` builds it, and `report` is called with its progress. Raises `ServiceDied` if that fails."""
    recipe = launches.recipe
    if not is_built(recipe.model):
        folder = model_folder(recipe.model)
        return "" if folder is None else str(folder.resolve())
    copied = recipe.model.source == "checkpoint"  # The copy belongs to this run alone.
    cache = (launches.run_dir.path if copied else cache_folder(launches.environment)) / "models"
    folder = built_folder(recipe, launches.run_dir.name, cache)
    if is_complete(folder):
        report(f"the initial model is in the cache: {folder}")
        return str(folder)
    report(f"copying {recipe.model.name}" if copied else "unpacking the initial model (kept for the next run)")
    launch = launches.initial_model(cache)
    async with run_process(launch) as process, background(_report_progress(launch.log, report)):
        code = await process.wait()
    if code != 0:
        raise process.died()
    return str(folder)


async def _report_progress(log: Path, report: Callable[[str], None]) -> None:
    reported = ""
    while True:
        await asyncio.sleep(_POLL_S)
        _, found, said = log_tail(log, lines=1).partition(PROGRESS)
        if found and said != reported:
            reported = said
            report(f"{PROGRESS}{said}")
