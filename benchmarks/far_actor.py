"""A run with one of its two actors behind a slow link: what each link costs the far actor, and what it costs the others.

    python -m benchmarks.far_actor [--steps 24] [--cases "20 Mbit/s"]

The far actor and its verifier are in a network namespace, and start with the variables of docs/other-clusters.md. A relay on
each side stands for the tunnel: from the namespace, only NATS can be reached. Both actors are light actors, so they share two
cores with the trainer; `near_tokens_per_cpu_s` is free of that. Figures of the near actor begin when the far one serves (or
after `ALONE_AFTER` steps), and end with the run. Linux, root and iproute2 only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.bounded_run import ROOT, run_steps
from benchmarks.broadcast_chain import why_not_here
from benchmarks.result_files import kept_cases, write_result
from pipelinerl.local.processes import living
from pipelinerl.local.services import available_cores
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import find_recipe, load_recipe, recipe_yaml
from pipelinerl.run_dir import RunDir, read_json
from pipelinerl.run_summary import read_jsonl
from pipelinerl.service.settings import read_address

RESULT = Path(__file__).parent / "results" / "far_actor.json"
NEAR, FAR = "10.214.7.1", "10.214.7.2"
NATS_PORT, HTTP_PORT, VERIFIER_PORT = 4222, 8080, 50051
CASES = {"no far actor": None, "unlimited link": 0, "20 Mbit/s": 20}
"""Megabits per second of the link; 0 = as fast as the kernel; None = there is no far actor."""
OVERRIDES = (
    *("weights.log=nats", "actor.count=1", "actor.sequences_in_progress=64", "trainer.batch_size=64"),
    *("evaluation.every_steps=0", "task.heldout_problems=8"),
)
JOIN_AFTER, ALONE_AFTER = 3, 6
WITHIN_S, JOIN_WITHIN_S, LOOK_S = 1500.0, 300.0, 0.5
LIGHT = (sys.executable, "-m", "benchmarks.light_actor")


@dataclass(frozen=True)
class Seen:
    """Totals of an actor's metrics at one moment, and the processor seconds of its process."""

    at_s: float
    cpu_s: float
    metrics: dict[str, float]

    def since(self, earlier: Seen, name: str) -> float:
        return self.metrics.get(name, 0.0) - earlier.metrics.get(name, 0.0)


def look(address: str, pid: int) -> Seen:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        found = {
            sample.name.removeprefix("pipelinerl_actor_") + sample.labels.get("outcome", ""): sample.value
            for family in families
            for sample in family.samples
        }
    times = psutil.Process(pid).cpu_times()
    return Seen(time.monotonic(), times.user + times.system, found)


@contextmanager
def link(megabits: int) -> Iterator[str]:
    """A namespace with the address `FAR`, behind a link of that rate to `NEAR`. It has no route to anywhere else."""
    name, cable = f"prlfar{os.getpid()}", f"prlf{os.getpid() % 10**6}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "addr", "add", f"{NEAR}/24", "dev", cable)
        _run("ip", "-n", name, "addr", "add", f"{FAR}/24", "dev", "eth0")
        _run("ip", "link", "set", cable, "up")
        for device in ("lo", "eth0"):
            _run("ip", "-n", name, "link", "set", device, "up")
        if megabits:
            limit = ("root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "200ms")
            _run("tc", "qdisc", "add", "dev", cable, *limit)
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit)
        yield name
    finally:
        subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True, timeout=60)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=60)


@asynccontextmanager
async def relay(host: str, port: int, target_host: str, target_port: int) -> AsyncIterator[None]:
    """Pass on what arrives at `host`:`port`, as `ssh -L` does."""

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to, back = await asyncio.open_connection(target_host, target_port)
        await asyncio.gather(copy(reader, back), copy(to, writer))

    server = await asyncio.start_server(serve, host, port)
    try:
        yield
    finally:
        server.close()


def far_environment(run_dir: RunDir, folder: Path) -> dict[str, str]:
    """Copy into `folder` what the far machine needs, and return its variables as docs/other-clusters.md gives them."""
    recipe = load_recipe(run_dir.recipe, ["weights.backend=log"])
    (folder / "recipe.yaml").write_text(recipe_yaml(recipe), encoding="utf-8")
    shutil.copy(run_dir.credentials.nats("actor"), folder / "nats-actor")
    shutil.copy(run_dir.credentials.tls_dir / "ca.crt", folder / "ca.crt")
    settings = {
        "run": run_dir.name,
        "recipe": str(folder / "recipe.yaml"),
        "nats_url": f"tls://127.0.0.1:{NATS_PORT}",
        "nats_credentials": str(folder / "nats-actor"),
        "nats_tls_dir": str(folder),
        "verifier": f"127.0.0.1:{VERIFIER_PORT}",
        "reachable": "false",
        "http_host": "0.0.0.0",  # for this benchmark, which reads the actor's metrics
    }
    named = {f"PIPELINERL_{name.upper()}": value for name, value in settings.items()}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIPELINERL_")}
    return {**kept, **named, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@asynccontextmanager
async def started(namespace: str, command: tuple[str, ...], log: Path, environment: dict[str, str]) -> AsyncIterator[int]:
    """A process in the namespace, by its pid. It gets SIGTERM at the end."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *("ip", "netns", "exec", namespace, *command), env=environment, stdout=output, stderr=output
        )
    try:
        yield process.pid
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@asynccontextmanager
async def far_actor(run_dir: RunDir, namespace: str) -> AsyncIterator[int]:
    """An actor and a verifier in the namespace, by the actor's pid."""
    nats_port = int(read_json(run_dir.address("nats"))["url"].rpartition(":")[2])
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = far_environment(run_dir, folder)
        await stack.enter_async_context(relay(NEAR, NATS_PORT, "127.0.0.1", nats_port))
        tunnel = (sys.executable, "-m", "benchmarks.far_actor", "--tunnel")
        logs = run_dir.path / "logs"
        await stack.enter_async_context(started(namespace, tunnel, logs / "far-tunnel.log", environment))
        verifier = {"PIPELINERL_INSTANCE": "far-verifier", "PIPELINERL_GRPC_PORT": str(VERIFIER_PORT)}
        command = (sys.executable, "-m", "services.verifier")
        await stack.enter_async_context(started(namespace, command, logs / "far-verifier.log", environment | verifier))
        actor = {"PIPELINERL_INSTANCE": "far-actor", "PIPELINERL_HTTP_PORT": str(HTTP_PORT)}
        yield await stack.enter_async_context(started(namespace, LIGHT, logs / "far-actor.log", environment | actor))


async def watch(run_dir: RunDir, case: str, steps: int, figures: dict[str, Any]) -> None:
    """Start the far actor of the case, if any, and fill in the figures of the case when the run has made its steps."""
    megabits = CASES[case]
    async with AsyncExitStack() as stack:
        far_pid = 0
        await _steps_made(run_dir, ALONE_AFTER if megabits is None else JOIN_AFTER)
        if megabits is not None:
            namespace, began_s = stack.enter_context(link(megabits)), time.monotonic()
            far_pid = await stack.enter_async_context(far_actor(run_dir, namespace))
            far = await _serving(far_pid)
            figures["join_s"] = far.at_s - began_s
        near_address, near_pid = read_address(run_dir.address("actor-0")).http, living(run_dir)["actor-0"]
        near, first = look(near_address, near_pid), len(read_jsonl(run_dir.metrics))
        await _steps_made(run_dir, steps)
        near_end, records = look(near_address, near_pid), read_jsonl(run_dir.metrics)[first:]
        figures |= {"from_step": first, **of_actor("near", near, near_end), **of_steps(records)}
        if far_pid:
            far_end = look(f"{FAR}:{HTTP_PORT}", far_pid)
            figures |= {**of_actor("far", far, far_end), **of_transfers(far, far_end)}


async def _steps_made(run_dir: RunDir, steps: int) -> None:
    while len(read_jsonl(run_dir.metrics)) < steps:  # noqa: ASYNC110 - a file grows
        await asyncio.sleep(LOOK_S)


async def _serving(pid: int) -> Seen:
    async with asyncio.timeout(JOIN_WITHIN_S):
        while True:
            with suppress(OSError):
                seen = await asyncio.to_thread(look, f"{FAR}:{HTTP_PORT}", pid)
                if "policy_version" in seen.metrics:
                    return seen
            await asyncio.sleep(LOOK_S / 5)


def of_actor(name: str, begin: Seen, end: Seen) -> dict[str, float]:
    tokens, swaps = end.since(begin, "generated_tokens_total"), end.since(begin, "stall_seconds_count")
    return {
        f"{name}_tokens_per_s": tokens / (end.at_s - begin.at_s),
        f"{name}_tokens_per_cpu_s": tokens / (end.cpu_s - begin.cpu_s),
        f"{name}_stall_ms": 1e3 * end.since(begin, "stall_seconds_sum") / max(1.0, swaps),
    }


def of_transfers(begin: Seen, end: Seen) -> dict[str, float]:
    """Versions that the far actor read after its first one, and a mean one's bytes and seconds."""
    versions = end.since(begin, "receive_seconds_count")
    return {
        "far_versions": versions,
        "mb_per_version": end.since(begin, "received_bytes_total") / max(1.0, versions) / 1e6,
        "s_per_version": end.since(begin, "receive_seconds_sum") / max(1.0, versions),
        "join_mb": begin.metrics.get("received_bytes_total", 0.0) / 1e6,
    }


def of_steps(records: list[dict[str, Any]]) -> dict[str, float]:
    half = len(records) // 2
    rewards = [record["reward_mean"] for record in records]
    return {
        "steps": len(records),
        "step_s": sum(record["step_s"]["total"] for record in records) / len(records),
        "lag_max": max(record["lag"]["max"] for record in records),
        "reward_first_half": sum(rewards[:half]) / half,
        "reward_second_half": sum(rewards[half:]) / (len(rewards) - half),
    }


def measured(case: str, steps: int) -> dict[str, Any]:
    recipe: Recipe = load_recipe(find_recipe("arithmetic"), [*OVERRIDES, f"trainer.steps={steps + 1000}"])
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:

        async def beside(run_dir: RunDir) -> None:
            await watch(run_dir, case, steps, figures)

        run_steps(recipe, Path(folder), {"actor": LIGHT}, steps, WITHIN_S, beside)
    figures["max_lag"] = recipe.algorithm.max_lag
    return {"link_megabits_per_s": CASES[case] or None, **{name: _rounded(value) for name, value in figures.items()}}


def _rounded(value: float) -> float:
    return float(f"{value:.3g}") if isinstance(value, float) else value


async def _tunnel() -> None:
    async with relay("127.0.0.1", NATS_PORT, NEAR, NATS_PORT):
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of each run")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--tunnel", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tunnel:
        asyncio.run(_tunnel())
        return
    if problem := why_not_here():
        print(f"far_actor: {problem}")
        return
    cases = kept_cases(arguments.output, CASES)
    for case in arguments.cases:
        cases[case] = measured(case, arguments.steps)
        print(json.dumps({case: cases[case]}), flush=True)
    limited, unlimited = (cases.get(case) for case in ("20 Mbit/s", "unlimited link"))
    if limited and unlimited:
        limited["near_ratio"] = _rounded(limited["near_tokens_per_cpu_s"] / unlimited["near_tokens_per_cpu_s"])
    machine = {"cores": available_cores(), "load_average_after": round(os.getloadavg()[0], 2)}
    write_result(arguments.output, {"benchmark": "far_actor", "machine": machine, "cases": cases})


if __name__ == "__main__":
    main()
