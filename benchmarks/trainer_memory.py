"""Peak memory of a micro-batch: log-probabilities and entropy of a large vocabulary, and activations of the layers.

**head**: hidden states and the weight of a head with 151,936 words (Qwen2.5's; width 896, as in its 0.5B model) stand
there; what is measured is logits, log-probabilities, entropy, loss, and the gradients of both. `naive` writes that down
plainly, and frees what it can: the logits in float32, log_softmax, entropy without a gradient. `chunks` is what this
project does with a head that is more than a linear layer, `ours` what it does with any other. **layers**: half of
Qwen2.5-0.5B's layers with random weights, forward and backward of one packed row, with and without
`trainer.gradient_checkpointing`.

`peak_mib` is above what was resident before (inputs and weights), so it holds the gradients, `gradients_mib` of it;
`ratio` is peak by the peak of the first way. Each measurement has a process of its own, in which freed memory goes back
to the system at once. The optimizer's state is not measured: it is the same everywhere.

    python -m benchmarks.trainer_memory [--tokens 8192] [--only head|layers] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from benchmarks.peak_memory import Measured, measured
from benchmarks.random_models import half_qwen2_config
from benchmarks.result_files import kept_rows, write_result
from benchmarks.training_data import VERSION, make_groups
from pipelinerl.recipe.fields import AlgorithmConfig
from services.trainer.learn.batch import MicroBatch, host_microbatch, token_row
from services.trainer.learn.loss import compute_loss
from services.trainer.learn.model import DTYPES, wrap_model
from services.trainer.learn.policy import MAX_LOGITS, Head, TokenScores, linear_scores, token_scores

RESULT = Path(__file__).parent / "results" / "trainer_memory.json"
WORDS, WIDTH = 151_936, 896
GOAL = 0.25
"""Of the head's peak by the naive form's."""
WAYS = {"head": ("naive", "chunks", "ours"), "layers": ("all kept", "checkpointed")}
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "262144"}
"""Has glibc give freed tensors back to the system. Left alone it keeps some, more in one run than in another."""
LAYERS_TOKENS = 4096
SEQUENCE_TOKENS = 512


def naive_scores(hidden: Tensor, head: nn.Linear, targets: Tensor) -> TokenScores:
    log_p = torch.log_softmax(F.linear(hidden, head.weight).float(), dim=-1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)
    return TokenScores(log_p.gather(-1, targets[:, None]).squeeze(-1), entropy)


def chunk_scores(hidden: Tensor, head: nn.Linear, targets: Tensor) -> TokenScores:
    """Call the head on chunks of tokens, and again in the backward pass."""

    def scores(hidden_chunk: Tensor, target_chunk: Tensor) -> TokenScores:
        return token_scores(head(hidden_chunk), target_chunk, 1.0)

    size = MAX_LOGITS // WORDS
    chunks = zip(hidden.split(size), targets.split(size), strict=True)
    parts = [checkpoint(scores, *chunk, use_reentrant=False) for chunk in chunks]
    return TokenScores(*(torch.cat(part) for part in zip(*(part[:2] for part in parts), strict=True)))


def our_scores(hidden: Tensor, head: nn.Linear, targets: Tensor) -> TokenScores:
    return TokenScores(*linear_scores(Head(hidden, head.weight, None, targets)))


HEADS = {"naive": naive_scores, "chunks": chunk_scores, "ours": our_scores}


def backward(scores: TokenScores) -> None:
    """The default loss of made-up advantages, and its gradient."""
    advantages = torch.linspace(-1, 1, len(scores.logprobs), device=scores.logprobs.device)
    nowhere = torch.zeros_like(advantages, dtype=torch.int64)
    batch = MicroBatch(
        row=token_row(np.zeros(1, np.int64), np.ones(1, np.int64)),
        predictors=nowhere,
        targets=nowhere,
        behaviour_logprobs=scores.logprobs.detach(),
        advantages=advantages,
        weights=torch.full_like(advantages, 1e-3),
        branch_index=nowhere,
        num_branches=1,
    )
    compute_loss(batch, scores, AlgorithmConfig()).loss.backward()


def measure_head(way: str, dtype: torch.dtype, tokens: int, device: torch.device) -> Measured:
    torch.manual_seed(0)

    def run(number: int, words: int) -> Measured:
        head = nn.Linear(WIDTH, words, bias=False, dtype=dtype, device=device)
        hidden = torch.randn(number, WIDTH, dtype=dtype, device=device).requires_grad_()
        targets = torch.randint(0, words, (number,), device=device)
        return measured(lambda: backward(HEADS[way](hidden, head, targets)), device)

    run(256, 256)  # libraries take room of their own on first use
    return run(tokens, WORDS)


def measure_layers(way: str, dtype: torch.dtype, tokens: int, device: torch.device) -> Measured:
    torch.manual_seed(0)
    config = half_qwen2_config()
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)
    policy = wrap_model(model, gradient_checkpointing=way == "checkpointed")
    groups = make_groups([SEQUENCE_TOKENS] * (tokens // SEQUENCE_TOKENS), config.vocab_size)
    branches = [branch for group in groups for sequence in group.sequences for branch in sequence.all_branches]
    ones = np.ones(len(branches))
    batch = host_microbatch(branches, ones, ones, VERSION).on(device)
    return measured(lambda: backward(policy.scores(batch.row, batch.predictors, batch.targets)), device)


def gradients_mib(part: str, dtype: torch.dtype, tokens: int) -> float:
    """Of the weights, and of the head's hidden states."""
    if part == "head":
        elements = (WORDS + tokens) * WIDTH
    else:
        with torch.device("meta"):
            elements = AutoModelForCausalLM.from_config(half_qwen2_config()).num_parameters()
    return elements * dtype.itemsize / 2**20


def in_own_process(part: str, way: str, dtype: str, tokens: int) -> Measured:
    """Raises RuntimeError when the process ends without a result, as it does where memory does not suffice."""
    command = [sys.executable, "-m", "benchmarks.trainer_memory", "--measure", part, way, dtype, str(tokens)]
    done = subprocess.run(command, env={**os.environ, **RETURN_FREED}, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{part}, {way}, {dtype}, {tokens} tokens ended with {done.returncode}: not enough memory?")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def rows(part: str, dtype: str, tokens: int) -> list[dict[str, Any]]:
    """One for each way, compared with the first."""
    found = {way: in_own_process(part, way, dtype, tokens) for way in WAYS[part]}
    first = found[WAYS[part][0]]
    made = [
        {
            "part": part,
            "way": way,
            "dtype": dtype,
            "tokens": tokens,
            "peak_mib": round(peak.peak_mib),
            "gradients_mib": round(gradients_mib(part, DTYPES[dtype], tokens)),
            "seconds": peak.seconds,
            "ratio": peak.peak_mib / first.peak_mib,
            "goal": GOAL if way == "ours" else None,
        }
        for way, peak in found.items()
    ]
    print(json.dumps(made, indent=2), flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192, help="Tokens that the head scores.")
    parser.add_argument("--only", choices=sorted(WAYS), help="One part instead of both; the other's result is kept.")
    parser.add_argument("--measure", nargs=4, metavar=("PART", "WAY", "DTYPE", "TOKENS"), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.measure:
        part, way, dtype, tokens = arguments.measure
        measure = measure_head if part == "head" else measure_layers
        print(json.dumps(asdict(measure(way, DTYPES[dtype], int(tokens), device))))
        return
    result: dict[str, Any] = {
        "benchmark": "trainer_memory",
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "load_average_before": round(os.getloadavg()[0], 2),
        "rows": kept_rows(arguments.output, "part", [arguments.only] if arguments.only else WAYS),
    }
    for part, tokens in (("head", arguments.tokens), ("layers", LAYERS_TOKENS)):
        for dtype in ("float32", "bfloat16"):
            if arguments.only in (None, part):
                result["rows"] += rows(part, dtype, tokens)
    result["rows"].sort(key=lambda row: list(WAYS).index(row["part"]))
    write_result(arguments.output, result)


if __name__ == "__main__":
    main()
