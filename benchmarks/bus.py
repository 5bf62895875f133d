"""Sequences per second from an actor's publish to the trainer's read, beside bare nats-py moving the same bytes.

    python -m benchmarks.bus [--rounds 11] [--concurrency 16]

One process publishes and reads at the same time, through one real nats-server with file storage. `ours` encodes, publishes
with a message id, reads in order and decodes; `bare` is `js.publish` and `pull_subscribe().fetch()` without
acknowledgements, with the same number of publishing tasks and the same batch. The two take turns, so that whatever else
the machine does hits both. It does not measure networks, replication or TLS.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import nats
import nats.errors
import numpy as np
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig

from benchmarks.nats_server import NatsServer, delete_streams
from pipelinerl.bus import jetstream
from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.bus.reader import BATCH
from pipelinerl.messages.sequences import Sequence, VersionSpan, decode_sequence, encode_sequence

RESULTS = Path(__file__).parent / "results" / "bus.json"
LIMITS = StreamLimits(sequences_max_bytes=1 << 30)
GOAL = 0.7


@dataclass(frozen=True)
class Load:
    label: str
    completion_tokens: int
    count: int
    """Sequences of one round."""


LOADS = (Load("1 KB", 85, 3000), Load("256 KB", 32_650, 300))


def build(load: Load, run: str) -> list[Sequence]:
    """`count` sequences with ids of their own and one content, three policy versions each."""
    rng = np.random.default_rng(0)
    tokens = load.completion_tokens
    first = Sequence(
        run=run,
        sequence_id="",
        group_id="",
        sample_index=0,
        group_size=8,
        task="chain_sum",
        prompt_token_ids=rng.integers(0, 50_000, 24, dtype=np.int32),
        completion_token_ids=rng.integers(0, 50_000, tokens, dtype=np.int32),
        behaviour_logprobs=-rng.random(tokens, dtype=np.float32),
        spans=tuple(VersionSpan(10 + i, i * tokens // 3, (i + 1) * tokens // 3) for i in range(3)),
        reward=1.0,
        reward_components={"answer": 1.0},
        actor="actor-0",
        completion_text="3 + 4 = 7, 7 + 5 = 12. The answer is 12.",
    )
    return [replace(first, group_id=f"g{i:06d}", sequence_id=f"g{i:06d}.0") for i in range(load.count)]


async def publish_all(count: int, concurrency: int, publish: Callable[[int], Awaitable[object]]) -> None:
    """`concurrency` tasks take the numbers below `count` in turn."""
    numbers: Iterator[int] = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await publish(number)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(worker())


async def ours(url: str, run: str, load: Load, concurrency: int) -> float:
    """Seconds."""
    sequences = build(load, run)
    async with jetstream.connect(url, run, limits=LIMITS) as actor, jetstream.connect(url, run, limits=LIMITS) as trainer:
        await trainer.create_streams()

        async def publish(number: int) -> None:
            await actor.publish_sequence(encode_sequence(sequences[number]), sequences[number].sequence_id)

        async def read() -> None:
            async with trainer.read_sequences(1) as entries:
                for _ in range(load.count):
                    decode_sequence((await anext(entries)).payload, expected_run=run)

        elapsed_s = await timed(publish_all(load.count, concurrency, publish), read())
        await delete_streams(trainer)
    return elapsed_s


async def bare(url: str, run: str, load: Load, concurrency: int) -> float:
    """Seconds."""
    payloads = [encode_sequence(sequence) for sequence in build(load, run)]
    async with await nats.connect(url) as publishing, await nats.connect(url) as reading:
        js, reader = publishing.jetstream(timeout=30), reading.jetstream(timeout=30)
        await reader.add_stream(StreamConfig(name=run, subjects=[run], max_bytes=LIMITS.sequences_max_bytes))
        config = ConsumerConfig(ack_policy=AckPolicy.NONE)
        subscription = await reader.pull_subscribe(run, stream=run, config=config)

        async def read() -> None:
            left = load.count
            while left:
                left -= len(await subscription.fetch(min(BATCH, left), timeout=30))

        elapsed_s = await timed(publish_all(load.count, concurrency, lambda number: js.publish(run, payloads[number])), read())
        await reader.delete_stream(run)
    return elapsed_s


async def timed(publishing: Awaitable[None], reading: Awaitable[None]) -> float:
    began = time.perf_counter()
    await asyncio.gather(publishing, reading)
    return time.perf_counter() - began


async def measure(url: str, load: Load, rounds: int, concurrency: int) -> dict[str, object]:
    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    for number in range(-1, rounds):  # round -1 warms up
        for name, run in (("ours", ours), ("bare", bare)) if number % 2 else (("bare", bare), ("ours", ours)):
            elapsed_s = await run(url, f"bench-{name}-{number + 1}", load, concurrency)
            if number >= 0:
                rates[name].append(load.count / elapsed_s)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "payload": load.label,
        "payload_bytes": len(encode_sequence(build(replace(load, count=1), "bench-ours-0")[0])),
        "sequences_per_round": load.count,
        "ours_per_s": round(medians["ours"], 1),
        "bare_per_s": round(medians["bare"], 1),
        "ratio": round(medians["ours"] / medians["bare"], 3),
        "rounds": {name: [round(value, 1) for value in values] for name, values in rates.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="alternations that are counted")
    parser.add_argument("--concurrency", type=int, default=16, help="publishing tasks, the same for both")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, NatsServer(Path(folder)) as server:
        rows = [asyncio.run(measure(server.url, load, arguments.rounds, arguments.concurrency)) for load in LOADS]
    print(f"{'payload':>8} {'bytes':>8} {'ours/s':>10} {'bare/s':>10} {'ratio':>7}   goal >= {GOAL}")
    for row in rows:
        print(
            f"{row['payload']:>8} {row['payload_bytes']:>8} {row['ours_per_s']:>10} {row['bare_per_s']:>10} {row['ratio']:>7}"
        )
    RESULTS.parent.mkdir(exist_ok=True)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.machine()}
    result = {"concurrency": arguments.concurrency, "batch": BATCH, "goal": GOAL, "machine": machine, "rows": rows}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
