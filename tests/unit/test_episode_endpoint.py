"""The endpoint of episodes over real HTTP: OpenAI's client, a token client and rude clients ask; the sampler is scripted."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import openai
import pytest
from prometheus_client import CollectorRegistry

from pipelinerl.messages.sequences import Completion, FinishReason, SamplingParams, TokenIds, VersionSpan
from pipelinerl.messages.verification import VerifierClient
from pipelinerl.service.http import serve_http
from services.actor.engine import EngineError
from services.actor.episodes import endpoint
from services.actor.episodes.endpoint import MAX_BODY_BYTES, episode_app
from services.actor.episodes.episode import Episode, Episodes
from services.actor.episodes.formats import TemplateFormat
from services.actor.metrics import ActorMetrics
from tests.support.machine import until
from tests.support.tokenizers import CHATML, ByteTokenizer, byte_tokenizer
from tests.unit.builders import make_recipe
from tests.unit.test_episode_tokens import LOOK_UP

ASK = [{"role": "user", "content": "Begin."}]
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "ab"}}\n</tool_call>'
TOKENIZER = byte_tokenizer(template=CHATML, known=("<|im_start|>",))
VOCAB_SIZE = 400
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@dataclass
class Sampler:
    """Says `says`, one after another, once `open`: as many tokens as it may, the end token if there is room."""

    says: list[str | Exception] = field(default_factory=list)
    tokenizer: ByteTokenizer = TOKENIZER
    open: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[tuple[list[int], SamplingParams, int]] = field(default_factory=list)
    is_interrupted: bool = False
    under_way: int = 0

    async def __call__(self, context: TokenIds, made: Completion, sampling: SamplingParams, number: int) -> Completion:
        self.asked.append((context.tolist(), sampling, number))
        said = self.says.pop(0)
        self.under_way += 1
        try:
            await self.open.wait()
        finally:
            self.under_way -= 1
        if isinstance(said, Exception):
            raise said
        whole = [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id]
        tokens = whole[: sampling.max_tokens]
        reason = None if self.is_interrupted else STOP if tokens == whole else LENGTH
        spans = (VersionSpan(3, 0, len(tokens)),)
        return Completion(np.array(tokens, np.int32), np.full(len(tokens), -0.5, np.float32), spans, reason)


@dataclass
class Stage:
    episodes: Episodes
    sampler: Sampler
    episode: Episode
    metrics: ActorMetrics
    registry: CollectorRegistry
    address: str

    @asynccontextmanager
    async def environment(self) -> AsyncIterator[openai.AsyncOpenAI]:
        """A run of the environment that asks with OpenAI's client, as it is."""
        with self.episodes.running(self.episode) as key:
            base_url = f"{self.address}/episodes/{key}/v1"
            async with openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=60) as client:
                yield client

    async def end_run(self, asked: asyncio.Task) -> None:
        self.episode.over.set()
        with pytest.raises(openai.NotFoundError):
            await asked

    async def hang_up(self, client: openai.AsyncOpenAI, messages: list[dict[str, str]]) -> None:
        """Ask, and go away as soon as the turn is being sampled."""
        before = self.sampler.under_way
        asked = asyncio.create_task(ask(client, messages))
        await until(lambda: self.sampler.under_way > before)
        asked.cancel()
        await until(lambda: not self.episode.served)

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"pipelinerl_actor_{name}", labels or None) or 0.0

    def told(self) -> list[list[str]]:
        branches = self.episode.result()
        return [
            [TOKENIZER.decode(branch.prompt_token_ids), TOKENIZER.decode(branch.completion_token_ids)] for branch in branches
        ]


@asynccontextmanager
async def stage(
    *says: str | Exception, max_turns: int = 10, max_context: int = 2_000, timeout_s: float = 60.0
) -> AsyncIterator[Stage]:
    registry, sampler = CollectorRegistry(), Sampler(list(says))
    limits: dict[str, Any] = {"max_turns": max_turns, "max_context": max_context, "turn_timeout_s": timeout_s}
    metrics = ActorMetrics(registry)
    episodes = Episodes(VerifierClient("127.0.0.1:1"), metrics, make_recipe(), TOKENIZER.decode)
    episode = Episode(SamplingParams(0.7, max_tokens=500), sampler, metrics, TOKENIZER.decode, **limits)
    sampler.open.set()
    app = episode_app(episodes, TemplateFormat(TOKENIZER), metrics, model="org/model", vocab_size=VOCAB_SIZE)
    async with serve_http(app, "127.0.0.1", 0, on_this_loop=True) as port:
        yield Stage(episodes, sampler, episode, metrics, registry, f"http://127.0.0.1:{port}")
        await episode.end()


async def ask(client: openai.AsyncOpenAI, messages: list[Any] = ASK, **options: Any) -> Any:
    return await client.chat.completions.create(**{"model": "m", "messages": messages} | options)


async def refusal(client: openai.AsyncOpenAI, messages: list[Any] = ASK) -> tuple[int, str | None, str]:
    with pytest.raises(openai.APIStatusError) as error:
        await ask(client, messages)
    return error.value.status_code, error.value.code, str(error.value)


async def test_an_agent_on_openais_client_calls_a_tool_and_goes_on() -> None:
    async with stage(CALL, "It is 42.") as s, s.environment() as client:
        asked = {"temperature": 0, "seed": 0, "presence_penalty": 0}
        first = await ask(client, model="any", tools=[LOOK_UP], **asked)
        choice = first.choices[0]
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert (call.function.name, call.function.arguments) == ("look_up", '{"word": "ab"}')
        assert first.model == "any"
        result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
        second = await ask(client, [*ASK, choice.message, result], tools=[LOOK_UP], max_completion_tokens=100)
        assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", "It is 42.")
        context, sampling, _ = s.sampler.asked[1]
        assert (second.usage.prompt_tokens, second.usage.completion_tokens) == (len(context), len("It is 42.") + 1)
        assert (sampling.temperature, sampling.max_tokens) == (0.7, 100)
        assert sampling.stop_token_ids == (TOKENIZER.eos_token_id,)
        ((prompt, said),) = s.told()
        assert "look_up" in prompt
        assert said == (
            f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\nIt is 42.<|im_end|>"
        )
        assert [s.count("episode_ignored_fields_total", field=name) for name in asked] == [1, 1, 0]
        assert [model.id for model in (await client.models.list()).data] == ["org/model"]


async def test_a_stream_has_the_same_message_and_stop_strings_end_a_turn_that_keeps_its_tokens() -> None:
    async with stage("one STOP", CALL) as s, s.environment() as client:
        uncalled = {"model": "m", "tools": [LOOK_UP], "tool_choice": "none", "stream": True, "stop": "STOP"}
        stream = await client.chat.completions.create(messages=ASK, stream_options={"include_usage": True}, **uncalled)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "one "
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, "stop"]
        assert chunks[-1].usage.completion_tokens == len(s.episode.result()[0].completion_token_ids)
        assert s.sampler.asked[0][1].stop == ("STOP",)
        goes_on = [*ASK, {"role": "assistant", "content": "one "}, {"role": "user", "content": "more"}]
        chunks = [chunk async for chunk in await client.chat.completions.create(messages=goes_on, **uncalled)]
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "stop"]
        assert (chunks[0].choices[0].delta.content, chunks[0].choices[0].delta.tool_calls) == (CALL, None)
        ((_, said),) = s.told()
        assert said.startswith("one STOP<|im_end|>\n<|im_start|>user\nmore")


async def test_tokens_in_and_tokens_out_as_verifiers_clients_ask() -> None:
    from renderers import config_from_name, create_renderer
    from renderers.client import generate

    tokenizer = byte_tokenizer()
    tokenizer.learns = True
    renderer = create_renderer(tokenizer, config_from_name("qwen3"))
    async with stage("yes") as s, s.environment() as client:
        answer = await generate(client=client, renderer=renderer, messages=ASK, model="org/model")
        assert answer["completion_ids"] == s.episode.turns[0].made.completion_token_ids.tolist()
        assert set(answer["completion_logprobs"]) == {-0.5}
        context, sampling, _ = s.sampler.asked[0]
        assert context == answer["prompt_ids"] == renderer.render_ids(ASK, add_generation_prompt=True)
        assert sampling.stop_token_ids == tuple(renderer.get_stop_token_ids())
        path = str(client.base_url).replace("/v1/", "/inference/v1/generate")
        async with httpx.AsyncClient(timeout=60) as raw:
            wrong = ([], [-1], [VOCAB_SIZE], [1.5], "ab", None)
            several = {"token_ids": context, "sampling_params": {"n": 2}}
            bodies = [(path, body) for body in (*({"token_ids": one} for one in wrong), several)]
            stopped = {"model": "m", "messages": ASK, "stop_token_ids": [5]}
            for url, body in (*bodies, (f"{client.base_url}chat/completions", stopped)):
                refused = await raw.post(url, json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")


async def test_a_call_that_holds_half_a_surrogate_pair_is_answered_and_gone_on_with() -> None:
    call = CALL.replace("ab", "\\ud83d ẞ").replace("look_up", "\\udc00look_up")
    async with stage(call, "end", call) as s, s.environment() as client:
        first = await ask(client, tools=[LOOK_UP])
        message = first.choices[0].message
        function = message.tool_calls[0].function
        assert (function.name, json.loads(function.arguments)) == ("\ufffdlook_up", {"word": "\ufffd ẞ"})
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "none"}
        await ask(client, [*ASK, message, result], tools=[LOOK_UP])
        ((_, said),) = s.told()
        assert said.startswith(f"{call}<|im_end|>")
        first_chunk, *_ = [chunk async for chunk in await ask(client, tools=[LOOK_UP], stream=True)]
        assert first_chunk.choices[0].delta.tool_calls[0].function.name == function.name


async def test_a_turn_that_cannot_be_answered_was_not_served_and_is_not_sampled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage("once") as s, s.environment() as client:
        with monkeypatch.context() as patch:
            patch.setattr(TemplateFormat, "parse", Mock(side_effect=RuntimeError("broken")))
            *told, text = await refusal(client)
        assert (told, "RuntimeError: broken" in text, s.episode.served) == ([500, "internal_error"], True, [])
        assert s.count("episode_refusals_total", code="internal_error") == 1  # the client was told not to try again
        again = await ask(client)
        assert (again.choices[0].message.content, len(s.sampler.asked)) == ("once", 1)


async def test_a_stream_is_kept_alive_until_its_turn_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "KEEP_ALIVE_S", 0.02)
    async with stage("late", EngineError("lost")) as s, s.environment() as client:
        s.sampler.open.clear()
        url, body = f"{client.base_url}chat/completions", {"messages": ASK, "stream": True}
        async with httpx.AsyncClient(timeout=60) as raw:
            async with raw.stream("POST", url, json=body):
                pass  # hung up after the head
            await until(lambda: s.count("episode_refusals_total", code="hung_up") == 1 and not s.episode.served)
            async with raw.stream("POST", url, json=body) as answer:
                lines = answer.aiter_lines()
                assert [await anext(lines) for _ in range(4)] == [": the turn is being sampled", ""] * 2
                s.sampler.open.set()
                events = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
            assert [event["choices"][0]["finish_reason"] for event in events] == [None, "stop"]
            assert events[0]["choices"][0]["delta"]["content"] == "late"
            s.sampler.open.clear()
            failing = await ask(client, stream=True)
            s.sampler.open.set()
            with pytest.raises(openai.APIError, match="engine: lost"):
                _ = [chunk async for chunk in failing]


async def test_turns_that_nobody_waits_for_any_more_count_as_turns() -> None:
    async with stage("a", "b", "c", max_turns=2) as s, s.environment() as client:
        s.sampler.open.clear()
        for number in range(2):
            await s.hang_up(client, [*ASK, *ASK][number:])
        assert (await refusal(client, [*ASK, *ASK, *ASK]))[:2] == (400, "max_turns_exceeded")
        assert s.sampler.under_way == 2
        s.sampler.open.set()
        again = await ask(client)
        assert (again.choices[0].message.content, s.sampler.under_way) == ("b", 0)


async def test_limits_are_told_as_openais_errors_are() -> None:
    async with stage("a", "b", "c", max_turns=2, max_context=60) as s, s.environment() as client:
        long = [{"role": "user", "content": "x" * 80}]
        assert (await refusal(client, long))[:2] == (400, "context_length_exceeded")
        assert s.episode.policy_fault == "context_length_exceeded"
        for _ in range(2):
            await ask(client)
        *told, text = await refusal(client)
        assert (told, "task.max_turns" in text) == ([400, "max_turns_exceeded"], True)
        room = s.sampler.asked[0][1].max_tokens
        assert room == 60 - len(s.sampler.asked[0][0])
        assert s.count("episode_refusals_total", code="max_turns_exceeded") == 1


async def test_only_episodes_under_way_are_answered() -> None:
    async with stage("a") as s:
        async with s.environment() as client:
            base_url = client.base_url
            await ask(client)
        late = openai.AsyncOpenAI(base_url=base_url, api_key="none")
        assert (await refusal(late))[:2] == (404, "episode_not_found")
        async with httpx.AsyncClient(base_url=s.address, timeout=60) as raw:
            for path in ("/", "/docs", "/metrics", "/healthz", "/episodes/guess/v1/models", "/episodes//v1/models"):
                answer = await raw.get(path)
                assert (answer.status_code, set(answer.json())) == (404, {"error"}), path


async def test_an_environment_that_is_run_again_gets_the_same_turns_and_ids() -> None:
    async with stage(CALL, "end") as s:
        told = []
        for _ in range(2):
            async with s.environment() as client:
                first = await ask(client, tools=[LOOK_UP])
                message = first.choices[0].message
                result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
                second = await ask(client, [*ASK, message, result], tools=[LOOK_UP])
                told.append((message, second.choices[0].message))
        assert told[0] == told[1]
        assert len(s.sampler.asked) == 2
        assert s.count("episode_turns_total", source="replayed") == 2


async def test_a_client_that_hangs_up_and_asks_again_gets_the_turn_that_was_begun() -> None:
    async with stage("once", "twice") as s, s.environment() as client:
        s.sampler.open.clear()
        await s.hang_up(client, ASK)
        again = asyncio.create_task(ask(client))
        await until(lambda: s.episode.served)
        beside = asyncio.create_task(ask(client))
        await until(lambda: len(s.sampler.asked) == 2)
        assert [number for _, _, number in s.sampler.asked] == [0, 1]  # their seeds differ by it
        s.sampler.open.set()
        assert [(await one).choices[0].message.content for one in (again, beside)] == ["once", "twice"]
        assert [said for _, said in s.told()] == ["once<|im_end|>", "twice<|im_end|>"]
        assert s.count("episode_refusals_total", code="hung_up") == 1


async def test_the_end_of_a_run_refuses_its_open_requests_and_leaves_the_turn_to_the_next() -> None:
    """And what is sampled for nobody may fail."""
    async with stage("once", EngineError("late"), "never") as s:
        s.sampler.open.clear()
        async with s.environment() as client:
            asked = asyncio.create_task(ask(client))
            await until(lambda: s.sampler.under_way)
            await s.end_run(asked)
        for is_last in (False, True):
            async with s.environment() as client:
                asked = asyncio.create_task(ask(client))
                await until(lambda: s.episode.served)
                s.sampler.open.set()
                assert (await asked).choices[0].message.content == "once"
                s.sampler.open.clear()
                asked = asyncio.create_task(ask(client))
                await until(lambda: s.sampler.under_way)
                await s.end_run(asked)
            if not is_last:
                s.sampler.open.set()
                await until(lambda: not s.sampler.under_way)
        assert s.episode.failure == ""
        await s.episode.end()
        assert s.sampler.under_way == 0
        assert [said for _, said in s.told()] == ["once<|im_end|>"]


async def test_what_the_actor_cannot_do_fails_the_episode_and_an_interruption_does_not() -> None:
    async with stage("gone", EngineError("out of memory")) as s, s.environment() as client:
        s.sampler.is_interrupted = True
        assert (await refusal(client))[:2] == (503, "interrupted")
        assert len(s.sampler.asked) == 1  # the client was told not to try again
        assert s.episode.failure == ""
        assert TOKENIZER.decode(s.episode.partial(0).branches[0].completion_token_ids) == "gone<|im_end|>"
        for _ in range(2):
            assert (await refusal(client, [*ASK, *ASK]))[:2] == (500, "failed")
        assert s.episode.failure == "engine: out of memory"
    async with stage("late", timeout_s=0.05) as s, s.environment() as client:
        s.sampler.open.clear()
        with pytest.raises(openai.InternalServerError):
            await ask(client)
        assert s.episode.failure.startswith("turn_timeout: ")
        assert s.sampler.under_way == 0


async def test_rude_requests_are_refused_and_change_nothing() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
    uncallable = {"role": "assistant", "tool_calls": [{"id": "a"}]}
    kings = [{"role": "king", "content": ""}]
    async with stage("fine", "fine") as s:
        with s.episodes.running(s.episode) as key:
            url = f"{s.address}/episodes/{key}/v1/chat/completions"
            async with httpx.AsyncClient(timeout=60) as raw:
                for content, status in (
                    (b"x" * (MAX_BODY_BYTES + 1), 413),
                    (b"{", 400),
                    (b"[]", 400),
                    (b"\xff", 400),
                    (b'{"messages":' + b"[" * 100_000, 400),
                    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
                    (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', 400),
                ):
                    answer = await raw.post(url, content=content)
                    assert (answer.status_code, set(answer.json())) == (status, {"error"}), content[:40]
                messages = ([], "hi", [1], kings, [image], [{"role": "user", "content": {"a": 1}}], [*ASK, uncallable])
                limits = ({"n": 2}, {"max_tokens": 0}, {"max_tokens": "5"}, {"stop": [""]}, {"stop": 7}, {"tools": {"a": 1}})
                more = ({}, {"messages": ASK, "functions": [{"name": "f"}]}, *({"messages": ASK, **limit} for limit in limits))
                for wrong in (*more, *({"messages": given} for given in messages)):
                    answer = await raw.post(url, json=wrong)
                    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request"), wrong
                    if "max_tokens" in wrong:
                        assert f"max_tokens = {wrong['max_tokens']!r}: " in answer.json()["error"]["message"]
                assert answer.json()["error"]["message"].startswith(f"messages[{len(ASK)}]: ")
                assert s.episode.turns == []
                assert s.episode.policy_fault == "request_too_large"
                function = {"name": "f", "arguments": '{"a": "\\ud800"}'}  # JSON in JSON: what a policy may have written
                said = {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}
                assert (await raw.post(url, json={"messages": [*ASK, said]})).status_code == 200
                unknown = {"messages": ASK, "store": True, "metadata": {"a": "b"}, "seed": None, "user": "me"}
                assert (await raw.post(url, json=unknown)).status_code == 200


async def test_an_incomplete_request_ends_at_its_deadline_or_with_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage("never") as s:

        async def begin(head: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(s.address.rpartition(":")[2]))
            writer.write(head.encode())
            return reader, writer

        with s.episodes.running(s.episode) as key:
            ask = f"POST /episodes/{key}/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{{"
            reader, writer = await begin(ask)
            async with httpx.AsyncClient(timeout=60) as raw:
                await raw.get(f"{s.address}/episodes/{key}/v1/models")  # which is answered after the other was received
        assert (await reader.readline()).startswith(b"HTTP/1.1 404")
        writer.close()
        monkeypatch.setattr(endpoint, "BODY_WITHIN_S", 0.05)
        with s.episodes.running(s.episode) as key:
            reader, writer = await begin(ask.replace(ask.split("/")[2], key))
            async with asyncio.timeout(60):
                head, _, content = (await reader.read()).partition(b"\r\n\r\n")  # to the end: the connection is closed
            writer.close()
        assert (head.split()[1], json.loads(content)["error"]["code"]) == (b"408", "request_timeout")
        assert s.count("episode_refusals_total", code="request_timeout") == 1
        assert s.episode.turns == []
