"""Size and cost of the weight log's deltas: real gradients of a Llama of SmolLM2-135M's shape, Adam at 1e-6, sent as bfloat16.

The model starts from random weights, takes a few steps at 1e-3 on the text of this project's documents, and then some at 1e-6
with a new Adam, as a run does. Each case is a delta between two of these versions. Ours and the bare library take turns on the
same bytes and one core. The bare library is zstd at level 1 on the plain XOR of each chunk; only ours has to compute it. Times
are processor time, since other programs may use the machine, unless they are named `wall`. A ratio is our time divided by the
bare one, the median over rounds. Each decoded stream is compared with the right one.

* `joins`: `READERS` light members, a process each, start at once and read an anchor with the deltas after it, from a folder and
  from NATS on loopback. The trainer's bytes are counted by the kernel, over all TCP connections of its process. `gloo`: as many
  that join by a side group instead, for comparison of the time.
* `swaps`: a vLLM engine that decodes a full batch gets versions over Gloo and from the file of the weight log, in blocks that
  take turns. A stall is the time that its update client says it paused decoding.

Not measured here: remote stores, slow links (`far_actor.py`), and training beside the encoder.

    python -m benchmarks.weight_log [--only deltas joins swaps] [--rounds 7] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.light_members import weights_checksum
from benchmarks.light_stage import ANCHOR_EVERY, NUM_CHUNKS, WITHIN_S, LightStage, light_stage
from benchmarks.random_models import smollm2_config
from benchmarks.recovery import PRODUCT
from benchmarks.result_files import write_result
from benchmarks.samples import milliseconds, percentile
from benchmarks.transfer_peers import SendingPeer, peer
from benchmarks.update_rounds import EngineRounds, Way, decoding
from benchmarks.weight_update import Case, cases, manifest_of
from pipelinerl.local.services import available_cores, plan_threads
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.chunks import describe, pack
from pipelinerl.transfer.delta import Bytes, decode_delta, encode_delta
from pipelinerl.transfer.manifest import Manifest

RESULTS = Path(__file__).parent / "results"
DOCUMENTS = Path(__file__).parent.parent
WARMUP_STEPS, STEPS = 4, 6
ROWS, ROW_TOKENS = 2, 128
CASES = {"step 1": (0, 1), "step 6": (5, 6), "steps 1 to 5": (0, 5)}
BEFORE, AFTER = PolicyVersion(1, 0), PolicyVersion(1, 1)
GOAL_SHARE, GOAL_S_PER_GB, GOAL_RATIO = 0.05, 2.0, 1.5
READERS, JOIN_MEGABYTES, JOIN_CHANGED = 16, 64, 0.03
PARTS, JOINS, SWAPS = ("deltas", "joins", "swaps"), ("file", "nats", "gloo"), ("1m", "135m")
SWAP_BLOCKS = 10
GOAL_SENT, GOAL_STALL = 0.001, 1.1
_BYTES_SENT = struct.Struct("<200xQ")
"""`tcpi_bytes_sent` in Linux's `struct tcp_info`."""


def batches(vocabulary: int) -> Iterator[torch.Tensor]:
    """Yield int64[ROWS, ROW_TOKENS] of the documents' words, numbered by their first occurrence, over and over."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCUMENTS.glob("*/*.md")))
    numbers: dict[str, int] = {}
    words = [numbers.setdefault(word, len(numbers) % vocabulary) for word in text.split()]
    for batch in count():
        start = batch * ROWS * ROW_TOKENS % (len(words) - ROWS * ROW_TOKENS)
        yield torch.tensor(words[start : start + ROWS * ROW_TOKENS]).view(ROWS, ROW_TOKENS)


def trained_versions() -> tuple[Manifest, list[Bytes], list[float]]:
    """Return the manifest, the streams of versions 0 to STEPS, and the loss of every step."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(smollm2_config(), dtype=torch.float32)
    manifest = describe(model.named_parameters(), wire_dtype="bfloat16")
    data, losses = batches(model.config.vocab_size), list[float]()

    def step(optimizer: torch.optim.Optimizer) -> None:
        tokens = next(data)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    def stream() -> Bytes:
        return pack(manifest, model.named_parameters()).numpy()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(WARMUP_STEPS):
        step(optimizer)
    streams, optimizer = [stream()], torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    for _ in range(STEPS):
        step(optimizer)
        streams.append(stream())
    return manifest, streams, losses


_Result = TypeVar("_Result")


def timed(work: Callable[[], _Result]) -> tuple[float, float, _Result]:
    """Return wall and processor seconds of this thread, and the result."""
    wall, processor = time.perf_counter(), time.thread_time()
    result = work()
    return time.perf_counter() - wall, time.thread_time() - processor, result


def one_round(manifest: Manifest, old: Bytes, new: Bytes, pieces: list[Bytes]) -> tuple[dict[str, float], int, int]:
    """Return the times of one round in seconds per GB of weights, and the bytes of our delta and of the bare one."""
    zstd, giga, into = pyarrow.Codec("zstd", compression_level=1), manifest.total_bytes / 1e9, old.copy()
    both = (torch.from_numpy(old), torch.from_numpy(new))
    wall_s, cpu_s, parts = timed(lambda: [bytes(part) for part in encode_delta(manifest, BEFORE, AFTER, *both)])
    _, bare_s, packed = timed(lambda: [zstd.compress(piece, asbytes=True) for piece in pieces])
    data = np.frombuffer(b"".join(parts), np.uint8)
    decode_wall_s, decode_s, _ = timed(lambda: list(decode_delta(manifest, BEFORE, AFTER, data, into, "delta")))
    _, bare_decode_s, _ = timed(lambda: [zstd.decompress(*pair) for pair in zip(packed, map(len, pieces), strict=True)])
    assert np.array_equal(into, new), "the delta is lossless"
    times = {
        "encode_s_per_gb": cpu_s / giga,
        "encode_wall_s_per_gb": wall_s / giga,
        "bare_encode_s_per_gb": bare_s / giga,
        "encode_ratio": cpu_s / bare_s,
        "decode_s_per_gb": decode_s / giga,
        "decode_wall_s_per_gb": decode_wall_s / giga,
        "bare_decode_s_per_gb": bare_decode_s / giga,
        "decode_ratio": decode_s / bare_decode_s,
    }
    return times, len(data), sum(map(len, packed))


def measure(manifest: Manifest, old: Bytes, new: Bytes, rounds: int) -> dict[str, Any]:
    """Return one case: medians over the rounds."""
    difference = old ^ new
    pieces = [difference[chunk.offset : chunk.offset + chunk.num_bytes] for chunk in manifest.chunks]
    found = [one_round(manifest, old, new, pieces) for _ in range(rounds)]
    _, num_bytes, bare_bytes = found[0]
    return {
        "changed": float(np.count_nonzero(difference.view(np.uint16))) * 2 / manifest.total_bytes,
        "delta_mb": num_bytes / 1e6,
        "share": num_bytes / manifest.total_bytes,
        "bare_share": bare_bytes / manifest.total_bytes,
        **{key: statistics.median(times[key] for times, _, _ in found) for key in found[0][0]},
        "sha256_s_per_gb": timed(lambda: sha256(new.data).digest())[1] / (manifest.total_bytes / 1e9),
        "goal_share": GOAL_SHARE,
        "goal_s_per_gb": GOAL_S_PER_GB,
        "goal_ratio": GOAL_RATIO,
    }


def sent_bytes() -> int:
    """Return the bytes that this process has sent on its open TCP connections, retransmissions included."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                total += _BYTES_SENT.unpack(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT.size))[0]
    return total


def changing_weights(megabytes: float) -> Callable[[int], dict[str, torch.Tensor]]:
    """Return the weights of a version, bfloat16. From one to the next, the lowest bit of `JOIN_CHANGED` of them flips."""
    elements = int(megabytes * 1e6 / 2 / NUM_CHUNKS) // 32 * 32
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(NUM_CHUNKS, elements, generator=generator).to(torch.bfloat16).view(torch.int16)

    def weights_of(version: int) -> dict[str, torch.Tensor]:
        words = first.clone()
        for number in range(1, version + 1):
            words ^= torch.rand(words.shape, generator=torch.Generator().manual_seed(number)) < JOIN_CHANGED
        return {f"w{index}": row.view(torch.bfloat16) for index, row in enumerate(words)}

    return weights_of


async def joins(way: str) -> dict[str, Any]:
    """One row: bytes and seconds of `READERS` members that start at once."""
    with tempfile.TemporaryDirectory() as folder:
        log = {"file": (Path(folder) / "log").as_uri(), "nats": "nats", "gloo": ""}[way]
        weights_of = changing_weights(JOIN_MEGABYTES)
        async with light_stage(Path(folder), replace(PRODUCT, log=log), weights_of, LightStage) as stage:
            await stage.start("first", reads_log=bool(log))
            for version in range(ANCHOR_EVERY):
                await stage.update(version)
            version_bytes, read_bytes = stage.sender.manifest.total_bytes, stage.sender.manifest.total_bytes
            if (writer := stage.updater.log) is not None:
                await writer.all_announced()
                assert writer.published is not None
                read_bytes = sum(one.bytes for one in writer.published.objects)
            load, sent, began_s = os.getloadavg()[0], sent_bytes(), time.monotonic()
            starting = (stage.start(f"r{number}", reads_log=bool(log)) for number in range(READERS))
            readers = await asyncio.gather(*starting)
            await asyncio.gather(*(reader.until_serving(version, WITHIN_S) for reader in readers))
            sent = sent_bytes() - sent
            expected = weights_checksum(weights_of(version))
            assert all(reader.served[-1].checksum == expected for reader in readers)
            seconds = [reader.served[-1].at_s - began_s for reader in readers]
            row = {"way": way, "readers": READERS, "version_mb": version_bytes / 1e6, "read_mb": READERS * read_bytes / 1e6}
            if log:  # a group's connections are closed when all have joined
                row |= {"trainer_sent_mb": sent / 1e6, "sent_by_version": sent / version_bytes, "goal": GOAL_SENT}
            return {**row, "first_s": min(seconds), "all_s": max(seconds), "load_before": load}


async def swaps(case: Case) -> dict[str, Any]:
    """One row: the stalls of a vLLM engine whose weights come over Gloo, and of the same one with a weight log."""
    from services.actor.vllm_engine import start_engine

    ways: tuple[Way, ...] = ("in flight", "log")
    stalls: dict[str, list[float]] = {way: [] for way in ways}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        case.build(case.recipe, Path(folder))
        manifest = manifest_of(Path(folder), case.chunk_bytes)
        with peer(SendingPeer, manifest) as trainer:
            store = await trainer("address")
            async with start_engine(case.recipe, folder) as engine:
                await engine.llm.update_weight_version(str(PolicyVersion(1, 0)))
                rounds = EngineRounds(engine.llm, manifest, trainer, store, Path(folder) / "stream")
                async with decoding(engine.llm, case.in_progress, case.max_tokens, engine.vocab_size):
                    for number in range(SWAP_BLOCKS):
                        for way in ways if number % 2 == 0 else reversed(ways):
                            block = await rounds.block(way, case.updates, case.quiet_s)
                            stalls[way] += [update.stall_s for update in block.updates]
                            print(f"{case.name} {way}: {len(stalls[way])} updates", file=sys.stderr)
    figures = {
        f"{name}_stall_p{percent}_ms": milliseconds(percentile(stalls[way], percent))
        for name, way in (("gloo", "in flight"), ("log", "log"))
        for percent in (50, 99)
    }
    return {
        "model": case.name,
        "megabytes": manifest.total_bytes / 1e6,
        "updates": len(stalls["log"]),
        **figures,
        "ratio": percentile(stalls["log"], 50) / percentile(stalls["in flight"], 50),
        "goal": GOAL_STALL,
        "load_before": load,
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    print(*rows, sep="\n", flush=True)
    machine = {"torch": torch.__version__, "cpus": os.cpu_count()}
    write_result(path, {"benchmark": path.stem, **machine, "rows": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=5, help="of the deltas")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    if "deltas" in arguments.only:
        deltas(arguments.rounds, arguments.output / "weight_log.json")
    if "joins" in arguments.only:
        write_rows(arguments.output / "weight_log_joins.json", [asyncio.run(joins(way)) for way in JOINS])
    if "swaps" in arguments.only:
        threads = plan_threads(available_cores(), num_actors=1)
        os.environ.update(threads.actor_env() | {"VLLM_LOGGING_LEVEL": "WARNING"})  # vLLM's engine process inherits it
        rows = [asyncio.run(swaps(case)) for case in cases(quick=False) if case.name in SWAPS]
        write_rows(arguments.output / "weight_log_swaps.json", rows)


def deltas(rounds: int, path: Path) -> None:
    load = os.getloadavg()[0]
    manifest, streams, losses = trained_versions()
    cases = {name: measure(manifest, streams[a], streams[b], rounds) for name, (a, b) in CASES.items()}
    result = {
        "benchmark": "weight_log",
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "load_average_before": load,
        "whole_mb": manifest.total_bytes / 1e6,
        "rounds": rounds,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "cases": cases,
    }
    write_result(path, result)
    for name, case in cases.items():
        print(name, {key: round(value, 4) for key, value in case.items()})


if __name__ == "__main__":
    main()
