"""How the processes of a local run share the cores.

Trainer and actors compute at the same time in pipeline mode: more threads than cores makes both slower, because a
parallel region waits for its slowest thread. Pure but for what asks the machine. Says nothing about GPUs, where these
threads only feed kernels.
"""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class ThreadPlan:
    """Compute threads of the trainer and of each actor's engine (of each rank of it)."""

    trainer: int
    engine: int

    def trainer_env(self, num_ranks: int = 1) -> dict[str, str]:
        """Of each of the trainer's ranks."""
        return _thread_env(max(1, self.trainer // num_ranks))

    def actor_env(self) -> dict[str, str]:
        """`nobind`: vLLM would otherwise pin every actor to the same first cores, under the trainer's feet."""
        return {**_thread_env(self.engine), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def light_env(self) -> dict[str, str]:
        """For processes that compute next to nothing (the verifier)."""
        return _thread_env(1)


def plan_threads(cores: int, num_actors: int, trainer_threads: int = 0, engine_threads: int = 0) -> ThreadPlan:
    """Half of the cores (rounded down) to the trainer, the rest shared by the actors, nobody below 1.

    `trainer_threads` and `engine_threads` above 0 are the recipe's own numbers and are taken as they are; what the
    recipe leaves open is filled from the cores that remain.
    """
    actors = max(1, num_actors)
    trainer = trainer_threads or max(1, _left_by_actors(cores, actors, engine_threads))
    engine = engine_threads or max(1, (cores - trainer) // actors)
    return ThreadPlan(trainer, engine)


def _left_by_actors(cores: int, actors: int, engine_threads: int) -> int:
    return cores - actors * engine_threads if engine_threads else cores // 2


def _thread_env(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def available_cores() -> int:
    """Cores this process may use: its CPU affinity and, in a container, the cgroup's CPU quota (rounded up)."""
    allowed, quota = _allowed_cores(), _quota_cores()
    return max(1, min(allowed, quota)) if quota else allowed


def keep_to_quota(environment: MutableMapping[str, str], processes: int) -> None:
    """Sets OMP_NUM_THREADS for so many processes in a container whose CPU quota is below the cores that they see: torch would
    start a thread for each of those. What is set already stays."""
    if "OMP_NUM_THREADS" not in environment and 0 < (quota := _quota_cores()) < _allowed_cores():
        environment["OMP_NUM_THREADS"] = str(max(1, quota // processes))


def _allowed_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quota_cores() -> int:
    """0 = no limit, and where there is no cgroup v2."""
    return _cgroup_cores(_CGROUP_QUOTA.read_text() if _CGROUP_QUOTA.is_file() else "max 100000")


def _cgroup_cores(cpu_max: str) -> int:
    """Cores of a cgroup v2 `cpu.max` line (`quota period`, microseconds); 0 = no limit."""
    quota, _, period = cpu_max.strip().partition(" ")
    return 0 if quota == "max" else max(1, math.ceil(int(quota) / int(period or 100_000)))
