"""An OpenAI-compatible chat completions endpoint on a free port, which says what a test tells it to."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


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
    one, lock = Endpoint(list(script)), threading.Lock()
    if not slow:
        one.slow.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
            with lock:
                one.asked.append((self.path, dict(self.headers), body))
                one.at_s.append(time.monotonic())
                one.at_once += 1
                one.most_at_once = max(one.most_at_once, one.at_once)
                said = one.script.pop(0) if len(one.script) > 1 else one.script[0]
            one.slow.wait(60)
            with lock:
                one.at_once -= 1
            if said is None:
                done.wait(60)
            elif isinstance(said, str):
                self.answer(200, json.dumps({"choices": [{"message": {"content": said}}]}))
            else:
                self.answer(*said)

        do_GET = do_POST

        def answer(self, status: int, body: str, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: Any) -> None:
            return

    done = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        one.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        try:
            yield one
        finally:
            done.set()
            one.slow.set()
            server.shutdown()
            serving.join()
