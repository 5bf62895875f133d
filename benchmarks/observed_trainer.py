"""Optimizer steps with everything that is observed of them, and with nothing of it, in turn.

Both sides take the same steps on a compute thread and write the same files, as the trainer does. Observed steps also feed all
metrics of the trainer, samples by token and the live page, while a process of its own has the page open and scrapes /metrics
every 15 s, as Prometheus does. A third measurement waits as long as a step takes instead of taking it, so that what processor
time goes is the observers' alone: on a machine that does other work, trust that one.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.loops_in_turn import Timing, Timings
from benchmarks.samples import spread
from benchmarks.trainer_cases import Case
from benchmarks.training_data import VERSION
from pipelinerl.recipe.fields import AlgorithmConfig
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.rl.groups import IssueRoom
from pipelinerl.rl.ledger import SequenceTracker, ledger_counts
from pipelinerl.run_summary import RunFiles
from pipelinerl.service.http import health_app, serve_http
from pipelinerl.service.lifecycle import Readiness
from pipelinerl.service.logs import LogContext
from pipelinerl.telemetry.metrics import RunRegistry
from services.trainer.learn.model import wrap_model
from services.trainer.learn.step import Learner
from services.trainer.reporting.metrics import RunView, TrainerMetrics
from services.trainer.reporting.page import PageBoard, add_page
from services.trainer.reporting.recorder import Recorder

GOAL = 0.99
SCRAPE_EVERY_S = 15.0
MEMBERS = 8
RUN = "observed"


class Unmeasured:
    """Takes every call and does nothing: metrics that are off."""

    def __getattr__(self, name: str) -> Unmeasured:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Unmeasured:
        return self


class Letters:
    """A tokenizer of one letter for each token."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + token % 26) for token in token_ids)


class Observed:
    """The loop around the learner. `take_step` gives a step's figures, on a thread."""

    def __init__(self, take_step: Callable[[], dict[str, Any]], groups: list[Any], folder: Path) -> None:
        self._take_step, self._groups, self._folder = take_step, groups, folder
        self._compute = ThreadPoolExecutor(1, "compute")
        self._steps = 0

    async def open(self, stack: AsyncExitStack) -> None:
        """Both sides' parts, and the server."""
        recipe, registry, board = load_recipe("arithmetic"), RunRegistry(RUN), PageBoard()
        metrics = TrainerMetrics(registry)
        app = health_app(Readiness(), registry)
        add_page(app, board)
        self.port = await stack.enter_async_context(serve_http(app, "127.0.0.1", 0))
        files = [stack.enter_context(RunFiles(self._folder / side)) for side in ("observed", "plain")]
        tokenizer: Any = Letters()
        context = LogContext(RUN, "trainer", "")
        self._observed = Recorder(recipe, files[0], metrics, board=board, context=context, tokenizer=tokenizer)
        self._watch(self._observed)
        unmeasured: Any = Unmeasured()
        self._plain = Recorder(recipe, files[1], unmeasured)
        stack.callback(self._compute.shutdown)

    async def block(self, steps: int, *, observed: bool, take_step: Callable[[], dict[str, Any]] | None = None) -> None:
        publishing = asyncio.create_task(self._observed.publish_state()) if observed else None
        for _ in range(steps):
            figures = await asyncio.get_running_loop().run_in_executor(self._compute, take_step or self._take_step)
            self._steps += 1
            figures = {**figures, **of_the_loop(self._steps)}
            (self._observed if observed else self._plain).step(figures, self._groups, 1000 * self._steps)
        if publishing is not None:
            publishing.cancel()

    @contextmanager
    def watched(self, observed: bool) -> Iterator[None]:
        """The page is open and /metrics is scraped, if `observed`."""
        if not observed:
            yield
            return
        command = [sys.executable, "-m", "benchmarks.page_client", str(self.port), str(SCRAPE_EVERY_S)]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            assert client.stdout is not None
            client.stdout.readline()  # it has the page
            yield
        finally:
            client.kill()
            client.communicate()

    def _watch(self, recorder: Recorder) -> None:
        """What is read at a scrape and for the page, of a run with `MEMBERS` actors."""
        names = [f"actor-{number}" for number in range(MEMBERS)]
        tracker, bounds = SequenceTracker(), SimpleNamespace(holds_actors_back=False)
        updater: Any = SimpleNamespace(served_version=1, epoch=3, members=names, states=dict.fromkeys(names, "serving"))
        updater.versions = dict.fromkeys(names, 1)
        updater.serving, updater.evictions, updater.bad_messages = names, 0, 0
        updater.regroups, updater.updates = 0, {"served": 1, "aborted": 0}
        feeder: Any = SimpleNamespace(room=IssueRoom(1, 1, False, 1, 1), refused={})
        feeder.tracker, feeder.bounds = tracker, bounds
        intake: Any = SimpleNamespace(tokens_arrived_here=1, position=1, bad_messages=0, failures={}, ready=[()])
        intake.quarantine = SimpleNamespace(actors=())
        uploads: Any = SimpleNamespace(waiting_s=None, last={})
        checkpoints: Any = SimpleNamespace(positions={}, saved_at_s=None)
        run = RunView(1, "", updater, feeder, intake, uploads, checkpoints, {})
        recorder.watch(lambda: run)
        recorder.training_begins()


def of_the_loop(step: int) -> dict[str, Any]:
    """What the optimizer loop adds to the learner's figures."""
    phases = {"total": 0.6, "wait": 0.1, "compute": 0.5, "snapshot": 0.01, "send": 0.0, "checkpoint": 0.0}
    return {
        "step": step,
        "policy_version": step,
        "served_version": step,
        "step_s": phases,
        "largest_lag": 1,
        "idle_s": 0.01,
        "sequences": ledger_counts(),
    }


def run_trainer(case: Case, pairs: int, steps: int) -> dict[str, Any]:
    """`pairs` blocks of `steps` steps of each side, the order swapped each time."""
    load = os.getloadavg()[0]
    model = case.build_model()
    groups = case.groups(model.config.vocab_size)
    learner = Learner(wrap_model(model), AlgorithmConfig(), case.trainer())

    def take_step() -> dict[str, Any]:
        return learner.step(learner.prepare(groups, VERSION))

    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        loop, stack = Observed(take_step, groups, Path(folder)), AsyncExitStack()
        runner.run(loop.open(stack))
        try:
            figures = take_step()
            timings = in_turn(runner, loop, pairs, steps)
            step_s = statistics.median(timing.wall_s for timing in timings.bare) / steps
            step_cpu_s = statistics.median(timing.cpu_s for timing in timings.bare) / steps
            seconds = max(2 * step_s, 2 * SCRAPE_EVERY_S) if pairs > 1 else 2 * step_s
            cost_s = cost_of_observing(runner, loop, figures, step_s, max(2, round(seconds / step_s)))
        finally:
            runner.run(stack.aclose())
    return result(timings, steps, step_s, step_cpu_s, cost_s) | {"load_before": round(load, 2)}


def in_turn(runner: asyncio.Runner, loop: Observed, pairs: int, steps: int) -> Timings:
    timings = Timings()
    for pair in range(pairs):
        for observed in (True, False) if pair % 2 else (False, True):
            with loop.watched(observed):
                timing = timed(runner, loop.block(steps, observed=observed))
            (timings.ours if observed else timings.bare).append(timing)
    return timings


def timed(runner: asyncio.Runner, block: Awaitable[None]) -> Timing:
    wall, cpu = time.perf_counter(), time.process_time()
    runner.run(block)  # type: ignore[arg-type]
    return Timing(time.perf_counter() - wall, time.process_time() - cpu)


def cost_of_observing(runner: asyncio.Runner, loop: Observed, figures: dict[str, Any], step_s: float, steps: int) -> float:
    """Processor seconds of one step's observers: steps that only wait, with them and without."""

    def wait() -> dict[str, Any]:
        time.sleep(step_s)
        return figures

    cpu_s = {}
    for observed in (False, True):
        with loop.watched(observed):
            cpu_s[observed] = timed(runner, loop.block(steps, observed=observed, take_step=wait)).cpu_s / steps
    return cpu_s[True] - cpu_s[False]


def result(timings: Timings, steps: int, step_s: float, step_cpu_s: float, cost_s: float) -> dict[str, Any]:
    pairs = list(zip(timings.ours, timings.bare, strict=True))
    return {
        "goal": GOAL,
        **spread("ratio", [bare.wall_s / ours.wall_s for ours, bare in pairs]),
        **spread("ratio_cpu_time", [bare.cpu_s / ours.cpu_s for ours, bare in pairs]),
        "ratio_cpu_time_best": round(
            min(timing.cpu_s for timing in timings.bare) / min(timing.cpu_s for timing in timings.ours), 4
        ),
        "ratio_by_cost": round(1 - cost_s / step_cpu_s, 5),
        "observers_cpu_ms": round(1e3 * cost_s, 3),
        "step_ms": round(1e3 * step_s, 1),
        "step_cpu_ms": round(1e3 * step_cpu_s, 1),
        "pairs": len(pairs),
        "steps_per_block": steps,
    }
