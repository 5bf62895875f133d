"""Episodes that a verifier runs: environments, tools and agents against an endpoint that plays the policy; misbehaving ones."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelinerl.episodes import Done, Turn
from pipelinerl.messages.verification import VerifierAway, VerifierClient, status_name
from pipelinerl.v1.verifier_pb2 import EpisodeRequest, VerifyItem, VerifyResult
from services.verifier.confinement import children, descendants
from services.verifier.episode import Policy, play_environment, run_episode
from services.verifier.sandbox import confinement_missing
from tests.support.chat_endpoint import Endpoint, calls, endpoint, refuses, says
from tests.support.hostile_programs import ESCAPES, HOGS, LEAVERS, MAY, left_by, surroundings_in
from tests.support.machine import ends_within, until
from tests.support.verifier import ROOT, START_S, Verifier, sample, serving, verifier

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="episodes are confined with Linux's means")

NAME = "hostile_environments:Hostile"
LONG_S = 600.0


def recipe(**sections: Any) -> dict[str, Any]:
    task = {"source": "environment", "name": NAME, "answer_timeout_s": 10.0, "episode_timeout_s": LONG_S}
    return {
        "name": "test",
        "model": {"source": "path", "name": "unused"},
        "task": task | sections.pop("task", {}),
        "reward": {"memory_mib": 256} | sections.pop("reward", {}),
        **sections,
    }


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verifier]:
    with verifier(tmp_path_factory.mktemp("episodes"), recipe(task={"config": {"bonus": 0.25}})) as running:
        yield running.wait_until_serving()


@pytest.fixture
def policy() -> Iterator[Endpoint]:
    with endpoint(lambda _: says("0.5")) as policy:
        yield policy


def episode(policy: Endpoint, row: dict[str, Any], number: int = 0, **fields: Any) -> EpisodeRequest:
    reference = {"row": row} | ({"answer": fields.pop("answer")} if "answer" in fields else {})
    known = {"sequence_id": f"g.{number}", "task": NAME, "seed": 7, "base_url": policy.base_url(str(number))}
    return EpisodeRequest(reference_json=json.dumps(reference), **(known | fields))


async def run(address: str, *requests: EpisodeRequest) -> list[VerifyResult]:
    async with VerifierClient(address) as client:
        return await asyncio.gather(*(client.run_episode(request, START_S) for request in requests))


async def run_few_at_once(hostile: Verifier, policy: Endpoint, programs: list[str]) -> list[VerifyResult]:
    requests = [episode(policy, {"in_reply": f"run {program}"}, number) for number, program in enumerate(programs)]
    batches = (requests[start : start + 4] for start in range(0, len(requests), 4))
    return [one for batch in batches for one in await run(hostile.address.grpc, *batch)]


# --- what an environment gets and gives


async def test_an_environment_is_asked_turn_by_turn_until_it_is_done(hostile: Verifier) -> None:
    turns = iter(["one", "two", "3"])
    with endpoint(lambda _: says(next(turns))) as policy:
        (result,) = await run(hostile.address.grpc, episode(policy, {"turns": 3}))
    assert (status_name(result.status), result.reward, dict(result.components)) == ("ok", 3.25, {"answer": 3.25})
    assert (dict(result.metrics), result.answer, result.message) == ({"said": 3.0}, "3", "")
    drawn = policy.requests[0]["messages"][1]["content"]
    assert policy.requests[2]["messages"] == [
        {"role": "system", "content": "seed 7"},
        {"role": "user", "content": drawn},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "2 left"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "1 left"},
    ]


async def test_the_same_seed_draws_the_same_and_another_one_something_else(hostile: Verifier, policy: Endpoint) -> None:
    await run(hostile.address.grpc, *(episode(policy, {}, number, seed=number // 2) for number in range(4)))
    drawn = sorted((r["messages"][0]["content"], r["messages"][1]["content"]) for r in policy.requests)
    assert drawn[0] == drawn[1]
    assert drawn[2] == drawn[3]
    assert not set(drawn[0][1].split()) & set(drawn[2][1].split())  # neither Python's number nor NumPy's


@pytest.mark.parametrize(("correct", "parts"), [(True, [1.0, -0.25]), (False, [0.0, 0.75])])
async def test_environments_give_rewards(hostile: Verifier, policy: Endpoint, correct: bool, parts: list[float]) -> None:
    (result,) = await run(hostile.address.grpc, episode(policy, {"correct": correct}))
    assert dict(result.components) == dict(zip(("answer", "environment"), parts, strict=True))
    assert result.reward == 0.75


class Odd:
    def start(self, row: Any, seed: int) -> Any:
        return "?"

    def reply(self, turn: Turn) -> Any:
        return Done(1.0)


def play(environment: type[Odd], policy: Endpoint, row: dict[str, Any]) -> VerifyResult:
    client = Policy(policy.base_url(), lambda _: None)
    result = run_episode(play_environment(environment, 1.0), episode(policy, row), client, max_abs=1e4)
    assert isinstance(result, VerifyResult)
    return result


def denied(*_: Any) -> None:
    raise PermissionError(13, "Permission denied", "log.txt")


@pytest.mark.parametrize(
    ("wrong", "status", "said"),
    [
        ({"reply": lambda *_: Done(None)}, "bad_reward", "Done's reward is None, not a number"),  # type: ignore[arg-type]
        ({"reply": lambda *_: Done(1.0, True)}, "bad_reward", "metrics are True; give a dict"),  # type: ignore[arg-type]
        ({"reply": lambda *_: Done(1.0, {}, "no")}, "crashed", "Done has correct='no'; it must be True, False or None"),  # type: ignore[arg-type]
        ({"reply": lambda *_: Done(1.0, {"a": None})}, "bad_reward", "metric 'a' is None, not"),  # type: ignore[dict-item]
        ({"reply": lambda *_: Done(1.0, {"answer": 7.0})}, "bad_reward", "rename Done's metric answer: a term of the reward"),
        ({"start": lambda *_: [{"role": "user", "text": "Hello"}]}, "crashed", "start returned [{'role': 'user', 'text': "),
        ({"start": lambda _, row, seed: row["question"]}, "crashed", "; the row has level, kind"),
        ({"start": denied}, "crashed", "; in a sandbox, code cannot write files "),
        ({"reply": lambda _, turn: turn.messages if len(turn.messages) < 3 else Done(1.0)}, "crashed", "whole conversation"),
        ({"tools": ["multiply"]}, "crashed", "attribute tools is ['multiply']; it must be a list of functions or schemas"),
    ],
)
def test_a_mistake_of_an_environment_is_named(wrong: dict[str, Any], status: str, said: str, policy: Endpoint) -> None:
    result = play(type("Odd", (Odd,), wrong), policy, {"level": 1, "kind": "a"})
    assert status_name(result.status) == status
    assert said in result.message


def test_an_environment_offers_functions_from_its_start_on_and_may_reuse_its_messages(policy: Endpoint) -> None:
    def look(place: str) -> str:
        return place

    class Changing(Odd):
        def start(self, row: Any, seed: int) -> Any:
            go = {"type": "function", "function": {"name": "go"}}
            self.tools, self._message = [look, go], {"role": "user", "content": "?"}
            return [self._message]

        def reply(self, turn: Turn) -> Any:
            if not self.tools:
                return Done(1.0)
            self.tools, self._message["content"] = [], "!"
            return [self._message]

    assert play(Changing, policy, {}).reward == 1.0
    first, second = policy.requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["look", "go"]
    assert ("tools" in second, [message["content"] for message in second["messages"]]) == (False, ["?", "0.5", "!"])


@pytest.mark.parametrize(
    ("code", "http_status"), [("max_turns_exceeded", 400), ("context_length_exceeded", 400), ("request_too_large", 413)]
)
async def test_a_turn_for_which_the_policy_has_no_room_is_its_fault(hostile: Verifier, code: str, http_status: int) -> None:
    turns = iter([says("one"), refuses(code, http_status)])
    with endpoint(lambda _: next(turns)) as policy:
        (result,) = await run(hostile.address.grpc, episode(policy, {"turns": 3}))
    assert (status_name(result.status), result.reward, result.message.partition(":")[0]) == ("ok", 0.0, code)
    assert dict(result.components) == {"answer": 0.0}


async def test_an_actor_that_refuses_or_is_gone_is_nobodys_fault(hostile: Verifier) -> None:
    with endpoint(lambda _: refuses("gone", 404)) as policy:
        (refused,) = await run(hostile.address.grpc, episode(policy, {}))
    (away,) = await run(hostile.address.grpc, episode(policy, {}))
    assert [status_name(result.status) for result in (refused, away)] == ["crashed"] * 2
    assert "HTTP 404" in refused.message
    assert "the actor does not answer" in away.message


# --- misdeeds


MISDEEDS = [
    ("sleep 600", "timeout", "10 s (task.answer_timeout_s)"),
    ("hang_in_c", "timeout", "waited for its environment's code for more than 10 s (task.answer_timeout_s)"),
    ("raise", "crashed", "RuntimeError: boom"),
    ("sys_exit", "crashed", "SystemExit"),
    ("os_exit", "crashed", "exit code 3"),
    ("segfault", "crashed", "SIGSEGV"),
    ("close_pipes", "crashed", ""),
    ("fill_memory", "out_of_memory", "reward.memory_mib"),
]


async def test_a_misdeed_costs_its_own_episode(hostile: Verifier, policy: Endpoint) -> None:
    """All at once, in the start and after a turn, with a good episode beside each."""
    rows = [{when: row[0]} for row in MISDEEDS for when in ("in_start", "in_reply")]
    pairs = enumerate([bad, {}] for bad in rows)
    requests = [episode(policy, row, 2 * number + index) for number, pair in pairs for index, row in enumerate(pair)]
    results = await run(hostile.address.grpc, *requests)
    for number, (bad, good) in enumerate(zip(results[::2], results[1::2], strict=True)):
        misdeed, status, message = MISDEEDS[number // 2]
        assert (status_name(bad.status), bad.reward, misdeed) == (status, 0.0, misdeed)
        assert message in bad.message
        assert (status_name(good.status), good.reward) == ("ok", 0.75)
    assert await sample(hostile.address, "episodes") == 0


async def test_processes_an_environment_started_end_with_its_episode(policy: Endpoint, tmp_path: Path) -> None:
    misdeeds = ("leave_children", "leave_children_and_hang")
    asked = [episode(policy, {"in_reply": f"{one} {tmp_path / one}"}, number) for number, one in enumerate(misdeeds)]
    with verifier(tmp_path, recipe(reward={"sandbox": False})) as running:
        results = await run(running.wait_until_serving().address.grpc, *asked)
    assert [status_name(result.status) for result in results] == ["ok", "timeout"]
    pids = [int(line) for one in misdeeds for line in (tmp_path / one).read_text().split()]
    assert len(pids) == 12
    assert [pid for pid in pids if not ends_within(pid, START_S)] == []


@pytest.mark.skipif(bool(confinement_missing()), reason=confinement_missing())
async def test_an_environment_gets_out_no_more_than_a_program(hostile: Verifier, policy: Endpoint, tmp_path: Path) -> None:
    with surroundings_in(tmp_path) as surroundings:
        escapes = [surroundings.filled(program, hostile.process.pid) for name, program in ESCAPES.items() if name not in MAY]
        results = await run_few_at_once(hostile, policy, escapes)
        assert surroundings.untouched
    assert [(status_name(result.status), result.message) for result in results] == [("ok", "")] * len(escapes)


@pytest.mark.skipif(bool(confinement_missing()), reason=confinement_missing())
async def test_what_an_environment_takes_or_leaves_is_bounded(hostile: Verifier, policy: Endpoint, tmp_path: Path) -> None:
    hasty = {"task": recipe(task={"answer_timeout_s": 3.0})["task"]}
    patient = {"name": "patient", "task": hasty["task"] | {"answer_timeout_s": START_S}}
    with verifier(tmp_path, recipe() | {"task": None, "tasks": [hasty, patient]}) as running:
        pid = running.wait_until_serving().process.pid
        misdeeds = [*HOGS.values(), *(program.format(parent=pid) for program in LEAVERS.values())]
        results = await run_few_at_once(running, policy, misdeeds)
        assert not any(each.message.endswith("got out") for each in results)
        assert await sample(running.address, 'sandbox{code="episodes",means="landlock"}') == 1
        assert "sandbox of episodes: landlock" in running.log
        (good,) = await run(running.address.grpc, episode(policy, {}, task="patient"))
        assert (status_name(good.status), good.reward) == ("ok", 0.5)
    pid = hostile.process.pid
    hanging = asyncio.create_task(run_few_at_once(hostile, policy, [LEAVERS["leaves processes and hangs"].format(parent=pid)]))
    await until(lambda: len(left_by(pid)) >= 4)
    async with asyncio.timeout(START_S):
        (template,) = children(pid)
        descriptors, (_, hard) = os.listdir(f"/proc/{template}/fd"), resource.prlimit(template, resource.RLIMIT_NOFILE)
        limits = resource.prlimit(template, resource.RLIMIT_NOFILE, (max(map(int, descriptors)) + 1, hard))
        for outside in children(template):
            os.kill(outside, signal.SIGKILL)  # alone, as the out-of-memory killer may do
        assert [each.message for each in await hanging] == ["the episode died with SIGKILL"]
        await until(lambda: not left_by(pid) and list(descendants(pid)) == [template])
        resource.prlimit(template, resource.RLIMIT_NOFILE, limits)


@pytest.mark.skipif(bool(confinement_missing()), reason=confinement_missing())
@pytest.mark.parametrize(
    ("prepares", "said"),
    [
        ("lambda: threading.Thread(target=threading.Event().wait, daemon=True).start()", "2 threads run instead of one"),
        ("lambda: sys.path.append('loop')", "a system call failed while the sandbox was set up: [Errno 40] Too many levels"),
    ],
)
async def test_an_episode_that_cannot_be_put_in_a_sandbox_says_why(
    policy: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepares: str, said: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    Path("prepared.py").write_text(f"""
import os, sys, threading
from hostile_environments import Hostile
os.register_at_fork(after_in_child={prepares})
""")
    data = recipe(task={"name": "prepared:Hostile"})
    (result,) = await served(tmp_path, data, episode(policy, {}, task="prepared:Hostile"))
    assert status_name(result.status) == "crashed"
    assert result.message.startswith(f"the episode has no sandbox: {said}")


async def test_a_call_that_is_cancelled_ends_its_episode(hostile: Verifier) -> None:
    asked = asyncio.Event()
    loop, waits = asyncio.get_running_loop(), threading.Event()

    def answer(_: dict[str, Any]) -> Any:
        loop.call_soon_threadsafe(asked.set)
        waits.wait()
        return says("1")

    with endpoint(answer) as policy:
        calling = asyncio.create_task(run(hostile.address.grpc, episode(policy, {})))
        await asked.wait()
        (template,) = children(hostile.process.pid)
        (process,) = children(template)
        calling.cancel()
        await asyncio.wait([calling])
        assert ends_within(process, START_S)
        waits.set()
    while await sample(hostile.address, "episodes"):
        await asyncio.sleep(0.01)


async def test_when_the_template_dies_its_episodes_may_be_run_again(hostile: Verifier, policy: Endpoint) -> None:
    reached = asyncio.Event()
    loop, policys = asyncio.get_running_loop(), policy.script[0]
    policy.script = [lambda body: (loop.call_soon_threadsafe(reached.set), policys(body))[1]]
    calling = asyncio.create_task(run(hostile.address.grpc, episode(policy, {"in_reply": "sleep 600"})))
    await reached.wait()
    (template,) = children(hostile.process.pid)
    os.kill(template, signal.SIGKILL)
    with pytest.raises(VerifierAway, match="UNAVAILABLE"):
        await calling
    async with asyncio.timeout(START_S):
        while True:
            try:
                (result,) = await run(hostile.address.grpc, episode(policy, {}))
                break
            except VerifierAway:
                await asyncio.sleep(0.02)
    assert result.reward == 0.75


# --- tools and agents


async def served(tmp_path: Path, data: dict[str, Any], *requests: EpisodeRequest, **settings: Any) -> list[VerifyResult]:
    async with serving(tmp_path, data, **settings) as address:
        return await run(address.grpc, *requests)


async def test_a_policy_calls_tools_until_it_answers(tmp_path: Path) -> None:
    turns = iter(
        [
            calls("multiply", '{"a": 6, "b": 7}'),
            calls("divide", '{"a": 1, "b": 0}'),
            calls("multiply", '{"a": "six", "b": 7}'),
            calls("multiply", "[6"),
            calls("add", "{}"),
            calls("table", "{}"),
            calls("repeat", '{"text": "\\ud800", "times": 300000}'),
            *([] if confinement_missing() else [calls("run", json.dumps({"program": ESCAPES["has memory without a name"]}))]),
            says("It is #42"),
        ]
    )
    task = {
        "source": "tools",
        "name": "sums",
        "path": "unused.jsonl",
        "prompt_template": "{left} * {right}?",
        "tools": [f"hostile_environments:{name}" for name in ("multiply", "divide", "repeat", "table", "run")],
        "system_prompt": "You have tools.",
        "instruction": "Write # before the answer.",
    }
    data = recipe(task=task, reward={"answer_pattern": "#(.*)", "overlong": {"buffer_tokens": 8, "penalty": 0.5}})
    with endpoint(lambda _: next(turns)) as policy:
        request = episode(policy, {"left": 6, "right": 7}, answer="42", task="sums", max_tokens=10)
        (result,) = await served(tmp_path, data, request)
    assert (status_name(result.status), result.answer) == ("ok", "It is #42")
    assert dict(result.components) == {"answer": 1.0, "overlong": pytest.approx(-0.5 * (9 - 2) / 8)}
    assert dict(result.metrics) == {"tool_errors": 1.0 if confinement_missing() else 2.0}  # divide and run
    first, last = policy.requests[0], policy.requests[-1]
    asked = [(message["role"], message["content"]) for message in first["messages"]]
    assert asked == [("system", "You have tools."), ("user", "6 * 7?\nWrite # before the answer.")]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["multiply", "divide", "repeat", "table", "run"]
    answers = [message for message in last["messages"] if message["role"] == "tool"]
    assert {message["tool_call_id"] for message in answers} == {"call-1"}
    assert [message["content"] for message in answers] == [
        "42",
        "error: ZeroDivisionError: division by zero",
        "error: $.a: 'six' is not of type 'integer'",
        "error: JSONDecodeError: Expecting ',' delimiter: line 1 column 3 (char 2)",
        "error: there is no tool 'add'; use multiply, divide, repeat, table, run",
        '{"é": [0, 1], "one": 1}',
        "\ufffd" * 262_144 + "\n[cut: these are 262144 of 300000 characters]",
        *([] if confinement_missing() else ["error: PermissionError: [Errno 1] Operation not permitted"]),
    ]


AGENT = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
assert json.loads(os.environ["PIPELINERL_ROW"]) == row
if "print" in row:
    print("x" * row["print"], flush=True)
if "exit" in row:
    print("no tool is here", file=sys.stderr)
    sys.exit(row["exit"])
body = json.dumps({"model": "any", "messages": [{"role": "user", "content": row["question"]}]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
assert os.environ["OPENAI_API_KEY"]
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
if "sleep" in row:
    import subprocess
    sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open(row["sleep"], "w").write(f"{os.getpid()} {sleeper.pid}")
    sleeper.wait()
"""


async def test_an_agent_runs_in_a_sandbox_where_the_recipe_says_so(tmp_path: Path, policy: Endpoint) -> None:
    """It asks the policy, and writes no file."""
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/main.py").write_text(AGENT)
    task = {"source": "agent", "name": "asking", "path": "unused.jsonl", "episode_timeout_s": START_S}
    task["command"] = f"{sys.executable} {tmp_path}/agent/main.py"
    row = {"question": "half?", "sleep": str(tmp_path / "pids")}
    rows = ({"question": "half?"}, row)
    asked = [episode(policy, one, number, answer="0.5", task="asking") for number, one in enumerate(rows)]
    results = await served(tmp_path, recipe(task=task, reward={"sandbox": True}), *asked)
    assert [(status_name(result.status), result.reward) for result in results] == [("ok", 1.0), ("crashed", 0.0)]
    assert not (tmp_path / "pids").exists()


async def test_an_agent_is_a_program_that_prints_its_answer(tmp_path: Path, policy: Endpoint) -> None:
    (tmp_path / "my agent.py").write_text(AGENT)
    task = {"source": "agent", "path": "unused.jsonl", "command": f"python '{tmp_path}/my agent.py'"}
    limits = {"asking": LONG_S, "hasty": 12.0}
    tasks = [{"task": task | {"name": name, "episode_timeout_s": limit}} for name, limit in limits.items()]
    rows = [("asking", {}), ("asking", {"exit": 3}), ("asking", {"print": 2**21}), ("hasty", {"sleep": str(tmp_path / "pids")})]
    asked = enumerate((name, {"question": "half?"} | row) for name, row in rows)
    requests = [episode(policy, row, number, answer="0.5", task=name) for number, (name, row) in asked]
    results = await served(tmp_path, recipe() | {"task": None, "tasks": tasks}, *requests)
    assert [status_name(result.status) for result in results] == ["ok", "crashed", "crashed", "timeout"]
    assert (results[0].reward, results[0].answer) == (1.0, "0.5\n")
    assert results[1].message == "the agent ended with exit code 3: no tool is here"
    assert "more than 1048576 bytes" in results[2].message
    assert "12 s (task.episode_timeout_s)" in results[3].message
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert [pid for pid in pids if not ends_within(pid, START_S)] == []


async def test_a_judge_scores_the_answers_of_tools_and_agents(
    tmp_path: Path, policy: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """Once their process has ended, and not those of one that failed, nor of one that was cut where that earns nothing. One
    that finds the judge's queue full waits, and is not run again."""
    (tmp_path / "agent.py").write_text(AGENT)
    judge = {"model": "big", "template": "{prompt} {reference} {completion}", "pattern": r"SCORE: (\S+)", "full_marks": 10.0}
    several = [
        {"task": {"source": "tools", "name": "sums", "path": "p.jsonl", "tools": ["hostile_environments:multiply"]}},
        {"task": {"source": "agent", "name": "asking", "path": "p.jsonl", "command": f"python {tmp_path}/agent.py"}},
    ]
    with endpoint("Well. SCORE: 7", "SCORE: 9", "SCORE: 5") as judging:
        reward = {"scorer": "judge", "judge": judge | {"url": judging.url}}
        several[0]["reward"] = reward | {"truncated": "zero"}
        for one in several:
            one["task"]["answer_timeout_s"] = LONG_S  # the judge's queue fills up only if both late answers arrive
        async with serving(tmp_path, recipe() | {"task": None, "tasks": several, "reward": reward}, max_queue=1) as address:
            row, about = {"prompt": "Half?", "question": "Half?"}, {"answer": "half", "prompt_text": "Half?"}
            results = [
                (await run(address.grpc, episode(policy, row | more, number, task=task, **about)))[0]
                for number, (task, more) in enumerate([("sums", {}), ("asking", {}), ("asking", {"exit": 3})])
            ]
            policy.script = [lambda _: says("1", finish_reason="length")]
            results += await run(address.grpc, episode(policy, row, 4, task="sums", **about))
            policy.script = [lambda _: says("1")]
            judging.slow.clear()
            named = [episode(policy, row, n, task="sums", **about | {"prompt_text": str(n)}) for n in (5, 6)]
            late = asyncio.create_task(run(address.grpc, *named))
            await until(lambda: "and max_queue = 1" in caplog.text or late.done())
            judging.slow.set()
            results += await late
    assert [(status_name(one.status), one.reward) for one in results] == [
        ("ok", 0.7), ("ok", 0.9), ("crashed", 0), ("ok", 0), ("ok", 0.5), ("ok", 0.5),
    ]  # fmt: skip
    texts = [body["messages"][0]["content"] for _, _, body in judging.asked]
    assert texts[:2] == ["Half? half 0.5", "Half? half 0.5\n"]
    assert sorted(texts[2:]) == ["5 half 1", "6 half 1"]


async def test_more_episodes_than_max_episodes_are_tried_again_later(tmp_path: Path) -> None:
    """Of a recipe that has a task of one turn too, which waits for no episode."""
    asked, waits = threading.Event(), threading.Event()

    def answer(_: dict[str, Any]) -> Any:
        asked.set()
        waits.wait()
        return says("1")

    texts = {"name": "texts", "task": {"source": "jsonl", "path": "unused.jsonl"}, "reward": {"scorer": "exact"}}
    mixed = {**recipe(), "task": None, "tasks": [{"task": recipe()["task"]}, texts]}
    item = VerifyItem(sequence_id="t.0", task="texts", completion_text="yes", reference_json='{"answer": "yes"}')
    with endpoint(answer) as policy:
        async with serving(tmp_path, mixed, max_episodes=1) as address:
            first = asyncio.create_task(run(address.grpc, episode(policy, {})))
            await asyncio.to_thread(asked.wait)
            with pytest.raises(VerifierAway, match="1 episodes, the maximum"):
                await run(address.grpc, episode(policy, {}))
            async with VerifierClient(address.grpc) as client:
                assert [one.reward for one in await client.verify([item])] == [1.0]
            waits.set()
            assert (await first)[0].reward == 1.0


async def test_the_agent_of_the_examples_is_a_plain_openai_program(tmp_path: Path) -> None:
    turns = iter([calls("calculate", '{"expression": "6 * 7"}'), says("It is 42.")])
    data = yaml.safe_load((ROOT / "examples/agent/recipe.yaml").read_text())
    with endpoint(lambda _: next(turns)) as policy:
        request = episode(policy, {"prompt": "What is 6 * 7?"}, answer="42", task="sums")
        (result,) = await served(tmp_path, data, request)
    assert (status_name(result.status), result.reward, result.answer) == ("ok", 1.0, "It is 42.\n")
    assert [tool["function"]["name"] for tool in policy.requests[0]["tools"]] == ["calculate"]
    assert policy.requests[1]["messages"][-1]["content"] == "42"
