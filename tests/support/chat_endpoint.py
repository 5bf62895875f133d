"""An OpenAI-compatible chat completions endpoint on a free port, which says what a test tells it to: a judge and others by
texts; and an actor's endpoint of episodes, without its engine, by a function."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.http_server import Answer, Request, http_server


@dataclass
class Endpoint:
    """Answers a call with what comes next of `script`, then with its last: a text, (status, body, headers), a function that
    gives the latter for a request's body, or None: never."""

    script: list[Any]
    url: str = ""
    asked: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    """Path, headers and body of each call."""
    at_s: list[float] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    slow: threading.Event = field(default_factory=threading.Event)
    """Set: it answers at once."""

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [body for _, _, body in self.asked]

    def base_url(self, key: str = "key") -> str:
        """Of `key`'s episode."""
        return f"{self.url.removesuffix('/v1')}/episodes/{key}/v1"


@contextmanager
def endpoint(*script: Any, slow: bool = False) -> Iterator[Endpoint]:
    one, lock, done = Endpoint(list(script)), threading.Lock(), threading.Event()
    if not slow:
        one.slow.set()

    def answer(request: Request) -> Answer | None:
        with lock:
            asked = json.loads(request.body or b"null")
            one.asked.append((request.path, dict(request.headers), asked))
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
        if callable(said):
            status, content = said(asked)
            found = request.path.endswith("/v1/chat/completions")
            said = status if found else 404, json.dumps(content), {"Content-Type": "application/json"}
        status, body, *headers = said
        return Answer(body.encode(), status, *headers)

    with http_server(answer) as url:
        one.url = f"{url}/v1"
        try:
            yield one
        finally:
            done.set()
            one.slow.set()


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
