"""Time of rank 0 between two optimizer steps, in which all devices wait: the figures of a step and the orders to the ranks.

    python -m benchmarks.rank_orders [--rounds 50] [--output FILE]

Two ways are compared on synthetic tokens, for 16 million tokens on 64 ranks:

* `ranks`: the trainer's. Each rank reduces its tokens, and rank 0 merges the statistics. Batches were sent during the step.
* `rank 0`: rank 0 receives four values of each token, computes the figures of all tokens on one thread, serialises the batches
  and sends them to one rank after the other.

This benchmark measures the work of one rank on its 250,000 tokens, the work of rank 0, and messages between four processes of
this machine over Gloo. From these it computes the times of 64 ranks, which reduce their tokens at the same time, and whose
messages take as long for each rank as those of four. A network's latency is not included. The share is that of a 7B step, which
takes 29.3 s on 64 H100 GPUs.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save

from benchmarks.result_files import write_result
from benchmarks.trainer_ranks import on_ranks
from pipelinerl.local.services import available_cores
from pipelinerl.rl.groups import LAG_BUCKETS, lag_bucket
from services.trainer.learn.batch import HostMicroBatch
from services.trainer.learn.meter import (
    BOUND_16_BIT,
    TokenStatistics,
    effective_sample_size,
    token_figures,
    token_statistics,
    weight_sums,
)
from services.trainer.learn.step import Share, batch_message
from services.trainer.worker import receive_batches
from services.trainer.world import END, TRAIN, Message, join_ranks, leave_ranks, world_of_ranks

RESULT = Path(__file__).parent / "results" / "rank_orders.json"
GOAL = 0.02
TOKENS, RANKS, STEP_S = 16_000_000, 64, 29.3
PROCESSES = 4
MICROBATCHES, BRANCHES, ACTORS, LARGEST_LAG = 8, 10, 32, 8
TOTALS, BUDGET = np.ones(4), 32_768


def synthetic_share(seed: int) -> tuple[NDArray[np.float32], Share]:
    """Return values [4, C] and batches of one rank, which has its part of `TOKENS`."""
    rng, length = np.random.default_rng(seed), TOKENS // RANKS // MICROBATCHES // BRANCHES
    share = tuple(synthetic_batch(rng, length) for _ in range(MICROBATCHES))
    values = rng.normal(0, 0.1, (4, TOKENS // RANKS)).astype(np.float32)
    values[1:3] = values[1:3] > 0.2
    return values, share


def synthetic_batch(rng: np.random.Generator, length: int) -> HostMicroBatch:
    tokens = BRANCHES * length
    return HostMicroBatch(
        token_ids=rng.integers(0, 150_000, tokens),
        lengths=np.full(BRANCHES, length),
        places=np.arange(tokens),
        predictors=np.arange(tokens),
        targets=rng.integers(0, 150_000, tokens),
        behaviour_logprobs=rng.normal(-1, 1, tokens).astype(np.float32),
        advantages=rng.normal(0, 1, tokens).astype(np.float32),
        weights=np.full(tokens, 1 / TOKENS, dtype=np.float32),
        branch_index=np.arange(BRANCHES).repeat(length),
        lags=rng.integers(0, LARGEST_LAG + 1, BRANCHES).repeat(length),
        actors=rng.integers(0, ACTORS, BRANCHES),
        reported=np.full(BRANCHES, -1),
    )


def figures_on_one_thread(values: NDArray[np.float32], batches: Share) -> dict[str, Any]:
    """Return the figures that need all tokens, computed from the values of all tokens."""
    log_weights, clipped, masked, entropy = values.astype(np.float64)
    lags = np.concatenate([batch.lags for batch in batches])
    buckets, fresh = lag_bucket(lags), log_weights[lags == 0]
    present = np.unique(buckets)
    return {
        "means": [float(each.mean()) for each in (clipped, masked, entropy, lags)],
        "ess": effective_sample_size(weight_sums(log_weights)[None]),
        "ess_by_lag": {LAG_BUCKETS[b]: effective_sample_size(weight_sums(log_weights[buckets == b])[None]) for b in present},
        "clip_fraction_by_lag": {LAG_BUCKETS[b]: float(clipped[buckets == b].mean()) for b in present},
        "mismatch_kl": float((np.expm1(np.minimum(fresh, 80.0)) - fresh).mean()),
        "log_weight_abs_max": float(np.abs(log_weights).max()),
        "p95": float(np.percentile(lags, 95)),
        "lags": np.unique(lags, return_counts=True),
    }


def play(rounds: int) -> dict[str, float]:
    """Exchange the messages of `rounds` steps. Return seconds of rank 0 for each other rank: `message_s` for an order and its
    report, `ahead_s` for batches during the step, and `bulk_s` for batches and values between two steps."""
    torch.set_num_threads(1)
    join_ranks(torch.device("cpu"))
    world = world_of_ranks(1, 0, torch.device("cpu"))
    values, share = synthetic_share(world.layout.rank)
    links, ahead, others = world.links, world.batches, range(1, world.layout.size)
    assert links is not None
    assert ahead is not None
    if not world.is_first:
        received, report = receive_batches(ahead), vars(token_statistics(values, share, BOUND_16_BIT))
        while (order := links.receive_order()).kind != END:
            if order.kind == TRAIN:
                next(received)
            links.send(Message("result", {"memory_peak_gib": 1.0}, report if order.kind == TRAIN else {"values": values}), 0)
        list(received)
        leave_ranks()
        return {}
    between, early, bulk = [], [], []
    for step in range(rounds + 1):
        began_s = time.perf_counter()
        works = [work for rank in others for work in ahead.begin_send(batch_message(step, share), rank)]
        if step > 0:  # the first batches are only received when they are ordered
            for work in works:
                work.wait()
        sent_s = time.perf_counter()
        links.broadcast(Message(TRAIN, {"version": step}))
        for report in links.receive(*others):
            TokenStatistics(**report.arrays)
        between.append((time.perf_counter() - sent_s) / len(others))
        early.append((sent_s - began_s) / len(others))
    for _ in range(max(3, rounds // 10)):
        began_s = time.perf_counter()
        for rank in others:
            links.send(batch_message(0, share), rank)
        for rank in others:
            links.receive(rank)
        bulk.append((time.perf_counter() - began_s) / len(others))
    links.broadcast(Message(END))
    ahead.broadcast(Message(END))
    leave_ranks()
    return {"message_s": median(between[1:]), "ahead_s": median(early[1:]), "bulk_s": median(bulk)}


def seconds(call: Callable[[], Any], repeats: int = 7) -> float:
    def once() -> float:
        began_s = time.perf_counter()
        call()
        return time.perf_counter() - began_s

    return median(once() for _ in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="number of steps whose messages are timed")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    load = round(os.getloadavg()[0], 2)
    values, share = synthetic_share(0)
    part = token_statistics(values, share, BOUND_16_BIT)
    loads = [len(batch.token_ids) for batch in share] * RANKS
    told = on_ranks(PROCESSES, play, arguments.rounds)[0]
    by_ranks = {
        "figures_s": seconds(lambda: token_statistics(values, share, BOUND_16_BIT))
        + seconds(lambda: token_figures([part] * RANKS, TOTALS, loads, BUDGET)),
        "orders_s": 0.0,
        "messages_s": (RANKS - 1) * told["message_s"],
        "sent_ahead_s": (RANKS - 1) * told["ahead_s"],
    }
    by_rank_0 = {
        "figures_s": RANKS * seconds(lambda: figures_on_one_thread(values, share)),
        "orders_s": RANKS * seconds(lambda: save(dict(batch_message(0, share).arrays))),
        "messages_s": (RANKS - 1) * told["bulk_s"],
    }
    rows = [row("ranks", by_ranks), row("rank 0", by_rank_0)]
    machine = {"cores": available_cores(), "load_average_before": load}
    write_result(arguments.output, {"benchmark": "rank_orders", "goal": GOAL, "machine": machine, "rows": rows})
    print(*rows, sep="\n")


def row(way: str, measured: dict[str, float]) -> dict[str, Any]:
    between_s = sum(measured[part] for part in ("figures_s", "orders_s", "messages_s"))
    found = {**measured, "between_s": between_s, "s_per_million_tokens": between_s / TOKENS * 1e6}
    return {"way": way, **{key: round(value, 4) for key, value in found.items()}, "share_of_step": round(between_s / STEP_S, 4)}


if __name__ == "__main__":
    main()
