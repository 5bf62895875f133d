"""The real actor around a light engine: a small transformers model that samples with real log-probabilities.

Run as `python -m benchmarks.light_actor`, configured as `services.actor` is. Everything but vLLM is the product's: streams,
verifier, gRPC, HTTP, membership and weight transfer. The model computes every position anew at each step, so no cached key or
value ever belongs to another version. It knows temperature and what ends a completion.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.light_members import TensorReceiver
from pipelinerl.messages.sequences import Completion, FinishReason, Logprobs, PolicyVersion, TokenIds, VersionSpan
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.lifecycle import run_service
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import ActorSettings
from pipelinerl.transfer.manifest import Manifest, ManifestDiffers
from services.actor.app import serve
from services.actor.engine import EngineError, GenerationRequest, OnStep, before_stop
from services.actor.weight_sync.client import WeightLoading


@dataclass(eq=False)
class Running:
    """A request under way: its tokens so far, each with its log-probability and version."""

    request: GenerationRequest
    done: asyncio.Future[FinishReason | None]
    random: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)

    def generation(self, finish_reason: FinishReason | None) -> Completion:
        """What there is of it; a step that is under way may be about to add a token."""
        versions = self.versions.copy()
        spans, start = [], 0
        for version, run in groupby(versions):
            end = start + len(list(run))
            spans.append(VersionSpan(version.number, start, end, version.incarnation))
            start = end
        tokens, logprobs = self.tokens[:start], self.logprobs[:start]
        return Completion(np.array(tokens, np.int32), np.array(logprobs, np.float32), tuple(spans), finish_reason)


class LightEngine:
    """An `InferenceEngine`: one token for every request under way at each step."""

    def __init__(self, recipe: Recipe, model_dir: str, on_step: OnStep | None, bind_host: str | None) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, recipe.model.dtype)).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._max_context, self._on_step = recipe.model.max_context, on_step or (lambda seconds, used: None)
        self._random = torch.Generator().manual_seed(recipe.seed)
        self._running: dict[str, Running] = {}
        self._wake = asyncio.Event()
        self._model_lock = threading.Lock()
        self._is_asleep = False
        self.version = PolicyVersion(0, 0)
        self.vocab_size = int(self._model.config.vocab_size)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()}
        self.weights = ModelReceiver(self, bind_host or "127.0.0.1")

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            self._wake.clear()
            if self._is_asleep or not self._running:
                await self._wake.wait()
                continue
            started = time.monotonic()
            for one, finish_reason in await asyncio.to_thread(self._step, list(self._running.values())):
                if not one.done.done():
                    one.done.set_result(finish_reason)
            self._on_step(time.monotonic() - started, 0.0)

    @torch.no_grad()
    def _step(self, batch: list[Running]) -> list[tuple[Running, FinishReason]]:
        with self._model_lock:
            sequences = [[*one.request.prompt_token_ids.tolist(), *one.tokens] for one in batch]
            longest = max(map(len, sequences))
            padded = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in sequences])
            logits = self._model(input_ids=padded).logits  # causal: the padding behind a token does not reach it
            finished = []
            for row, one in enumerate(batch):
                self._sample(one, logits[row, len(sequences[row]) - 1].float())
                if reason := self._finish_reason(one):
                    finished.append((one, reason))
            return finished

    def _sample(self, one: Running, logits_V: torch.Tensor) -> None:
        temperature = one.request.sampling.temperature
        logprobs_V = torch.log_softmax(logits_V / (temperature or 1.0), dim=-1)
        token = logprobs_V.exp().multinomial(1, generator=one.random) if temperature else logprobs_V.argmax()
        one.tokens.append(int(token))
        one.logprobs.append(float(logprobs_V[int(token)]))
        one.versions.append(self.version)

    def _finish_reason(self, one: Running) -> FinishReason | None:
        sampling = one.request.sampling
        if one.tokens[-1] in (self.tokenizer.eos_token_id, *sampling.stop_token_ids):
            return FinishReason.STOP
        if sampling.stop and before_stop(text := self.decode(one.tokens), sampling.stop) != text:
            return FinishReason.STOP
        room = min(sampling.max_tokens, self._max_context - len(one.request.prompt_token_ids))
        return FinishReason.LENGTH if len(one.tokens) >= room else None

    def install(self, weights: dict[str, torch.Tensor], version: PolicyVersion) -> float:
        """Between two steps. Returns the stall in seconds."""
        with self._model_lock, torch.no_grad():
            started = time.monotonic()
            for name, parameter in self._model.named_parameters():
                if name in weights:
                    parameter.copy_(weights[name])
            self.version, self._is_asleep = version, False
            return time.monotonic() - started

    def sleep(self) -> None:
        """Until `install`, there are no weights to step with."""
        self._is_asleep = True
        with self._model_lock, torch.no_grad():
            for parameter in self._model.parameters():
                parameter.fill_(torch.nan)

    async def generate(self, request: GenerationRequest) -> Completion:
        if len(request.prompt_token_ids) >= self._max_context:
            raise EngineError(f"request {request.request_id}: the prompt fills the context")
        random = torch.Generator().manual_seed(request.seed % (1 << 63)) if request.seed else self._random
        one = Running(request, asyncio.get_running_loop().create_future(), random)
        self._running[request.request_id] = one
        self._admit(one)
        try:
            return one.generation(await one.done)
        finally:
            self._running.pop(request.request_id, None)

    def _admit(self, one: Running) -> None:
        self.wake()

    def wake(self) -> None:
        self._wake.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            one = self._running.pop(request_id, None)
            if one is not None and not one.done.done():
                one.done.set_result(None)

    def progress(self) -> dict[str, int]:
        return {request_id: len(one.versions) for request_id, one in self._running.items()}

    async def score(self, token_ids: TokenIds) -> Logprobs:
        return await asyncio.to_thread(self._score, torch.from_numpy(np.asarray(token_ids, np.int64)))

    @torch.no_grad()
    def _score(self, tokens: torch.Tensor) -> Logprobs:
        with self._model_lock:
            logprobs_TV = torch.log_softmax(self._model(input_ids=tokens[None]).logits[0, :-1].float(), dim=-1)
        return logprobs_TV.gather(1, tokens[1:, None])[:, 0].numpy()

    def decode(self, token_ids: Sequence[int] | TokenIds) -> str:
        return str(self.tokenizer.decode(np.asarray(token_ids).tolist(), skip_special_tokens=True))

    async def check_health(self) -> None:
        return


class ModelReceiver(TensorReceiver):
    """Swaps what it received into the engine's model. It knows no adapters."""

    def __init__(self, engine: LightEngine, address: str) -> None:
        super().__init__(address)
        self._engine = engine

    async def prepare(self, manifest: Manifest) -> WeightLoading:
        for spec in manifest.parameters:
            here = self._engine.shapes.get(spec.name)
            if here != tuple(spec.shape):
                raise ManifestDiffers(spec.name, "shape", here, tuple(spec.shape))
        return await super().prepare(manifest)

    async def commit(self, version: PolicyVersion) -> float:
        await super().commit(version)
        stall_s = await asyncio.to_thread(self._engine.install, self.weights, version)
        self._engine.wake()
        return stall_s

    async def sleep(self) -> None:
        await asyncio.to_thread(self._engine.sleep)

    async def wake(self) -> None:
        return


@asynccontextmanager
async def start_light_engine(
    recipe: Recipe,
    model: str,
    stop: asyncio.Event | None = None,
    *,
    on_step: OnStep | None = None,
    bind_host: str | None = None,
) -> AsyncIterator[LightEngine]:
    """Stands in for `services.actor.vllm_engine.start_engine`."""
    engine = await asyncio.to_thread(lambda: LightEngine(recipe, model, on_step, bind_host))
    stepping = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        stepping.cancel()
        await asyncio.wait([stepping])


async def run(settings: ActorSettings, stop: asyncio.Event, context: LogContext) -> None:
    torch.set_num_threads(1)
    await serve(settings, stop, context, start_light_engine)


if __name__ == "__main__":
    sys.exit(run_service(ActorSettings, "actor", run))
