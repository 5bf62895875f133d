"""The real actor around virtual accelerators: a tiny policy is sampled for real, and each decode step takes its modelled time.

Run as `python -m benchmarks.virtual_actor PROFILE FILE`, configured as `services.actor` is; FILE tells at the end how well this
machine kept pace. One process stands for all generating accelerators. Each has its own decode steps, the time of which
depends on how many sequences it has in progress; a new sequence goes to the one with the fewest. KV caches are real, and
stay when new weights come in.

How long a completion gets is drawn from the profile's lengths, and it ends there: the policy has no end token, so every token
is sampled from its whole distribution. Prompts are one token, so that there is no prefill.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.light_actor import LightEngine, ModelReceiver, Running
from benchmarks.virtual_profile import Pace, Profile, arguments
from pipelinerl.messages.sequences import Completion, FinishReason, PolicyVersion
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.lifecycle import run_service
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import ActorSettings
from services.actor.app import serve
from services.actor.engine import EngineError, GenerationRequest, OnStep
from services.actor.weight_sync.client import StagedWeights

ADMISSION = 0.2
"""Share of a decode step in which a sequence may still join it: what is sampled is real work of a later part."""
SPARE_ROWS = 8
SWITCH_S = 0.5e-3
"""Decode steps, on other threads, leave the interpreter to the event loop after that: prompts come in meanwhile."""


class RowCache(DynamicCache):
    """Keys and values of R rows, each at a position of its own, for up to T tokens."""

    def __init__(self, num_rows: int, num_tokens: int) -> None:
        super().__init__()
        self.at_R = torch.zeros(num_rows, dtype=torch.long)
        """Position of each row's next token."""
        self._num_tokens, self._rows = num_tokens, torch.arange(num_rows)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def next_probabilities(self, model: Any, tokens_R1: Tensor) -> Tensor:
        """[R, vocabulary], after one more token of each row."""
        visible_RT = torch.arange(self._num_tokens) <= self.at_R[:, None]
        logits = model(
            input_ids=tokens_R1, position_ids=self.at_R[:, None], attention_mask=visible_RT[:, None, None], past_key_values=self
        ).logits
        self.at_R = (self.at_R + 1).clamp(max=self._num_tokens - 1)  # rows without a sequence go on and on
        return torch.softmax(logits[:, 0].float(), dim=-1)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object) -> tuple[Tensor, Tensor]:
        rows, heads, _, width = key_states.shape
        if layer_idx not in self._kept:
            empty = torch.zeros(rows, heads, self._num_tokens, width, dtype=key_states.dtype)
            self._kept[layer_idx] = empty, empty.clone()
        keys, values = self._kept[layer_idx]
        keys[self._rows, :, self.at_R] = key_states[:, :, 0]
        values[self._rows, :, self.at_R] = value_states[:, :, 0]
        return keys, values


class Accelerator:
    """Sequences in rows of one cache. `lengths`: of the completions of the rows."""

    def __init__(self, num_rows: int, num_tokens: int) -> None:
        self.cache = RowCache(num_rows, num_tokens)
        self.last_R1 = torch.zeros(num_rows, 1, dtype=torch.long)
        """The token that each row goes on from."""
        self.rows: dict[int, Running] = {}
        self.lengths: dict[int, int] = {}
        self.free = list(range(num_rows))
        self.joining: list[tuple[Running, int]] = []
        self.joined = asyncio.Event()

    @property
    def num_sequences(self) -> int:
        return len(self.rows) + len(self.joining)

    def admit(self, one: Running, length: int) -> None:
        """To take part in the next decode step."""
        self.joining.append((one, length))
        self.joined.set()

    def change(self) -> None:
        """Between two decode steps: those that have ended leave their rows, and others join."""
        for row in [row for row, one in self.rows.items() if one.done.done()]:
            del self.rows[row], self.lengths[row]
            self.free.append(row)
        while self.joining and self.free:
            one, length = self.joining.pop(0)
            row = self.free.pop()
            self.rows[row], self.lengths[row] = one, length
            self.cache.at_R[row] = 0
            self.last_R1[row] = int(one.request.prompt_token_ids[0])


class VirtualEngine(LightEngine):
    """An `InferenceEngine` of `profile.accelerators` virtual accelerators."""

    def __init__(self, profile: Profile, recipe: Recipe, model_dir: str, on_step: OnStep | None, bind_host: str | None) -> None:
        super().__init__(recipe, model_dir, on_step, bind_host)
        self.pace, self._profile, self._curve = Pace(), profile, profile.curve
        self._lengths, self._random_lengths = profile.completions, np.random.default_rng(recipe.seed)
        self._drawn: list[int] = []
        num_rows = -(-recipe.actor.sequences_in_progress // profile.accelerators) + SPARE_ROWS
        self._accelerators = [Accelerator(num_rows, recipe.model.max_context) for _ in range(profile.accelerators)]
        self.weights = PacedReceiver(self, bind_host or "127.0.0.1", profile.transfer * profile.flash_s)

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for accelerator in self._accelerators:
                tasks.create_task(self._decode(accelerator))

    async def _decode(self, accelerator: Accelerator) -> None:
        """The decode steps of one accelerator, each at least as long as the profile says for what is in progress."""
        flash_s, at_s = self._profile.flash_s, 0.0
        shortest_s = float(self._curve.step_time(1)) * flash_s
        while True:
            accelerator.change()
            if not accelerator.num_sequences:
                accelerator.joined.clear()
                await accelerator.joined.wait()
                at_s = time.monotonic()
            await asyncio.sleep(at_s + ADMISSION * shortest_s - time.monotonic())
            accelerator.change()
            in_progress = len(accelerator.rows)
            finished = await asyncio.to_thread(self._next_tokens, accelerator)
            at_s = self.pace.due_s(at_s, float(self._curve.step_time(in_progress)) * flash_s)
            await asyncio.sleep(at_s - time.monotonic())
            for one in finished:
                if not one.done.done():
                    one.done.set_result(FinishReason.LENGTH)

    @torch.no_grad()
    def _next_tokens(self, accelerator: Accelerator) -> list[Running]:
        """Samples a token for every row, the empty ones included; returns those that are finished with it."""
        with self._model_lock:
            rows = list(accelerator.rows.items())
            probabilities_RV = accelerator.cache.next_probabilities(self._model, accelerator.last_R1)
            tokens_R1 = probabilities_RV.multinomial(1, generator=self._random)
            sampled = tokens_R1[:, 0].tolist()
            logprobs = probabilities_RV.gather(1, tokens_R1)[:, 0].log().tolist()
            for row, one in rows:
                one.tokens.append(sampled[row])
                one.logprobs.append(logprobs[row])
                one.versions.append(self.version)
            accelerator.last_R1 = tokens_R1
            return [one for row, one in rows if len(one.tokens) >= accelerator.lengths[row]]

    async def generate(self, request: GenerationRequest) -> Completion:
        if len(request.prompt_token_ids) != 1:
            raise EngineError(f"request {request.request_id}: virtual accelerators take prompts of one token")
        return await super().generate(request)

    def _admit(self, one: Running) -> None:
        is_heldout = one.request.request_id.startswith("eval-")  # not what is modelled: over after a step
        length = 1 if is_heldout else self._next_length()
        min(self._accelerators, key=lambda accelerator: accelerator.num_sequences).admit(one, length)

    def _next_length(self) -> int:
        if not self._drawn:
            self._drawn = self._lengths.sample(self._random_lengths, 1000).tolist()
        return self._drawn.pop()


class PacedReceiver(ModelReceiver):
    def __init__(self, engine: LightEngine, address: str, transfer_s: float) -> None:
        super().__init__(engine, address)
        self._transfer_s = transfer_s

    async def receive(self, version: PolicyVersion, deadline_s: float, file: Path | None = None) -> StagedWeights:
        began_s = time.monotonic()
        staged = await super().receive(version, deadline_s, file)
        await asyncio.sleep(began_s + self._transfer_s - time.monotonic())
        return staged


@asynccontextmanager
async def start_virtual_engine(
    profile: Profile,
    file: Path,
    recipe: Recipe,
    model: str,
    stop: asyncio.Event | None = None,
    *,
    on_step: OnStep | None = None,
    bind_host: str | None = None,
) -> AsyncIterator[VirtualEngine]:
    engine = await asyncio.to_thread(lambda: VirtualEngine(profile, recipe, model, on_step, bind_host))
    stepping = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        engine.pace.write(file)
        stepping.cancel()
        await asyncio.wait([stepping])


async def run(settings: ActorSettings, stop: asyncio.Event, context: LogContext) -> None:
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_S)
    await serve(settings, stop, context, partial(start_virtual_engine, *arguments(sys.argv)))


if __name__ == "__main__":
    sys.exit(run_service(ActorSettings, "actor", run))
