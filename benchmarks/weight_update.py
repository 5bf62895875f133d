"""What an update of the weights costs: the pause in decoding, the bandwidth of the transfer, the throughput beside it.

    python -m benchmarks.weight_update [--only 1m|135m|1b|chain] [--quick]

For models of three sizes with random weights: that of `arithmetic`, SmolLM2-135M's shape, and one of 1B parameters in
bfloat16. Three measurements of each, in one run:

* transfer alone: the product's sender and receiver (headers, checksums) and a bare `ProcessGroupGloo` broadcast of the
  same bytes in pieces of a chunk's size take turns, between two processes that do nothing else;
* updates into a vLLM engine that decodes a full batch, in blocks that take turns: in flight (received and prepared beside
  decoding, then swapped), and paused (pause, receive, load, resume);
* one memory copy of the same bytes by one thread, before and after.

`chain` is a transfer to several ranks over slow links (`broadcast_chain.py`), as root only.

Not here: the control channel (`membership.py`), the optimizer that would share the cores, several actors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.broadcast_chain import chain_row, why_not_here
from benchmarks.decode_trace import Step, Window, median_step, rate_in, stall_before, tokens_in
from benchmarks.random_models import build_billion, build_smollm2_shape, build_tiny
from benchmarks.result_files import kept_rows, write_result
from benchmarks.samples import milliseconds, paired_ratio, percentile
from benchmarks.transfer_peers import Moved, ReceivingPeer, RemotePeer, SendingPeer, peer
from benchmarks.update_rounds import WAYS, Block, EngineRounds, Update, decoding
from pipelinerl.local.services import available_cores, plan_threads
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.transfer.manifest import Manifest, build_manifest, chunk_size

RESULTS = Path(__file__).parent / "results"
STALL_COPIES, STALL_EXTRA_MS = 3.0, 25.0
BANDWIDTH_GOAL, DECODING_GOAL = 0.8, 0.6
COPIES = 5


@dataclass(frozen=True)
class Case:
    """`transfers`: rounds of the transfer alone. `blocks` of each way, `updates` in each, `quiet_s` after each update."""

    name: str
    recipe: Recipe
    build: Callable[[Recipe, Path], None]
    in_progress: int
    max_tokens: int
    transfers: int
    blocks: int
    updates: int
    quiet_s: float

    @property
    def chunk_bytes(self) -> int:
        return chunk_size(self.recipe.weights.chunk_mib, "gloo")


def cases(quick: bool) -> list[Case]:
    tiny, smollm2 = load_recipe("arithmetic"), load_recipe("smollm2", ["task.prompt_style=compact"])
    billion = load_recipe("smollm2", ["task.prompt_style=compact", "model.dtype=bfloat16"])
    if quick:
        return [
            Case("1m", tiny, build_tiny, 128, 110, 5, 1, 10, 0.2),
            Case("135m", smollm2, build_smollm2_shape, 32, 200, 3, 1, 2, 1.0),
        ]
    return [
        Case("1m", tiny, build_tiny, 128, 110, 60, 4, 40, 0.25),
        Case("135m", smollm2, build_smollm2_shape, 32, 200, 15, 3, 8, 2.0),
        Case("1b", billion, build_billion, 8, 200, 5, 1, 3, 4.0),
    ]


async def measure(case: Case) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of the updates, one a way, and the row of the bandwidth."""
    with tempfile.TemporaryDirectory() as folder:
        case.build(case.recipe, Path(folder))
        manifest = manifest_of(Path(folder), case.chunk_bytes)
        with peer(SendingPeer, manifest) as trainer:
            store = await trainer("address")
            with peer(ReceivingPeer, manifest, store) as receiver:
                copies = await trainer("copy", COPIES)
                alone, bare = await transfers(trainer, receiver, case.transfers)
            blocks, steps = await engine_rounds(case, folder, manifest, trainer, store)
            copies += await trainer("copy", COPIES)
    copy_ms = milliseconds(statistics.median(copies))
    rows = [update_row(case, manifest, blocks, steps, way, copy_ms) for way in WAYS]
    return rows, bandwidth_row(case, manifest, alone, bare, [b for b in blocks if b.way == "in flight"])


def manifest_of(folder: Path, chunk_bytes: int) -> Manifest:
    """Of the saved model's tensors, tied ones once."""
    from safetensors import safe_open

    names = {"F32": "float32", "BF16": "bfloat16"}
    with safe_open(folder / "model.safetensors", "pt") as file:
        parts = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118 - not a dict
        described = [(name, part.get_shape(), names[part.get_dtype()]) for name, part in parts]
    return build_manifest(described, chunk_bytes=chunk_bytes)


async def transfers(trainer: RemotePeer, receiver: RemotePeer, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of the product's transfer and of the bare broadcast, from the first byte sent to the last one taken."""
    for command in ("join", "join_bare"):
        await asyncio.gather(trainer(command, command), receiver(command, command))
    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    for number in range(-1, rounds):  # round -1 warms up
        for side in ("ours", "bare") if number % 2 else ("bare", "ours"):
            version = PolicyVersion(0, number + 2)
            commands = (("receive", version), ("send", version)) if side == "ours" else (("bare",), ("bare",))
            taken, sent = await asyncio.gather(receiver(*commands[0]), trainer(*commands[1]))
            if number >= 0:
                seconds[side].append(seconds_of(sent, taken))
    return seconds["ours"], seconds["bare"]


def seconds_of(sent: Moved, taken: Moved) -> float:
    assert sent.checksum == taken.checksum
    return taken.ended_s - sent.began_s


async def engine_rounds(
    case: Case, folder: str, manifest: Manifest, trainer: RemotePeer, store: str
) -> tuple[list[Block], list[Step]]:
    from services.actor.vllm_engine import start_engine

    async with start_engine(case.recipe, folder) as engine:
        await engine.llm.update_weight_version(str(PolicyVersion(1, 0)))
        rounds = EngineRounds(engine.llm, manifest, trainer, store)
        blocks: list[Block] = []
        async with decoding(engine.llm, case.in_progress, case.max_tokens, engine.vocab_size):
            for number in range(case.blocks):
                for way in WAYS if number % 2 == 0 else reversed(WAYS):
                    blocks.append(await rounds.block(way, case.updates, case.quiet_s))
                    print(f"{case.name} {way}: {len(blocks)} of {2 * case.blocks} blocks", file=sys.stderr)
    return blocks, rounds.trace.steps


def update_row(
    case: Case, manifest: Manifest, blocks: Sequence[Block], steps: Sequence[Step], way: str, copy_ms: float
) -> dict[str, Any]:
    """`normal` is decoding in the quiet windows between the updates of the same way."""
    mine = [block for block in blocks if block.way == way]
    updates: list[Update] = [update for block in mine for update in block.updates]
    quiet: list[Window] = [window for block in mine for window in block.quiet]
    step_s, normal = median_step(steps, quiet), rate_in(steps, quiet)
    during = rate_in(steps, [update.moving for update in updates]) / normal if way == "in flight" else None
    stalls = [update.stall_s for update in updates]
    gaps = [stall_before(steps, str(update.version), step_s) for update in updates]
    lost = [normal * (update.whole[1] - update.whole[0]) - tokens_in(steps, [update.whole]) for update in updates]
    return {
        "model": case.name,
        "way": way,
        "loader": mine[0].mode,
        "parameters": sum(math.prod(spec.shape) for spec in manifest.parameters),
        "megabytes": round(manifest.total_bytes / 1e6, 1),
        "updates": len(updates),
        "copy_ms": copy_ms,
        "goal_ms": round(STALL_COPIES * copy_ms + STALL_EXTRA_MS, 1),
        "stall_p50_ms": milliseconds(percentile(stalls, 50)),
        "stall_p99_ms": milliseconds(percentile(stalls, 99)),
        "gap_p50_ms": milliseconds(percentile(gaps, 50)),
        "gap_p99_ms": milliseconds(percentile(gaps, 99)),
        "step_ms": milliseconds(step_s),
        "in_progress": case.in_progress,
        "decoding_tokens_per_s": round(normal, 1),
        "decoding_during_receive": None if during is None else round(during, 3),
        "tokens_lost": round(statistics.median(lost), 1),
        "receive_ms": milliseconds(statistics.median(update.receive_s for update in updates)),
        "prepare_ms": milliseconds(statistics.median(update.prepare_s for update in updates)),
        "snapshot_ms": milliseconds(statistics.median(update.snapshot_s for update in updates)),
        "stalls_ms": [milliseconds(stall) for stall in stalls],
        "gaps_ms": [milliseconds(gap) for gap in gaps],
    }


def bandwidth_row(
    case: Case, manifest: Manifest, alone: Sequence[float], bare: Sequence[float], in_flight: Sequence[Block]
) -> dict[str, Any]:
    """`into_engine_mb_per_s` counts from the first byte sent until the version is in the engine's layout, beside decoding."""
    bare_s = statistics.median(bare)
    updates = [update for block in in_flight for update in block.updates]
    staged_s = statistics.median(update.moving[1] - update.moving[0] for update in updates)
    megabytes = manifest.total_bytes / 1e6
    return {
        "model": case.name,
        "megabytes": round(megabytes, 1),
        "chunk_megabytes": round(case.chunk_bytes / 1e6, 1),
        "rounds": len(bare),
        "bare_mb_per_s": round(megabytes / bare_s, 1),
        "alone_mb_per_s": round(megabytes / statistics.median(alone), 1),
        "ratio": round(paired_ratio(bare, alone), 3),
        "goal": BANDWIDTH_GOAL,
        "into_engine_mb_per_s": round(megabytes / staged_s, 1),
        "into_engine_ratio": round(bare_s / staged_s, 3),
        "rounds_ms": {"alone": list(map(milliseconds, alone)), "bare": list(map(milliseconds, bare))},
    }


def write(name: str, rows: Sequence[dict[str, Any]], machine: dict[str, Any], folder: Path) -> None:
    """Models that were not measured this time keep the rows that the file has of them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    kept = kept_rows(path, "model", [row["model"] for row in rows])
    rows = sorted([*kept, *rows], key=lambda row: float(row["megabytes"]))
    result = {"benchmark": name, "machine": machine, "rows": rows}
    write_result(path, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["1m", "135m", "1b", "chain"], help="some cases instead of all")
    parser.add_argument("--quick", action="store_true", help="a few updates of the two small models")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    cores = available_cores()
    threads = plan_threads(cores, num_actors=1)
    # Before torch is imported anywhere: vLLM's engine process inherits it.
    os.environ.update(threads.actor_env() | {"VLLM_LOGGING_LEVEL": "WARNING"})
    machine = {"cores": cores, "engine_threads": threads.engine}
    for case in cases(arguments.quick):
        if arguments.only and case.name not in arguments.only:
            continue
        load = {"load_before": round(os.getloadavg()[0], 2)}
        updates, bandwidth = asyncio.run(measure(case))
        for row in (*updates, bandwidth):
            row |= load
            print(json.dumps({key: value for key, value in row.items() if not isinstance(value, list | dict)}), flush=True)
        write("weight_update", updates, machine, arguments.output)
        write("weight_bandwidth", [bandwidth], machine, arguments.output)
    if not arguments.quick and (not arguments.only or "chain" in arguments.only):
        if obstacle := why_not_here():
            print(f"chain: {obstacle}", file=sys.stderr)
            return
        row = asyncio.run(chain_row())
        print(json.dumps(row), flush=True)
        write("weight_bandwidth", [row], machine, arguments.output)


if __name__ == "__main__":
    main()
