"""Size and cost of the weight log's deltas: real gradients of a Llama of SmolLM2-135M's shape, Adam at 1e-6, sent as bfloat16.

The model starts from random weights, takes a few steps at 1e-3 on the text of this project's documents, and then some at 1e-6
with a new Adam, as a run does. Each case is a delta between two of these versions. Ours and the bare library take turns on the
same bytes and one core. The bare library is zstd at level 1 on the plain XOR of each chunk; only ours has to compute it. Times
are processor time, since other programs may use the machine, unless they are named `wall`. A ratio is our time divided by the
bare one, the median over rounds. Each decoded stream is compared with the right one.

Not measured here: stores, networks, and training beside the encoder.

    python -m benchmarks.weight_log [--rounds 7] [--output FILE]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.random_models import smollm2_config
from benchmarks.result_files import write_result
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.chunks import describe, pack
from pipelinerl.transfer.delta import Bytes, decode_delta, encode_delta
from pipelinerl.transfer.manifest import Manifest

RESULT = Path(__file__).parent / "results" / "weight_log.json"
DOCUMENTS = Path(__file__).parent.parent
WARMUP_STEPS, STEPS = 4, 6
ROWS, ROW_TOKENS = 2, 128
CASES = {"step 1": (0, 1), "step 6": (5, 6), "steps 1 to 5": (0, 5)}
BEFORE, AFTER = PolicyVersion(1, 0), PolicyVersion(1, 1)
GOAL_SHARE, GOAL_S_PER_GB, GOAL_RATIO = 0.05, 2.0, 1.5


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
    wall_s, cpu_s, parts = timed(lambda: [bytes(part) for part in encode_delta(manifest, BEFORE, AFTER, old, new)])
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    manifest, streams, losses = trained_versions()
    cases = {name: measure(manifest, streams[a], streams[b], arguments.rounds) for name, (a, b) in CASES.items()}
    result = {
        "benchmark": "weight_log",
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "load_average_before": load,
        "whole_mb": manifest.total_bytes / 1e6,
        "rounds": arguments.rounds,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "cases": cases,
    }
    write_result(arguments.output, result)
    for name, case in cases.items():
        print(name, {key: round(value, 4) for key, value in case.items()})


if __name__ == "__main__":
    main()
