"""Completions scored by another model: what it is asked, how often, and what becomes of its failures. Against a real server."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from prometheus_client import CollectorRegistry

from pipelinerl.errors import FieldError
from pipelinerl.messages.verification import status_name
from pipelinerl.recipe.fields import RewardConfig, TaskConfig
from pipelinerl.service.lifecycle import Readiness
from pipelinerl.service.retry import Backoff
from pipelinerl.v1 import verifier_pb2 as pb
from pipelinerl.v1.sequence_pb2 import FINISH_REASON_LENGTH
from services.verifier import judge as judging
from services.verifier.judge import Judge, api_key
from services.verifier.metrics import VerifierMetrics
from services.verifier.pool import QueueFull, RewardPool
from services.verifier.rewards.compose import make_reward, score_item
from tests.support.chat_endpoint import endpoint
from tests.support.machine import an_hour_later, until

KEY = "sk-very-secret"
REFERENCE = '{"answer":"42"}'


@pytest.fixture(autouse=True)
def tried_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "_BACKOFF", Backoff(first_s=0.01))


def reward(url: str, truncated: str = "score", **more: Any) -> RewardConfig:
    template = "Problem: {prompt}\nRight: {reference}\nGiven: {completion}\n{braces} {{stay}}"
    config = {"url": url, "model": "big", "template": template, "pattern": r"SCORE: (\S+)", "full_marks": 10.0, **more}
    return RewardConfig.model_validate({"scorer": "judge", "judge": config, "truncated": truncated})


class CountedJudge(Judge):
    def __init__(self, config: RewardConfig) -> None:
        self.registry = CollectorRegistry()
        super().__init__(config, KEY, VerifierMetrics(self.registry, ["t"]))

    def calls(self, outcome: str) -> float | None:
        return self.registry.get_sample_value("pipelinerl_verifier_judge_calls_total", {"outcome": outcome})


def judge_of(url: str, **more: Any) -> CountedJudge:
    return CountedJudge(reward(url, **more))


def item(completion: str, index: int = 0, **more: Any) -> pb.VerifyItem:
    return pb.VerifyItem(
        sequence_id=f"g.{index}", task="t", prompt_text="6 * 7?", completion_text=completion, reference_json=REFERENCE, **more
    )


async def late_answer(one: CountedJudge) -> pb.VerifyResult:
    """The answer if the time of a call ends after it was tried again."""
    before = one.calls("retried")
    asked = one.answer(item("x"))
    await until(lambda: one.calls("retried") != before)
    with an_hour_later():
        return await asked


async def test_the_judge_gets_the_filled_template_and_the_key_and_each_text_once() -> None:
    with endpoint("Well.\nSCORE: 7") as server:
        async with judge_of(server.url) as one:
            tricky = item("I say {reference} and {prompt} 😀")
            same = await asyncio.gather(one.answer(tricky), one.answer(tricky))
            again = await one.answer(tricky)
            assert ([*same, again], again.answer) == ([again] * 3, "Well.\nSCORE: 7")
            assert [one.calls(outcome) for outcome in ("answered", "cached", "retried", "failed")] == [1, 2, 0, 0]
    ((path, headers, body),) = server.asked
    assert (path, headers["Content-Type"]) == ("/v1/chat/completions", "application/json")
    assert headers["Authorization"] == f"Bearer {KEY}"
    text = "Problem: 6 * 7?\nRight: 42\nGiven: I say {reference} and {prompt} 😀\n{braces} {{stay}}"
    assert body == {"model": "big", "messages": [{"role": "user", "content": text}], "temperature": 0}


async def test_what_may_heal_is_tried_again_and_a_judge_that_is_away_is_waited_for() -> None:
    with endpoint((503, "busy"), (429, "slow down"), "SCORE: 10") as server:
        async with judge_of(server.url) as one:
            answer = await one.answer(item("x"))
            assert (answer.answer, len(server.asked)) == ("SCORE: 10", 3)
            assert (one.calls("answered"), one.calls("retried")) == (1, 2)
    async with judge_of("http://127.0.0.1:1/v1") as one:
        answer = await late_answer(one)
    assert answer.status == pb.VERIFY_STATUS_TIMEOUT
    assert "Connection refused" in answer.message


@pytest.mark.parametrize(
    ("script", "timeout_s", "status", "told"),
    [
        ((401, f"bad key {KEY}, of you"), 60, pb.VERIFY_STATUS_CRASHED, "would not help: HTTP 401: bad key ***, of you"),
        ((200, "<html>"), 60, pb.VERIFY_STATUS_CRASHED, "the response is not a chat completion: '<html>'"),
        ((200, '{"choices": []}'), 60, pb.VERIFY_STATUS_CRASHED, "not a chat completion"),
        ((500, "out of memory"), 60, pb.VERIFY_STATUS_TIMEOUT, "60 s (reward.judge.timeout_s): HTTP 500: out of memory"),
        (None, 0.2, pb.VERIFY_STATUS_TIMEOUT, "the judge gave no answer within 0.2 s (reward.judge.timeout_s)"),
    ],
)
async def test_a_failure_is_not_cached_and_tells_no_key(
    script: Any, timeout_s: float, status: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with endpoint(script) as server:
        async with judge_of(server.url, timeout_s=float(timeout_s)) as one:
            for _ in range(2):
                answer = await (late_answer(one) if "HTTP 500" in told else one.answer(item("x")))
                assert (answer.status, told in answer.message) == (status, True), answer.message
            assert (one.calls("failed"), one.calls("cached")) == (2, 0)
    assert KEY not in caplog.text + answer.message


async def test_the_key_does_not_follow_a_redirection() -> None:
    with endpoint("SCORE: 1") as other, endpoint((302, "", {"Location": other.url})) as server:
        async with judge_of(server.url) as one:
            await one.answer(item("x"))
    assert server.asked[0][1]["Authorization"] == f"Bearer {KEY}"
    assert ["Authorization" in headers for _, headers, _ in other.asked] == [False]


async def test_calls_at_once_and_calls_a_minute_are_bounded() -> None:
    with endpoint("SCORE: 1", slow=True) as server:
        async with judge_of(server.url, concurrency=2) as one:
            asking = [one.answer(item(f"c{index}")) for index in range(6)]
            while len(server.asked) < 2:
                await asyncio.sleep(0)
            server.slow.set()
            await asyncio.gather(*asking)
        assert (server.most_at_once, len(server.asked)) == (2, 6)
    with endpoint("SCORE: 1") as server:
        async with judge_of(server.url, requests_per_minute=600.0) as one:
            began_s = time.monotonic()
            await asyncio.gather(*(one.answer(item(f"c{index}")) for index in range(3)))
        assert max(server.at_s) - began_s > 0.19, "a tenth of a second between two calls"


async def test_old_answers_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "MOST_ANSWERS", 2)
    with endpoint("SCORE: 1") as server:
        async with judge_of(server.url) as one:
            for completion in ("a", "b", "a", "c", "a", "b"):
                await one.answer(item(completion))
    assert [body["messages"][0]["content"].partition("Given: ")[2][0] for _, _, body in server.asked] == ["a", "b", "c", "b"]


# --- from the judge's answer to a result


class InProcess:
    """Scores in this process, as a worker would."""

    pid = 0

    def __init__(self, config: RewardConfig) -> None:
        self._reward = make_reward(config, TaskConfig(name="t"))
        self.ended = asyncio.get_running_loop().create_future()

    async def score(self, item: pb.VerifyItem, within_s: float) -> pb.VerifyResult:
        return score_item(self._reward, item)

    async def kill(self) -> None: ...


@asynccontextmanager
async def judged_pool(config: RewardConfig, one: Judge) -> AsyncIterator[RewardPool]:
    recipe: Any = SimpleNamespace(problem_sets={"t": SimpleNamespace(reward=config)})
    worker: Any = InProcess(config)
    async with one:
        pool = RewardPool(recipe, VerifierMetrics(CollectorRegistry(), ["t"]), Readiness(), 8, {"t": one})
        slot = asyncio.create_task(pool.run_slot(worker))
        yield pool
        slot.cancel()


async def scored(config: RewardConfig, *items: pb.VerifyItem) -> list[pb.VerifyResult]:
    heard: list[pb.VerifyResult] = []
    async with judged_pool(config, CountedJudge(config)) as pool:
        results = await pool.score(items, heard.append)
    assert sorted(result.sequence_id for result in heard) == [item.sequence_id for item in items]
    return results


async def test_the_number_over_full_marks_is_the_score_and_what_earns_nothing_anyway_is_not_asked_about() -> None:
    answers = ["SCORE: 3, no \ud83d: SCORE: 7", (403, "no"), "I cannot say", "SCORE: 11", "SCORE: many", "SCORE: nan"]
    with endpoint(*answers) as server:
        config = reward(server.url, concurrency=1)
        results = await scored(config, *(item(f"c{index}", index) for index in range(6)))
    assert [status_name(result.status) for result in results] == ["ok", "crashed", *["bad_reward"] * 4]
    assert (results[0].reward, dict(results[0].components)) == (pytest.approx(0.7), {"answer": pytest.approx(0.7)})
    said = "the last match of reward.judge.pattern is not a number from 0 to 10 in the judge's answer: 'I cannot say'"
    assert results[2].message == said
    assert all(result.reward == 0 for result in results[1:])
    with endpoint("SCORE: 10") as server:
        (result,) = await scored(reward(server.url, truncated="zero"), item("cut", finish_reason=FINISH_REASON_LENGTH))
    assert (result.status, result.reward, server.asked) == (pb.VERIFY_STATUS_OK, 0.0, [])


async def test_a_pattern_that_cuts_the_judges_number_is_told() -> None:
    with endpoint("SCORE: 0.9", "SCORE: 7,5", "SCORE: 7/10, the last of [1,2]. ") as server:
        config = reward(server.url, pattern=r"SCORE: (\d+)")
        *cut, whole = [(await scored(config, item(completion)))[0] for completion in "abc"]
    assert ([one.status for one in cut], whole.reward) == ([pb.VERIFY_STATUS_BAD_REWARD] * 2, pytest.approx(0.7))
    assert cut[0].message.startswith("reward.judge.pattern takes only '0' of '0.9'; let its group match the whole number")


async def test_more_items_than_may_wait_are_refused_and_what_was_asked_is_known_when_they_come_again() -> None:
    with endpoint("SCORE: 1", slow=True) as server:
        config = reward(server.url)
        one = CountedJudge(config)
        async with judged_pool(config, one) as pool:
            first = asyncio.create_task(pool.score([item("a"), item("b")]))
            await asyncio.sleep(0)  # its requests count at once, although none has begun
            assert (one.num_waiting, server.asked) == (2, [])
            with pytest.raises(QueueFull, match="no room for 7 more items: 2 are waiting, and max_queue = 8"):
                await pool.score([item("c")] * 7)
            first.cancel()  # as a caller whose deadline has passed
            await asyncio.gather(first, return_exceptions=True)
            server.slow.set()
            results = await pool.score([item("a"), item("b")])
    assert ([result.reward for result in results], len(server.asked)) == ([0.1, 0.1], 2)


async def test_a_call_that_fails_leaves_no_item_in_the_queue() -> None:
    """A defect of the judge's call ends the whole call; its other items would be scored for nobody."""
    judge: Any = SimpleNamespace(num_waiting=0, answer=AsyncMock(side_effect=RuntimeError("can't start new thread")))
    config = reward("http://127.0.0.1:1/v1")
    sets = {"t": SimpleNamespace(reward=config), "plain": SimpleNamespace(reward=config)}
    recipe: Any = SimpleNamespace(problem_sets=sets)
    registry = CollectorRegistry()
    pool = RewardPool(recipe, VerifierMetrics(registry, ["t"]), Readiness(), 8, {"t": judge})
    plain = pb.VerifyItem(sequence_id="p.0", task="plain")
    with pytest.raises(RuntimeError, match="new thread"):
        await pool.score([plain, item("a")])
    assert registry.get_sample_value("pipelinerl_verifier_queue_items") == 0


def test_a_key_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = reward("http://x/v1", api_key_env="JUDGE_KEY").judge
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(FieldError, match=r"reward.judge.api_key_env = 'JUDGE_KEY': is not set, or is empty"):
        api_key(config)
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\n")
    assert api_key(config) == KEY
    for wrong in (f"{KEY}\r\n{KEY}", f"{KEY}é"):
        monkeypatch.setenv("JUDGE_KEY", wrong)
        with pytest.raises(FieldError, match="an HTTP header cannot have") as error:
            api_key(config)
        assert KEY not in str(error.value)
    assert api_key(config.model_copy(update={"api_key_env": ""})) == ""
