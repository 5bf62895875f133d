"""How full an actor stays while environments take their time: its tokens per second, compared with bare vLLM's.

    python -m benchmarks.episodes [--rounds 2] [--only tiny|smollm2] [--output FILE]

`actor`: the service's generation loop, finisher and endpoint, with a real nats-server, and a real verifier that runs each
episode's environment in a process of its own; it waits 0.1, 1 or 5 s before each answer. `bare`: `AsyncLLM.generate` in a plain
loop on the same engine, H turns at a time, each followed at once by its episode's next. Episodes of both have four turns of the
same lengths after prompts and observations of the same lengths, four samples of each prompt, and the prefix cache. `episodes`
is `actor.episodes_in_progress` by Little's law, H (1 + wait / turn), where `turn_s` is a turn's time in the bare loop, and a
fifth more, since how many wait at a time varies. Tokens are counted in the middle of a round, in which neither side starts or
ends.

`ratio`: the actor's tokens per second relative to those of the bare rounds before and after it, median over rounds. `decoding`:
turns that decode in the actor, relative to H, on average. `ratio_engine_cpu`: the engine's processor time per turn in bare
rounds, divided by that in the actor's; other work on the machine hardly changes it. `…_front_cpu_ms`: processor time for a turn
of this process, vLLM's front end included and its engine not.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import math
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from benchmarks.actor_overhead import verifying
from benchmarks.episode_cases import CASES, OBSERVATION_WORDS, PROMPT_WORDS, TURNS, build_model, episode_recipe, words
from benchmarks.generation_rounds import KEEP_ALIVE_S, VERSION
from benchmarks.nats_server import NatsServer
from benchmarks.observed_actor import cpu_s
from benchmarks.result_files import kept_rows, write_result
from benchmarks.samples import milliseconds
from benchmarks.waiting_environment import WaitingEnvironment
from pipelinerl.bus import jetstream
from pipelinerl.errors import ServiceError
from pipelinerl.local.services import ServiceLaunches, ThreadPlan, available_cores, plan_threads
from pipelinerl.messages.sequences import PromptGroup, SamplingParams, decode_sequence, encode_group
from pipelinerl.messages.verification import VerifierClient
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import recipe_yaml
from pipelinerl.run_dir import create_run_dir
from pipelinerl.service.http import serve_http
from services.actor.episodes.endpoint import episode_app
from services.actor.episodes.episode import Episodes
from services.actor.episodes.formats import ChatFormat, chat_format
from services.actor.generation import Finisher, GenerationLoop, Sampler
from services.actor.hand_over import HeldGroups
from services.actor.metrics import ActorMetrics
from services.actor.vllm_engine import VllmEngine, start_engine
from services.actor.weight_sync.updates import ServingGate

NAME = "episodes"
RESULT = Path(__file__).parent / "results" / f"{NAME}.json"
GOAL = 0.9
WAITS_S = (0.1, 1.0, 5.0)
GROUP_SIZE, MAX_EPISODES = 4, 4096
HOST, LOOK_S, STOP_S = "127.0.0.1", 0.05, 10.0
MARGIN = 1.2
"""Of episodes, above Little's law."""


@dataclass(frozen=True)
class Load:
    """`in_progress`: H. `turn_tokens`: on average; each prompt's turns have a length of their own from half to one and a half
    times as many, so that turns do not end all at once. `window_s`: in which tokens are counted."""

    in_progress: int
    turn_tokens: int
    warm_s: float
    """Before the window, and twice the environment's wait."""
    window_s: float


LOADS = {"tiny": Load(64, 64, 3.0, 10.0), "smollm2": Load(16, 32, 6.0, 15.0)}


@dataclass(frozen=True)
class Round:
    """Of the window. `decoding`: turns at a time, on average."""

    tokens_per_s: float
    front_cpu_s_per_turn: float
    engine_cpu_s_per_turn: float
    decoding: float


class Stage:
    """An engine, a verifier and NATS; rounds of both sides."""

    def __init__(self, load: Load, recipe: Recipe, engine: VllmEngine, verifier: VerifierClient, nats_url: str) -> None:
        self._load, self._recipe, self._engine, self._verifier, self._nats_url = load, recipe, engine, verifier, nats_url
        self._chat = chat_format(engine.tokenizer, recipe.model)
        self._numbers = itertools.count()

    async def bare(self) -> Round:
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        number, samples, tokens = next(self._numbers), itertools.count(), 0
        prompt_tokens, more_tokens = context_growth(self._chat)

        async def episodes() -> None:
            nonlocal tokens
            while True:
                group, index = divmod(next(samples), GROUP_SIZE)
                sampling = VllmSamplingParams(
                    temperature=1.0,
                    max_tokens=self._turn_tokens(group),
                    stop_token_ids=list(self._chat.stop_token_ids),
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                context = self._random_tokens(prompt_tokens, number, group)
                for turn in range(TURNS):
                    prompt = tokens_input(list(context), cache_salt=str(number))
                    async for output in self._engine.llm.generate(prompt, sampling, f"bare-{number}-{group}-{index}-{turn}"):
                        final = output
                    sampled = final.outputs[0].token_ids
                    tokens += len(sampled)
                    context += [*sampled, *self._random_tokens(more_tokens, number, group, index, turn)]

        async with running(*(episodes() for _ in range(self._load.in_progress))):
            await asyncio.sleep(self._load.warm_s)
            return await self._window(lambda: tokens, lambda: self._load.in_progress)

    async def actor(self, wait_s: float, num_episodes: int, tokens_per_s: float) -> Round:
        """In a run of its own. `tokens_per_s`: about as fast as it is, for prompts until its end. Raises `ServiceError` when an
        episode failed."""
        recipe, engine, name = self._recipe, self._engine, f"round-{next(self._numbers)}"
        metrics, held = ActorMetrics(CollectorRegistry()), HeldGroups()
        episodes = Episodes(self._verifier, metrics, recipe, engine.decode)
        gate = ServingGate(recipe.algorithm.max_lag)
        gate.serve(VERSION)
        warm_s = self._load.warm_s + 2 * wait_s
        per_episode = TURNS * self._load.turn_tokens
        num_more = 2 * (warm_s + self._load.window_s) * tokens_per_s / per_episode
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(jetstream.connect(self._nats_url, name))
            await bus.create_streams()
            await self._publish_prompts(bus, wait_s, math.ceil((num_episodes + num_more) / GROUP_SIZE))
            app = episode_app(episodes, self._chat, metrics, model="policy", vocab_size=engine.vocab_size)
            port = await stack.enter_async_context(serve_http(app, HOST, 0, on_this_loop=True))
            episodes.address = f"{HOST}:{port}"
            finisher = Finisher(
                bus,
                self._verifier,
                metrics,
                held.published,
                buffer_size=recipe.actor.publish_buffer,
                batch_size=recipe.actor.verify_batch,
            )
            sampler = Sampler(
                engine,
                gate,
                instance="actor-0",
                max_context=recipe.model.max_context,
                places=self._load.in_progress,
                episodes=episodes,
                metrics=metrics,
                keep=held.keep,
            )
            generation = GenerationLoop(
                bus, sampler, finisher, held, gate, metrics, instance="actor-0", samples_in_progress=num_episodes
            )
            async with running(finisher.run(), generation.run(), held.keep_alive(KEEP_ALIVE_S)):
                await asyncio.sleep(warm_s)
                measured = await self._window(lambda: metrics.tokens_total, lambda: metrics.busy.running)
                left = await bus.pending_prompts()
                await sampler.interrupt(STOP_S)
                await finisher.buffer.join()
            if not left:
                raise ServiceError("there were no prompts left at the end of a round: its window says nothing")
            await check_sequences(bus)
        return measured

    async def _publish_prompts(self, bus: jetstream.Bus, wait_s: float, num_groups: int) -> None:
        """Publish prompt groups whose environments wait `wait_s` before each answer."""
        (task,) = self._recipe.episodic_tasks
        for number in range(num_groups):
            group = PromptGroup(
                run=bus.run,
                group_id=f"g{number:08d}",
                problem_index=number,
                task=task,
                prompt_token_ids=np.empty(0, np.int32),
                prompt_text="",
                reference_json=json.dumps({"row": {"wait_s": wait_s}}),
                num_samples=GROUP_SIZE,
                sampling=SamplingParams(1.0, self._turn_tokens(number)),
                seed=0,
                issued_version=0,
                episodic=True,
            )
            await bus.publish_prompt(encode_group(group), group.group_id)

    async def _window(self, finished_tokens: Callable[[], int], decoding: Callable[[], int]) -> Round:
        def tokens() -> int:
            return finished_tokens() + sum(self._engine.progress().values())

        def engine_cpu_s() -> float:
            return sum(cpu_s(child.pid) for child in multiprocessing.active_children() if child.pid)

        seen: list[int] = []
        began_s, began_cpu_s, began_engine_s, before = time.perf_counter(), time.process_time(), engine_cpu_s(), tokens()
        while time.perf_counter() - began_s < self._load.window_s:
            await asyncio.sleep(LOOK_S)
            seen.append(decoding())
        elapsed_s, made = time.perf_counter() - began_s, tokens() - before
        front_s, engine_s = time.process_time() - began_cpu_s, engine_cpu_s() - began_engine_s
        turns = made / self._load.turn_tokens
        return Round(made / elapsed_s, front_s / turns, engine_s / turns, statistics.mean(seen))

    def _turn_tokens(self, group: int) -> int:
        mean = self._load.turn_tokens
        return int(np.random.default_rng(group).integers(mean // 2, mean + mean // 2 + 1))

    def _random_tokens(self, number: int, *seed: int) -> list[int]:
        tokens: list[int] = np.random.default_rng(seed).integers(0, self._engine.vocab_size, number).tolist()
        return tokens


@asynccontextmanager
async def running(*parts: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Until the block ends, which an error of one of them ends."""
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(part) for part in parts]
        yield
        for task in started:
            task.cancel()


def context_growth(chat: ChatFormat) -> tuple[int, int]:
    """Tokens of an episode's first context, and those between two of its turns."""
    asked = [{"role": "user", "content": words(random.Random(0), PROMPT_WORDS)}]
    prompt, sampled = chat.render(asked, []), [1]
    answer = {"role": "assistant", "content": chat.parse(sampled, prompt, []).content}
    observation = {"role": "user", "content": words(random.Random(0), OBSERVATION_WORDS)}
    extended = chat.extend(prompt, sampled, [*asked, answer, observation], 2, [])
    assert extended is not None
    return len(prompt), len(extended) - len(prompt) - len(sampled)


async def check_sequences(bus: jetstream.Bus) -> None:
    """Raises `ServiceError` for a failed one, and where turns did not extend each other."""
    async with bus.read_sequences(1) as entries:
        for _ in range((await bus.sequences_info()).messages):
            sequence = decode_sequence((await anext(entries)).payload, expected_run=bus.run)
            if sequence.failure or sequence.branches or len(sequence.turns) != TURNS:
                turns = f"{len(sequence.turns)} turns, {len(sequence.branches)} further branches"
                raise ServiceError(f"episode {sequence.sequence_id}: {sequence.failure or turns}")


@asynccontextmanager
async def stage(case: str, threads: ThreadPlan) -> AsyncIterator[Stage]:
    load = LOADS[case]
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        build_model(case, folder / "model")
        environment = [f"task.name={WaitingEnvironment.__module__}:{WaitingEnvironment.__name__}", "task.config={}"]
        limits = [f"task.max_turns={TURNS}", "task.answer_timeout_s=60", "task.episode_timeout_s=600"]
        recipe = episode_recipe(str(folder / "model"), load.in_progress, 2 * load.turn_tokens, *environment, *limits)
        run_dir = create_run_dir(recipe.name, datetime.now(), path=folder / "run")
        run_dir.recipe.write_text(recipe_yaml(recipe), encoding="utf-8")
        launches = ServiceLaunches(recipe, run_dir, threads, os.environ | {"PIPELINERL_MAX_EPISODES": str(MAX_EPISODES)})
        verifier = await stack.enter_async_context(verifying(launches))
        engine = await stack.enter_async_context(start_engine(recipe, str(folder / "model")))
        gc.freeze()  # as the service does
        await engine.llm.update_weight_version(str(VERSION))
        server = stack.enter_context(NatsServer(run_dir.nats_store, log_file=run_dir.log("nats")))
        yield Stage(load, recipe, engine, verifier, server.url)


async def run_case(case: str, threads: ThreadPlan, rounds: int) -> list[dict[str, Any]]:
    """The sides in turn; a first bare round is not counted. The fastest so far says how long a turn is."""
    load, load_average = LOADS[case], os.getloadavg()[0]
    bare, actor = list[Round](), {wait_s: list[Round]() for wait_s in WAITS_S}
    num_episodes = dict.fromkeys(WAITS_S, 0)
    async with stage(case, threads) as ready:
        fastest = (await ready.bare()).tokens_per_s
        for wait_s in rounds * WAITS_S:
            bare.append(await ready.bare())
            fastest = max(fastest, bare[-1].tokens_per_s)
            turn_s = load.in_progress * load.turn_tokens / fastest
            num_episodes[wait_s] = math.ceil(MARGIN * load.in_progress * (1 + wait_s / turn_s))
            actor[wait_s].append(await ready.actor(wait_s, num_episodes[wait_s], fastest))
            print(f"{case}, {wait_s:g} s: {actor[wait_s][-1]}; {bare[-1]}", file=sys.stderr)
        bare.append(await ready.bare())
    shared = {"case": case, "goal": GOAL, "turn_s": round(turn_s, 3), "load_before": round(load_average, 2)}
    return [
        shared | {"wait_s": wait_s, "episodes": num_episodes[wait_s]} | row_of(load, number, actor[wait_s], bare)
        for number, wait_s in enumerate(WAITS_S)
    ]


def row_of(load: Load, number: int, actor: Sequence[Round], bare: Sequence[Round]) -> dict[str, Any]:
    """`number`: of the first actor's round among all of them; `bare`: one before each actor's round, one at the end. Pure."""
    around = [bare[at : at + 2] for at in range(number, len(bare) - 1, len(WAITS_S))]
    bare_rates = [statistics.mean(one.tokens_per_s for one in pair) for pair in around]
    ratios = [ours.tokens_per_s / rate for ours, rate in zip(actor, bare_rates, strict=True)]
    engine_s = {
        side: statistics.median(one.engine_cpu_s_per_turn for one in those)
        for side, those in (("actor", actor), ("bare", bare))
    }
    return {
        "actor_tokens_per_s": round(statistics.median(one.tokens_per_s for one in actor), 1),
        "bare_tokens_per_s": round(statistics.median(bare_rates), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_engine_cpu": round(engine_s["bare"] / engine_s["actor"], 3),
        "decoding": round(statistics.mean(one.decoding for one in actor) / load.in_progress, 3),
        "actor_front_cpu_ms": milliseconds(statistics.median(one.front_cpu_s_per_turn for one in actor)),
        "bare_front_cpu_ms": milliseconds(statistics.median(one.front_cpu_s_per_turn for one in bare)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="of the actor with each wait")
    parser.add_argument("--only", choices=CASES, help="one model instead of both; the other's rows are kept")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    cores = available_cores()
    threads = plan_threads(cores, num_actors=1)
    # Before torch is imported anywhere: vLLM's engine process inherits it.
    os.environ.update(threads.actor_env() | {"VLLM_LOGGING_LEVEL": "WARNING"})
    names = [arguments.only] if arguments.only else list(CASES)
    rows = [row for name in names for row in asyncio.run(run_case(name, threads, arguments.rounds))]
    for row in rows:
        print(json.dumps(row))
    machine = {"cores": cores, "load_average_after": round(os.getloadavg()[0], 2)}
    rows = [*kept_rows(arguments.output, "case", names), *rows]
    write_result(arguments.output, {"benchmark": NAME, "machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
