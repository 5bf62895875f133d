"""ActorService over a real gRPC server, with an engine made for the test; asked by the trainer's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from pipelinerl.errors import MessageError, ServiceError
from pipelinerl.messages.sequences import PolicyVersion, SamplingParams, VersionSpan
from pipelinerl.service.grpc import serve_grpc
from pipelinerl.v1 import actor_pb2, actor_pb2_grpc
from services.actor.engine import EngineError, Generation, GenerationRequest
from services.actor.generation import ServingGate
from services.actor.metrics import ActorMetrics
from services.actor.server import MAX_PROMPTS, ActorService, read_prompts, read_tokens
from services.trainer.data.evaluation import ActorClient
from tests.support.generation import ScriptedEngine, generated

NAME = "pipelinerl.v1.ActorService"
VOCABULARY = 10
SAMPLING, SPANS = SamplingParams(max_tokens=4), (VersionSpan(3, 0, 1, 1),)


class Engine(ScriptedEngine):
    """Answers every prompt with its last token, once; refuses prompts that begin with 9."""

    async def generate(self, request: GenerationRequest) -> Generation:
        if request.prompt_token_ids[0] == 9:
            raise EngineError("refused")
        return replace(generated(0), completion_token_ids=request.prompt_token_ids[-1:], spans=SPANS)

    async def score(self, token_ids: Any) -> Any:
        return np.full(len(token_ids) - 1, -0.25, np.float32)


class Generating:
    """What the service asks of the generation loop."""

    def __init__(self) -> None:
        self.num_in_progress, self.done = 2, asyncio.Event()

    async def idle(self) -> None:
        await self.done.wait()


@asynccontextmanager
async def served(gate: ServingGate, generation: Generating | None = None) -> AsyncIterator[str]:
    updates = SimpleNamespace(serving=asyncio.Lock(), epoch=None)
    service = ActorService(
        "a",
        Engine(vocab_size=VOCABULARY),
        gate,
        generation or Generating(),
        updates,
        ActorMetrics(CollectorRegistry()),
        0.0,
        max_context=8,
    )  # type: ignore[arg-type]
    register = lambda server: actor_pb2_grpc.add_ActorServiceServicer_to_server(service, server)  # noqa: E731
    async with serve_grpc(register, [NAME], "127.0.0.1", 0, stop_grace_s=0.1) as server:
        yield f"127.0.0.1:{server.port}"


def serving(version: int = 3) -> ServingGate:
    gate = ServingGate(max_lag=1)
    gate.serve(PolicyVersion(1, version))
    return gate


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


async def test_completions_come_back_by_id_and_a_refused_prompt_costs_itself_only() -> None:
    async with served(serving()) as address, ActorClient("a", address) as client:
        prompts = {"good": tokens(1, 2, 7), "bad": tokens(9, 1)}
        answers = {c.problem_id: c async for c in client.generate(prompts, SAMPLING, seed=1, timeout_s=10)}
    assert (answers["good"].text, answers["good"].failure) == ("7", "")
    assert answers["good"].spans == SPANS
    assert answers["bad"].failure == "refused"


@pytest.mark.parametrize(("bad", "shown"), [(-1, "-1"), (VOCABULARY, "10")])
async def test_token_ids_outside_the_vocabulary_are_refused(bad: int, shown: str) -> None:
    async with served(serving()) as address, ActorClient("a", address) as client:
        with pytest.raises(
            ServiceError, match=rf"INVALID_ARGUMENT.*prompts\[p\].*token 1 is {shown}, allowed are 0 to 9"
        ):
            async for _ in client.generate({"p": tokens(1, bad)}, SAMPLING, seed=1, timeout_s=10):
                pass
        with pytest.raises(ServiceError, match=rf"INVALID_ARGUMENT.*ScoreRequest.token_ids: token 2 is {shown}"):
            await client.score(tokens(1, 2, bad), timeout_s=10)


async def test_score_names_its_version_and_needs_one() -> None:
    async with served(serving(5)) as address, ActorClient("a", address) as client:
        logprobs, version = await client.score(tokens(1, 2, 3), timeout_s=10)
        assert (logprobs.tolist(), version) == ([-0.25, -0.25], PolicyVersion(1, 5))
        for wrong in (tokens(1), tokens(*[1] * 8)):
            with pytest.raises(ServiceError, match=r"INVALID_ARGUMENT.*give 2 to 7"):
                await client.score(wrong, timeout_s=10)
    async with served(ServingGate(1)) as address, ActorClient("a", address) as client:
        with pytest.raises(ServiceError, match="FAILED_PRECONDITION"):
            await client.score(tokens(1, 2), timeout_s=10)


async def test_drain_says_what_is_left_when_its_time_is_over() -> None:
    gate, generation = serving(), Generating()
    async with served(gate, generation) as address, grpc.aio.insecure_channel(address) as channel:
        stub = actor_pb2_grpc.ActorServiceStub(channel)
        assert (await stub.Drain(actor_pb2.DrainRequest(timeout_s=0.05))).sequences_left == 2
        assert not gate.is_open
        generation.num_in_progress = 0
        generation.done.set()
        assert (await stub.Drain(actor_pb2.DrainRequest(timeout_s=5))).sequences_left == 0
        state = await stub.GetState(actor_pb2.GetStateRequest())
        assert (state.phase, state.policy_version) == (actor_pb2.ACTOR_PHASE_DRAINING, 3)


def test_a_request_that_is_too_long_or_holds_no_tokens_is_refused_whole() -> None:
    request = actor_pb2.GenerateRequest(prompts=[actor_pb2.GeneratePrompt(id="p")] * (MAX_PROMPTS + 1))
    with pytest.raises(MessageError, match=r"prompts: 100001 given, 100000 allowed"):
        read_prompts(request, VOCABULARY)
    with pytest.raises(MessageError, match=r"K\.f: 3 bytes"):
        read_tokens(b"abc", VOCABULARY, "K", "f")
