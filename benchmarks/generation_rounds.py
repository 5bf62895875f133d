"""One round of generation, twice: vLLM alone in a plain loop, and the actor's own loop with everything around it.

Both sides generate the same prompt groups with the same sampling on the same engine, H sequences at a time. Neither
knows of clocks beyond its own round, or of how rounds are compared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from pipelinerl.bus.protocol import Bus
from pipelinerl.codec import encode_group
from pipelinerl.config.recipe import Recipe
from pipelinerl.errors import ServiceError
from pipelinerl.types import PolicyVersion, PromptGroup
from pipelinerl.verify import VerifierClient
from services.actor.finishing import Finisher
from services.actor.gate import ServingGate
from services.actor.generation import GenerationLoop
from services.actor.held_groups import HeldGroups
from services.actor.metrics import ActorMetrics
from services.actor.vllm_engine import VllmEngine

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams

KEEP_ALIVE_S = 10.0


@dataclass(frozen=True)
class Round:
    """`front_cpu_s`: CPU seconds of this process, vLLM's front end included and its engine process not."""

    tokens: int
    elapsed_s: float
    front_cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.elapsed_s


async def timed(generate: Callable[[], Awaitable[int]]) -> Round:
    """`generate` returns the number of completion tokens."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    tokens = await generate()
    return Round(tokens, time.perf_counter() - began_s, time.process_time() - began_cpu_s)


async def bare_round(
    engine: VllmEngine, groups: Sequence[PromptGroup], in_progress: int, *, logprobs: bool
) -> Round:
    """`AsyncLLM.generate` under a semaphore; final outputs only, and nothing is done with them."""
    slots = asyncio.Semaphore(in_progress)

    async def sample(group: PromptGroup, sampling: VllmSamplingParams, request_id: str) -> int:
        final = None
        async with slots:
            async for output in engine.llm.generate(
                {"prompt_token_ids": group.prompt_token_ids.tolist()}, sampling, request_id
            ):
                final = output
        assert final is not None
        return len(final.outputs[0].token_ids)

    async def generate() -> int:
        async with asyncio.TaskGroup() as tasks:
            samples = [
                tasks.create_task(sample(group, bare_sampling(group, logprobs), f"bare-{group.sequence_id(index)}"))
                for group in groups
                for index in range(group.num_samples)
            ]
        return sum(task.result() for task in samples)

    return await timed(generate)


def bare_sampling(group: PromptGroup, logprobs: bool) -> VllmSamplingParams:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = group.sampling
    return VllmSamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        logprobs=0 if logprobs else None,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


async def actor_round(
    engine: VllmEngine,
    groups: Sequence[PromptGroup],
    recipe: Recipe,
    bus: Bus,
    verifier: VerifierClient,
    watched: AbstractContextManager[object] | None = None,
) -> Round:
    """From the first prompt fetched to the last sequence stored and the last group acknowledged.

    The groups are on PROMPTS before the clock starts. Raises `ServiceError` when a sequence failed.
    """
    for group in groups:
        await bus.publish_prompt(encode_group(group), group.group_id)
    metrics, held, gate = ActorMetrics(CollectorRegistry()), HeldGroups(), ServingGate(recipe.algorithm.max_lag)
    left, stored = sum(group.num_samples for group in groups), asyncio.Event()

    async def on_published(group: PromptGroup, sample_index: int) -> None:
        nonlocal left
        await held.published(group, sample_index)
        left -= 1
        if left == 0:
            stored.set()

    finisher = Finisher(
        bus,
        verifier,
        metrics,
        on_published,
        buffer_size=recipe.actor.publish_buffer,
        batch_size=recipe.actor.verify_batch,
    )
    generation = GenerationLoop(
        bus,
        engine,
        finisher,
        held,
        gate,
        metrics,
        instance="actor-0",
        sequences_in_progress=recipe.actor.sequences_in_progress,
        max_context=recipe.model.max_context,
    )
    gate.serve(PolicyVersion(1, 0))

    async def generate() -> int:
        async with asyncio.TaskGroup() as tasks:
            parts = (finisher.run(), generation.run(), held.keep_alive(KEEP_ALIVE_S))
            running = [tasks.create_task(part) for part in parts]
            await stored.wait()
            for task in running:
                task.cancel()
        return metrics.tokens_total

    with watched or nullcontext():
        round_ = await timed(generate)
    failures = [sample.labels for metric in metrics.failed.collect() for sample in metric.samples if sample.value]
    if failures or len(held):
        raise ServiceError(f"the round is not clean: failures {failures}, groups still held {len(held)}")
    return round_


def renamed(groups: Sequence[PromptGroup], prefix: str) -> list[PromptGroup]:
    """The same groups under ids of their own: streams know a repeated id as the same message."""
    return [replace(group, group_id=f"{prefix}-{group.group_id}") for group in groups]
