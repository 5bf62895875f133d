"""An actor's episode endpoint without its engine: a policy that says what a test's script says."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.http_server import Answer, Request, http_server

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
