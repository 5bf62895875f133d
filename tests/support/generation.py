"""A generation loop over an in-memory bus, an engine that does as it is told, and a verifier that can be away."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
from prometheus_client import CollectorRegistry

from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.errors import BusError, ServiceError
from pipelinerl.messages.sequences import (
    Branch,
    Completion,
    FinishReason,
    PartialSequence,
    PolicyVersion,
    SamplingParams,
    VersionSpan,
    decode_sequence,
    encode_group,
)
from pipelinerl.messages.sequences import Sequence as TrainedSequence
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_OK as OK
from pipelinerl.v1.verifier_pb2 import VerifyItem, VerifyResult
from services.actor.engine import EngineError, GenerationRequest
from services.actor.episodes.episode import Episode, Episodes
from services.actor.generation import Finisher, GenerationLoop, Sampler
from services.actor.hand_over import HeldGroups, hand_over
from services.actor.metrics import ActorMetrics
from services.actor.weight_sync.updates import ServingGate
from tests.support.memory_bus import MemoryBus, MemoryServer
from tests.unit.builders import RUN, make_group

STOP = FinishReason.STOP


def generated(*tokens: int, version: int = 0, finish: FinishReason | None = STOP) -> Completion:
    spans = (VersionSpan(version, 0, len(tokens)),) if tokens else ()
    return Completion(np.array(tokens, np.int32), np.full(len(tokens), -float(version), np.float32), spans, finish)


def partial(index: int, *tokens: int, version: int = 1, finish: FinishReason | None = None) -> PartialSequence:
    return PartialSequence(**vars(generated(*tokens, version=version, finish=finish)), sample_index=index)


GOOD = generated(7, 2)


def recorded(branches: Iterable[Branch] = ()) -> Episode:
    """An episode with the branches that another actor has recorded; it samples no turn itself."""
    limits: dict[str, Any] = {"max_turns": 100, "max_context": 10_000, "turn_timeout_s": 1.0}
    sample = AsyncMock(side_effect=AssertionError("no turn is sampled here"))
    return Episode(SamplingParams(), sample, ActorMetrics(CollectorRegistry()), lambda tokens: "", branches, **limits)


@dataclass
class Delivery:
    """A message of PROMPTS as far as groups in hand ask it."""

    position: int = 1
    payload: bytes = b""
    msg_id: str = ""
    num_deliveries: int = 1
    said: list[str] = field(default_factory=list)
    refuse: int = 0
    """Acknowledgements that do not get through."""

    async def ack(self) -> None:
        if self.refuse:
            self.refuse -= 1
            raise BusError("no connection")
        self.said.append("ack")

    async def in_progress(self) -> None:
        self.said.append("in progress")


@dataclass
class ScriptedEngine:
    """Answers with `answer(request)` once `open`, or with `so_far(request)` when it is aborted; counts what is under way."""

    answer: Callable[[GenerationRequest], Completion] = lambda request: GOOD
    so_far: Callable[[GenerationRequest], Completion] = lambda request: generated(7, 2, finish=None)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    alive: bool = True
    running: int = 0
    most_running: int = 0
    started: list[str] = field(default_factory=list)
    requests: dict[str, GenerationRequest] = field(default_factory=dict)
    salts: dict[str, str] = field(default_factory=dict)
    aborted: dict[str, asyncio.Event] = field(default_factory=dict)
    vocab_size: int = 100
    weights: None = None
    tokenizer: Any = None

    async def generate(self, request: GenerationRequest) -> Completion:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.started.append(request.request_id)
        self.requests[request.request_id], self.salts[request.request_id] = request, request.cache_salt()
        aborted = self.aborted[request.request_id] = asyncio.Event()
        waits = [asyncio.ensure_future(event.wait()) for event in (self.open, aborted)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return self.so_far(request) if aborted.is_set() else self.answer(request)
        finally:
            self.running -= 1
            for wait in waits:
                wait.cancel()

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.aborted[request_id].set()

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(str(int(token)) for token in token_ids)

    async def check_health(self) -> None:
        if not self.alive:
            raise EngineError("the engine process died")


@dataclass
class ScriptedVerifier:
    """Answers with `judge(item)` once `up`; a ServiceError is raised as the client would."""

    judge: Callable[[VerifyItem], VerifyResult] = lambda one: VerifyResult(sequence_id=one.sequence_id, status=OK, reward=1.0)
    up: asyncio.Event = field(default_factory=asyncio.Event)
    refuses: Callable[[VerifyItem], bool] = lambda item: False

    async def verify(self, items: Sequence[VerifyItem]) -> list[VerifyResult]:
        await self.up.wait()
        if any(self.refuses(item) for item in items):
            raise ServiceError("refused a batch")
        return [self.judge(item) for item in items]


@dataclass
class Stage:
    bus: MemoryBus
    server: MemoryServer
    engine: ScriptedEngine
    verifier: ScriptedVerifier
    sampler: Sampler
    loop: GenerationLoop
    gate: ServingGate
    held: HeldGroups
    metrics: ActorMetrics
    registry: CollectorRegistry
    running: asyncio.Task[None]

    async def issue(self, *numbers: int, **changes: object) -> None:
        for number in numbers:
            group = make_group(number, **changes)  # type: ignore[arg-type]
            await self.bus.publish_prompt(encode_group(group), group.group_id)

    async def generating(self, count: int) -> None:
        await self.until(lambda: self.engine.running == count)

    async def all_acknowledged(self, left: int = 0) -> None:
        """Everything in hand; `left`: messages that nobody has in hand."""
        await self.until(lambda: len(self.held) == 0)
        assert (await self.bus.prompts_info()).messages == left

    async def published(self, count: int) -> list[TrainedSequence]:
        async with asyncio.timeout(60), self.bus.read_sequences(1) as entries:
            return [decode_sequence((await anext(entries)).payload, expected_run=RUN) for _ in range(count)]

    async def leave(self, timeout_s: float = 60.0, store_within_s: float = 60.0) -> int:
        self.gate.drain()
        await self.sampler.interrupt(timeout_s)
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        return await hand_over(self.bus, self.held, self.metrics, instance="a", timeout_s=store_within_s)

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"pipelinerl_actor_{name}_total", labels) or 0.0

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0)


@asynccontextmanager
async def stage(
    *,
    in_progress: int = 4,
    buffer_size: int = 8,
    max_payload_bytes: int = 1024**2,
    serve: bool = True,
    server: MemoryServer | None = None,
    limits: StreamLimits | None = None,
    episodes: Callable[[ScriptedEngine, ActorMetrics], AbstractAsyncContextManager[Episodes]] | None = None,
    samples_in_progress: int | None = None,
) -> AsyncIterator[Stage]:
    server = server or MemoryServer(max_payload_bytes=max_payload_bytes)
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(MemoryBus(RUN, server=server, limits=limits or StreamLimits()))
        await bus.create_streams()
        engine, verifier = ScriptedEngine(), ScriptedVerifier()
        engine.open.set()
        verifier.up.set()
        registry = CollectorRegistry()
        metrics, held, gate = ActorMetrics(registry), HeldGroups(), ServingGate(max_lag=1)
        finisher = Finisher(bus, verifier, metrics, held.published, buffer_size=buffer_size, batch_size=4)  # type: ignore[arg-type]
        sampler = Sampler(
            engine,
            gate,
            instance="a",
            max_context=64,
            places=in_progress,
            episodes=await stack.enter_async_context(episodes(engine, metrics)) if episodes else None,
            metrics=metrics,
            keep=held.keep,
        )
        most = samples_in_progress or in_progress
        loop = GenerationLoop(bus, sampler, finisher, held, gate, metrics, instance="a", samples_in_progress=most)
        if serve:
            gate.serve(PolicyVersion(1, 0))

        async def run() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(finisher.run())
                tasks.create_task(loop.run())

        running = asyncio.create_task(run())
        try:
            yield Stage(bus, server, engine, verifier, sampler, loop, gate, held, metrics, registry, running)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError, ExceptionGroup):
                await running
