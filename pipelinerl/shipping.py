"""Write a function of a notebook or script as the source of a module, so that the verifier can import it.

The module has the function, the imports and constants that it uses, and the functions of the same notebook that it calls. What
cannot be written as source, such as a closure or an object, is refused by name. Nothing is pickled.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from pipelinerl.errors import FieldError

_MOST_CHARACTERS = 100_000
"""Largest constant that is written into the module."""


def source_of(function: Any) -> str:
    """Return the source of a module with this function. Raises `FieldError` for what cannot be shipped, with the reason."""
    parts: dict[str, str] = {}
    _ship_function(getattr(function, "__name__", repr(function)), function, parts)
    return "\n".join(["from __future__ import annotations\n", *parts.values()])


def _ship_function(name: str, function: Any, parts: dict[str, str]) -> None:
    """Add the function's source to `parts`, after everything that it uses."""
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        kind = "lambda" if isinstance(function, FunctionType) else type(function).__name__
        raise _refused(name, f"is a {kind}; define a function with def")
    if free := function.__code__.co_freevars:
        raise _refused(name, f"uses {', '.join(free)} of an enclosing function; pass it as a default value, or make it global")
    try:
        source = textwrap.dedent(inspect.getsource(function))
        definition = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise _refused(name, f"has no source ({error}); define it in a file or in a notebook") from error
    parts[name] = ""  # a function may call itself, or one that calls it
    for used in _globals_of(function, definition):
        if used not in parts:
            _ship_value(name, used, function, parts)
    for node in ast.walk(definition):  # modules of packages, such as `xml.etree.ElementTree` after `import xml`
        first, _, rest = ast.unparse(node).partition(".") if isinstance(node, ast.Attribute) else ("", "", "")
        module = function.__globals__.get(first)
        if isinstance(module, ModuleType) and (dotted := f"{module.__name__}.{rest}") in sys.modules:
            parts[dotted] = f"import {dotted}\n"
    del parts[name]
    parts[name] = f"\n{source}"
    if function.__name__ != name:
        parts[name] += f"\n\n{name} = {function.__name__}\n"


def _globals_of(function: FunctionType, definition: ast.AST) -> list[str]:
    """Return the global names that a function needs: when it runs, and for its defaults and decorators when it is defined."""
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef), "the source of a function"
    outside = [*definition.decorator_list, *definition.args.defaults, *filter(None, definition.args.kw_defaults)]
    at_start = [node.id for one in outside for node in ast.walk(one) if isinstance(node, ast.Name)]
    for stored in _names(function.__code__, "STORE_GLOBAL", "DELETE_GLOBAL"):
        raise _refused(function.__name__, f"changes the global {stored}, of which each process of the verifier has its own")
    return list(dict.fromkeys([*at_start, *_names(function.__code__, "LOAD_GLOBAL", "LOAD_NAME")]))


def _names(code: CodeType, *operations: str) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in operations:
            yield str(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner, *operations)


def _ship_value(user: str, name: str, function: FunctionType, parts: dict[str, str]) -> None:
    """Add the global `name` of `function` to `parts`: an import, a function of the same notebook, or a constant."""
    if name not in function.__globals__:
        if not hasattr(builtins, name) and name != "__name__":
            raise _refused(user, f"uses {name}, which is not defined")
        return
    value = function.__globals__[name]
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if isinstance(value, ModuleType):
        parts[name] = f"import {value.__name__} as {name}\n"
    elif isinstance(value, FunctionType) and module == function.__module__:
        _ship_function(name, value, parts)
    elif module != "__main__" and getattr(sys.modules.get(str(module)), qualified or " ", None) is value:
        parts[name] = f"from {module} import {qualified} as {name}\n"
    elif isinstance(value, re.Pattern):
        parts["re "] = "import re\n"
        parts[name] = f"{name} = re.compile({value.pattern!r}, {value.flags})\n"
    elif _is_constant(value):
        parts[name] = f"{name} = {value!r}\n"
    else:
        kind = "a class of this program" if isinstance(value, type) else f"an object of type {type(value).__name__}"
        fix = "import it from a file, make it in the function, or pass numbers, texts, lists and mappings of them"
        raise _refused(user, f"uses {name}, {kind}, which cannot be written as source; {fix}")


def _is_constant(value: Any) -> bool:
    """Return whether a value is made of numbers, texts, lists, tuples, sets and mappings, and is not too large."""
    text = repr(value)
    try:
        return len(text) <= _MOST_CHARACTERS and bool(ast.literal_eval(text) == value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False


def _refused(name: str, why: str) -> FieldError:
    return FieldError("reward", name, why)
