"""What an update costs with adapters: their factors sent and merged by the actor, against whole merged weights.

    python -m benchmarks.lora_update [--only 135m|1b]

SmolLM2-135M's shape in float32 and 1.07B parameters in bfloat16, random weights, adapters of rank 16 on all linear layers. One
vLLM engine decodes a batch; this process is the trainer, and updates of both kinds take turns in blocks. Both kinds end in the
same policy, which is checked by scoring a sequence on both sides.

Not here: the optimizer step, several actors, the network: all bytes move within one machine, where they are cheapest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.random_models import build_billion, build_smollm2_shape
from benchmarks.result_files import kept_rows, write_result
from benchmarks.samples import milliseconds
from benchmarks.update_rounds import TIMEOUT_S, decoding
from benchmarks.weight_update import RESULTS
from pipelinerl.local.services import available_cores, plan_threads
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe

HOST = "127.0.0.1"
Way = Literal["adapter", "merged"]
WAYS: tuple[Way, ...] = ("merged", "adapter")
BLOCKS, UPDATES = 3, 4
IN_PROGRESS, MAX_TOKENS = 8, 200
RANK = 16
CASES: dict[str, tuple[str, Callable[[Recipe, Path], None]]] = {
    "135m": ("float32", build_smollm2_shape),
    "1b": ("bfloat16", build_billion),
}


@dataclass(frozen=True)
class Update:
    """Seconds. `snapshot_s`: in which the trainer computes nothing; `staged_s`: from then until the actor has it ready."""

    num_bytes: int
    snapshot_s: float
    staged_s: float
    receive_s: float
    prepare_s: float
    stall_s: float


class Trainer:
    """Policy, sender and store of one model."""

    def __init__(self, recipe: Recipe, folder: str) -> None:
        import torch

        from pipelinerl.transfer.group import GroupStore
        from services.trainer.learn.lora import layer_adapters
        from services.trainer.learn.model import load_policy
        from services.trainer.learn.step import Learner

        policy = load_policy(folder, recipe.model, lora=recipe.trainer.lora)
        self.learner = Learner(policy, recipe.algorithm, recipe.trainer)
        self.store = GroupStore(HOST)
        torch.manual_seed(0)
        with torch.no_grad():
            for adapter in layer_adapters(policy.model).values():
                adapter.b.normal_(std=0.02)  # as after training: nothing is 0

    def sender(self, way: Way) -> Any:
        from services.trainer.weight_sync.sender import WeightSender, adapter_factors, whole_weights

        described = adapter_factors if way == "adapter" else whole_weights
        return WeightSender(described(self.learner.policy.model, wire_dtype="", chunk_bytes=2**24))


async def block(trainer: Trainer, llm: Any, way: Way, versions: Any, groups: Any) -> list[Update]:
    """The engine must be decoding. The first update warms up."""
    from pipelinerl.transfer.group import WeightGroup
    from pipelinerl.transfer.manifest import GroupSpec
    from services.actor.weight_sync.client import WeightUpdateClient
    from services.trainer.distributed.world import ADAPTER, WEIGHTS

    sender, client = trainer.sender(way), WeightUpdateClient(llm, bind_host=HOST, stall_timeout_s=TIMEOUT_S)
    await client.prepare(sender.manifest)
    epoch = next(groups)
    spec = GroupSpec(trainer.store.own_address, f"epoch-{epoch}", 0, 2, "gloo", HOST)
    group, _ = await asyncio.gather(
        asyncio.to_thread(WeightGroup.connect, spec, TIMEOUT_S), client.join_group(replace(spec, rank=1), TIMEOUT_S)
    )
    done = []
    for _ in range(UPDATES + 1):
        version = PolicyVersion(1, next(versions))
        began_s = time.monotonic()
        sent = trainer.learner.gather(ADAPTER if way == "adapter" else WEIGHTS)
        snapshot = await asyncio.to_thread(sender.snapshot, version, sent)
        offered_s = time.monotonic()
        broadcast = sender.broadcast(snapshot, group, TIMEOUT_S)
        staged = await client.receive(version, TIMEOUT_S)
        staged_s = time.monotonic() - offered_s
        assert (await asyncio.wrap_future(broadcast)).checksum == staged.checksum
        stall_s = await client.commit(version)
        update = Update(staged.num_bytes, offered_s - began_s, staged_s, staged.receive_s, staged.prepare_s, stall_s)
        done.append(update)
    await client.close()
    group.close()
    return done[1:]


async def measure(name: str) -> list[dict[str, Any]]:
    dtype, build = CASES[name]
    recipe = load_recipe("smollm2", ["task.prompt_style=compact", f"model.dtype={dtype}", f"trainer.lora.rank={RANK}"])
    from services.actor.vllm_engine import start_engine

    updates: dict[Way, list[Update]] = {way: [] for way in WAYS}
    mismatch: dict[Way, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        build(recipe, Path(folder))
        trainer, versions, groups = Trainer(recipe, folder), count(1), count(1)
        tokens = np.random.default_rng(0).integers(0, 1000, 32).astype(np.int32)
        expected = trainer.learner.score(tokens)
        async with start_engine(recipe, folder) as engine:
            await engine.llm.update_weight_version(str(PolicyVersion(1, 0)))
            for number in range(BLOCKS):
                for way in WAYS if number % 2 == 0 else reversed(WAYS):
                    async with decoding(engine.llm, IN_PROGRESS, MAX_TOKENS, engine.vocab_size):
                        updates[way] += await block(trainer, engine.llm, way, versions, groups)
                    scored = await engine.score(tokens)
                    mismatch[way] = float(np.abs(np.asarray(scored) - expected).max())
    return [row(name, way, updates[way], mismatch[way]) for way in WAYS]


def row(name: str, way: Way, updates: list[Update], mismatch: float) -> dict[str, Any]:
    def median_ms(field: str) -> float:
        return milliseconds(statistics.median(getattr(update, field) for update in updates))

    times = ("snapshot", "staged", "receive", "prepare", "stall")
    return {
        "model": name,
        "sent": way,
        "updates": len(updates),
        "megabytes": round(updates[0].num_bytes / 1e6, 1),
        **{f"{part}_ms": median_ms(f"{part}_s") for part in times},
        "logprob_mismatch": f"{mismatch:.1e}",
    }


def place(row: dict[str, Any]) -> tuple[int, int]:
    return list(CASES).index(row["model"]), WAYS.index(row["sent"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="some models instead of all")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    cores = available_cores()
    os.environ.update(plan_threads(cores, num_actors=1).actor_env() | {"VLLM_LOGGING_LEVEL": "WARNING"})
    path = arguments.output / "lora_update.json"
    for name in arguments.only:
        load = round(os.getloadavg()[0], 2)
        rows = [one | {"load_before": load} for one in asyncio.run(measure(name))]
        print(*map(json.dumps, rows), sep="\n", flush=True)
        rows += kept_rows(path, "model", [row["model"] for row in rows])
        result = {"benchmark": "lora_update", "machine": {"cores": cores}, "rows": sorted(rows, key=place)}
        write_result(path, result)


if __name__ == "__main__":
    main()
