"""What the actor costs over bare vLLM: completion tokens per second of both, on one engine, in one run.

    python -m benchmarks.actor_overhead [--pairs 5] [--threads 0] [--random-weights] [--only tiny|smollm2] [--output FILE]

`actor` is the service's own generation loop and finisher: prompts from a real nats-server, rewards from a real verifier
process, every sequence published and every group acknowledged. `bare` is `AsyncLLM.generate` in a plain loop with the
same engine, prompts, sampling and number of sequences in progress; it asks for log-probabilities, as training needs
them. `bare_without_logprobs` is there for information. The sides take turns, so that whatever else the machine does hits
both; `ratio` is the median over pairs of neighbouring rounds, `ratio_best` compares the fastest round of each.

The models are those of the recipes `arithmetic` and `smollm2`; `--random-weights`, or a 135M model whose package is not
installed, puts one of the same shape and with lengths drawn beforehand in its place. Not measured here: weight updates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.actor_cases import CASES, Case
from benchmarks.generation_rounds import VERSION, Round, actor_round, bare_round, renamed
from benchmarks.nats_server import NatsServer
from benchmarks.result_files import write_result
from pipelinerl.bus import jetstream
from pipelinerl.local.processes import Launch, ServiceProcess
from pipelinerl.local.services import ServiceLaunches, ThreadPlan, available_cores, initial_model, plan_threads
from pipelinerl.messages.sequences import PromptGroup
from pipelinerl.messages.verification import VerifierClient
from pipelinerl.recipe.loading import recipe_yaml
from pipelinerl.run_dir import RunDir, create_run_dir
from services.actor.vllm_engine import VllmEngine, start_engine

RESULT = Path(__file__).parent / "results" / "actor_overhead.json"
START_S, STOP_S = 120.0, 10.0
SIDES = ("actor", "bare")


class Stage:
    """A case with everything it needs running: engine, NATS, verifier."""

    def __init__(
        self, case: Case, groups: list[PromptGroup], engine: VllmEngine, bus: jetstream.Bus,
        verifier: VerifierClient,
    ) -> None:  # fmt: skip
        self.case, self.groups, self._engine, self._bus, self._verifier = case, groups, engine, bus, verifier

    async def round(self, side: str, name: str) -> Round:
        recipe, groups = self.case.recipe, renamed(self.groups, name)
        if side == "actor":
            return await actor_round(self._engine, groups, recipe, self._bus, self._verifier)
        in_progress = recipe.actor.sequences_in_progress
        return await bare_round(self._engine, groups, in_progress, logprobs=side == "bare")


@asynccontextmanager
async def stage(case: Case, threads: ThreadPlan) -> AsyncIterator[Stage]:
    """Starts what a local run starts for an actor, and ends it."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        case = case.with_model(folder / "model")
        run_dir = create_run_dir(case.recipe.name, datetime.now(), path=folder / "run")
        run_dir.recipe.write_text(recipe_yaml(case.recipe), encoding="utf-8")
        launches = ServiceLaunches(case.recipe, run_dir, threads, dict(os.environ))
        verifier = await stack.enter_async_context(verifying(launches))
        model_dir = await initial_model(launches, process, lambda text: print(text, file=sys.stderr))
        engine = await stack.enter_async_context(start_engine(case.recipe, model_dir))
        await engine.llm.update_weight_version(str(VERSION))
        bus = await stack.enter_async_context(streams(run_dir))
        yield Stage(case, case.groups(run_dir.name, model_dir), engine, bus, verifier)


@asynccontextmanager
async def process(launch: Launch) -> AsyncIterator[ServiceProcess]:
    started = await ServiceProcess.start(launch)
    try:
        yield started
    finally:
        await started.terminate(STOP_S)


@asynccontextmanager
async def verifying(launches: ServiceLaunches) -> AsyncIterator[VerifierClient]:
    """A verifier, in a process of its own with the login of a local run."""
    credentials = launches.run_dir.credentials
    credentials.make(launches.run_dir.name)
    async with process(launches.verifier()) as started:
        address = await started.ready(START_S)
        async with VerifierClient(address.grpc, tls_dir=credentials.tls_dir) as client:
            yield client


@asynccontextmanager
async def streams(run_dir: RunDir) -> AsyncIterator[jetstream.Bus]:
    with NatsServer(run_dir.nats_store, log_file=run_dir.log("nats")) as server:
        async with jetstream.connect(server.url, run_dir.name) as bus:
            await bus.create_streams()
            yield bus


async def run_case(case: Case, threads: ThreadPlan, pairs: int) -> dict[str, Any]:
    """Both sides in turn, the order swapped each time; one round of each before that is not counted."""
    rounds: dict[str, list[Round]] = {side: [] for side in SIDES}
    async with stage(case, threads) as ready:
        for number in range(-1, pairs):
            for side in SIDES if number % 2 else reversed(SIDES):
                done = await ready.round(side, f"{side}{number + 1}")
                print(f"{case.name} {side}: {done.tokens_per_s:.1f} tokens/s", file=sys.stderr)
                if number >= 0:
                    rounds[side].append(done)
        plain = await ready.round("bare_without_logprobs", "plain")
    return {"weights": case.weights, **result(case, threads, rounds, plain)}


def result(case: Case, threads: ThreadPlan, rounds: Mapping[str, list[Round]], plain: Round) -> dict[str, Any]:
    rates = {side: [done.tokens_per_s for done in rounds[side]] for side in SIDES}
    front = {side: statistics.median(1e6 * done.front_cpu_s / done.tokens for done in rounds[side]) for side in SIDES}
    return {
        "goal": case.goal,
        "ratio": round(statistics.median(a / b for a, b in zip(rates["actor"], rates["bare"], strict=True)), 3),
        "ratio_best": round(max(rates["actor"]) / max(rates["bare"]), 3),
        "actor_tokens_per_s": round(statistics.median(rates["actor"]), 1),
        "bare_tokens_per_s": round(statistics.median(rates["bare"]), 1),
        "bare_without_logprobs_tokens_per_s": round(plain.tokens_per_s, 1),
        "actor_front_cpu_us_per_token": round(front["actor"], 1),
        "bare_front_cpu_us_per_token": round(front["bare"], 1),
        "sequences_in_progress": case.recipe.actor.sequences_in_progress,
        "sequences_per_round": case.num_sequences,
        "engine_threads": threads.engine,
        "tokens_per_sequence": round(
            statistics.mean(done.tokens / case.num_sequences for side in SIDES for done in rounds[side]), 1
        ),
        "rounds": {side: [round(rate, 1) for rate in rates[side]] for side in SIDES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="rounds of each side that are counted")
    parser.add_argument("--threads", type=int, default=0, help="of vLLM's engine; 0 = as a local run sets them")
    parser.add_argument("--only", choices=sorted(CASES), help="one model instead of both")
    parser.add_argument("--random-weights", action="store_true", help="build no recipe's model")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    cores = available_cores()
    threads = plan_threads(cores, num_actors=1, engine_threads=arguments.threads)
    # Before torch is imported anywhere: vLLM's engine process inherits it.
    os.environ.update(threads.actor_env() | {"VLLM_LOGGING_LEVEL": "WARNING"})
    cases = {}
    for name in [arguments.only] if arguments.only else CASES:
        cases[name] = asyncio.run(run_case(CASES[name](arguments.random_weights), threads, arguments.pairs))
        print(name, json.dumps(cases[name], indent=2), flush=True)
    machine = {"cores": cores, "load_average_after": round(os.getloadavg()[0], 2)}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    output = {"benchmark": "actor_overhead", "machine": machine, "cases": cases}
    write_result(arguments.output, output)


if __name__ == "__main__":
    main()
