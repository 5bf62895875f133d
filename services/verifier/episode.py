"""Run one episode: an environment, tools or an agent requests the policy's turns from the actor.

An error in users' code becomes the result's status. If the actor refuses a turn with one of `POLICY_FAULTS`, the episode earns
0. The verifier's main process enforces deadlines (`episode_pool`).
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib
import inspect
import json
import math
import os
import re
import selectors
import shlex
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from itertools import islice
from statistics import fmean
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pipelinerl import episodes
from pipelinerl.episodes import POLICY_FAULTS, Done, Environment, Messages, Tool, ToolCall, Turn
from pipelinerl.errors import FieldError, UserError, as_unicode, how_ended
from pipelinerl.recipe.fields import ProblemSet, TaskConfig
from pipelinerl.tasks.source import Division, Split, conversation, prompt_of
from pipelinerl.v1 import verifier_pb2
from pipelinerl.v1.sequence_pb2 import FINISH_REASON_LENGTH
from pipelinerl.v1.verifier_pb2 import EpisodeRequest, VerifyItem, VerifyResult
from services.verifier.rewards.compose import (
    MESSAGE_CHARACTERS,
    failed,
    make_reward,
    number_of,
    outcome,
    score_item,
    terms_of,
    wrong_number,
)
from services.verifier.rewards.item import BadReward

if TYPE_CHECKING:
    from verifiers.v1 import Episode, Trace

_MOST_ANSWER_BYTES = 1024**2
_MOST_RESULT_CHARACTERS = 256 * 1024
"""Maximum total size of the results of one turn's tool calls."""
_FIRST_OF_ENDLESS = 4096
"""Number of tasks taken from an endless taskset of the package `verifiers`."""
_ROW_IN_ENVIRONMENT_BYTES = 100_000
"""Maximum size of a row in an environment variable; Linux allows 128 KiB."""


class PolicyFault(Exception):
    """The actor refuses further turns of this episode, for a reason in `POLICY_FAULTS`."""


class EpisodeFailed(Exception):
    """The episode failed, for example because the actor does not answer, or because the agent's program ended with an error."""


class Policy:
    """A client of the actor's HTTP server for this episode. `on_wait` is called with True before a turn is requested, and with
    False when it has arrived. Each request opens a new connection: the server closes idle ones while the environment works."""

    def __init__(self, base_url: str, on_wait: Callable[[bool], None]) -> None:
        self.base_url, self._on_wait = base_url, on_wait
        self.completion_tokens = 0
        """Number of tokens in the latest turn."""

    def sample(self, messages: Messages, tools: Iterable[Mapping[str, Any]] = ()) -> Turn:
        """Return the next turn, and append it to `messages`. Raises `PolicyFault` or `EpisodeFailed` if none arrives."""
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
            raise PolicyFault(f"{refusal['code']}: {refusal.get('message', '')}")
        raise EpisodeFailed(f"the actor answers HTTP {response.status}: {text[:300].decode(errors='replace')}")


def row_of(request: EpisodeRequest) -> dict[str, Any]:
    """Return the problem's row of data; empty if it has none."""
    return dict(json.loads(request.reference_json).get("row") or {})


Play = Callable[[EpisodeRequest, Policy], VerifyResult | VerifyItem]
"""Function that runs an episode, and returns its result or, if a judge scores it, the item to judge."""


def run_episode(play: Play, request: EpisodeRequest, policy: Policy, max_abs: float) -> VerifyResult | VerifyItem:
    """Call `play`, and convert its exceptions to a status. `max_abs`: largest valid absolute value of a reward or term."""

    def played() -> VerifyResult | VerifyItem:
        try:
            result = play(request, policy)
        except PolicyFault as fault:
            message = as_unicode(str(fault))[:MESSAGE_CHARACTERS]
            return VerifyResult(status=verifier_pb2.VERIFY_STATUS_OK, components={"answer": 0.0}, message=message)
        except EpisodeFailed as failure:
            return failed(verifier_pb2.VERIFY_STATUS_CRASHED, str(failure))
        if isinstance(result, VerifyResult) and (wrong := wrong_number((result.reward, *result.components.values()), max_abs)):
            raise BadReward(f"{wrong}: {result.reward}, with terms {dict(result.components)}")
        return result

    return outcome(request.sequence_id, played, "episode", lambda error: _hint(error, request))


def _hint(error: BaseException, request: EpisodeRequest) -> str:
    if isinstance(error, KeyError):
        return f"; the row has {', '.join(row_of(request)) or 'no fields, because task.path is not set'}"
    if re.search("Permission denied|Operation not permitted", str(error)):
        return "; in a sandbox, code cannot write files or reach other services (reward.sandbox: false turns it off)"
    return ""


def play_environment(make: Callable[[], Environment], correct: float) -> Play:
    """Return the function that runs an environment's episodes. `correct`: the reward of a right answer."""

    def play(request: EpisodeRequest, policy: Policy) -> VerifyResult:
        done, turn = converse(make(), row_of(request), request.seed, policy)
        reward = number_of(done.reward, "Done's reward")
        if not isinstance(done.metrics, Mapping):
            raise BadReward(f"Done's metrics are {done.metrics!r:.100}; give a dict of numbers, or leave them out")
        metrics = terms_of(done.metrics, "Done's dict of metrics", "Done's metric")
        if not all(map(math.isfinite, metrics.values())):
            raise BadReward(f"not all of the environment's metrics are finite: {metrics}")
        components = {"answer": reward}
        if done.correct not in (None, True, False):
            raise TypeError(f"Done has correct={done.correct!r:.100}; it must be True, False or None")
        if done.correct is not None:  # the component `answer` only says whether the answer is right
            answer = correct * done.correct
            components = {"answer": answer, "environment": reward - answer}
        if hidden := ", ".join(components.keys() & metrics):
            raise BadReward(f"rename Done's metric {hidden}: a term of the reward has the same name and would hide the metric")
        return VerifyResult(
            status=verifier_pb2.VERIFY_STATUS_OK, reward=reward, components=components, metrics=metrics, answer=turn.text
        )

    return play


def converse(environment: Environment, row: Mapping[str, Any], seed: int, policy: Policy) -> tuple[Done, Turn]:
    """Alternate turns and replies until the environment is done. Return its result and the last turn."""

    async def wait_for(value: Any) -> Any:
        return await value

    with asyncio.Runner() as loop:

        def awaited(value: Any) -> Any:
            return loop.run(wait_for(value)) if inspect.isawaitable(value) else value

        messages = _messages(awaited(environment.start(row, seed)), "start")
        while True:
            turn = policy.sample(messages, episodes.offered_tools(environment))
            reply = awaited(environment.reply(turn))
            if isinstance(reply, Done):
                return reply, turn
            if isinstance(reply, list) and reply[: len(messages)] == messages:
                raise TypeError("reply returned the whole conversation; it must return only the new messages")
            messages += _messages(reply, "reply")


def _messages(given: Any, method: str) -> Messages:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if isinstance(given, list) and given and all(map(_is_message, given)):
        return deepcopy(given)  # the environment may reuse its objects
    wanted = "a string or a list of messages, {'role': ..., 'content': ...}" + (" or Done" * (method == "reply"))
    raise TypeError(f"{method} returned {given!r:.200}; it must be {wanted}")


def _is_message(given: Any) -> bool:
    return isinstance(given, dict) and "role" in given and (given.get("content") is not None or bool(given.get("tool_calls")))


class ToolUse:
    """An environment for problems from a file. The policy may call the task's functions, plain or async, until it answers."""

    def __init__(self, tools: Mapping[str, Tool], task: TaskConfig) -> None:
        self._tools, self._task, self.num_errors = tools, task, 0
        self.tools = [tool.schema for tool in tools.values()]

    def start(self, row: Mapping[str, Any], seed: int) -> Messages:
        return conversation([{"role": "user", "content": prompt_of(row, self._task)[0]}], self._task)

    async def reply(self, turn: Turn) -> Messages | Done:
        """Return the results of the turn's calls. A turn without calls ends the episode; a scorer gives the reward later."""
        if not turn.tool_calls:
            return Done(0.0)
        most, messages = _MOST_RESULT_CHARACTERS // len(turn.tool_calls), list[dict[str, Any]]()
        for call in turn.tool_calls:
            answer = await self._answer(call)
            if len(answer) > most:  # a longer text may leave no room for another turn
                answer = f"{answer[:most]}\n[cut: these are {most} of {len(answer)} characters]"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
        return messages

    async def _answer(self, call: ToolCall) -> str:
        """Return the function's result or an error message, for the policy."""
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import best_match

        tool, is_called = self._tools.get(call.name), False
        if tool is None:
            return f"error: there is no tool {call.name!r:.100}; use {', '.join(self._tools)}"
        try:
            arguments = call.arguments()
            problem = best_match(Draft202012Validator(tool.parameters).iter_errors(arguments))
            if problem is not None:
                return f"error: {problem.json_path}: {problem.message}"[:MESSAGE_CHARACTERS]
            is_called = True
            result = tool.function(**arguments)
            if inspect.isawaitable(result):
                result = await result
            return result if isinstance(result, str) else json.dumps(result, default=_plain, ensure_ascii=False)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - an error of the tool, which the policy sees
            if is_called:  # counted, since a tool whose calls all fail is probably defective
                self.num_errors += 1
                traceback.print_exc()
            return f"error: {type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def run_agent(command: str, request: EpisodeRequest, search_path: str) -> str:
    """Run an agent's program and return its standard output. It gets the problem's row on standard input and, if the row is
    short, in PIPELINERL_ROW. `search_path`: its PYTHONPATH. Raises `EpisodeFailed` if the program fails or prints too much."""
    row = json.dumps(row_of(request))
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
        raise EpisodeFailed(f"the agent ended with {how_ended(program.returncode)}: {why}")
    return printed


def _printed(program: subprocess.Popen[bytes], given: bytes) -> tuple[str, str]:
    """Write `given` to the program's standard input; return its standard output and the end of its standard error, which is
    also copied to that of this process. Raises `EpisodeFailed` if the program prints too much."""
    assert program.stdin is not None
    assert program.stdout is not None
    assert program.stderr is not None

    def feed(stdin: IO[bytes]) -> None:
        with contextlib.suppress(BrokenPipeError), stdin:
            stdin.write(given)

    threading.Thread(target=feed, args=(program.stdin,), daemon=True).start()
    ended, printed, complained = os.pidfd_open(program.pid), bytearray(), bytearray()
    texts = {program.stdout.fileno(): printed, program.stderr.fileno(): complained}
    with selectors.DefaultSelector() as ready:
        for descriptor in (*texts, ended):
            ready.register(descriptor, selectors.EVENT_READ)
        # Child processes may keep the pipes open, so the loop lasts until the program has ended and its output is read.
        while (found := {key.fd for key, _ in ready.select()}) != {ended}:
            for descriptor in found - {ended}:
                text, chunk = texts[descriptor], os.read(descriptor, 65536)
                text += chunk
                if not chunk:
                    ready.unregister(descriptor)
                elif text is complained:
                    sys.stderr.buffer.write(chunk)
                    sys.stderr.buffer.flush()
                    del text[:-MESSAGE_CHARACTERS]
                elif len(text) > _MOST_ANSWER_BYTES:
                    problem = f"the agent printed more than {_MOST_ANSWER_BYTES} bytes to standard output"
                    raise EpisodeFailed(f"{problem}; print only the answer there, and logs to standard error")
    program.wait()
    os.close(ended)
    return printed.decode(errors="replace"), complained.decode(errors="replace")


def load_play(share: ProblemSet, search_path: str) -> Play:
    """Import the user's code and return the function that runs its episodes. Raises `UserError` if this code has a mistake."""
    task, reward = share.task, share.reward
    if task.source == "environment":
        kind = episodes.imported("task.name", task.name)
        try:
            episodes.check_environment_class(kind, task.config)
        except UserError as error:
            raise FieldError("task.name", task.name, str(error)) from error
        return play_environment(lambda: kind(**task.config), reward.correct)
    score = make_reward(reward, task)

    def scored(request: EpisodeRequest, answer: str, **fields: Any) -> VerifyResult | VerifyItem:
        item = VerifyItem(
            sequence_id=request.sequence_id,
            task=request.task,
            prompt_text=request.prompt_text,
            completion_text=answer,
            reference_json=request.reference_json,
            max_tokens=request.max_tokens,
            **fields,
        )
        if reward.judge is not None:
            return item
        result = score_item(score, item)
        result.answer = answer
        return result

    if task.source == "agent":
        return lambda request, policy: scored(request, run_agent(task.command, request, search_path))
    tools = {}
    for path in task.tools:
        try:
            tool = episodes.tool_of(episodes.imported("task.tools", path))
        except UserError as error:
            raise error if isinstance(error, FieldError) else FieldError("task.tools", path, str(error)) from error
        tools[tool.name] = tool

    def play_tools(request: EpisodeRequest, policy: Policy) -> VerifyResult | VerifyItem:
        use = ToolUse(tools, task)
        _, turn = converse(use, row_of(request), request.seed, policy)
        reason = FINISH_REASON_LENGTH if turn.finish_reason == "length" else None
        result = scored(request, turn.text, completion_tokens=policy.completion_tokens, finish_reason=reason)
        if isinstance(result, VerifyResult):
            result.metrics["tool_errors"] = use.num_errors
        return result

    return play_tools


def play_verifiers(task: TaskConfig, seed: int, *, is_trained_on: bool) -> Play:
    """Import an environment of the package `verifiers` (0.4, v1) and return the function that runs its episodes with the
    package's own loop. A server of the package forwards the requests of agents unchanged to the actor. Raises `FieldError` if
    the package or the environment cannot be loaded."""
    from pipelinerl.recipe.preflight import VERIFIERS, VERIFIERS_MISSING

    if VERIFIERS.is_dir():
        sys.path.insert(0, str(VERIFIERS))
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the programs and tool servers of environments
    os.environ["UV_PYTHON"] = sys.executable  # for uv, with which the package prepares programs
    os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    try:
        import verifiers.v1 as vf
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        importlib.import_module("openai.resources")  # otherwise each episode's process would import it
    except ImportError as error:
        raise FieldError("task.source", task.source, f"{VERIFIERS_MISSING} ({error})") from error
    try:
        taskset = {**task.config.get("taskset", {}), "id": task.name}
        config = resolve_env_config({**task.config, "taskset": taskset})
        for agent in agent_config_fields(config).values():
            if "runtime" not in agent.model_fields_set:  # the package's default is a paid service
                agent.runtime = vf.SubprocessConfig()
            if agent.max_turns is None:  # at this limit the environment scores the episode; a refusal by the actor would earn 0
                agent.max_turns = task.max_turns
        env = load_environment(config)
        tasks = list(islice(env.taskset, _FIRST_OF_ENDLESS if env.taskset.INFINITE else None))
    except Exception as error:
        raise FieldError("task.name", task.name, f"`verifiers` cannot load it: {type(error).__name__}: {error}") from error
    division = Division(len(tasks), task, seed, is_trained_on=is_trained_on, where=task.name)

    def play(request: EpisodeRequest, policy: Policy) -> VerifyResult:
        row = row_of(request)
        number = division.number(Split(row["split"]), row["index"])
        client = vf.EvalClientConfig(base_url=policy.base_url, api_key_var="OPENAI_API_KEY")
        context = vf.ModelContext(model="policy", client=client)

        async def played() -> Episode:
            async with env.serving():
                (slot,) = env.slots(tasks[number])
                return await env.run_slot(slot, context)

        return result_of(asyncio.run(played()), policy.base_url)

    return play


def result_of(episode: Episode, base_url: str) -> VerifyResult:
    """Return the mean reward and metrics over trained agents' traces. Raises `EpisodeFailed` if the result cannot be used."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise EpisodeFailed("verifiers: " + (f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode is not ok"))
    for trace in episode.traces:
        if not trace.agent.trainable and trace.agent.config.client.base_url == base_url:
            raise EpisodeFailed(
                f"agent {trace.agent.name} is not trainable, but the policy plays it; give it another model with "
                f"task.config.{trace.agent.name}.client and task.config.{trace.agent.name}.model"
            )
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    if not traces:
        raise EpisodeFailed("none of the episode's agents is trained; in Env.setup, leave at least one of them trainable")
    reward = fmean(trace.reward for trace in traces)
    numbers = [one for trace in traces for one in _numbers_of(trace)]
    last = [node.message.content for node in traces[-1].nodes if node.sampled]
    return VerifyResult(
        status=verifier_pb2.VERIFY_STATUS_OK,
        reward=reward,
        components={"answer": reward},
        metrics={name: fmean(value for known, value in numbers if known == name) for name, _ in numbers},
        answer=str(last[-1] or "") if last else "",
    )


def _numbers_of(trace: Trace) -> list[tuple[str, float]]:
    named = {**trace.metrics, **{name: reward.value for name, reward in trace.rewards.items() if reward is not None}}
    return [(name, float(value)) for name, value in named.items() if value is not None and math.isfinite(value)]
