"""OpenAI-compatible chat completions endpoints on a free port, which say what a test tells them to: a judge and others by a
script; and an actor's endpoint of episodes, without its engine, by a function."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.http_server import Answer, Request, http_server


@dataclass
class Endpoint:
    """Answers a call with what comes next of `script`, then with its last: a text, (status, body, headers), or None: never."""

    script: list[Any]
    url: str = ""
    asked: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    """Path, headers and body of each call."""
    at_s: list[float] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    slow: threading.Event = field(default_factory=threading.Event)
    """Set: it answers at once."""


@contextmanager
def endpoint(*script: Any, slow: bool = False) -> Iterator[Endpoint]:
    one, lock, done = Endpoint(list(script)), threading.Lock(), threading.Event()
    if not slow:
        one.slow.set()

    def answer(request: Request) -> Answer | None:
        with lock:
            one.asked.append((request.path, dict(request.headers), json.loads(request.body or b"null")))
            one.at_s.append(time.monotonic())
            one.at_once += 1
            one.most_at_once = max(one.most_at_once, one.at_once)
            said = one.script.pop(0) if len(one.script) > 1 else one.script[0]
        one.slow.wait(60)
        with lock:
            one.at_once -= 1
        if said is None:
            done.wait(60)
            return None
        if isinstance(said, str):
            return Answer(json.dumps({"choices": [{"message": {"content": said}}]}).encode())
        status, body, *headers = said
        return Answer(body.encode(), status, *headers)

    with http_server(answer) as url:
        one.url = f"{url}/v1"
        try:
            yield one
        finally:
            done.set()
            one.slow.set()


Says = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]
"""HTTP status and body for a request's body."""


def says(text: str, *, finish_reason: str = "stop", tool_calls: Any = None) -> tuple[int, dict[str, Any]]:
    message = {"role": "assistant", "content": text} | ({"tool_calls": tool_calls} if tool_calls else {})
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if tool_calls else finish_reason}
    usage = {"completion_tokens": len(text), "prompt_tokens": 1, "total_tokens": len(text) + 1}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "policy"}
    return 200, {**head, "choices": [choice], "usage": usage}


def calls(name: str, arguments: str) -> tuple[int, dict[str, Any]]:
    return says("", tool_calls=[{"id": "call-1", "type": "function", "function": {"name": name, "arguments": arguments}}])


def refuses(code: str, status: int = 400) -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": f"refused: {code}", "type": "invalid_request_error", "code": code}}


class FakeEndpoint:
    """`requests`: bodies in the order in which they came, after `answer` was asked. `base_url`: of `{key}`'s episode."""

    def __init__(self, answer: Says) -> None:
        self.answer, self.url = answer, ""
        self.requests: list[dict[str, Any]] = []

    def base_url(self, key: str = "key") -> str:
        return f"{self.url}/episodes/{key}/v1"


@contextmanager
def fake_endpoint(answer: Says) -> Iterator[FakeEndpoint]:
    endpoint = FakeEndpoint(answer)

    def answered(request: Request) -> Answer:
        body = json.loads(request.body)
        endpoint.requests.append(body)
        status, said = endpoint.answer(body)
        found = request.path.endswith("/v1/chat/completions")
        return Answer(json.dumps(said).encode(), status if found else 404, {"Content-Type": "application/json"})

    with http_server(answered) as endpoint.url:
        yield endpoint
