"""Episodes through the actor's loop, its endpoint and a real verifier; the engine is told what to say. Faults between turns."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from pipelinerl.messages.sequences import (
    Completion,
    FinishReason,
    PolicyVersion,
    Sequence,
    VersionSpan,
    decode_sequence,
    encode_group,
)
from pipelinerl.messages.verification import VerifierClient
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.grpc import serve_grpc
from pipelinerl.service.http import serve_http
from pipelinerl.service.settings import host_port
from pipelinerl.v1 import actor_pb2, actor_pb2_grpc
from services.actor import app
from services.actor.engine import GenerationRequest
from services.actor.episodes.endpoint import episode_app
from services.actor.episodes.episode import Episodes
from services.actor.episodes.formats import TemplateFormat
from services.actor.metrics import ActorMetrics
from tests.integration.test_episodes import NAME, recipe
from tests.support.generation import ScriptedEngine, Stage, stage
from tests.support.machine import free_port
from tests.support.memory_bus import MemoryBus, MemoryServer
from tests.support.tokenizers import CHATML, byte_tokenizer
from tests.support.verifier import Verifier, verifier
from tests.unit.builders import RUN, make_group
from tests.unit.test_actor_app import CONTEXT, SAMPLING, settings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="episodes are confined with Linux's means")

TOKENIZER = byte_tokenizer(template=CHATML, known=("<|im_start|>",))
VOCAB_SIZE = 400
END = TOKENIZER.eos_token_id
HALF = [*TOKENIZER.encode("0.5", add_special_tokens=False), END]
DATA = recipe(task={"config": {"bonus": 0.25}}, model={"source": "path", "name": "unused", "max_context": 2048})
MakeEpisodes = Callable[[ScriptedEngine, ActorMetrics], AbstractAsyncContextManager[Episodes]]


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verifier]:
    with verifier(tmp_path_factory.mktemp("verifier"), DATA) as running:
        yield running.wait_until_serving()


def half(version: int = 0, left: int = 0, finish: FinishReason | None = FinishReason.STOP) -> Completion:
    """`0.5`, but for its first `left` tokens; all but the last one where it is cut."""
    tokens = HALF[left:] if finish else HALF[left:-1]
    spans = (VersionSpan(version, 0, len(tokens), 1),)
    return Completion(np.array(tokens, np.int32), np.full(len(tokens), -0.5, np.float32), spans, finish)


def episodes(address: str, data: dict[str, Any] = DATA) -> MakeEpisodes:
    """The endpoint and what runs episodes, as the service puts them together."""

    @asynccontextmanager
    async def running(engine: ScriptedEngine, metrics: ActorMetrics) -> AsyncIterator[Episodes]:
        engine.answer = lambda request: half()
        async with VerifierClient(address) as client:
            started = Episodes(client, metrics, Recipe.model_validate(data), engine.decode)
            endpoint = episode_app(started, TemplateFormat(TOKENIZER), metrics, model="m", vocab_size=VOCAB_SIZE)
            async with serve_http(endpoint, "127.0.0.1", 0, on_this_loop=True) as port:
                started.address = host_port("127.0.0.1", port)
                yield started

    return running


async def issue(one: Stage, number: int, reference_json: str, **changes: object) -> None:
    given = {"prompt": (), "episodic": True, "task": NAME, "reference_json": reference_json, "num_samples": 1}
    await one.issue(number, **(given | changes))


def text(tokens: np.ndarray) -> str:
    return str(TOKENIZER.decode(tokens))


def check_three_turns(sequence: Sequence) -> None:
    assert sequence.failure == ""
    assert (sequence.reward, sequence.reward_components, sequence.answer) == (0.75, {"answer": 0.75}, "0.5")
    assert sequence.reported == {"turns": 3.0, "said": 3.0, "answer": 0.75}
    assert text(sequence.prompt_token_ids).endswith("<|im_start|>assistant\n")
    said = [text(sequence.completion_token_ids[turn.start : turn.end]) for turn in sequence.turns]
    assert said == ["0.5<|im_end|>"] * 3
    observed = "{}\n<|im_start|>user\n{} left<|im_end|>\n<|im_start|>assistant\n"
    between = "".join(observed.format(turn, left) for turn, left in zip(said, (2, 1), strict=False))
    assert text(sequence.completion_token_ids) == between + said[2]
    assert sequence.num_sampled_tokens == 3 * len(HALF)
    assert sequence.branches == ()


async def test_an_episode_takes_a_place_only_while_it_decodes_and_is_published_with_its_reward(environments: Verifier) -> None:
    runner = episodes(environments.address.grpc)
    async with stage(in_progress=1, samples_in_progress=3, episodes=runner) as one:
        one.engine.open.clear()
        await issue(one, 0, '{"row": {"turns": 3}}', num_samples=4)
        await one.until(lambda: one.registry.get_sample_value("pipelinerl_actor_episodes_in_progress") == 3)
        await one.generating(1)
        one.gate.serve(PolicyVersion(1, 1))  # before the first turns of the others
        one.engine.open.set()
        for sequence in await one.published(4):
            check_three_turns(sequence)
        assert one.engine.most_running == 1
        prompts = {tuple(r.prompt_token_ids) for r in one.engine.requests.values()}
        assert len(prompts) == 3  # the samples of a group have the same seed
        salts: dict[str, set[str]] = {}
        for request_id, salt in one.engine.salts.items():
            salts.setdefault(request_id.rpartition(".")[0], set()).add(salt)
        assert sorted(salts.values(), key=min) == [{"begun at 1:0"}, *[{"begun at 1:1"}] * 3]
        assert (one.counted("episode_turns", source="sampled"), one.metrics.busy.running) == (12, 0)
        await one.all_acknowledged()


async def test_an_actor_that_stops_hands_its_record_over_and_the_next_samples_nothing_twice(environments: Verifier) -> None:
    runner, server = episodes(environments.address.grpc), MemoryServer()
    both = stage(server=server, episodes=runner), stage(server=server, episodes=runner, serve=False)
    async with both[0] as first, both[1] as second:

        def answer(request: GenerationRequest) -> Completion:
            first.engine.open.clear()
            return half(version=1)

        first.engine.answer = answer
        first.engine.so_far = lambda request: half(version=1, finish=None)
        await issue(first, 0, '{"row": {"turns": 3}}')
        await first.until(lambda: len(first.engine.requests) == 2 and first.engine.running == 1)
        await first.leave()
        assert first.counted("sequences_handed_over", state="unfinished") == 1
        assert len(await second.bus.pending_prompts()) == 1

        wanted = [half(version=2, left=len(HALF) - 1), half(version=2)]
        second.engine.answer = lambda request: wanted[len(second.engine.requests) - 1]
        second.gate.serve(PolicyVersion(1, 2))
        (sequence,) = await second.published(1)
        check_three_turns(sequence)
        assert [(span.version, span.end - span.start) for span in sequence.spans] == [
            (1, len(HALF)), (1, len(HALF) - 1), (2, 1), (2, len(HALF)),
        ]  # fmt: skip
        assert len(second.engine.requests) == 2
        assert second.counted("episode_turns", source="replayed") == 1
        assert second.counted("carried_tokens") == 2 * len(HALF) - 1


async def test_an_episode_whose_verifier_dies_is_run_again_and_nothing_is_sampled_twice(tmp_path: Path) -> None:
    port = free_port()
    with verifier(tmp_path / "one", DATA, grpc_port=port) as dying:
        address = dying.wait_until_serving().address.grpc
        async with stage(in_progress=2, episodes=episodes(address)) as one:

            def answer(request: GenerationRequest) -> Completion:
                if len(one.engine.requests) == 2:
                    one.engine.open.clear()
                return half()

            one.engine.answer = answer
            await issue(one, 0, '{"row": {"turns": 3}}')
            await one.until(lambda: len(one.engine.requests) == 3 and one.engine.running == 1)
            dying.process.kill()
            with verifier(tmp_path / "two", DATA, grpc_port=port) as other:
                await asyncio.to_thread(other.wait_until_serving)
                one.engine.open.set()
                (sequence,) = await one.published(1)
            check_three_turns(sequence)
            assert len(one.engine.requests) == 3
            assert one.counted("episode_turns", source="replayed") >= 2


async def test_an_episode_too_large_for_a_message_costs_that_sequence(environments: Verifier) -> None:
    async with stage(episodes=episodes(environments.address.grpc), max_payload_bytes=1000) as one:
        await issue(one, 0, '{"row": {"turns": 9}}')
        (sequence,) = await one.published(1)
        assert sequence.failure.startswith("too_large: ")
        assert (sequence.turns, sequence.branches, sequence.reward_components) == ((), (), {})
        await one.all_acknowledged()


async def test_what_an_environment_does_wrong_costs_its_own_episode(environments: Verifier) -> None:
    rows = {
        '{"in_start": "raise"}': ("episode_crashed: the episode raised RuntimeError", 0),
        '{"in_reply": "sleep 600"}': ("episode_timeout: the episode waited for its environment", 1),
        '{"turns": 1}': ("", 1),
        '{"turns": 40}': ("", 16),  # task.max_turns: the policy's fault
    }
    async with stage(episodes=episodes(environments.address.grpc)) as one:
        for number, row in enumerate(rows):
            await issue(one, number, f'{{"row": {row}}}')
        await issue(one, len(rows), "{}", task="another recipe's")
        stored = {sequence.group_id: sequence for sequence in await one.published(len(rows) + 1)}
        assert stored[f"g{len(rows):08d}"].failure.startswith('unknown_task: "another recipe\'s" is not an episodic task')
        for number, (failure, num_turns) in enumerate(rows.values()):
            sequence = stored[f"g{number:08d}"]
            assert sequence.failure.startswith(failure), sequence.failure
            assert bool(sequence.failure) == bool(failure)
            assert len(sequence.turns) == (0 if failure else num_turns)
        assert [stored[f"g{number:08d}"].reward for number in (2, 3)] == [0.75, 0.0]
        await one.all_acknowledged()


async def test_heldout_problems_of_such_a_task_are_episodes_that_come_back_with_their_verdict(environments: Verifier) -> None:
    engine, metrics = ScriptedEngine(), ActorMetrics(CollectorRegistry())
    engine.open.set()
    asked = (("good", NAME, '"turns": 2'), ("bad", NAME, '"in_start": "raise"'), ("other", "x", ""))
    one_sample = {"num_samples": 1, "episodic": True, "prompt": (), "sampling": SAMPLING}
    groups = [
        make_group(3, group_id=name, task=task, seed=len(name), reference_json=f'{{"row": {{{row}}}}}', **one_sample)
        for name, task, row in asked
    ]
    runner = episodes(environments.address.grpc)
    async with MemoryBus(RUN, server=MemoryServer()) as bus, runner(engine, metrics) as plays:
        recipe = Recipe.model_validate(DATA)
        parts = (settings(), recipe, engine, bus, None, metrics, CONTEXT, asyncio.Event(), plays)
        actor = app.Actor(*parts)  # type: ignore[arg-type]
        register = lambda server: actor_pb2_grpc.add_ActorServiceServicer_to_server(actor, server)  # noqa: E731
        async with (
            serve_grpc(register, [app.SERVICE], "127.0.0.1", 0, stop_grace_s=0.1) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            stub = actor_pb2_grpc.ActorServiceStub(channel)
            request = actor_pb2.GenerateRequest(groups=map(encode_group, groups))
            found = [decode_sequence(one.sequence) async for one in stub.Generate(request, timeout=60)]
    answers = {one.group_id: one for one in found}
    good, bad, other = (answers[name] for name, *_ in asked)
    assert (good.failure, good.reward, good.metrics, good.answer) == ("", 0.75, {"said": 2.0}, "0.5")
    (branch,) = good.all_branches
    assert (len(branch.turns), branch.num_sampled_tokens) == (2, 2 * len(HALF))
    assert branch.spans[-1].end == branch.num_completion_tokens
    assert len({request.seed for request in engine.requests.values()}) == 2
    assert bad.failure.startswith("episode_crashed")
    assert other.failure.startswith("unknown_task: 'x' is not an episodic task")


AGENT = """
import json, os, sys, threading, urllib.request
row, url = json.load(sys.stdin), os.environ["OPENAI_BASE_URL"] + "/chat/completions"
def ask(words):
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": words}]}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body)).read()
threads = [threading.Thread(target=ask, args=(f"question {n}",)) for n in range(row["asks"])]
[thread.start() for thread in threads], [thread.join() for thread in threads]
if row["asks"] == 1:
    ask("x" * 9_000)
print(0.5)
"""


async def test_what_an_agent_asks_at_once_are_branches_and_one_that_has_no_turn_costs_its_own_episode(tmp_path: Path) -> None:
    """The second one's other request is longer than the context: the policy's fault."""
    (tmp_path / "agent.py").write_text(AGENT)
    agent = {"source": "agent", "name": NAME, "path": "p.jsonl", "command": f"python {tmp_path}/agent.py"}
    data = DATA | {"task": agent | {"episode_timeout_s": 60.0}, "reward": {"scorer": "exact"}}
    with verifier(tmp_path / "verifier", data) as running:
        address = running.wait_until_serving().address.grpc
        async with stage(episodes=episodes(address, data), samples_in_progress=8) as one:
            for asks in (0, 1, 3):
                await issue(one, asks, f'{{"row": {{"asks": {asks}}}, "answer": "0.5"}}')
            silent, long, parallel = sorted(await one.published(3), key=lambda sequence: sequence.group_id)
    assert (parallel.failure, parallel.reward, len(parallel.all_branches)) == ("", 1.0, 3)
    assert [branch.num_sampled_tokens for branch in parallel.all_branches] == [len(HALF)] * 3
    assert one.counted("episode_branches") == 2
    assert silent.failure.startswith("no_turns")
    assert (long.failure, long.reward, long.reason.partition(":")[0]) == ("", 0.0, "context_length_exceeded")
