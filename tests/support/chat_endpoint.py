"""An OpenAI-compatible chat completions endpoint on a free port, which says what a test tells it to."""

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
