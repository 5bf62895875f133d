"""The actor's parts together over an in-memory bus: the order of its stop, and how its errors end it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from pipelinerl.bus.jetstream import connect
from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.local.nats import NatsServer
from pipelinerl.messages.sequences import PolicyVersion, SamplingParams, decode_group, encode_group
from pipelinerl.service.lifecycle import Readiness, StartStopped
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import ActorSettings
from services.actor import app
from services.actor.engine import EngineError, GenerationRequest
from services.actor.metrics import ActorMetrics
from tests.support.generation import ScriptedEngine, ScriptedVerifier
from tests.support.memory_bus import MemoryBus, MemoryServer
from tests.unit.builders import RUN, make_group, make_recipe

SAMPLING, CONTEXT = SamplingParams(), LogContext(RUN, "actor", "a")


@dataclass
class Running:
    actor: app.Actor
    bus: MemoryBus
    engine: ScriptedEngine
    verifier: ScriptedVerifier
    readiness: Readiness
    stop: asyncio.Event
    task: asyncio.Task[None]
    registry: CollectorRegistry

    async def until(self, condition: object) -> None:
        async with asyncio.timeout(10):
            while not condition():  # type: ignore[operator]
                await asyncio.sleep(0.001)

    async def num_stored(self) -> int:
        return (await self.bus.sequences_info()).messages


def settings() -> ActorSettings:
    return ActorSettings(run=RUN, recipe=Path("recipe.yaml"), instance="a", verifier="127.0.0.1:1")


@asynccontextmanager
async def running() -> AsyncIterator[Running]:
    async with MemoryBus(RUN, server=MemoryServer(), limits=StreamLimits(member_ttl_s=0.3)) as bus:
        await bus.create_streams()
        engine, verifier, stop, readiness = ScriptedEngine(), ScriptedVerifier(), asyncio.Event(), Readiness()
        engine.open.set()
        registry = CollectorRegistry()
        actor = app.Actor(settings(), make_recipe(), engine, bus, verifier, ActorMetrics(registry), CONTEXT, stop)  # type: ignore[arg-type]
        task = asyncio.create_task(actor.run("a:1", readiness))
        actor._gate.serve(PolicyVersion(1, 0))
        try:
            yield Running(actor, bus, engine, verifier, readiness, stop, task, registry)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def members(bus: MemoryBus) -> bool:
    return bool(bus.server.streams and bus.server.streams.expiries_s)


async def issue(bus: MemoryBus, number: int) -> None:
    group = make_group(number)
    await bus.publish_prompt(encode_group(group), group.group_id)


async def test_a_stop_stores_what_is_finished_takes_nothing_new_and_leaves_first() -> None:
    async with running() as one:
        one.verifier.up.clear()
        await issue(one.bus, 0)
        await one.until(lambda: len(one.engine.started) == 2 and one.actor._generation.num_in_progress == 0)
        assert await one.num_stored() == 0
        of = one.registry.get_sample_value
        names = ("policy_version", "ready", "prompts_held_groups", "sequences_in_progress_max")
        assert [of(f"pipelinerl_actor_{name}") for name in names] == [0, 1, 1, 64]
        assert of("pipelinerl_actor_staging_state", {"state": "idle"}) == 1
        one.stop.set()
        await one.until(lambda: not members(one.bus))
        assert one.readiness.reason == "draining"
        assert not one.task.done()
        await issue(one.bus, 1)
        one.verifier.up.set()
        async with asyncio.timeout(2):
            await one.task
        assert len(one.engine.started) == await one.num_stored() == 2
        assert list(await one.bus.pending_prompts()) == ["g00000001"]
        assert of("pipelinerl_actor_ready") == 0


async def test_a_stop_does_not_wait_for_ever_for_the_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "DRAIN_S", 0.1)
    async with running() as one:
        one.verifier.up.clear()
        await issue(one.bus, 0)
        await one.until(lambda: len(one.engine.started) == 2)
        one.stop.set()
        async with asyncio.timeout(2):
            await one.task
        (msg_id,) = await one.bus.pending_prompts()  # another actor's
        assert msg_id.startswith("g00000000/a-")


async def test_a_stop_in_the_middle_of_generation_hands_over_and_leaves_evaluation_alone() -> None:
    async with running() as one:
        one.engine.open.clear()
        held_out = asyncio.create_task(one.engine.generate(GenerationRequest("eval-1", np.ones(1, np.int32), SAMPLING)))
        await issue(one.bus, 0)
        await one.until(lambda: one.engine.running == 3)
        one.stop.set()
        async with asyncio.timeout(2):
            await one.task
        delivery = await one.bus.next_prompt(1.0)
        assert delivery is not None
        partials = decode_group(delivery.payload).partials
        assert [(p.sample_index, p.completion_token_ids.tolist()) for p in partials] == [(0, [7, 2]), (1, [7, 2])]
        assert not members(one.bus)
        assert (await one.bus.prompts_info()).messages == 1
        assert not held_out.done()
        held_out.cancel()


async def test_a_dead_engine_ends_the_actor_and_its_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "HEALTH_CHECK_S", 0.01)
    async with running() as one:
        await one.until(lambda: members(one.bus))
        one.engine.alive = False
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.timeout(5):
                await one.task
        assert raised.group_contains(EngineError)
        assert not members(one.bus)


async def test_a_stop_before_the_engine_is_up_is_an_ordinary_end(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def start_engine(*_: object, **more: object) -> AsyncIterator[None]:
        raise StartStopped("stopped before the engine was up")
        yield

    monkeypatch.setattr(app, "load_recipe", lambda _: make_recipe())
    await app.serve(settings(), asyncio.Event(), CONTEXT, start_engine)


@asynccontextmanager
async def scripted_engine(*_: object, **more: object) -> AsyncIterator[ScriptedEngine]:
    yield ScriptedEngine()


@asynccontextmanager
async def waiting_for_nats(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, **changes: object
) -> AsyncIterator[asyncio.Event]:
    """An actor that has tried in vain to reach NATS, 0.2 s at a time; it has to end in the block, where its stop can be set."""
    monkeypatch.setattr(app, "load_recipe", lambda _: make_recipe())
    monkeypatch.setattr(app, "connect", lambda *a, **k: connect(*a, **k | {"connect_timeout_s": 0.2}))
    stop = asyncio.Event()
    actor = asyncio.create_task(app.serve(settings().model_copy(update=changes), stop, CONTEXT, scripted_engine))
    async with asyncio.timeout(30):
        while "cannot connect, trying again: cannot connect to NATS" not in caplog.text:
            await asyncio.sleep(0.01)
        yield stop
        await actor


async def test_an_actor_that_is_up_before_nats_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    address_file = tmp_path / "address.json"
    with NatsServer(tmp_path / "nats") as nats:
        url = nats.url
    nats.port = int(url.rpartition(":")[2])
    async with (
        waiting_for_nats(monkeypatch, caplog, nats_url=url, address_file=address_file) as stop,
        nats,
    ):
        while not address_file.exists():
            await asyncio.sleep(0.01)
        stop.set()


async def test_a_stop_is_heard_while_an_actor_waits_for_nats(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with waiting_for_nats(monkeypatch, caplog, nats_url="nats://127.0.0.1:1") as stop:
        stop.set()
