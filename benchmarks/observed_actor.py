"""Decode throughput of the actor's own loop with all its metrics and vLLM's figures of each step, and with none, in turn.

Two engines of the same model in one process take turns, since vLLM is told at its start whether it is watched: one with the
actor's logger of engine steps and metrics that are scraped once a round over HTTP, one with neither. Two engines are never
quite alike, so half of the rounds are taken with the one started first, half with the other. `ratio_cpu_time` counts this
process and the engine's own.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.actor_cases import Case
from benchmarks.actor_overhead import process, streams, verifying
from benchmarks.generation_rounds import VERSION, Round, actor_round, renamed
from benchmarks.observed_trainer import GOAL, Unmeasured
from benchmarks.page_client import fetched
from benchmarks.samples import spread
from pipelinerl.local.services import ServiceLaunches, ThreadPlan, initial_model
from pipelinerl.recipe.loading import recipe_yaml
from pipelinerl.run_dir import create_run_dir
from pipelinerl.service.http import health_app, serve_http
from pipelinerl.service.lifecycle import Readiness
from pipelinerl.telemetry.metrics import RunRegistry
from services.actor.metrics import ActorMetrics
from services.actor.vllm_engine import VllmEngine, start_engine

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SIDES = ("observed", "plain")


@dataclass(frozen=True)
class Side:
    engine: VllmEngine
    pids: frozenset[int]
    """Of the engine's processes."""
    metrics: ActorMetrics
    port: int
    """Of /metrics; 0 = nobody asks."""

    def engine_cpu_s(self) -> float:
        return sum(cpu_s(pid) for pid in self.pids)


@dataclass(frozen=True)
class Measured:
    """One round. `cpu_us_per_token`: of this process and the engine's."""

    tokens_per_s: float
    cpu_us_per_token: float


def cpu_s(pid: int) -> float:
    """Processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


async def run_actor(case: Case, threads: ThreadPlan, pairs: int) -> dict[str, Any]:
    """`pairs` rounds of each side, half of them with the engines started the other way round."""
    load = os.getloadavg()[0]
    rounds: dict[str, list[Measured]] = {side: [] for side in SIDES}
    for order in (SIDES, SIDES[::-1]):
        for side, measured in (await in_turn(case, threads, max(1, pairs // 2), order)).items():
            rounds[side] += measured
    return result(rounds) | {"load_before": round(load, 2)}


async def in_turn(case: Case, threads: ThreadPlan, pairs: int, order: Sequence[str]) -> dict[str, list[Measured]]:
    """Rounds of both sides in turn, the order swapped each time; one of each before that is not counted. The engines are
    started in `order`."""
    rounds: dict[str, list[Measured]] = {side: [] for side in SIDES}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        case = case.with_model(folder / "model")
        run_dir = create_run_dir(case.recipe.name, datetime.now(), path=folder / "run")
        run_dir.recipe.write_text(recipe_yaml(case.recipe), encoding="utf-8")
        launches = ServiceLaunches(case.recipe, run_dir, threads, dict(os.environ))
        verifier = await stack.enter_async_context(verifying(launches))
        model = await initial_model(launches, process, lambda text: print(text, file=sys.stderr))
        sides = {side: await open_side(stack, case, model, observed=side == "observed") for side in order}
        bus = await stack.enter_async_context(streams(run_dir))
        groups = case.groups(run_dir.name, model)
        for number in range(-1, pairs):
            for name in SIDES if number % 2 else reversed(SIDES):
                these = renamed(groups, f"{name}{number + 1}")
                side = sides[name]
                before_s = side.engine_cpu_s()
                asking = asyncio.create_task(asyncio.to_thread(fetched, side.port, "/metrics")) if side.port else None
                done = await actor_round(side.engine, these, case.recipe, bus, verifier, side.metrics)
                if asking is not None:
                    await asking
                measured = summed(done, side.engine_cpu_s() - before_s)
                print(f"actor {name}: {measured.tokens_per_s:.0f} tokens/s", file=sys.stderr)
                if number >= 0:
                    rounds[name].append(measured)
    return rounds


async def open_side(stack: AsyncExitStack, case: Case, model: str, *, observed: bool) -> Side:
    """An engine with the metrics that go with it."""
    metrics: Any = Unmeasured()
    port, before = 0, {child.pid for child in multiprocessing.active_children()}
    if observed:
        registry = RunRegistry("observed")
        metrics = ActorMetrics(registry)
        for reading in (metrics.version, metrics.ready, metrics.held_groups):
            reading.read(lambda: 1)
        app = health_app(Readiness(), registry)
        port = await stack.enter_async_context(serve_http(app, "127.0.0.1", 0))
    on_step = metrics.engine_step if observed else None
    engine = await stack.enter_async_context(start_engine(case.recipe, model, on_step=on_step))
    await engine.llm.update_weight_version(str(VERSION))
    pids = {child.pid for child in multiprocessing.active_children()} - before
    return Side(engine, frozenset(pid for pid in pids if pid is not None), metrics, port)


def summed(done: Round, engine_s: float) -> Measured:
    return Measured(done.tokens_per_s, 1e6 * (done.front_cpu_s + engine_s) / done.tokens)


def result(rounds: dict[str, list[Measured]]) -> dict[str, Any]:
    best_us = {side: min(one.cpu_us_per_token for one in rounds[side]) for side in SIDES}
    pairs = list(zip(rounds["observed"], rounds["plain"], strict=True))
    return {
        "goal": GOAL,
        **spread("ratio", [ours.tokens_per_s / plain.tokens_per_s for ours, plain in pairs]),
        **spread("ratio_cpu_time", [plain.cpu_us_per_token / ours.cpu_us_per_token for ours, plain in pairs]),
        "ratio_cpu_time_best": round(best_us["plain"] / best_us["observed"], 4),
        "observed_tokens_per_s": round(max(ours.tokens_per_s for ours, _ in pairs), 1),
        "plain_tokens_per_s": round(max(plain.tokens_per_s for _, plain in pairs), 1),
        **{f"{side}_cpu_us_per_token": round(least, 1) for side, least in best_us.items()},
        "pairs": len(pairs),
    }
