"""One round of generation, twice: vLLM alone in a plain loop, and the actor's own loop with everything around it.

Both sides generate the same prompt groups with the same sampling on the same engine, H sequences at a time. Neither
knows of clocks beyond its own round, or of how rounds are compared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from pipelinerl.bus.jetstream import Bus
from pipelinerl.errors import ServiceError
from pipelinerl.messages.sequences import PolicyVersion, PromptGroup, decode_sequence, encode_group
from pipelinerl.messages.verification import VerifierClient
from pipelinerl.recipe.fields import Recipe
from services.actor.generation import Finisher, GenerationLoop, Sampler
from services.actor.hand_over import HeldGroups
from services.actor.metrics import ActorMetrics
from services.actor.vllm_engine import VllmEngine
from services.actor.weight_sync.updates import ServingGate

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams

KEEP_ALIVE_S = 10.0
VERSION = PolicyVersion(1, 0)
"""What the engine's weights are labelled, as after a trainer's first update."""


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


async def bare_round(engine: VllmEngine, groups: Sequence[PromptGroup], in_progress: int, *, logprobs: bool) -> Round:
    """`AsyncLLM.generate` under a semaphore; final outputs only, and nothing is done with them.

    Prompts are rendered, as the actor's are: others pass through a thread.
    """
    from vllm.inputs import tokens_input

    slots = asyncio.Semaphore(in_progress)

    async def sample(group: PromptGroup, sampling: VllmSamplingParams, request_id: str) -> int:
        final = None
        async with slots:
            prompt = tokens_input(group.prompt_token_ids.tolist())
            async for output in engine.llm.generate(prompt, sampling, request_id):
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
    metrics: ActorMetrics | None = None,
) -> Round:
    """From the first prompt fetched to the last sequence stored and the last group acknowledged.

    The groups are on PROMPTS before the clock starts, and what was stored is read back after it has stopped: tokens are
    counted there. Raises `ServiceError` when a sequence failed or a group is still held.
    """
    position = (await bus.sequences_info()).last_position + 1
    num_sequences = sum(group.num_samples for group in groups)
    for group in groups:
        await bus.publish_prompt(encode_group(group), group.group_id)
    actor = Actor(engine, recipe, bus, verifier, num_sequences, metrics or ActorMetrics(CollectorRegistry()))
    done = await timed(actor.run)
    if len(actor.held):
        raise ServiceError(f"{len(actor.held)} groups are not acknowledged")
    return replace(done, tokens=await stored_tokens(bus, position, num_sequences))


class Actor:
    """The service's own parts, wired as it wires them, for `num_sequences` sequences."""

    def __init__(
        self, engine: VllmEngine, recipe: Recipe, bus: Bus, verifier: VerifierClient, num_sequences: int, metrics: ActorMetrics
    ) -> None:
        gate = ServingGate(recipe.algorithm.max_lag)
        gate.serve(VERSION)
        self.held = HeldGroups()
        self._left, self._stored = num_sequences, asyncio.Event()
        self._finisher = Finisher(
            bus,
            verifier,
            metrics,
            self._published,
            buffer_size=recipe.actor.publish_buffer,
            batch_size=recipe.actor.verify_batch,
        )
        most = recipe.actor.sequences_in_progress
        sampler = Sampler(
            engine, gate, instance="actor-0", max_context=recipe.model.max_context, places=most, metrics=metrics,
            keep=self.held.keep,
        )  # fmt: skip
        self._generation = GenerationLoop(
            bus, sampler, self._finisher, self.held, gate, metrics, instance="actor-0", samples_in_progress=most
        )

    async def run(self) -> int:
        """Until everything is stored. Returns 0: tokens are counted where they are stored."""
        async with asyncio.TaskGroup() as tasks:
            parts = (self._finisher.run(), self._generation.run(), self.held.keep_alive(KEEP_ALIVE_S))
            running = [tasks.create_task(part) for part in parts]
            await self._stored.wait()
            for task in running:
                task.cancel()
        return 0

    async def _published(self, group: PromptGroup, sample_index: int) -> None:
        await self.held.published(group, sample_index)
        self._left -= 1
        if self._left == 0:
            self._stored.set()


async def stored_tokens(bus: Bus, position: int, num_sequences: int) -> int:
    """Completion tokens of the `num_sequences` sequences from `position` on. Raises `ServiceError` for a failed one."""
    tokens = 0
    async with bus.read_sequences(position) as entries:
        for _ in range(num_sequences):
            sequence = decode_sequence((await anext(entries)).payload, expected_run=bus.run)
            if sequence.failure:
                raise ServiceError(f"sequence {sequence.sequence_id} failed: {sequence.failure}")
            tokens += sequence.num_completion_tokens
    return tokens


def renamed(groups: Sequence[PromptGroup], prefix: str) -> list[PromptGroup]:
    """The same groups under ids of their own: streams know a repeated id as the same message."""
    return [replace(group, group_id=f"{prefix}-{group.group_id}") for group in groups]
