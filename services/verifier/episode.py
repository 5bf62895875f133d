"""Run one episode: an environment, tools or an agent talks to the actor that samples the policy's turns.

An episode has its own process, and the verifier enforces its deadlines (`episode_pool`). An error of users' code becomes the
result's status. If the actor refuses a turn with one of `POLICY_FAULTS`, the episode earns 0.
"""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
import math
import os
import selectors
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pipelinerl.episodes import (
    POLICY_FAULTS,
    Done,
    Environment,
    Messages,
    Tool,
    ToolCall,
    Turn,
    check_environment_class,
    tool_of,
)
from pipelinerl.errors import FieldError, UserError, as_unicode, located
from pipelinerl.recipe.fields import ProblemSet
from pipelinerl.v1.sequence_pb2 import FINISH_REASON_LENGTH
from pipelinerl.v1.verifier_pb2 import (
    VERIFY_STATUS_BAD_REWARD,
    VERIFY_STATUS_CRASHED,
    VERIFY_STATUS_OK,
    VERIFY_STATUS_OUT_OF_MEMORY,
    EpisodeRequest,
    VerifyItem,
    VerifyResult,
)
from services.verifier.rewards.compose import imported, make_reward, wrong_number
from services.verifier.worker import MESSAGE_CHARACTERS, failed, score_item

_MOST_ANSWER_BYTES = 1024**2
_MOST_RESULT_CHARACTERS = 256 * 1024
"""Maximum size of the results of one turn's tool calls together, far below the actor's limit of a request."""
_ROW_IN_ENVIRONMENT_BYTES = 100_000
"""Limit of a row in an environment variable; Linux allows 128 KiB."""


class PolicyFault(Exception):
    """The actor refuses further turns of this episode. Attribute: `code`, one of `POLICY_FAULTS`."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class EpisodeFailed(Exception):
    """The episode failed for a reason other than an exception of the environment's code or the policy's fault."""


class Policy:
    """A client of the episode's endpoint, which samples the policy's turns.

    Each request opens a new connection, because the server would close an idle one while the environment works.
    `on_wait` is called with True before a turn is requested and with False when it has arrived.
    """

    def __init__(self, base_url: str, on_wait: Callable[[bool], None]) -> None:
        self.base_url, self._on_wait = base_url, on_wait
        self.completion_tokens = 0
        """Number of tokens in the latest turn."""

    def sample(self, messages: Messages, tools: Iterable[Mapping[str, Any]] = ()) -> Turn:
        """Return the next turn, and append it to `messages`. Raises `PolicyFault` and `EpisodeFailed`."""
        request: dict[str, Any] = {"model": "policy", "messages": messages}
        if listed := list(tools):
            request["tools"] = listed
        self._on_wait(True)
        answer = self._post(as_unicode(json.dumps(request, ensure_ascii=False)).encode())
        self._on_wait(False)
        choice = answer["choices"][0]
        message = choice["message"]
        self.completion_tokens = int((answer.get("usage") or {}).get("completion_tokens", 0))
        messages.append(message)
        calls = tuple(
            ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        )
        return Turn(message.get("content") or "", calls, choice["finish_reason"], list(messages))

    def _post(self, body: bytes) -> dict[str, Any]:
        url = urlsplit(self.base_url)
        assert url.hostname is not None
        connection = http.client.HTTPConnection(url.hostname, url.port)
        try:
            connection.request("POST", f"{url.path}/chat/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise EpisodeFailed(f"the actor does not answer: {error!r}") from error
        finally:
            connection.close()
        try:
            answer: dict[str, Any] = json.loads(text)
        except ValueError:
            answer = {}
        if response.status == 200 and answer:
            return answer
        refusal = answer.get("error") or {}
        if refusal.get("code") in POLICY_FAULTS:
            raise PolicyFault(refusal["code"], str(refusal.get("message", "")))
        raise EpisodeFailed(f"the actor answers HTTP {response.status}: {text[:300].decode(errors='replace')}")


@dataclass(frozen=True)
class Problem:
    """The content of `EpisodeRequest.reference_json`."""

    row: Mapping[str, Any]
    answer: str
    """The reference answer; empty if the task has none."""

    @classmethod
    def of(cls, request: EpisodeRequest) -> Problem:
        reference = json.loads(request.reference_json)
        return cls(reference.get("row") or {}, str(reference.get("answer", "")))


Play = Callable[[EpisodeRequest, Policy], VerifyResult | VerifyItem]
"""Function that runs one episode and returns its result, or its answer for a judge. Its exceptions become a status."""


def run_episode(play: Play, request: EpisodeRequest, policy: Policy, max_abs: float) -> VerifyResult | VerifyItem:
    """Run an episode. Never raises. `max_abs`: the bound of rewards, as in `RewardConfig`."""
    started_s = time.perf_counter()
    try:
        result = play(request, policy)
        if isinstance(result, VerifyItem):
            return result
        if wrong := wrong_number((result.reward, *result.components.values()), max_abs):
            result = failed(VERIFY_STATUS_BAD_REWARD, f"{wrong}: {result.reward}")
    except PolicyFault as fault:
        result = VerifyResult(
            status=VERIFY_STATUS_OK,
            components={"answer": 0.0},
            message=as_unicode(f"{fault.code}: {fault}")[:MESSAGE_CHARACTERS],
        )
    except MemoryError:  # the traceback holds the memory and is freed at the end of this block
        result = failed(VERIFY_STATUS_OUT_OF_MEMORY, "the episode ran past reward.memory_mib")
    except EpisodeFailed as failure:
        result = failed(VERIFY_STATUS_CRASHED, str(failure))
    except BaseException as error:  # noqa: BLE001 - the process boundary; SystemExit is an environment's too
        traceback.print_exc()
        result = failed(VERIFY_STATUS_CRASHED, f"the environment raised {located(error)}")
    result.sequence_id = request.sequence_id
    result.seconds = time.perf_counter() - started_s
    return result


def play_environment(make: Callable[[], Environment], correct: float) -> Play:
    """Return the function that runs an environment's episodes. `correct`: the reward of a right answer."""

    def play(request: EpisodeRequest, policy: Policy) -> VerifyResult:
        done, turn = converse(make(), Problem.of(request).row, request.seed, policy)
        reward = float(done.reward)
        metrics = {str(name): float(value) for name, value in done.metrics.items()}
        if not all(map(math.isfinite, metrics.values())):
            return failed(VERIFY_STATUS_BAD_REWARD, f"not all of the environment's metrics are finite: {metrics}")
        components = {"answer": reward}
        if done.correct is not None:  # the component `answer` only says whether it is right
            components = {"answer": correct if done.correct else 0.0}
            components["environment"] = reward - components["answer"]
        return VerifyResult(status=VERIFY_STATUS_OK, reward=reward, components=components, metrics=metrics, answer=turn.text)

    return play


def converse(environment: Environment, row: Mapping[str, Any], seed: int, policy: Policy) -> tuple[Done, Turn]:
    """Alternate turns and replies until the environment is done; return its result and the last turn."""
    offered = getattr(environment, "tools", ())
    with asyncio.Runner() as loop:

        def awaited(value: Any) -> Any:
            async def wait() -> Any:
                return await value

            return loop.run(wait()) if inspect.isawaitable(value) else value

        messages = _messages(awaited(environment.start(row, seed)), "start")
        while True:
            turn = policy.sample(messages, offered)
            reply = awaited(environment.reply(turn))
            if isinstance(reply, Done):
                return reply, turn
            messages += _messages(reply, "reply")


def _messages(given: Any, method: str) -> Messages:
    """Return messages that an environment gave as a text or a list. Raises `TypeError` for anything else."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if isinstance(given, list) and given and all(isinstance(each, dict) and "role" in each for each in given):
        return list(given)
    wanted = "a text or a list of messages, {'role': ..., 'content': ...}" + (" or Done" * (method == "reply"))
    raise TypeError(f"{method} returned {given!r:.200}; it must be {wanted}")


class ToolUse:
    """An environment for a problem from a file. The policy may call functions, also async ones, until it answers."""

    def __init__(self, tools: Mapping[str, Tool], system_prompt: str, instruction: str, prompt_field: str) -> None:
        self._tools, self._system_prompt, self._instruction = tools, system_prompt, instruction
        self._prompt_field = prompt_field
        self.tools = [tool.schema for tool in tools.values()]

    def start(self, row: Mapping[str, Any], seed: int) -> Messages:
        system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        asked = "\n".join(filter(None, (str(row[self._prompt_field]), self._instruction)))
        return [*system, {"role": "user", "content": asked}]

    async def reply(self, turn: Turn) -> Messages | Done:
        """Return the results of the turn's calls. A turn without calls ends the episode; a scorer gives the reward later."""
        if not turn.tool_calls:
            return Done(0.0)
        most = _MOST_RESULT_CHARACTERS // len(turn.tool_calls)
        answers = [(call.id, await self._answer(call)) for call in turn.tool_calls]
        return [{"role": "tool", "tool_call_id": id_, "content": _shortened(answer, most)} for id_, answer in answers]

    async def _answer(self, call: ToolCall) -> str:
        """Return the function's result, or a message about what is wrong with the call. The policy sees either."""
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import best_match

        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r:.100}; use {', '.join(self._tools)}"
        try:
            arguments = call.arguments()
            problem = best_match(Draft202012Validator(tool.parameters).iter_errors(arguments))
            if problem is not None:
                return f"error: {problem.json_path}: {problem.message}"[:MESSAGE_CHARACTERS]
            result = tool.function(**arguments)
            if inspect.isawaitable(result):
                result = await result
            return result if isinstance(result, str) else json.dumps(result, default=str)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - an error of the tool, which the policy sees
            return f"error: {type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]


def _shortened(answer: str, most: int) -> str:
    """Cut a result. If a long one left no room for another turn, the episode would end without a reward."""
    return answer if len(answer) <= most else f"{answer[:most]}\n[cut: these are {most} of {len(answer)} characters]"


def run_agent(command: str, request: EpisodeRequest, search_path: str) -> str:
    """Run an agent's program and return its output. Raises `EpisodeFailed` if it fails or prints too much.

    The program gets the problem's row on standard input and, up to `_ROW_IN_ENVIRONMENT_BYTES`, in PIPELINERL_ROW. Its standard
    error goes to the verifier's log; the last line is the reason of a failure. `search_path`: its PYTHONPATH.
    """
    row = json.dumps(Problem.of(request).row)
    own = {"OPENAI_BASE_URL": request.base_url, "OPENAI_API_KEY": "unused", "PYTHONPATH": search_path}
    if len(row) <= _ROW_IN_ENVIRONMENT_BYTES:
        own["PIPELINERL_ROW"] = row
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    program = subprocess.Popen(
        shlex.split(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PATH": path, **own},
    )
    printed, complained = _printed(program, row.encode())
    if program.returncode:
        why = (complained.strip().splitlines() or ["it wrote nothing to standard error"])[-1]
        how = f"exit code {program.returncode}" if program.returncode > 0 else f"signal {-program.returncode}"
        raise EpisodeFailed(f"the agent ended with {how}: {why}")
    return printed


def _printed(program: subprocess.Popen[bytes], given: bytes) -> tuple[str, str]:
    """Return the output until the program ends, even if other processes still hold its pipe, and the last characters of its
    standard error, which is also copied to this process's. `given`: standard input, which the program may ignore."""
    assert program.stdin is not None
    assert program.stdout is not None
    assert program.stderr is not None
    ended, printed, complained = os.pidfd_open(program.pid), bytearray(), bytearray()
    texts = {program.stdout.fileno(): printed, program.stderr.fileno(): complained}
    with selectors.DefaultSelector() as ready:
        ready.register(program.stdin, selectors.EVENT_WRITE)
        os.set_blocking(program.stdin.fileno(), False)
        for descriptor in (*texts, ended):
            ready.register(descriptor, selectors.EVENT_READ)
            os.set_blocking(descriptor, descriptor == ended)
        while True:
            found = {key.fd for key, _ in ready.select()}
            has_ended = ended in found
            if not program.stdin.closed and program.stdin.fileno() in found:
                given = _left(program.stdin.fileno(), given)
                if not given:
                    ready.unregister(program.stdin)
                    program.stdin.close()
            for descriptor, text in texts.items():
                while chunk := _read_now(descriptor):
                    text += chunk
                    if text is complained:
                        sys.stderr.buffer.write(chunk)
                        sys.stderr.buffer.flush()
                        del text[:-MESSAGE_CHARACTERS]
                    elif len(text) > _MOST_ANSWER_BYTES:
                        raise EpisodeFailed(f"the agent printed more than {_MOST_ANSWER_BYTES} bytes")
                if chunk == b"" and descriptor in ready.get_map():
                    ready.unregister(descriptor)
            if has_ended:
                break
    program.wait()
    os.close(ended)
    return printed.decode(errors="replace"), complained.decode(errors="replace")


def _left(descriptor: int, given: bytes) -> bytes:
    """Write as much as fits into a pipe and return the rest."""
    try:
        return given[os.write(descriptor, given) :]
    except BrokenPipeError:  # no process reads it
        return b""


def _read_now(descriptor: int) -> bytes | None:
    """Read available bytes; return b"" at the end, and None if no bytes are available yet."""
    try:
        return os.read(descriptor, 65536)
    except BlockingIOError:
        return None


def load_play(share: ProblemSet, search_path: str) -> Play:
    """Import the user's code and return the function that runs its episodes. Raises `UserError` for missing or bad code."""
    task, reward = share.task, share.reward
    if task.source == "environment":
        kind = imported("task.name", task.name)
        try:
            check_environment_class(kind, task.config)
        except UserError as error:
            raise FieldError("task.name", task.name, str(error)) from error
        return play_environment(lambda: kind(**task.config), reward.correct)
    score = make_reward(reward, task)

    def scored(
        request: EpisodeRequest, answer: str, turn: Turn | None = None, num_tokens: int = 0
    ) -> VerifyResult | VerifyItem:
        item = VerifyItem(
            sequence_id=request.sequence_id,
            task=request.task,
            prompt_text=request.prompt_text,
            completion_text=answer,
            reference_json=request.reference_json,
            completion_tokens=num_tokens,
            max_tokens=request.max_tokens,
            finish_reason=FINISH_REASON_LENGTH if turn is not None and turn.finish_reason == "length" else None,
        )
        if reward.judge is not None:
            return item
        result = score_item(score, item)
        result.answer = answer
        return result

    if task.source == "agent":
        return lambda request, policy: scored(request, run_agent(task.command, request, search_path))
    tools = {tool.name: tool for tool in map(_tool, task.tools)}

    def play_tools(request: EpisodeRequest, policy: Policy) -> VerifyResult | VerifyItem:
        environment = ToolUse(tools, task.system_prompt, task.instruction, task.prompt_field)
        _, turn = converse(environment, Problem.of(request).row, request.seed, policy)
        return scored(request, turn.text, turn, policy.completion_tokens)

    return play_tools


def _tool(path: str) -> Tool:
    try:
        return tool_of(imported("task.tools", path))
    except FieldError:
        raise
    except UserError as error:
        raise FieldError("task.tools", path, str(error)) from error
