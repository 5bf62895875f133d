"""What the learner costs over a bare transformers training loop: trained tokens per second of both, in one run.

Both sides step models of equal weights on the same micro-batches (same packing, same attention) with the same kind of
loss, in turn. The bare loop's batches are built before the clock starts, it computes logits only where they are needed,
and it measures nothing; the learner builds its batches and computes all its metrics within its time. A second bare loop
uses transformers' own block-diagonal mask instead of this project's attention, for scale. `ratio` is the median over
pairs of neighbouring steps (wall time), `ratio_best` compares the fastest step of each, `ratio_cpu_time` CPU seconds:
on a machine that does other work, trust the last two. `packing_fill` is the step's tokens over its micro-batches' token
budgets, low where a batch is smaller than a budget; `stream_fill` is what packing reaches on a long stream of such lengths.

Not measured here: streams, the verifier, sending weights.

    python -m benchmarks.trainer_overhead [--pairs 5] [--threads 0] [--only tiny|smollm2] [--output FILE]
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.random_models import smollm2_config, tiny_config
from pipelinerl.algorithms.packing import fill, pack, plan_microbatches
from pipelinerl.config.load import load_recipe
from pipelinerl.config.recipe import AlgorithmConfig, TrainerConfig
from pipelinerl.types import Sequence, VersionSpan
from services.trainer.learn.attention import VARLEN, forward_arguments
from services.trainer.learn.batch import MicroBatch, TrainingGroup, build_microbatch
from services.trainer.learn.model import wrap_model
from services.trainer.learn.normalization import BatchTotals
from services.trainer.learn.step import Learner

RESULT = Path(__file__).parent / "results" / "trainer_overhead.json"
GROUP_SIZE = 8
PROMPT_TOKENS = 8


@dataclass(frozen=True)
class Case:
    """One model and one batch. Lengths are of whole sequences, uniform, both ends included."""

    name: str
    goal: float
    batch_size: int
    lengths: tuple[int, int]
    tokens_per_microbatch: int
    with_mask: bool
    """Whether the loop with transformers' own mask is timed too."""


TINY = Case("tiny", 0.85, 256, (15, 60), 2048, with_mask=True)
SMOLLM2 = Case("smollm2", 0.95, 8, (15, 60), 512, with_mask=False)


def tiny_model() -> PreTrainedModel:
    """The default recipe's, with random weights."""
    return LlamaForCausalLM(tiny_config(load_recipe("arithmetic")))


def smollm2_model() -> PreTrainedModel:
    """SmolLM2-135M's shape with random weights, which cost the same."""
    return LlamaForCausalLM(smollm2_config())


MODELS: dict[str, Callable[[], PreTrainedModel]] = {"tiny": tiny_model, "smollm2": smollm2_model}


def make_groups(case: Case, vocabulary: int, seed: int = 0) -> list[TrainingGroup]:
    """Random tokens in random lengths, of two policy versions each, as an actor would leave them."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(case.lengths[0], case.lengths[1] + 1, case.batch_size) - PROMPT_TOKENS
    sequences = [_sequence(generator, index, int(tokens), vocabulary) for index, tokens in enumerate(lengths)]
    return [
        TrainingGroup(tuple(sequences[first : first + GROUP_SIZE]), generator.normal(size=GROUP_SIZE))
        for first in range(0, case.batch_size, GROUP_SIZE)
    ]


def _sequence(generator: np.random.Generator, index: int, tokens: int, vocabulary: int) -> Sequence:
    middle = tokens // 2
    return Sequence(
        run="benchmark",
        sequence_id=str(index),
        group_id=str(index // GROUP_SIZE),
        sample_index=index % GROUP_SIZE,
        group_size=GROUP_SIZE,
        task="none",
        prompt_token_ids=generator.integers(0, vocabulary, PROMPT_TOKENS).astype(np.int32),
        completion_token_ids=generator.integers(0, vocabulary, tokens).astype(np.int32),
        behaviour_logprobs=np.full(tokens, -np.log(vocabulary), dtype=np.float32),
        spans=(VersionSpan(0, 0, middle), VersionSpan(1, middle, tokens)),
        reward=0.0,
    )


class BareLoop:
    """forward, backward, step: transformers and torch, nothing of this project but the attention and ready batches."""

    def __init__(
        self, model: PreTrainedModel, attention: str, batches: list[MicroBatch], trainer: TrainerConfig
    ) -> None:
        model.set_attn_implementation(attention)
        self.model, self.attention, self.batches, self.trainer = model.train(), attention, batches, trainer
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=trainer.learning_rate,
            betas=(trainer.beta1, trainer.beta2),
            eps=trainer.epsilon,
            weight_decay=trainer.weight_decay,
            fused=True,
        )

    def step(self) -> None:
        for batch in self.batches:
            logits = self.model(
                input_ids=batch.row.input_ids,
                position_ids=batch.row.position_ids,
                use_cache=False,
                logits_to_keep=batch.predictors,
                **forward_arguments(self.attention, batch.row.layout),
            ).logits[0]
            logprobs = -F.cross_entropy(logits.float(), batch.targets, reduction="none")
            weights = (logprobs.detach() - batch.behaviour_logprobs).exp().clamp(max=5.0)
            (-(batch.weights * weights * batch.advantages * logprobs).sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.trainer.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def micro_batches(groups: list[TrainingGroup], budget: int) -> list[MicroBatch]:
    """Those that the learner would make of `groups` at version 1."""
    sequences = [sequence for group in groups for sequence in group.sequences]
    advantages = np.concatenate([group.advantages for group in groups])
    totals = BatchTotals(len(sequences), sum(sequence.num_completion_tokens for sequence in sequences))
    return [
        build_microbatch([sequences[index] for index in members], advantages[members], 1, "batch", totals)
        for members in plan_microbatches([sequence.num_tokens for sequence in sequences], budget)
    ]


def timed(step: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds of one step."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


def run_case(case: Case, pairs: int) -> dict[str, Any]:
    """Steps both loops in turn, the order swapped each time; ratios are medians over pairs of neighbours."""
    torch.manual_seed(0)
    model = MODELS[case.name]()
    groups = make_groups(case, model.config.vocab_size)
    trainer = TrainerConfig(tokens_per_microbatch=case.tokens_per_microbatch, learning_rate=1e-6)
    batches = micro_batches(groups, case.tokens_per_microbatch)
    learner = Learner(wrap_model(copy.deepcopy(model)), AlgorithmConfig(), trainer)
    outcome = learner.train_step(groups, version=1)
    masked = BareLoop(copy.deepcopy(model), "sdpa", batches, trainer) if case.with_mask else None
    bare = BareLoop(model, VARLEN, batches, trainer)
    bare.step()
    loops: list[Callable[[], Any]] = [lambda: learner.train_step(groups, version=1), bare.step]
    seconds: list[list[tuple[float, float]]] = [[], []]
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 else (1, 0):
            seconds[side].append(timed(loops[side]))
    return _result(case, outcome.metrics, seconds, timed(masked.step) if masked else None)


def _result(
    case: Case,
    metrics: dict[str, Any],
    seconds: list[list[tuple[float, float]]],
    masked: tuple[float, float] | None,
) -> dict[str, Any]:
    tokens = metrics["completion_tokens"]
    ratios = [[bare[clock] / ours[clock] for ours, bare in zip(*seconds, strict=True)] for clock in (0, 1)]
    result = {
        "goal": case.goal,
        "ratio": statistics.median(ratios[0]),
        "ratio_best": min(wall for wall, _ in seconds[1]) / min(wall for wall, _ in seconds[0]),
        "ratio_cpu_time": statistics.median(ratios[1]),
        "learner_tokens_per_s": tokens / statistics.median(wall for wall, _ in seconds[0]),
        "bare_tokens_per_s": tokens / statistics.median(wall for wall, _ in seconds[1]),
        "learner_cpu_s_per_step": statistics.median(cpu for _, cpu in seconds[0]),
        "bare_cpu_s_per_step": statistics.median(cpu for _, cpu in seconds[1]),
        "pairs": len(ratios[0]),
        "sequences": metrics["sequences"],
        "completion_tokens": tokens,
        "tokens": metrics["tokens"],
        "microbatches": metrics["microbatches"],
        "packing_fill": metrics["packing_fill"],
        "stream_fill": stream_fill(case, case.tokens_per_microbatch),
    }
    return result if masked is None else {**result, "bare_with_hf_mask_cpu_s_per_step": masked[1]}


def stream_fill(case: Case, budget: int, num_sequences: int = 4096) -> float:
    """Share of full bins of `budget` tokens that a long stream of such lengths fills."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(case.lengths[0], case.lengths[1] + 1, num_sequences).tolist()
    return fill(lengths, pack(lengths, budget), capacity=budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=7, help="Steps of each loop that are timed.")
    parser.add_argument("--threads", type=int, default=0, help="Torch threads; 0 = torch's default.")
    parser.add_argument("--only", choices=["tiny", "smollm2"], help="One model instead of both.")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    result: dict[str, Any] = {
        "benchmark": "trainer_overhead",
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "cases": {},
    }
    for case in (TINY, SMOLLM2):
        if arguments.only in (None, case.name):
            result["cases"][case.name] = run_case(case, arguments.pairs)
            print(case.name, json.dumps(result["cases"][case.name], indent=2), flush=True)
            gc.collect()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
