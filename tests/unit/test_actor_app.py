"""The actor's parts together over an in-memory bus: the order of its stop, how its errors end it, what it answers over gRPC.
Its engine is built on a thread: the loop goes on, and a stop ends what was begun.
"""

import asyncio
import multiprocessing
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, call

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from benchmarks.nats_server import NatsServer
from pipelinerl.bus import jetstream
from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.errors import FieldError, ServiceError, TransferError
from pipelinerl.messages.control import decode_control
from pipelinerl.messages.sequences import (
    Completion,
    PolicyVersion,
    PromptGroup,
    SamplingParams,
    Sequence,
    VersionSpan,
    decode_group,
    decode_sequence,
    encode_group,
)
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.rl.groups import EVALUATION_SLOTS
from pipelinerl.service.grpc import serve_grpc
from pipelinerl.service.lifecycle import Readiness, StartStopped
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import ActorSettings
from pipelinerl.v1 import actor_pb2, actor_pb2_grpc
from pipelinerl.v1.control_pb2 import Registration
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_OK, VERIFY_STATUS_TIMEOUT, VerifyResult
from services.actor import app, vllm_engine
from services.actor.engine import EngineError, GenerationRequest
from services.actor.metrics import ActorMetrics
from services.actor.vllm_engine import build_llm, build_off_loop, engine_arguments, use_known_model_infos
from services.actor.weight_sync.client import CommitFailed, WeightUpdateClient
from services.trainer.data.evaluation import calls_to
from tests.support.generation import ScriptedEngine, ScriptedVerifier, generated
from tests.support.machine import held_port, until
from tests.support.memory_bus import MemoryBus
from tests.unit.builders import RUN, make_group, make_recipe, write_weights

SAMPLING, CONTEXT = SamplingParams(max_tokens=4), LogContext(RUN, "actor", "a")
SPANS = (VersionSpan(3, 0, 1, 1),)


@dataclass
class Running:
    actor: app.Actor
    bus: MemoryBus
    engine: ScriptedEngine
    verifier: ScriptedVerifier
    readiness: Readiness
    stop: asyncio.Event
    task: asyncio.Task[None]

    async def num_stored(self) -> int:
        return (await self.bus.sequences_info()).messages


def settings() -> ActorSettings:
    return ActorSettings(run=RUN, recipe=Path("recipe.yaml"), instance="a", verifier="127.0.0.1:1")


@asynccontextmanager
async def running(engine: ScriptedEngine | None = None, version: int | None = 0) -> AsyncIterator[Running]:
    async with MemoryBus(RUN, limits=StreamLimits(member_ttl_s=0.3)) as bus:
        engine, verifier, stop, readiness = engine or ScriptedEngine(), ScriptedVerifier(), asyncio.Event(), Readiness()
        engine.open.set()
        metrics = ActorMetrics(CollectorRegistry())
        actor = app.Actor(settings(), make_recipe(), engine, bus, verifier, metrics, CONTEXT, stop)  # type: ignore[arg-type]
        task = asyncio.create_task(actor.run("a:1", readiness))
        if version is not None:
            actor.gate.serve(PolicyVersion(1, version))
        try:
            yield Running(actor, bus, engine, verifier, readiness, stop, task)
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
        await until(lambda: len(one.engine.started) == 2 and one.actor.metrics.busy.running == 0)
        assert await one.num_stored() == 0
        one.stop.set()
        await until(lambda: not members(one.bus))
        assert one.readiness.reason == "draining"
        assert not one.task.done()
        await issue(one.bus, 1)
        one.verifier.up.set()
        async with asyncio.timeout(60):
            await one.task
        assert len(one.engine.started) == await one.num_stored() == 2
        assert list(await one.bus.pending_prompts()) == ["g00000001"]


async def test_a_stop_does_not_wait_for_ever_for_the_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "DRAIN_S", 0.1)
    async with running() as one:
        one.verifier.up.clear()
        await issue(one.bus, 0)
        await until(lambda: len(one.engine.started) == 2)
        one.stop.set()
        async with asyncio.timeout(60):
            await one.task
        (msg_id,) = await one.bus.pending_prompts()  # another actor's
        assert msg_id.startswith("g00000000/a-")


async def test_a_stop_in_the_middle_of_generation_hands_over_and_leaves_evaluation_alone() -> None:
    async with running() as one:
        one.engine.open.clear()
        held_out = asyncio.create_task(one.engine.generate(GenerationRequest("eval-1", np.ones(1, np.int32), SAMPLING)))
        await issue(one.bus, 0)
        await until(lambda: one.engine.running == 3)
        one.stop.set()
        async with asyncio.timeout(60):
            await one.task
        delivery = await one.bus.next_prompt(1.0)
        partials = decode_group(delivery.payload).partials
        assert [(p.sample_index, p.completion_token_ids.tolist()) for p in partials] == [(0, [7, 2]), (1, [7, 2])]
        assert not members(one.bus)
        assert (await one.bus.prompts_info()).messages == 1
        assert not held_out.done()
        held_out.cancel()


async def test_a_dead_engine_ends_the_actor_and_its_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "HEALTH_CHECK_S", 0.01)
    async with running() as one:
        await until(lambda: members(one.bus))
        one.engine.alive = False
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.timeout(60):
                await one.task
        assert raised.group_contains(EngineError)
        assert not members(one.bus)


@pytest.mark.parametrize("reachable", [True, False])
async def test_an_actor_registers_while_its_engine_starts_and_when_it_can_be_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    up = asyncio.Event()

    @asynccontextmanager
    async def start_engine(*_: object, **more: object) -> AsyncIterator[ScriptedEngine]:
        await up.wait()
        yield ScriptedEngine()

    monkeypatch.setattr(app, "load_recipe", lambda _: make_recipe(weights={"backend": "log"}))
    with NatsServer(tmp_path / "nats") as nats:
        async with jetstream.connect(nats.url, RUN) as bus, asyncio.timeout(60):
            await bus.create_streams()
            stop = asyncio.Event()
            own = settings().model_copy(update={"nats_url": nats.url, "reachable": reachable})
            actor = asyncio.create_task(app.serve(own, stop, CONTEXT, start_engine))
            heard: dict[tuple[str, str], None] = {}  # in order; the heartbeat may repeat one
            async with bus.watch_members() as events:
                async for event in events:
                    said = decode_control(event.payload, Registration)
                    heard[said.phase, said.grpc_address.partition(":")[0]] = None
                    up.set()
                    if len(heard) == 2:
                        break
            stop.set()
            await actor
    called = "127.0.0.1" if reachable else ""
    assert [*heard] == [("starting", "-"), ("starting", called)], "while vLLM starts, and before a manifest comes"
    if not reachable:
        monkeypatch.setattr(app, "load_recipe", lambda _: make_recipe())
        with pytest.raises(FieldError, match=r"weights\.backend = 'auto': needs connections to this actor; use log here"):
            await app.serve(own, stop, CONTEXT, start_engine)


@pytest.mark.parametrize("nats_comes", [True, False])
async def test_an_actor_that_is_up_before_nats_waits_for_it_or_for_its_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, nats_comes: bool
) -> None:
    monkeypatch.setattr(app, "load_recipe", lambda _: make_recipe())
    monkeypatch.setattr(jetstream, "CONNECT_TIMEOUT_S", 0.2)
    stop, address_file = asyncio.Event(), tmp_path / "address.json"
    start = lambda *_, **__: nullcontext(ScriptedEngine())  # noqa: E731
    with held_port() as port:
        own = settings().model_copy(update={"nats_url": f"nats://127.0.0.1:{port}", "address_file": address_file})
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(app.serve(own, stop, CONTEXT, start))
            while "cannot connect, trying again: cannot connect to NATS" not in caplog.text:
                await asyncio.sleep(0.01)
            with NatsServer(tmp_path / "nats", port) if nats_comes else nullcontext():
                while nats_comes and not address_file.exists():
                    await asyncio.sleep(0.01)
                stop.set()


# What it answers over gRPC, asked by the trainer's own client.


class Engine(ScriptedEngine):
    """Answers every prompt with its last token, once; refuses prompts that begin with 9."""

    def __init__(self) -> None:
        super().__init__(vocab_size=10)
        self.seeds: list[int | None] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        self.seeds.append(request.seed)
        if request.prompt_token_ids[0] == 9:
            raise EngineError("refused")
        return replace(generated(0), completion_token_ids=request.prompt_token_ids[-1:], spans=SPANS)

    async def score(self, token_ids: Any) -> Any:
        return np.full(len(token_ids) - 1, -0.25, np.float32)


@asynccontextmanager
async def answering(version: int | None = 3, engine: ScriptedEngine | None = None) -> AsyncIterator[tuple[Running, str]]:
    async with running(engine or Engine(), version) as one:
        register = lambda server: actor_pb2_grpc.add_ActorServiceServicer_to_server(one.actor, server)  # noqa: E731
        async with serve_grpc(register, [app.SERVICE], "127.0.0.1", 0, stop_grace_s=0.1) as port:
            yield one, f"127.0.0.1:{port}"


async def answers(address: str, *groups: PromptGroup) -> dict[str, Sequence]:
    request = actor_pb2.GenerateRequest(groups=map(encode_group, groups))
    async with calls_to("a", address) as stub:
        found = [decode_sequence(result.sequence, expected_run=RUN) async for result in stub.Generate(request, timeout=60)]
    return {sequence.sequence_id: sequence for sequence in found}


async def scores(address: str, *ids: int) -> actor_pb2.ScoreResponse:
    async with calls_to("a", address) as stub:
        return await stub.Score(actor_pb2.ScoreRequest(token_ids=np.array(ids, np.int32).tobytes()), timeout=60)


async def test_held_out_prompts_enter_the_engine_gradually_and_leave_training_its_places() -> None:
    groups = [make_group(number, num_samples=1) for number in range(EVALUATION_SLOTS + 20)]
    async with answering(engine=ScriptedEngine()) as (one, address):
        one.verifier.up.set()
        one.engine.open.clear()
        evaluating = asyncio.create_task(answers(address, *groups))
        await until(lambda: one.engine.running >= EVALUATION_SLOTS)
        await issue(one.bus, 1000)
        await until(lambda: one.actor.metrics.busy.running == 2)
        one.engine.open.set()
        assert len(await evaluating) == EVALUATION_SLOTS + 20
    assert one.engine.most_running == EVALUATION_SLOTS + 2


async def test_held_out_answers_come_back_scored_and_a_refused_prompt_costs_itself_only() -> None:
    engine, prompts = Engine(), {0: (1, 2, 7), 1: (9, 1), 2: (1,) * 64, 3: (1, 2, 7), 4: (1, 8)}
    groups = [
        make_group(number, prompt=prompt, seed=number, num_samples=1 + (not number)) for number, prompt in prompts.items()
    ]
    async with answering(engine=engine) as (one, address):
        one.verifier.up.set()
        one.verifier.judge = lambda item: VerifyResult(
            sequence_id=item.sequence_id,
            status=VERIFY_STATUS_TIMEOUT if item.completion_text == "8" else VERIFY_STATUS_OK,
            reward=0.5,
        )
        found = await answers(address, *groups)
        assert await one.num_stored() == 0, "they are not for training"
    failures = {sequence_id.lstrip("g0"): sequence.failure for sequence_id, sequence in found.items()}
    too_long = "prompt_too_long: 64 tokens leave no room in model.max_context (64)"
    refused = {"1.0": "engine: refused", "2.0": too_long, "4.0": "reward_timeout: "}
    assert failures == dict.fromkeys((".0", ".1", "3.0"), "") | refused
    good = found["g00000000.1"]
    assert (good.completion_text, good.reward, good.spans) == ("7", 0.5, SPANS)
    assert engine.seeds[:2] == [None, None]
    assert len({*engine.seeds}) == 4, "groups have seeds of their own"


async def test_a_held_out_prompt_is_answered_also_while_the_engine_dies() -> None:
    engine = Engine()
    async with answering(engine=engine) as (_, address):
        engine.alive = False
        (answer,) = (await answers(address, make_group(prompt=(9,), num_samples=1))).values()
    assert answer.failure == "engine: the engine process died"


async def test_token_ids_outside_the_vocabulary_are_refused() -> None:
    async with answering() as (_, address):
        with pytest.raises(ServiceError, match=r"INVALID_ARGUMENT.*token_ids: token 1 has the id 10; give ids from 0 to 9"):
            await answers(address, make_group(prompt=(1, 10)))
        for bad in (-1, 10):
            with pytest.raises(ServiceError, match=rf"INVALID_ARGUMENT.*ScoreRequest.token_ids: token 2 has the id {bad}"):
                await scores(address, 1, 2, bad)
        with pytest.raises(ServiceError, match=r"INVALID_ARGUMENT.*PromptGroup.run"):
            await answers(address, make_group(run="another"))


async def test_score_names_its_version_and_needs_one() -> None:
    async with answering(5) as (_, address):
        answer = await scores(address, 1, 2, 3)
        assert np.frombuffer(answer.logprobs, np.float32).tolist() == [-0.25, -0.25]
        assert (answer.incarnation, answer.policy_version) == (1, 5)
        for num_tokens in (1, 64):
            with pytest.raises(ServiceError, match=r"INVALID_ARGUMENT.*give 2 to 63"):
                await scores(address, *[1] * num_tokens)
    async with answering(None) as (_, address):
        with pytest.raises(ServiceError, match="FAILED_PRECONDITION"):
            await scores(address, 1, 2)


async def test_the_state_is_answered_also_while_it_drains() -> None:
    async with answering(3, ScriptedEngine()) as (one, address), grpc.aio.insecure_channel(address) as channel:
        stub = actor_pb2_grpc.ActorServiceStub(channel)
        one.engine.open.clear()
        await issue(one.bus, 0)
        await until(lambda: one.engine.running == 2)
        assert (await stub.GetState(actor_pb2.GetStateRequest())).sequences_in_progress == 2
        one.actor.gate.drain()
        one.engine.open.set()
        await until(lambda: one.actor.metrics.busy.running == 0)
        state = await stub.GetState(actor_pb2.GetStateRequest())
        assert (state.phase, state.policy_version) == (actor_pb2.ACTOR_PHASE_DRAINING, 3)
        assert (state.instance, state.sequences_finished, state.generated_tokens) == ("a", 2, 4)


# How its engine starts


async def test_the_loop_goes_on_meanwhile_and_hears_of_a_failure() -> None:
    go = threading.Event()
    asyncio.get_running_loop().call_later(0.05, go.set)
    assert await build_off_loop(lambda: go.wait(60), asyncio.Event()) is True
    with pytest.raises(RuntimeError, match="no such model"):
        await build_off_loop(MagicMock(side_effect=RuntimeError("no such model")), asyncio.Event())


@pytest.mark.parametrize("fails_then", [True, False])
async def test_a_stop_ends_the_children_and_waits_for_the_thread(fails_then: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was built in spite of it is not lost."""
    stop, child_ends, ended = asyncio.Event(), threading.Event(), []
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [SimpleNamespace(terminate=child_ends.set)])

    def build() -> int:
        child_ends.wait(60)
        ended.append(True)
        if fails_then:
            raise RuntimeError("engine core initialization failed")
        return 7

    asyncio.get_running_loop().call_later(0.05, stop.set)
    async with asyncio.timeout(60):
        with pytest.raises(StartStopped) if fails_then else nullcontext():
            assert await build_off_loop(build, stop) == 7
    assert ended == [True]


@pytest.mark.parametrize(
    ("model", "override"),
    [
        ({"dtype": "float32"}, None),
        ({"dtype": "bfloat16"}, {"head_dtype": "float32"}),
        ({"dtype": "bfloat16", "head_dtype": "model"}, None),
    ],
)
def test_an_engine_in_sixteen_bits_computes_logits_in_float32(model: dict[str, str], override: object) -> None:
    recipe = make_recipe(model={"source": "path", "name": "nowhere", "max_context": 64, **model})
    assert engine_arguments(recipe, "nowhere", gpu_gib=80.0).get("hf_overrides") == override


@pytest.mark.parametrize(
    ("parameters", "overrides", "share", "warned"),
    [
        (494_032_768, (), 0.9, False),
        # 14.16 GiB of weights and 2 for receiving: 1 - 16.16 / 80 = 0.798.
        (7_600_000_000, (), 0.79, False),
        (7_600_000_000, ("trainer.lora.rank=16",), 0.9, False),
        # Two instances of 37.3 GiB and 5 do not fit 80 GiB, so that updates are loaded while the engine is paused.
        (20_000_000_000, (), 0.9, True),
        (7_600_000_000, ("actor.engine.quantization=fp8",), 0.9, False),
        (0, (), 0.9, False),
    ],
)
def test_a_share_that_no_placement_has_set_leaves_room_for_weight_updates(
    parameters: int,
    overrides: tuple[str, ...],
    share: float,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(vllm_engine, "hub_parameters", lambda _: parameters)
    recipe = load_recipe("gsm8k", ["actor.engine.gpu_memory_utilization=auto", "trainer.learning_rate=1e-5", *overrides])
    assert engine_arguments(recipe, "a/model", gpu_gib=80.0)["gpu_memory_utilization"] == share
    assert ("too little GPU memory" in caplog.text) == warned
    write_weights(tmp_path / "model.safetensors", w=(2, 3))
    assert engine_arguments(recipe, str(tmp_path), gpu_gib=80.0)["gpu_memory_utilization"] == 0.9, "a folder tells its size"
    given = load_recipe("gsm8k", ["actor.engine.gpu_memory_utilization=0.5"])
    assert engine_arguments(given, "a/model", gpu_gib=80.0)["gpu_memory_utilization"] == 0.5
    assert "gpu_memory_utilization" not in engine_arguments(recipe, "a/model", gpu_gib=None)


async def test_an_engine_sleeps_where_vllm_can_and_goes_on_after_a_failed_commit() -> None:
    llm = AsyncMock()
    client = WeightUpdateClient(llm)
    await client.sleep()
    await client.wake()
    assert llm.mock_calls == [call.sleep(level=1, mode="keep"), call.wake_up()]
    llm.update_weights.side_effect = RuntimeError("nothing is staged")
    with pytest.raises(TransferError, match="cannot be committed"):
        await client.commit(PolicyVersion(1, 2))
    assert llm.mock_calls[-1] == call.resume_generation()
    llm.sleep.side_effect = llm.wake_up.side_effect = RuntimeError("broken")
    for change in (client.sleep, client.wake):
        with pytest.raises(CommitFailed, match="cannot fall asleep or wake up: broken"):
            await change()
    colocated = make_recipe(mode="conventional", actor={"colocate": True})
    assert engine_arguments(colocated, "nowhere", gpu_gib=80.0)["enable_sleep_mode"]
    with pytest.raises(FieldError, match=r"actor\.colocate = True: needs vLLM's sleep mode, which this build for cpu lacks"):
        build_llm(colocated, "nowhere", lambda: False)


def test_no_two_engines_draw_the_same_random_numbers() -> None:
    """vLLM's model runner V2 seeds the n-th request without a seed with the n-th number that NumPy draws from the engine's."""
    seeds = [engine_arguments(make_recipe(seed=3), "nowhere", gpu_gib=80.0)["seed"] for _ in range(3)]
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert len({np.random.RandomState(seed).randint(2**62) for seed in seeds}) == 3


@pytest.mark.parametrize(
    ("logprobs", "end", "scored", "says"),
    [
        ([-1.0, -2.0], 2, [-1.0], None),
        ([-1.0, float("nan")], 2, [-1.0], "cannot be used: non_finite_logprobs"),
        ([-1.0, -2.0], 1, [-1.0], "cannot be used: version_spans: cover 1 of 2 tokens"),
        ([-1.0], 2, [-1.0], "1 log-probabilities for 2 tokens"),
        ([-1.0, -2.0], 2, [float("nan")], "cannot be used: non-finite scores"),
    ],
)
async def test_an_engine_whose_first_results_no_trainer_could_use_does_not_start(
    logprobs: list[float], end: int, scored: list[float], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = SimpleNamespace(
        token_ids=[1, 2],
        logprobs=SimpleNamespace(logprobs=logprobs, start_indices=range(len(logprobs))),
        finish_reason="length",
        weight_versions=[SimpleNamespace(version="default", start=0, end=end)],
    )
    monkeypatch.setattr(vllm_engine, "vllm_sampling", MagicMock())
    engine = vllm_engine.VllmEngine(MagicMock(), MagicMock())
    monkeypatch.setattr(engine, "_run", AsyncMock(return_value=SimpleNamespace(outputs=[output])))
    monkeypatch.setattr(engine, "score", AsyncMock(return_value=np.array(scored)))
    with pytest.raises(EngineError, match=says) if says else nullcontext():
        await engine.warm_up(make_recipe())


async def test_a_stop_is_heard_while_an_engine_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = asyncio.Event()

    async def without_end(*_: object) -> None:
        stop.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(vllm_engine, "build_llm", MagicMock())
    monkeypatch.setattr(vllm_engine.VllmEngine, "warm_up", without_end)
    async with asyncio.timeout(60):
        with pytest.raises(StartStopped):
            async with vllm_engine.start_engine(make_recipe(), "nowhere", stop):
                raise AssertionError("it was never warm")


def test_a_new_cache_begins_with_the_images_model_infos_and_another_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, cache = tmp_path / "image", tmp_path / "cache"
    use_known_model_infos(image, cache)  # an installation without any
    assert not cache.exists()
    (image / "modelinfos").mkdir(parents=True)
    (image / "modelinfos" / "llama.json").write_text("1")
    use_known_model_infos(image, cache)
    (image / "modelinfos" / "llama.json").write_text("2")
    use_known_model_infos(image, cache)
    assert (cache / "modelinfos" / "llama.json").read_text() == "1"
    assert [path.name for path in cache.iterdir()] == ["modelinfos"]
    monkeypatch.setattr(shutil, "copytree", MagicMock(side_effect=OSError("no space left")))
    use_known_model_infos(image, tmp_path / "full")
    assert list((tmp_path / "full").iterdir()) == []


SIGNALLED_CHILD = """
import asyncio, multiprocessing, signal, time
from services.actor.vllm_engine import prepare_forks

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    prepare_forks()
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    child = context.Process(target=lambda: (begun.set(), time.sleep(600)))
    await asyncio.to_thread(child.start)
    await asyncio.to_thread(begun.wait, 60)
    child.terminate()
    await asyncio.to_thread(child.join, 30)
    for _ in range(5):
        await asyncio.sleep(0)  # the loop reads its wake-up socket and runs the handler
    print(child.exitcode, stop.is_set())
    child.kill()

asyncio.run(main())
"""


def test_a_signal_to_a_forked_engine_process_ends_it_and_does_not_stop_the_actor() -> None:
    done = subprocess.run([sys.executable, "-c", SIGNALLED_CHILD], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout == "-15 False\n", done.stderr
