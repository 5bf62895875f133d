"""An actor's episode endpoint without its engine: a policy that says what a test's script says."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]
"""HTTP status and body for a request's body."""


def says(text: str, *, finish_reason: str = "stop", tool_calls: Any = None) -> tuple[int, dict[str, Any]]:
    message = {"role": "assistant", "content": text} | ({"tool_calls": tool_calls} if tool_calls else {})
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if tool_calls else finish_reason}
    usage = {"completion_tokens": len(text), "prompt_tokens": 1, "total_tokens": len(text) + 1}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "policy"}
    return 200, {**head, "choices": [choice], "usage": usage}


def calls(name: str, arguments: str, id_: str = "call-1") -> tuple[int, dict[str, Any]]:
    return says("", tool_calls=[{"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}])


def refuses(code: str, status: int = 400) -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": f"refused: {code}", "type": "invalid_request_error", "code": code}}


class FakeEndpoint:
    """`requests`: bodies in the order in which they came, after `answer` was asked. `base_url`: of `{key}`'s episode."""

    def __init__(self, answer: Answer, port: int) -> None:
        self.answer, self._port = answer, port
        self.requests: list[dict[str, Any]] = []

    def base_url(self, key: str = "key") -> str:
        return f"http://127.0.0.1:{self._port}/episodes/{key}/v1"


@contextmanager
def fake_endpoint(answer: Answer) -> Iterator[FakeEndpoint]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            endpoint.requests.append(body)
            status, answer = endpoint.answer(body)
            data = json.dumps(answer).encode()
            self.send_response(status if self.path.endswith("/v1/chat/completions") else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    endpoint = FakeEndpoint(answer, server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
