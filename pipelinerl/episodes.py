"""Environments and tools, as users write them (docs/episodes.md).

An environment starts an episode, answers each turn of the policy, and gives the episode's reward. Each episode has its own
environment object in its own process. All samples of a prompt get the same row and seed. If the verifier or the actor is lost,
the environment starts again. If it then repeats a request, it gets the turn that was already sampled.

A tool is a Python function. Its name, type hints and docstring make up the schema that the policy reads. Parameters are str,
int, float, bool, list, dict, Literal, and unions of these such as `str | None`. The policy reads the function's result: text as
it is, anything else as JSON.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import re
import traceback
import types
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Union

from pipelinerl.errors import FieldError, Lacking, UserError, located

Messages = list[dict[str, Any]]
"""Messages in OpenAI's form: `{"role": "user", "content": "..."}`; a tool's answer also has `tool_call_id`."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call by the policy. `arguments_json` is the policy's own text, which may be invalid JSON."""

    id: str
    name: str
    arguments_json: str

    def arguments(self) -> dict[str, Any]:
        """Return the parsed arguments. Raises `ValueError` unless they are a JSON object."""
        arguments = json.loads(self.arguments_json or "{}")
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments are {self.arguments_json!r:.200}, not a JSON object")
        return arguments


@dataclass(frozen=True)
class Turn:
    """One turn that the policy sampled. `messages`: the whole conversation so far, including this turn."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """`stop`, `length` (cut at `sampling.max_tokens` or the end of the context) or `tool_calls`."""
    messages: Messages


@dataclass(frozen=True)
class Done:
    """The end of an episode. `correct`: whether a held-out problem counts as solved; None = compare the reward with
    `reward.correct`. `metrics` are averaged over episodes."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    correct: bool | None = None


MAX_TURNS, CONTEXT_LENGTH, TOO_LARGE = "max_turns_exceeded", "context_length_exceeded", "request_too_large"
POLICY_FAULTS = (MAX_TURNS, CONTEXT_LENGTH, TOO_LARGE)
"""Codes with which an actor refuses a turn because the policy exceeded a limit. The episode then earns 0."""

Start = Messages | str
"""First messages of an episode. A plain text stands for one user message."""
Reply = Messages | str | Done


class Environment(Protocol):
    """Interface of the user's class in `task: {source: environment, name: "package.module:Class"}`, whose constructor takes the
    entries of `task.config` as keyword arguments. `start` and `reply` may be async. An attribute `tools` may list functions or
    OpenAI schemas of tools that the policy can call; `reply` answers the calls."""

    def start(self, row: Mapping[str, Any], seed: int) -> Start | Awaitable[Start]:
        """Return the first messages. `row`: the problem's row of `task.path`, or `{}` without a file."""
        ...

    def reply(self, turn: Turn) -> Reply | Awaitable[Reply]:
        """Return what the policy reads next, or `Done`."""
        ...


def imported(field: str, path: str) -> Callable[..., Any]:
    """Import a user's `pkg.module:name`. Raises `FieldError` on `field` if that fails, `Lacking` if a package is missing."""
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
        function = getattr(found, name, None)  # this may import, if the package loads its modules lazily
    except (Exception, SystemExit) as error:
        traceback.print_exc()  # a worker's standard error goes to the verifier's log
        is_absent = isinstance(error, ModuleNotFoundError) and "." not in (error.name or "")
        fix = "; install the package, or start in the folder that holds it" if is_absent else ""
        fix = f"; write {module.removesuffix('.py')}:{name}" if module.endswith(".py") else fix
        kind = Lacking if is_absent else FieldError
        raise kind(field, path, f"cannot import {module}: {located(error)}{fix}") from error
    if not callable(function):
        near = difflib.get_close_matches(name, [key for key, value in vars(found).items() if callable(value)], n=1)
        what = "is not a function" if hasattr(found, name) else "does not exist"
        fix = f"did you mean {near[0]}?" if near else "name a function of that module"
        raise FieldError(field, path, f"{name} {what} in {module}; {fix}")
    return function


def check_code(field: str, path: str, config: str) -> None:
    """Import a user's function or class, and check it if `field` is task.tools (a tool) or task.name (an environment).
    `config`: `task.config` as JSON. Raises `UserError` if it cannot be used."""
    found = imported(field, path)
    if field == "task.tools":
        tool_of(found)
    elif field == "task.name":
        check_environment_class(found, json.loads(config))


def check_environment_class(kind: Callable[..., Any], config: Mapping[str, Any]) -> None:
    """Raise `UserError` if a class has wrong methods or tools for an `Environment`, or does not take `config`."""
    wanted = {"start": ("row", "seed"), "reply": ("turn",)} if isinstance(kind, type) else {}
    for method, parameters in wanted.items():
        if not callable(getattr(kind, method, None)):
            fix = "an environment is a class with start(self, row, seed) and reply(self, turn)"
            raise UserError(f"{kind.__name__} has no method {method}; {fix}")
        if inspect.isfunction(plain := inspect.getattr_static(kind, method)):  # not a static or class method
            _bind(f"{kind.__name__}.{method}", plain, ("self", *parameters))
    _bind(getattr(kind, "__name__", repr(kind)), kind, config=config)
    if callable(tools := inspect.getattr_static(kind, "tools", ())) or not hasattr(tools, "__get__"):  # not a property
        offered_tools(kind)


def _bind(name: str, function: Callable[..., Any], arguments: tuple[str, ...] = (), config: Mapping[str, Any] = {}) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a class in C may have no signature
        return
    try:
        signature.bind(*arguments, **config)
    except TypeError as error:
        given = ", ".join(arguments) or f"task.config = {config}"
        raise UserError(f"{name}{signature} is called with {given}: {error}") from error


_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
_PARAMETER = re.compile(r"^( +)(\w+)(?: \([^)]*\))?: +(.+(?:\n\1 +\S.*)*)", re.MULTILINE)
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Tool names that OpenAI's API allows."""


@dataclass(frozen=True)
class Tool:
    """A function and its schema. `schema` is an entry of `tools` in a chat completion request."""

    function: Callable[..., Any]
    schema: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    @property
    def parameters(self) -> Mapping[str, Any]:
        """JSON Schema of the arguments."""
        return dict(self.schema["function"]["parameters"])


def tool_of(function: Callable[..., Any]) -> Tool:
    """Turn a function into a tool. Raises `UserError`, naming function and parameter, if no model could call it."""
    name = getattr(function, "__name__", type(function).__name__)
    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot be a tool: use a function whose name has at most 64 letters, digits and underscores")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UserError(f"tool {name}: is a generator function (it yields); return the result instead")
    description, described = _described(inspect.getdoc(function) or "")
    try:
        hints, signature = typing.get_type_hints(function), inspect.signature(function)
    except Exception as error:
        raise UserError(f"tool {name}: its type hints cannot be read: {error}") from error
    properties, required = dict[str, Any](), list[str]()
    for parameter in signature.parameters.values():
        what = f"tool {name}: parameter {parameter.name}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"{what} cannot be passed by name, as models pass every argument; declare it without *, ** or /")
        if parameter.name not in hints:
            bound = f"bind the method in start: self.tools = [self.{name}]" if parameter.name == "self" else ""
            raise UserError(f"{what} has no type hint; {bound or f'write one, such as {parameter.name}: str'}")
        schema = properties[parameter.name] = _schema_of(hints[parameter.name], what)
        if parameter.name in described:
            schema["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
            continue
        try:
            schema["default"] = json.loads(json.dumps(parameter.default, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise UserError(f"{what} has the default {parameter.default!r:.100}, which is not JSON; use another") from error
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    described_function = {"name": name, "description": description, "parameters": parameters}
    return Tool(function, {"type": "function", "function": described_function})


def offered_tools(environment: object) -> list[Mapping[str, Any]]:
    """Return the schemas of `environment.tools`, which may change between turns. Raises `UserError` if they are invalid."""
    tools = getattr(environment, "tools", None) or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(each, Mapping) or callable(each) for each in tools):
        raise UserError(f"the environment's attribute tools is {tools!r:.200}; it must be a list of functions or schemas")
    return [each if isinstance(each, Mapping) else tool_of(each).schema for each in tools]


def _schema_of(hint: Any, what: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of(each, what) for each in arguments]}
    if origin is Literal and all(type(each) in _PLAIN for each in arguments):
        return {"enum": list(arguments)}
    if hint is list or origin is list:
        return {"type": "array", "items": _schema_of(arguments[0], what) if arguments else {}}
    if hint is dict or (origin is dict and arguments[:1] in ((), (str,))):
        return {"type": "object", "additionalProperties": _schema_of(arguments[1], what) if arguments else {}}
    shown = hint if arguments else getattr(hint, "__name__", hint)
    fix = "use str, int, float, bool, list, dict with keys of type str, Literal of plain values, or a union"
    raise UserError(f"{what} has type {shown}; {fix}")


def _described(docstring: str) -> tuple[str, dict[str, str]]:
    parts = _SECTION.split(docstring)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    listed = sections.get("Args") or sections.get("Arguments") or sections.get("Parameters") or ""
    described = {name: " ".join(text.split()) for _, name, text in _PARAMETER.findall(listed)}
    return parts[0].strip(), described
