"""Ask another model to judge a completion, through an OpenAI-compatible endpoint.

The verifier's main process makes the call, because waiting must not occupy a worker. The answer is untrusted, so a
worker reads it, as the item's `judgement`. If the judge does not answer, the item fails. Answers are cached by the sent text.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import logging
import os
import re
import time
import urllib.error
import urllib.request
from contextlib import AbstractAsyncContextManager

from pipelinerl.errors import FieldError, PipelineRLError, as_unicode
from pipelinerl.recipe.fields import JudgeConfig, RewardConfig
from pipelinerl.service.lifecycle import on_thread
from pipelinerl.service.retry import Backoff, retry_forever
from pipelinerl.v1 import sequence_pb2, verifier_pb2
from services.verifier.metrics import VerifierMetrics
from services.verifier.rewards.compose import failed

log = logging.getLogger(__name__)

MOST_ANSWERS = 10_000
"""Maximum number of cached answers."""
ANSWER_CHARACTERS = 8192
"""Number of characters kept of a judge's answer, from its end, where models put their verdict."""
MOST_BYTES = 4 * 1024**2
"""Maximum number of bytes read from a response."""
_BACKOFF = Backoff(first_s=0.5, most_s=10.0, jitter=0.5)
_HEALS = (408, 409, 425, 429)
"""HTTP statuses, in addition to 5xx, after which the call is repeated."""


class JudgeUnavailable(PipelineRLError):
    """The judge gave no answer, but may answer another call."""


class JudgeRefused(PipelineRLError):
    """A call failed that a retry cannot heal: the judge refused it, or its response is not a chat completion."""


class Judge(AbstractAsyncContextManager["Judge"]):
    """The judge of one reward. `key`: API key, empty = none; it appears in no log and no message."""

    def __init__(self, reward: RewardConfig, key: str, metrics: VerifierMetrics) -> None:
        assert reward.judge is not None
        self._config, self._key, self._calls = reward.judge, key, metrics.judge_calls
        self._skips_cut = reward.truncated == "zero"
        self._answers: dict[bytes, asyncio.Task[verifier_pb2.VerifyResult]] = {}  # least recently used first
        self._places = asyncio.Semaphore(reward.judge.concurrency)
        self._next_at_s = 0.0
        self.num_waiting = 0

    async def __aexit__(self, *exc: object) -> None:
        for task in self._answers.values():
            task.cancel()
        await asyncio.gather(*self._answers.values(), return_exceptions=True)

    def answer(self, item: verifier_pb2.VerifyItem) -> asyncio.Future[verifier_pb2.VerifyResult]:
        """Return a result with the judge's text as `answer`, or a failure. With `truncated: zero`, a truncated completion is
        not judged, and `answer` is empty. If the caller is cancelled, the judge's answer is still awaited and cached."""
        if self._skips_cut and item.finish_reason == sequence_pb2.FINISH_REASON_LENGTH:
            unasked = asyncio.get_running_loop().create_future()
            unasked.set_result(verifier_pb2.VerifyResult(status=verifier_pb2.VERIFY_STATUS_OK))
            return unasked
        text = filled(self._config.template, item)
        key = hashlib.sha256(text.encode()).digest()
        if key in self._answers:
            self._calls.labels("cached").inc()
        else:
            self.num_waiting += 1
            self._answers[key] = asyncio.create_task(self._ask(key, text))
            while len(self._answers) > MOST_ANSWERS and self._answers[oldest := next(iter(self._answers))].done():
                del self._answers[oldest]
        self._answers[key] = self._answers.pop(key)
        return asyncio.shield(self._answers[key])

    async def _ask(self, key: bytes, text: str) -> verifier_pb2.VerifyResult:
        is_kept = False
        try:
            async with self._places:
                answer = await self._answer_in_time(text)
            is_kept = answer.status == verifier_pb2.VERIFY_STATUS_OK
            return answer
        finally:
            self.num_waiting -= 1
            self._calls.labels("answered" if is_kept else "failed").inc()
            if not is_kept:
                self._answers.pop(key, None)

    async def _answer_in_time(self, text: str) -> verifier_pb2.VerifyResult:
        """Call the judge, with retries. The timeout starts only when the rate limit allows the first attempt."""
        timeout_s, failures = self._config.timeout_s, list[str]()
        await self._turn()
        until_s = time.monotonic() + timeout_s

        async def attempt() -> str:
            if failures:
                self._calls.labels("retried").inc()
                await self._turn()
            left_s = max(until_s - time.monotonic(), 0.1)
            return await asyncio.wrap_future(on_thread("judge-call", lambda: post(self._config, self._key, text, left_s)))

        def may_heal(error: Exception) -> bool:
            failures.append(str(error))
            return isinstance(error, JudgeUnavailable)

        try:
            async with asyncio.timeout(timeout_s):
                said = await retry_forever(attempt, "have a completion judged", retried=may_heal, backoff=_BACKOFF)
            return verifier_pb2.VerifyResult(status=verifier_pb2.VERIFY_STATUS_OK, answer=said[-ANSWER_CHARACTERS:])
        except TimeoutError:
            late = f"the judge gave no answer within {timeout_s:g} s (reward.judge.timeout_s)"
            return failed(verifier_pb2.VERIFY_STATUS_TIMEOUT, ": ".join((late, *failures[-1:])))
        except JudgeRefused as error:
            log.error("the judge failed, and a retry would not help: %s", error)
            return failed(verifier_pb2.VERIFY_STATUS_CRASHED, f"the judge failed, and a retry would not help: {error}")

    async def _turn(self) -> None:
        if self._config.requests_per_minute:
            now_s = time.monotonic()
            mine_s = max(now_s, self._next_at_s)
            self._next_at_s = mine_s + 60.0 / self._config.requests_per_minute
            await asyncio.sleep(mine_s - now_s)


def api_key(config: JudgeConfig) -> str:
    """Return the API key; "" if none is needed. Raises `FieldError` if the variable `api_key_env` is missing or unusable."""
    key = os.environ.get(config.api_key_env, "").strip() if config.api_key_env else ""
    if config.api_key_env and not key:
        problem = "is not set, or is empty, in the verifier's environment; set it where the verifier starts"
        raise FieldError("reward.judge.api_key_env", config.api_key_env, problem)
    if not (key.isascii() and key.isprintable()):  # http.client would raise an error that contains the key
        problem = "the variable holds a line break or another character that an HTTP header cannot have; remove it"
        raise FieldError("reward.judge.api_key_env", config.api_key_env, problem)
    return key


_PLACE = re.compile(r"\{(prompt|completion|reference)\}")


def filled(template: str, item: verifier_pb2.VerifyItem) -> str:
    """Return `template` with {prompt}, {completion} and {reference} replaced. Other braces stay, even in the inserted text."""
    try:
        reference = json.loads(item.reference_json)
    except (ValueError, RecursionError):
        reference = item.reference_json
    answer = reference.get("answer") if isinstance(reference, dict) else reference
    parts = {
        "prompt": item.prompt_text,
        "completion": item.completion_text,
        "reference": answer if isinstance(answer, str) else item.reference_json,
    }
    return _PLACE.sub(lambda found: parts[found[1]], template)


def post(config: JudgeConfig, key: str, text: str, timeout_s: float) -> str:
    """Make one blocking call and return the judge's text. Raises `JudgeUnavailable` or `JudgeRefused`."""
    asked = {"model": config.model, "messages": [{"role": "user", "content": text}], "temperature": 0}
    url = f"{config.url.rstrip('/')}/chat/completions"
    request = urllib.request.Request(url, data=json.dumps(asked).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    if key:
        request.add_unredirected_header("Authorization", f"Bearer {key}")  # for this host only
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            body = response.read(MOST_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(2048).decode(errors="replace")
        reason = f"HTTP {error.code}: {' '.join(said.split())}"
        reason = (reason.replace(key, "***") if key else reason)[:300]
        kind = JudgeUnavailable if error.code >= 500 or error.code in _HEALS else JudgeRefused
        raise kind(reason) from None
    except (OSError, http.client.HTTPException) as error:  # refused, reset, cut, timed out
        raise JudgeUnavailable(f"{type(error).__name__}: {error}"[:300]) from None
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        content = None
    if not isinstance(content, str):
        raise JudgeRefused(f"the response is not a chat completion: {body[:200].decode(errors='replace')!r}")
    return as_unicode(content)
