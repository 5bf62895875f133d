"""The HTTP endpoint at which environments and agents request turns, as OpenAI's chat completions or as tokens.

Every URL contains the key of a running episode. The recipe, not the request, sets the temperature and all other parameters of
the sampling distribution. A stream sends the whole message in one chunk.

`context_of` and `answer_of` convert messages to tokens and back. If a request continues a recorded conversation and the chat
format allows it, the recorded tokens are kept, and only the new messages are rendered. Any other history is rendered whole.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from pipelinerl.episodes import TOO_LARGE
from pipelinerl.errors import as_unicode
from pipelinerl.messages.sequences import SamplingParams, TokenIds
from services.actor.engine import before_stop
from services.actor.episodes.episode import Episode, Episodes, RecordedTurn, Refused, no_such_episode
from services.actor.episodes.formats import ChatFormat, Message, Tools, Unrenderable, parsed_json
from services.actor.metrics import IGNORED_FIELDS, ActorMetrics

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 1024 * 1024
"""Maximum size of a request's body."""
BODY_WITHIN_S = 30.0
KEEP_ALIVE_S = 2.0
"""Maximum seconds until a stream's headers are sent, and between the comments that keep its connection alive."""
MAX_STOPS = 16

_Result = TypeVar("_Result")


class _Limits(msgspec.Struct):
    """Fields of a request that limit its turn."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: str | Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[int] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) and self.stop else tuple(self.stop or ())


class _ChatRequest(_Limits):
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    tools: Tools | None = None
    tool_choice: Any = None
    stream: Any = False
    stream_options: dict[str, Any] | None = None


class _GenerateRequest(msgspec.Struct):
    token_ids: Annotated[list[int], Meta(min_length=1)]
    sampling_params: _Limits | None = None


class _GivenMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[str | dict[str, Any]] | None = None
    name: Any = None
    tool_call_id: Any = None
    reasoning_content: Any = None
    tool_calls: list[dict[str, Any]] | None = None


def _read(given: Any, kind: type[_Result], where: str = "the body") -> _Result:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        field = re.search(r"`\$\.(\w+)", str(error))
        value = f" {field[1]} = {given[field[1]]!r:.100}:" if field and isinstance(given, dict) and field[1] in given else ""
        raise Unrenderable(f"{where}:{value} {error}") from error


def episode_app(episodes: Episodes, chat: ChatFormat, metrics: ActorMetrics, *, model: str, vocab_size: int) -> FastAPI:
    """Return the app that serves turns. It must run on the event loop of the sampler. `model`: the model's name in /models."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    endpoint = Endpoint(episodes, chat, metrics, model, vocab_size)
    app.add_api_route("/episodes/{key}/v1/models", endpoint.models)
    app.add_api_route("/episodes/{key}/v1/chat/completions", endpoint.chat_completions, methods=["POST"])
    app.add_api_route("/episodes/{key}/inference/v1/generate", endpoint.generate, methods=["POST"])
    for kind in (Refused, Unrenderable, RecursionError, HTTPException, Exception):
        app.add_exception_handler(kind, endpoint.refuse)
    return app


class Endpoint:
    def __init__(self, episodes: Episodes, chat: ChatFormat, metrics: ActorMetrics, model: str, vocab_size: int) -> None:
        self._episodes, self._chat, self._metrics = episodes, chat, metrics
        self._model, self._vocab_size = model, vocab_size
        self._logged_fields: set[str] = set()

    async def models(self, key: str) -> dict[str, Any]:
        card = {"id": self._model, "object": "model", "created": 0, "owned_by": "pipelinerl"}
        return {"object": "list", "data": [{**card, "max_model_len": self._episodes[key].max_context}]}

    async def chat_completions(self, key: str, request: Request) -> Response:
        episode, body = await self._received(key, request)
        chat, asked = self._chat, _read(body, _ChatRequest)
        messages = read_messages(body.get("messages") or None)
        _check_count(body)
        if body.get("functions"):
            raise Unrenderable(f"functions = {body['functions']!r:.100}: use tools, which replaced this field")
        if asked.stop_token_ids:
            raise Unrenderable(f"stop_token_ids = {asked.stop_token_ids!r:.100}: the chat format sets them; use stop instead")
        tools, may_call = asked.tools or [], asked.tool_choice != "none"
        context = context_of(chat, episode.served, messages, tools)
        self._count_ignored(ignored_fields(body, episode.sampling))
        stop = (*episode.sampling.stop, *asked.stops)
        with_usage = bool((asked.stream_options or {}).get("include_usage"))

        def answered(turn: RecordedTurn) -> str:
            message = answer_of(chat, turn, messages, tools, stop, may_call)
            completion = chat_completion(turn, message, model=str(body.get("model") or self._model))
            return stream_of(completion, with_usage) if asked.stream else json.dumps(completion)

        max_tokens = asked.max_completion_tokens or asked.max_tokens
        waits = episode.turn(context, max_tokens=max_tokens, stop=asked.stops, stop_token_ids=chat.stop_token_ids)
        answering = _answer(episode, request, waits, answered)
        return await self._stream(answering) if asked.stream else Response(await answering, media_type="application/json")

    async def generate(self, key: str, request: Request) -> Response:
        episode, body = await self._received(key, request)
        asked = _read(body, _GenerateRequest)
        limits = asked.sampling_params or _Limits()
        _check_count(given := body.get("sampling_params") or {})
        if refused := next(filter(body.get, ("features", "content_parts", "stream")), ""):
            fix = "leave it out, since this endpoint takes only token ids and does not stream"
            raise Unrenderable(f"{refused} = {body[refused]!r:.100}: {fix}")
        stop_token_ids = tuple(limits.stop_token_ids or ())
        for name, ids in (("token_ids", asked.token_ids), ("sampling_params.stop_token_ids", stop_token_ids)):
            if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
                raise Unrenderable(f"{name}: give token ids from 0 to {self._vocab_size - 1}")
        ignored = ignored_fields(given, episode.sampling)
        self._count_ignored(name for name in ignored if name != "logprobs")  # answers always contain log-probabilities
        context = np.array(asked.token_ids, dtype=np.int32)
        waits = episode.turn(context, max_tokens=limits.max_tokens, stop=limits.stops, stop_token_ids=stop_token_ids)
        model = str(body.get("model") or self._model)
        answer = await _answer(episode, request, waits, lambda turn: json.dumps(generated(turn, model=model)))
        return Response(answer, media_type="application/json")

    async def refuse(self, _: Request, error: Exception) -> Response:
        refused = _refusal_of(error)
        # OpenAI's clients would otherwise retry after a 408 or 5xx, and be refused again.
        headers = {"x-should-retry": "false"} | ({"connection": "close"} if refused.status == 408 else {})
        return JSONResponse(self._error_of(refused), refused.status, headers=headers)

    def _error_of(self, error: Refused) -> dict[str, Any]:
        """Count a refusal and return it as OpenAI's error object."""
        self._metrics.episode_refusals.labels(error.code).inc()
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}

    async def _stream(self, answering: Coroutine[Any, Any, str]) -> Response:
        """Answer with a stream. An error within `KEEP_ALIVE_S` sets the HTTP status; later errors are sent as events."""
        task = asyncio.create_task(answering)

        async def kept_alive() -> AsyncIterator[str]:
            try:
                while not task.done():
                    yield ": the turn is being sampled\n\n"
                    await asyncio.wait((task,), timeout=KEEP_ALIVE_S)
                yield task.result()
            except asyncio.CancelledError:
                self._error_of(_hung_up_on())
                raise
            except Exception as error:
                if not isinstance(error, Refused):
                    log.exception("a turn of an episode cannot be answered")
                yield f"data: {json.dumps(self._error_of(_refusal_of(error)))}\n\n"
            finally:
                task.cancel()

        try:
            done, _ = await asyncio.wait((task,), timeout=KEEP_ALIVE_S)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if done:
            return Response(task.result(), media_type="text/event-stream")
        return StreamingResponse(kept_alive(), media_type="text/event-stream")

    async def _received(self, key: str, request: Request) -> tuple[Episode, dict[str, Any]]:
        episode = self._episodes[key]  # without a valid key, the body is not read
        try:
            body = _parsed(await _unless_over(_body_of(request), episode.over))
        except Refused as error:
            raise episode.policy_refused(TOO_LARGE, str(error), 413) if error.code == TOO_LARGE else error from None
        return self._episodes[key], body  # the environment's run may have ended meanwhile

    def _count_ignored(self, fields: Iterable[str]) -> None:
        for name in fields:
            self._metrics.episode_ignored_fields.labels(name).inc()
            if name not in self._logged_fields:
                self._logged_fields.add(name)
                log.warning("requests of environments set %s, which is ignored: turns are sampled as the recipe says", name)


async def _body_of(request: Request) -> bytes:
    """Read the whole body, even if it is too large, because a client that is still sending may not read the answer."""
    chunks, size = list[bytes](), 0
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > MAX_BODY_BYTES:
                    chunks.clear()
                else:
                    chunks.append(chunk)
    except TimeoutError as error:
        raise Refused(408, "request_timeout", f"the request did not arrive within {BODY_WITHIN_S:g} s") from error
    except ClientDisconnect as error:
        raise _hung_up_on() from error
    if size > MAX_BODY_BYTES:
        raise Refused(413, TOO_LARGE, f"the request has more than {MAX_BODY_BYTES} bytes")
    return b"".join(chunks)


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
        json.dumps(parsed, ensure_ascii=False).encode()  # fails for a lone surrogate, which JSON can escape
    except (ValueError, RecursionError) as error:
        raise Unrenderable(f"the body cannot be read as JSON of Unicode text: {error}") from error
    if not isinstance(parsed, dict):
        raise Unrenderable("the body is not a JSON object")
    return parsed


def _check_count(given: Mapping[str, Any]) -> None:
    if given.get("n") not in (None, 1):
        raise Unrenderable(f"n = {given['n']!r}: use 1, since each request records one answer; send several requests")


def ignored_fields(body: Mapping[str, Any], sampling: SamplingParams) -> list[str]:
    """Return the `IGNORED_FIELDS` of a request that would change `sampling` or the answer's form if obeyed. Pure."""
    unchanged = {
        # These values change nothing: recipes have no penalties, top-p or top-k, and answers are plain text.
        **dict.fromkeys(("frequency_penalty", "min_p", "min_tokens", "presence_penalty"), (0,)),
        "repetition_penalty": (1,),
        "temperature": (sampling.temperature,),
        "top_p": (1,),
        "top_k": (-1, 0),
        "tool_choice": ("auto", "none"),
        "response_format": ({"type": "text"},),
    }
    given = {name: body[name] for name in IGNORED_FIELDS if body.get(name) not in (None, {}, []) and body[name] is not False}
    return sorted(name for name, value in given.items() if value not in unchanged.get(name, ()))


def chat_completion(turn: RecordedTurn, message: Message, *, model: str) -> dict[str, Any]:
    """Return OpenAI's `chat.completion`, with a random id and the current time."""
    finish_reason = str(turn.made.finish_reason)
    if "tool_calls" in message:
        message, finish_reason = {**message, "content": message["content"] or None}, "tool_calls"
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}],
        "usage": _usage(turn),
    }


def stream_of(completion: dict[str, Any], with_usage: bool) -> str:
    """Return a completion as server-sent events: the message, the finish reason and, if asked for, the usage. Pure."""
    head = {**completion, "object": "chat.completion.chunk", "usage": None}
    choice = completion["choices"][0]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}]},
    ]
    if with_usage:
        chunks.append({**head, "choices": [], "usage": completion["usage"]})
    events = [json.dumps(chunk) for chunk in chunks]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])


def generated(turn: RecordedTurn, *, model: str) -> dict[str, Any]:
    """Return a turn as vLLM's endpoint for token ids does. Log-probabilities are those of the sampling policy (log μ)."""
    token_ids, logprobs = turn.made.completion_token_ids.tolist(), turn.made.behaviour_logprobs.tolist()
    content = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(token_ids, logprobs, strict=True)
    ]
    reason = str(turn.made.finish_reason)
    choice = {"index": 0, "token_ids": token_ids, "logprobs": {"content": content}, "finish_reason": reason}
    return {"request_id": f"gen-{secrets.token_hex(12)}", "model": model, "choices": [choice], "usage": _usage(turn)}


async def _unless_over(
    waits: Coroutine[Any, Any, _Result], over: asyncio.Event, *hung_up: Coroutine[Any, Any, None]
) -> _Result:
    """Return the result of `waits`. If the environment's run ends or the client hangs up, cancel it and raise `Refused`."""
    working = asyncio.create_task(waits)
    ending = [asyncio.create_task(one) for one in (over.wait(), *hung_up)]
    try:
        await asyncio.wait([working, *ending], return_when=asyncio.FIRST_COMPLETED)
        if working.done() and not working.cancelled():
            return working.result()
        raise no_such_episode() if over.is_set() else _hung_up_on()
    finally:
        for task in (working, *ending):
            task.cancel()


async def _answer(
    episode: Episode, request: Request, waits: Coroutine[Any, Any, RecordedTurn], answered: Callable[[RecordedTurn], str]
) -> str:
    """Wait for a turn and return the response body `answered(turn)`."""
    turn = await _unless_over(waits, over := episode.over, _hung_up(request))
    try:
        return answered(turn)
    except Exception:
        episode.not_served(turn, over)
        raise


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _hung_up_on() -> Refused:
    return Refused(499, "hung_up", "the client hung up")


def _refusal_of(error: Exception) -> Refused:
    match error:
        case Refused():
            return error
        case Unrenderable() | RecursionError():
            return Refused(400, "invalid_request", str(error))
        case HTTPException():
            fix = "use POST {base_url}/chat/completions or GET {base_url}/models"
            return Refused(error.status_code, "not_found", f"{error.detail}: {fix}")
    return Refused(500, "internal_error", f"the actor cannot answer this: {type(error).__name__}: {error}"[:500])


def _usage(turn: RecordedTurn) -> dict[str, int]:
    prompt, completion = len(turn.context_token_ids), len(turn.made.completion_token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def context_of(chat: ChatFormat, served: list[RecordedTurn], messages: list[Message], tools: Tools) -> TokenIds:
    """Return the requested turn's context, int32[context]. Of the recorded turns whose history the request continues, extend
    the one with the longest history, if the format allows it. Text never becomes control tokens. Raises `Unrenderable`."""
    turn = _last_known(served, _history(messages, tools))
    messages, tools = chat.control.parted(messages), chat.control.parted(tools)
    token_ids = None
    if turn is not None:
        prompt_ids, sampled_ids = turn.context_token_ids.tolist(), turn.made.completion_token_ids.tolist()
        num_known = len(turn.messages) - 1
        token_ids = chat.extend(prompt_ids, sampled_ids, messages, num_known, tools)
    return np.array(token_ids or chat.render(messages, tools), dtype=np.int32)


def answer_of(
    chat: ChatFormat, turn: RecordedTurn, messages: list[Message], tools: Tools, stop: Iterable[str] = (), may_call: bool = True
) -> Message:
    """Return the turn as a message without its stop string. Set `turn.messages` to the history that ends with this message."""
    prompt_ids, sampled_ids = turn.context_token_ids.tolist(), turn.made.completion_token_ids.tolist()
    parsed = chat.parse(sampled_ids, prompt_ids, tools if may_call else [])
    message: Message = {"role": "assistant", "content": before_stop(parsed.content, stop)}
    if reasoning := before_stop(parsed.reasoning, stop):
        message["reasoning_content"] = reasoning

    def made_id(number: int) -> str:  # the same for the same call; Mistral's templates require nine letters or digits
        salt = number.to_bytes(8, "little")
        return hashlib.blake2b(turn.token_ids.tobytes(), digest_size=8, salt=salt).hexdigest()[:9]

    if parsed.tool_calls:
        message["tool_calls"] = [
            _call(as_unicode(call.id) or made_id(number), as_unicode(call.name), as_unicode(call.arguments_json))
            for number, call in enumerate(parsed.tool_calls)
        ]
    turn.messages = _history([*messages, message], tools)
    return message


def read_messages(given: Any) -> list[Message]:
    """Read a request's messages. Text parts are joined, and the arguments of calls are parsed. Raises `Unrenderable`."""
    fix = "messages (give a list of messages with text content and the role system, user, assistant or tool)"
    return [_message(one, f"messages[{number}]") for number, one in enumerate(_read(given, list[_GivenMessage], fix))]


def _message(given: _GivenMessage, where: str) -> Message:
    message: Message = {"role": "system" if given.role == "developer" else given.role}
    parts = given.content if isinstance(given.content, list) else [given.content or ""]
    try:
        message["content"] = "".join(part if isinstance(part, str) else part["text"] for part in parts)
        calls = [
            (call.get("id") or "", call["function"]["name"], call["function"]["arguments"]) for call in given.tool_calls or ()
        ]
    except (KeyError, TypeError) as error:
        raise Unrenderable(f"{where}: content parts need text; tool_calls need function.name and function.arguments") from error
    for field in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(value := getattr(given, field), str):
            message[field] = value
    if calls:
        message["tool_calls"] = [_call(call_id, str(name), parsed_json(arguments)) for call_id, name, arguments in calls]
    return message


def _call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _history(messages: list[Message], tools: Tools) -> tuple[Any, ...]:
    """Return a key for comparing histories, without reasoning and empty fields, which clients drop or add."""
    return (
        json.dumps(tools, sort_keys=True),
        *(
            json.dumps(
                [message["role"], message.get("content", ""), message.get("name"), message.get("tool_call_id")]
                + [
                    [call["id"], call["function"]["name"], parsed_json(call["function"]["arguments"])]
                    for call in message.get("tool_calls", ())
                ],
                sort_keys=True,
            )
            for message in messages
        ),
    )


def _last_known(served: list[RecordedTurn], history: tuple[Any, ...]) -> RecordedTurn | None:
    """Return a turn whose messages are the longest prefix of `history`, preferably one that no turn extends, or None."""
    extended = {id(turn.extends) for turn in served}
    known = [
        turn
        for turn in served
        if turn.messages and len(turn.messages) < len(history) and history[: len(turn.messages)] == turn.messages
    ]
    return max(known, key=lambda turn: (len(turn.messages), id(turn) not in extended), default=None)
