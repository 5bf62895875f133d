"""The main program of two sandboxed processes: one runs a model's program and answers calls, the other runs its tests.

In the process of the tests, each name of the program is a `Remote`, which stands for an object in the other process. Plain data
is sent as JSON; all other objects stay in their process and are called remotely. This file imports only the standard library,
because `code` copies it into each sandbox.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import operator
import os
import re
import sys
import types
from collections.abc import Callable
from typing import Any

_DATETIME = ("datetime.date", "datetime.datetime", "datetime.timedelta")
_MADE = ("builtins.complex", "builtins.range", "fractions.Fraction", "decimal.Decimal", *_DATETIME)
"""Types whose values are sent as the arguments of their constructors."""
_PRELUDE = "typing, collections, itertools, functools, heapq, bisect, math, string, re, random, copy, json"
"""Modules that a program may use without importing them, as on LeetCode."""
_LARGE = 1 << 63
_ADDRESSES = ("__array_interface__", "__array_struct__")
"""Attributes from which NumPy takes a memory address. A `Remote` lacks them, because the program could give any address."""


def encode(value: Any, refer: Callable[[Any], list[Any]]) -> Any:
    """Encode `value` for JSON if it is plain data. Otherwise return `refer(value)`, which may raise."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _LARGE:
        return ["int", hex(value)]  # Python limits the length of decimal text
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [encode(each, refer) for each in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(key, refer), encode(each, refer)] for key, each in value.items()]]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if value is NotImplemented:
        return ["nothing"]
    made: type = complex if isinstance(value, complex) else type(value)
    kind_name = f"{made.__module__}.{made.__qualname__}"
    if kind_name in _MADE:
        arguments = (value.real, value.imag) if isinstance(value, complex) else value.__reduce__()[1]
        return ["made", kind_name, [encode(each, refer) for each in arguments]]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        listed = encode(value.tolist(), refer)
        return ["array", listed] if isinstance(listed, list) and listed[0] == "list" else listed
    return refer(value)


def decode(message: Any, resolve: Callable[..., Any]) -> Any:
    """Return the value that `encode` wrote. `resolve` finds the object of a reference, and makes an object of a type in `_MADE`
    from its arguments. Raises an exception for any other message."""
    if not isinstance(message, list):
        return message
    match message:
        case ["int", text]:
            return int(text, 16)
        case ["list" | "tuple" | "set" | "frozenset" as name, items]:
            return getattr(builtins, name)(decode(each, resolve) for each in items)
        case ["dict", pairs]:
            return {decode(key, resolve): decode(each, resolve) for key, each in pairs}
        case ["bytes", text]:
            return bytes.fromhex(text)
        case ["nothing"]:
            return NotImplemented
        case ["array", listed]:
            return importlib.import_module("numpy").array(decode(listed, resolve))
        case ["made", name, arguments]:
            return resolve("made", name, *(decode(each, resolve) for each in arguments))
        case ["mine" | "yours" as whose, number]:
            return resolve(whose, number)
    raise ValueError("not a message of the harness")


class Peer:
    """This process's connection to the other process. `is_guarded`: of the objects that it gets, the other process can read
    and set only public attributes of instances of the tests' classes. Calls, indexing and comparisons are not limited."""

    def __init__(self, reading: int, writing: int, find: Callable[[str], Any], *, is_guarded: bool) -> None:
        self._reading, self._writing = os.fdopen(reading, "rb"), os.fdopen(writing, "wb")
        self._find, self._is_guarded = find, is_guarded
        self._shown, self._numbers, self._remotes = list[Any](), dict[int, int](), dict[Any, Remote]()
        self.is_gone = False

    def remote(self, number: Any) -> Remote:
        return self._remotes.setdefault(number, Remote(self, number))

    def ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """Have the other process perform an operation, and return the result. Changes to the arguments are copied back."""
        given = [self._encoded(each) for each in arguments], {name: self._encoded(each) for name, each in keywords.items()}
        with contextlib.suppress(ConnectionError):  # if the other process has ended, nothing is received below
            self._send([operation, *given])
        while (message := self._receive()) is not None:
            kind, *rest = message
            if kind == "value":
                for each, after in zip((*arguments, *keywords.values()), rest[1] or (), strict=False):
                    _renew(each, self._decoded(after))
                return self._decoded(rest[0])
            if kind == "raise":
                raise _raised(rest[0], str(rest[1]), operation)
            self._answer(kind, *rest)  # the program calls an argument
        self.is_gone = True
        raise EOFError("the program ends too soon")

    def serve(self) -> None:
        """Answer calls until the other process closes the connection."""
        while (message := self._receive()) is not None:
            self._answer(*message)

    def _answer(self, operation: str, arguments: list[Any], keywords: dict[str, Any]) -> None:
        before = [*arguments, *keywords.values()]
        reply: list[Any]
        try:
            given = [self._decoded(each) for each in arguments]
            named = {name: self._decoded(each) for name, each in keywords.items()}
            if self._is_guarded and operation in ("__getattr__", "__setattr__"):
                is_ours = type(given[0]).__module__ == "tests" and isinstance(given[1], str)
                if not is_ours or given[1].startswith("_"):
                    raise AttributeError(given[1])
            result = self._encoded(_OPERATIONS[operation](*given, **named))
            after = [self._encoded(each) for each in (*given, *named.values())]
            reply = ["value", result, after if after != before else None]
        except BaseException as error:  # noqa: BLE001 - the caller in the other process raises it
            reply = ["raise", [each.__name__ for each in type(error).__mro__], str(error)[:500]]
        self._send(reply)

    def _encoded(self, value: Any) -> Any:
        return encode(value, self._refer)

    def _refer(self, value: Any) -> list[Any]:
        if isinstance(value, Remote):
            return ["yours", value._line[1]]
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._shown)
            self._shown.append(value)
        return ["mine", self._numbers[id(value)]]

    def _decoded(self, message: Any) -> Any:
        return decode(message, self._resolve)

    def _resolve(self, whose: str, what: Any, *arguments: Any) -> Any:
        if whose == "mine":
            return self.remote(what)
        if whose == "made":
            module, _, kind = _MADE[_MADE.index(what)].partition(".")
            return getattr(importlib.import_module(module), kind)(*arguments)
        return self._find(what) if isinstance(what, str) else self._shown[what]

    def _send(self, message: list[Any]) -> None:
        self._writing.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        self._writing.flush()

    def _receive(self) -> list[Any] | None:
        """Return the next message; None if the connection is closed or the message is invalid."""
        try:
            return json.loads(self._reading.readline())
        except (ConnectionError, ValueError):
            return None


class Remote:
    """Stands for an object in the other process. It never equals plain data, even if the object says so."""

    __slots__ = ("_line",)
    _line: tuple[Peer, Any]

    def __init__(self, peer: Peer, number: Any) -> None:
        object.__setattr__(self, "_line", (peer, number))


_BINARY = ("eq", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "__getattr__": getattr,
    "__setattr__": setattr,
    "__instancecheck__": lambda kind, value: isinstance(value, kind),
    **{f"__{name}__": getattr(builtins, name) for name in ("len", "iter", "next", "bool", "str", "repr", "hash")},
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in ("call", "getitem", "setitem", "delitem", *_BINARY)},
}


def _forwarded(operation: str, *, among_remotes: bool) -> Callable[..., Any]:
    def forwarded(self: Remote, /, *arguments: Any, **keywords: Any) -> Any:
        if among_remotes and not isinstance(arguments[0], Remote):
            return NotImplemented if operation != "__instancecheck__" else False
        if operation == "__getattr__" and arguments[0] in _ADDRESSES:
            raise AttributeError(arguments[0])
        return self._line[0].ask(operation, self, *arguments, **keywords)

    return forwarded


for _operation in _OPERATIONS:
    setattr(Remote, _operation, _forwarded(_operation, among_remotes=_operation.strip("_") in (*_BINARY, "instancecheck")))


def _renew(given: Any, after: Any) -> None:
    if isinstance(given, list) and isinstance(after, list):
        given[:] = after
    elif (isinstance(given, dict) and isinstance(after, dict)) or (isinstance(given, set) and isinstance(after, set)):
        given.clear()
        given.update(after)


def _raised(names: list[str], text: str, operation: str) -> BaseException:
    """Return the built-in exception nearest to the one that the program raised; StopIteration only for a call of `__next__`."""
    for name in names:
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            if kind is StopIteration and operation != "__next__":
                break
            try:
                return kind(text)
            except TypeError:
                continue
    return RuntimeError(text)


def _quiet() -> tuple[int, int]:
    line = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    return line


def _module(name: str) -> types.ModuleType:
    sys.modules[name] = types.ModuleType(name)
    return sys.modules[name]


def _serve() -> None:
    peer, program = Peer(*_quiet(), lambda name: find(name), is_guarded=False), vars(_module("program"))
    with open("program.py", encoding="utf-8") as file:
        source = file.read()
    words = set(re.findall(r"\w+", source))
    for name in _PRELUDE.split(", "):
        module = importlib.import_module(name)
        exported = (each for each in getattr(module, "__all__", dir(module)) if each[0] != "_")
        for each in {name, *exported} & words - vars(builtins).keys():
            setattr(builtins, each, getattr(module, each, module))
    ended = ""
    try:
        exec(compile(source, "program.py", "exec"), program)
    except SystemExit:
        ended = "after its early exit, "

    def find(name: str) -> Any:
        if name in program:
            return program[name]
        if "Solution" in program and hasattr(program["Solution"], name):
            return getattr(program["Solution"](), name)
        raise NameError(f"{ended}the program does not define {name}")

    peer.serve()


def _check() -> None:
    reading, writing = _quiet()
    with open("tests.json", encoding="utf-8") as file:
        order = json.load(file)
    peer = Peer(reading, os.dup(reading), lambda name: None, is_guarded=True)

    def named(name: str) -> Remote:
        if name.startswith("_"):
            raise AttributeError(name)
        return peer.remote(name)

    for name in ("program", "solution"):
        vars(_module(name))["__getattr__"] = named
    tests = vars(_module("tests"))
    tests.update({name: peer.remote(name) for name in order["names"]})
    verdict = {"passed": False, "refused": "", "problem": ""}
    try:
        exec(compile(order["text"], "tests.py", "exec"), tests)
        verdict["refused"] = "" if order["runs"] else _collected(tests)
        verdict["passed"] = not (peer.is_gone or verdict["refused"])
    except BaseException as error:  # noqa: BLE001 - the process boundary
        if isinstance(error, ImportError | NameError) and error.name:  # errors from the program have no `name`
            verdict["refused"] = f"the tests raise {type(error).__name__}: {error}"
        verdict["problem"] = f"{type(error).__name__}: {error}".removesuffix(": ")
    os.write(writing, json.dumps({**verdict, "gone": peer.is_gone}).encode())


_SETUPS = {"setup_module", "setup_function", "setup_class", "setup_method", "setUpModule", "setUpClass"}
_SKIPPED = "__unittest_skip__"  # set by unittest.skip
_LAZY = "is async or yields, so a call does not run it; let a plain function run it, such as with asyncio.run"


def _is_lazy(function: Any) -> bool:
    """Return whether calling `function` only makes a generator or a coroutine (flags of `inspect`, which is slow to import)."""
    return bool(getattr(getattr(function, "__code__", None), "co_flags", 0) & (0x20 | 0x80 | 0x200))


def _collected(tests: dict[str, Any]) -> str:
    """Run the tests that pytest would run. Return why one cannot be run, or "" if all can. Raises the errors of the tests."""
    runs, names = list[Callable[[], Any]](), set(tests)
    for name, value in list(tests.items()):
        own = getattr(value, "__module__", None) == "tests" and not isinstance(value, Remote)
        is_case = own and hasattr(value, "debug")  # a TestCase of unittest
        if own and isinstance(value, type) and (is_case or name.startswith("Test")):
            names.update(*(vars(kind) for kind in value.__mro__ if kind.__module__ == "tests"))
            methods = {each: getattr(value, each) for each in dir(value) if each.startswith("test")}
            for each, method in methods.items():
                if callable(method) and not getattr(value, _SKIPPED, getattr(method, _SKIPPED, False)):
                    if _is_lazy(method) and not hasattr(value, "addAsyncCleanup"):  # IsolatedAsyncioTestCase awaits it
                        return f"{each} {_LAZY}"
                    runs.append(value(each).debug if is_case else getattr(value(), each))
        elif own and isinstance(value, types.FunctionType) and name.startswith("test"):
            if _is_lazy(value):
                return f"{name} {_LAZY}"
            runs.append(value)
    if unrun := names & _SETUPS:
        return f"{min(unrun)} is not run; rename it, and let the tests call it"
    for run in runs:
        code = getattr(run, "__code__", None) or getattr(getattr(run, "__func__", None), "__code__", None)
        if code and code.co_argcount > isinstance(run, types.MethodType) + len(run.__defaults__ or ()):
            return f"{code.co_name} takes arguments, which pytest's fixtures or parameters would give; call it in the tests"
        run()
    return "" if runs else "the tests run nothing; call them, or name the function for check(candidate) in entry_point"


if __name__ == "__main__":
    try:
        _serve() if os.path.exists("program.py") else _check()
    finally:
        sys.stderr.flush()
    os._exit(0)
