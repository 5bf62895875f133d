"""What the endpoint of episodes costs a turn: 64 conversations at once with an actor's endpoint and with vLLM's own server.

    python -m benchmarks.episode_endpoint [--pairs 4] [--output FILE]

Both servers are processes of their own with the same 1M model and engine arguments, and take turns in answering one client: 64
conversations of four turns at once, over connections that are kept. With `think_s` 0 the next turn is asked for as soon as one
is there, so that 64 requests are always open and both servers are as busy as they can be; otherwise so long after it. The
actor's side is its engine and its endpoint with an episode for each conversation, so everything that an answer waits for is in
it, recording included. vLLM's server is asked for tokens and log-probabilities, which training needs (`bare`), and for text
alone (`plain`). `overhead_ms`: difference of the median times of a turn to `bare`, median over neighbouring rounds;
`overhead_p95_ms`: of the 95th percentiles; `over_plain_ms`: of the median times to `plain`. `…_front_cpu_ms`: processor time
for a turn of the process that answers; `…_engine_cpu_ms`: of its engine's process. Not measured here: environments
(`benchmarks.episodes`), and agents that open a connection for each turn.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.episode_cases import OBSERVATION_WORDS, PROMPT_WORDS, TURNS, build_model, episode_recipe, words
from benchmarks.observed_actor import cpu_s
from benchmarks.result_files import write_result
from benchmarks.samples import percentile
from pipelinerl.errors import ServiceError
from pipelinerl.local.die_with_parent import guarded
from pipelinerl.local.services import available_cores, plan_threads
from pipelinerl.messages.sequences import Completion, SamplingParams, TokenIds
from pipelinerl.recipe.fields import Recipe
from services.verifier.confinement import children

NAME = "episode_endpoint"
RESULT = Path(__file__).parent / "results" / f"{NAME}.json"
HOST, START_S, POLL_S = "127.0.0.1", 300.0, 0.2
GOAL_MS = 5.0
CONCURRENT, TURN_TOKENS = 64, 8
CONVERSATIONS = {0.0: 512, 0.5: 256}
"""Of a round, by `think_s`."""
SIDES = ("ours", "bare", "plain")
BARE = {"logprobs": True, "return_token_ids": True}
"""What a trainer needs of a turn, as vLLM's server is asked for it."""
BARE_SERVER = "from vllm.entrypoints.launchers.api_server.entry import main; main()"
"""What `vllm serve` runs; that command asks for metadata that vLLM's CPU package does not have."""


@dataclass(frozen=True)
class Round:
    """Seconds of each turn, and processor seconds of all of them."""

    turns_s: list[float]
    elapsed_s: float
    front_cpu_s: float
    engine_cpu_s: float


@dataclass(frozen=True)
class Server:
    """`engine_pid`: of the process that decodes."""

    process: Process
    engine_pid: int
    port: int

    @asynccontextmanager
    async def base_urls(self, number: int) -> AsyncIterator[list[str]]:
        """Of as many conversations."""
        asked, address = self.process.stdin, f"http://{HOST}:{self.port}"
        if asked is None:
            yield [f"{address}/v1"] * number
        else:
            asked.write(f"{number}\n".encode())
            yield [f"{address}{path}" for path in await _said(self.process)]
            asked.write(b"\n")


async def serve(model: str) -> None:
    """The actor's engine and endpoint, until standard input ends. There a line with a number of episodes, whose addresses it
    prints, alternates with one that ends them."""
    from prometheus_client import CollectorRegistry

    from pipelinerl.messages.verification import VerifierClient
    from pipelinerl.service.http import serve_http
    from services.actor.engine import GenerationRequest
    from services.actor.episodes.endpoint import episode_app
    from services.actor.episodes.episode import Episode, Episodes
    from services.actor.episodes.formats import chat_format
    from services.actor.metrics import ActorMetrics
    from services.actor.vllm_engine import start_engine

    recipe = _recipe(model)
    sampling = SamplingParams(recipe.sampling.temperature, TURN_TOKENS)
    limits: dict[str, Any] = {"max_turns": TURNS, "max_context": recipe.model.max_context, "turn_timeout_s": 60.0}
    metrics = ActorMetrics(CollectorRegistry())
    async with start_engine(recipe, model) as engine:
        gc.freeze()  # as the service does
        await engine.llm.update_weight_version("1.0")
        serving = Episodes(VerifierClient("127.0.0.1:1"), metrics, recipe, engine.decode)  # environments run in this process
        app = episode_app(
            serving, chat_format(engine.tokenizer, recipe.model), metrics, model="policy", vocab_size=engine.vocab_size
        )

        def begun(name: str) -> Episode:
            async def sample(context: TokenIds, _: Completion, sampling: SamplingParams, number: int) -> Completion:
                return await engine.generate(GenerationRequest(f"{name}.{number}", context, sampling, None, "begun at 0"))

            return Episode(sampling, sample, metrics, engine.decode, **limits)

        async with serve_http(app, HOST, 0, on_this_loop=True) as port:
            print(json.dumps(port), flush=True)
            lines, rounds = asyncio.StreamReader(), 0
            await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
            while line := await lines.readline():
                rounds += 1
                with ExitStack() as under_way:
                    episodes = [begun(f"{rounds}-{index}") for index in range(int(line))]
                    keys = [under_way.enter_context(serving.running(episode)) for episode in episodes]
                    print(json.dumps([f"/episodes/{key}/v1" for key in keys]), flush=True)
                    await lines.readline()
                if any(len(episode.result()) != 1 for episode in episodes):
                    raise ServiceError("turns did not extend each other")


def bare_command(model: str, port: int) -> list[str]:
    """With the arguments of the actor's engine, and nothing noted of a request."""
    from services.actor.vllm_engine import engine_arguments

    arguments = engine_arguments(_recipe(model), model, gpu_gib=None)
    for name in ("weight_transfer_config", "logprobs_mode", "trust_remote_code"):
        del arguments[name]
    executor = arguments.pop("distributed_executor_backend")
    arguments["distributed_executor_backend"] = f"{executor.__module__}.{executor.__qualname__}"
    options = ["--disable-uvicorn-access-log"]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        options += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return [sys.executable, "-c", BARE_SERVER, "--host", HOST, "--port", str(port), "--served-model-name", "policy", *options]


def _recipe(model: str) -> Recipe:
    return episode_recipe(model, CONCURRENT, TURN_TOKENS)


@asynccontextmanager
async def started(side: str, model: str) -> AsyncIterator[Server]:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    command = bare_command(model, port) if side == "bare" else [sys.executable, "-m", f"benchmarks.{NAME}", "--serve", model]
    pipes = {"stdin": PIPE, "stdout": PIPE} if side == "ours" else {"stdout": sys.stderr}
    process = await asyncio.create_subprocess_exec(*guarded(command), **pipes)
    try:
        async with asyncio.timeout(START_S):
            port = await _said(process) if side == "ours" else port
            if side == "bare":
                await _answers(process, port)
        yield Server(process, _engine_of(process.pid), port)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        elif process.returncode is None:
            process.terminate()
        await process.wait()


def _engine_of(front: int) -> int:
    (pid,) = [pid for pid in children(front) if "EngineCor" in Path(f"/proc/{pid}/comm").read_text()]
    return pid


async def _said(process: Process) -> Any:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if line[:1] in b"[0123456789":  # else vLLM's
            return json.loads(line)
    raise ServiceError(f"{NAME} --serve ended with exit code {await process.wait()}")


async def _answers(process: Process, port: int) -> None:
    async with aiohttp.ClientSession() as client:
        while process.returncode is None:
            with suppress(aiohttp.ClientError):
                async with client.get(f"http://{HOST}:{port}/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(POLL_S)
    raise ServiceError(f"vLLM's server ended with exit code {process.returncode}")


async def round_of(server: Server, think_s: float, seed: str, more: Mapping[str, Any]) -> Round:
    """Conversations of words that the seed draws. `more`: fields of a request."""
    turns_s: list[float] = []
    pids = server.process.pid, server.engine_pid
    async with (
        server.base_urls(CONVERSATIONS[think_s]) as base_urls,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONCURRENT)) as client,
    ):
        waiting = list(enumerate(base_urls))

        async def converse() -> None:
            while waiting:
                number, base_url = waiting.pop()
                rng = random.Random(f"{seed}-{number}")
                messages = [{"role": "user", "content": words(rng, PROMPT_WORDS)}]
                for _ in range(TURNS):
                    asked = {"model": "policy", "messages": messages, "max_tokens": TURN_TOKENS, **more}
                    began_s = time.perf_counter()
                    async with client.post(f"{base_url}/chat/completions", json=asked) as answer:
                        said = await answer.json()
                    turns_s.append(time.perf_counter() - began_s)
                    messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
                    messages.append({"role": "user", "content": words(rng, OBSERVATION_WORDS)})
                    await asyncio.sleep(think_s)

        began_s, before = time.perf_counter(), [cpu_s(pid) for pid in pids]
        await asyncio.gather(*(converse() for _ in range(CONCURRENT)))
        elapsed_s = time.perf_counter() - began_s
        front_s, engine_s = (cpu_s(pid) - used_s for pid, used_s in zip(pids, before, strict=True))
    return Round(turns_s, elapsed_s, front_s, engine_s)


async def measured(pairs: int) -> list[dict[str, Any]]:
    """Rounds of both sides in turn, the order swapped each time; one of each before that is not counted."""
    rows = []
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        build_model("tiny", Path(folder))
        servers = {side: await stack.enter_async_context(started(side, folder)) for side in ("ours", "bare")}
        servers["plain"] = servers["bare"]
        for think_s in CONVERSATIONS:
            load, rounds = os.getloadavg()[0], {side: list[Round]() for side in SIDES}
            for number in range(-1, pairs):
                for side in SIDES if number % 2 else reversed(SIDES):
                    done = await round_of(servers[side], think_s, f"{side}-{think_s}-{number}", BARE if side == "bare" else {})
                    print(f"{side}, think {think_s:g} s: {statistics.median(done.turns_s):.3f} s a turn", file=sys.stderr)
                    if number >= 0:
                        rounds[side].append(done)
            rows.append(row_of(think_s, rounds) | {"load_before": round(load, 2)})
    return rows


def row_of(think_s: float, rounds: Mapping[str, list[Round]]) -> dict[str, Any]:
    """Pure."""

    def of(side: str, measure: Callable[[Round], float]) -> float:
        return round(1000 * statistics.median(map(measure, rounds[side])), 2)

    def over_ms(side: str, percent: float) -> float:
        pairs = zip(rounds["ours"], rounds[side], strict=True)
        apart_s = [percentile(ours.turns_s, percent) - percentile(bare.turns_s, percent) for ours, bare in pairs]
        return round(1000 * statistics.median(apart_s), 1)

    row = {"think_s": think_s, "goal_ms": GOAL_MS, "overhead_ms": over_ms("bare", 50)}
    row |= {"overhead_p95_ms": over_ms("bare", 95), "over_plain_ms": over_ms("plain", 50)}
    for side in SIDES:
        row |= {
            f"{side}_turn_ms": of(side, lambda done: percentile(done.turns_s, 50)),
            f"{side}_turn_p95_ms": of(side, lambda done: percentile(done.turns_s, 95)),
            f"{side}_front_cpu_ms": of(side, lambda done: done.front_cpu_s / len(done.turns_s)),
            f"{side}_engine_cpu_ms": of(side, lambda done: done.engine_cpu_s / len(done.turns_s)),
            f"{side}_turns_per_s": round(statistics.median(len(done.turns_s) / done.elapsed_s for done in rounds[side]), 1),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, help="rounds of each side that are counted")
    parser.add_argument("--serve", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.serve))
        return
    cores = available_cores()
    # Before torch is imported anywhere: vLLM's engine processes inherit it.
    os.environ.update(plan_threads(cores, num_actors=1).actor_env() | {"VLLM_LOGGING_LEVEL": "WARNING"})
    rows = asyncio.run(measured(arguments.pairs))
    for row in rows:
        print(json.dumps(row, indent=2))
    machine = {"cores": cores, "load_average_after": round(os.getloadavg()[0], 2)}
    write_result(arguments.output, {"benchmark": NAME, "machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
