"""A Python function as a tool: its name, type hints and docstring are the schema that the policy reads.

    def multiply(a: float, b: float = 1.0) -> float:
        '''Product of two numbers.

        Args:
            a: The first factor.
            b: The second one.
        '''
        return a * b

Parameters are str, int, float, bool, list, dict, Literal, and unions of these such as `str | None`. The policy
reads the function's result: text unchanged, anything else as JSON.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

from pipelinerl.errors import UserError

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
        parameters: Mapping[str, Any] = self.schema["function"]["parameters"]
        return parameters


def tool_of(function: Callable[..., Any]) -> Tool:
    """Turn a function into a tool. Raises `UserError`, naming function and parameter, if a model could not call it."""
    name = getattr(function, "__name__", type(function).__name__)
    if not NAME.fullmatch(name):
        raise UserError(f"tool {name!r}: a tool is a function with a name of letters, digits and _, at most 64 of them")
    description, described = _described(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise UserError(f"tool {name}: its type hints cannot be read: {error}") from error
    properties, required = dict[str, Any](), list[str]()
    for parameter in inspect.signature(function).parameters.values():
        what = f"tool {name}: parameter {parameter.name}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"{what} cannot be given by name; a model's arguments have names")
        if parameter.name not in hints:
            raise UserError(f"{what} has no type hint; write one, such as {parameter.name}: str")
        properties[parameter.name] = _schema_of(hints[parameter.name], what)
        if parameter.name in described:
            properties[parameter.name]["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        else:
            properties[parameter.name]["default"] = _default(parameter.default, what)
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    schema = {"name": name, "description": description, "parameters": parameters}
    return Tool(function, {"type": "function", "function": schema})


def _schema_of(hint: Any, what: str) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of(each, what) for each in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if hint is list or origin is list:
        return {"type": "array", "items": _schema_of(arguments[0], what) if arguments else {}}
    if hint is dict or (origin is dict and arguments[0] is str):
        return {"type": "object", "additionalProperties": _schema_of(arguments[1], what) if arguments else {}}
    raise UserError(
        f"{what} is {getattr(hint, '__name__', hint)}; use str, int, float, bool, list, dict, Literal or a union of these"
    )


def _default(value: Any, what: str) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} has the default {value!r:.100}, which is not JSON") from error
    return value


def _described(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first section, and the text of each parameter in the section `Args`."""
    parts = _SECTION.split(docstring)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    listed = sections.get("Args") or sections.get("Arguments") or sections.get("Parameters") or ""
    described = {name: " ".join(text.split()) for _, name, text in _PARAMETER.findall(listed)}
    return parts[0].strip(), described
