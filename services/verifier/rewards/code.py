"""Scorer `code`: run the program in a completion against the problem's tests, each in a new sandbox.

A problem's tests have one of the forms of common data sets:

    [{"input": "2 3", "output": "5"}, ...]                        standard input and expected output
    {"inputs": ["2 3", ...], "outputs": ["5", ...]}               the same (APPS, TACO), also as a JSON string
    {"fn_name": "add", "inputs": [[2, 3]], "outputs": [5]}        arguments and result of a function or of a method of the class
                                                                  Solution (LeetCode); "outputs": [[5]] is the same (APPS)
    ["assert add(2, 3) == 5", ...], or one string                 statements that must not raise (MBPP)
    "def check(candidate): ..."  with  entry_point: "add"         a function that checks the program (HumanEval)

The program's process gets neither expected results nor statements: results are compared in this process, and statements run in
another sandbox (`harness`).
"""

from __future__ import annotations

import ast
import base64
import builtins
import io
import json
import math
import operator
import pickle
import re
import symtable
import sys
import textwrap
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import RewardConfig
from pipelinerl.tasks.rows import ABSENT, value_in
from services.verifier.rewards import harness
from services.verifier.rewards.item import NO_ANSWER, BadReference, RewardInput, Score, Scorer
from services.verifier.sandbox import Ended, Limits, Means, python, run, run_pair, strongest_means

_FENCE = re.compile(r"^([ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)*)(`{3,}|~{3,})[ \t]*\{?\.?([\w+-]*)[^`\n]*$")
_FENCE_IN_LINE = re.compile(r"^(.*?)(`{3,}|~{3,})[ \t]*(python3?|py)[ \t]*$", re.IGNORECASE)
_PYTHON = ("python", "python3", "py")
_NUMBER, _DECIMAL = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?"), re.compile(r"\d\.\d")
_MODULES = {"np": "numpy"}
_SHOWN_CHARACTERS = 80
_UNPACKED_BYTES = 1 << 26
_LARGE = 1e300
_MALFORMED = (
    *(LookupError, TypeError, ValueError, SyntaxError, AttributeError, RecursionError, EOFError),
    *(zlib.error, pickle.PickleError),
)
_BUDGET = 0.8
"""Share of `reward.timeout_s` that all tests of an answer may take together. At the full time, the worker would be killed."""


@dataclass(frozen=True)
class Test:
    """One test: `stdin` and the expected `stdout`; or a `call` and the expected result; or `statements` that must not raise.
    `call` and `statements` are messages to the harness, in JSON."""

    stdin: str = ""
    stdout: str = ""
    call: str = ""
    returned: Any = None
    in_list: bool = False
    """True if the program may also return the only element of the list `returned`, as in APPS."""
    statements: str = ""


def code_scorer(config: RewardConfig) -> Scorer:
    """Return a scorer that gives the share of passed tests; with `reward.binary`, it stops at the first failure. Raises
    `FieldError` if this machine lacks the sandbox that the recipe requires."""
    means = Means.NONE if config.sandbox is False else strongest_means()
    if means is Means.NONE and config.sandbox is not False:
        needs = "a sandbox needs libseccomp, and either bubblewrap with user namespaces or Landlock (Linux 6.2)"
        fix = f"no sandbox for a model's programs works on this machine: {needs}; sandbox: false would trust all programs"
        raise FieldError("reward.sandbox", config.sandbox, fix)

    def score(item: RewardInput) -> Score:
        tests = tests_of(item.reference, config.tests_field)
        if item.answer is None:
            return NO_ANSWER
        source, taken = program_in(item.answer)
        deadline_s, passed, problems = time.monotonic() + _BUDGET * config.timeout_s, 0, []
        for number, test in enumerate(tests, start=1):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                problems.append(f"no time was left from test {number} on (reward.timeout_s)")
                break
            problem = _run(source, test, Limits(min(config.test_timeout_s, left_s), config.memory_mib), means)
            passed += not problem
            if problem:
                problems.append(f"test {number} of {len(tests)}: {problem}")
                if config.binary:
                    break
        return Score(passed / len(tests), "; ".join((taken, *problems[:1])))

    return score


def program_in(answer: str) -> tuple[str, str]:
    """Return the program in an answer, and a note such as 'took its code block'. The program is the last fenced block
    marked as Python, else the last unmarked block, else the whole answer. A block may lack its closing fence."""
    blocks = [(language, body) for language, body in _blocks(answer) if body.strip()]
    for wanted in (_PYTHON, ("",)):
        if found := [body for language, body in blocks if language in wanted]:
            return found[-1], "took its code block" if len(found) == 1 else f"took the last of its {len(found)} code blocks"
    return answer, "took the whole answer as code"


def _blocks(answer: str) -> Iterator[tuple[str, str]]:
    fence, language, depth, body = "", "", 0, list[str]()
    for line in answer.replace("\r\n", "\n").split("\n"):
        indent, opens = len(line) - len(line.lstrip()), _FENCE.match(line)
        if fence:
            is_fence = line.lstrip().startswith(fence) and indent < depth + 4
            reopens = is_fence and opens and opens[3].lower() in _PYTHON
            cut = line.rstrip().removesuffix(fence)
            if not is_fence and (cut == line.rstrip() or fence in cut):
                body.append(line)
                continue
            yield language, textwrap.dedent("\n".join([*body, "" if is_fence else cut]))
            fence, body = "", []
            if not reopens:
                continue
        if found := opens or _FENCE_IN_LINE.match(line):
            fence, language = found[2], found[3].lower()
            depth = len(found[1]) if opens else indent
    if fence:
        yield language, textwrap.dedent("\n".join(body))


def tests_of(reference: Mapping[str, Any], field: str) -> list[Test]:
    """Return the tests in a reference. Raises `BadReference` if there are none, or if a test has an unknown form."""
    row = reference.get("row") or (reference.get("entry") or {}).get("metadata") or reference
    given: Any = None if (found := value_in(row, field)) is ABSENT else found
    try:
        tests = list(_tests(given, row))
    except _MALFORMED as error:
        raise BadReference(field, f"{given!r:.200} is not a list of tests: {error!r:.300}") from error
    if not tests:
        lacks = "the row lacks it; name the field with the tests in reward.tests_field"
        raise BadReference(field, lacks if given is None else "has no tests; add some, or leave the row out")
    return tests


def _loaded(given: Any) -> Any:
    """Decode JSON, a Python literal, or base64 of compressed, perhaps pickled JSON (LiveCodeBench). Keep other values."""
    if not isinstance(given, str):
        return given
    if given.lstrip().startswith(("{", "[")):
        try:
            return json.loads(given)
        except ValueError:
            return ast.literal_eval(given.strip())
    if given.startswith("eJ") and not given[:200].strip().count(" "):
        content = zlib.decompressobj().decompress(base64.b64decode(given), _UNPACKED_BYTES)
        return json.loads(_Text(io.BytesIO(content)).load() if content[:1] == b"\x80" else content)
    return given


class _Text(pickle.Unpickler):
    """Unpickles plain data only, because classes and functions could run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"the pickled tests refer to {module}.{name}, which could run code; give the tests as JSON")


def _tests(given: Any, row: Mapping[str, Any]) -> Iterator[Test]:
    given, entry_point = _loaded(given), str(row.get("entry_point") or "")
    if isinstance(given, str):
        given = [given] if given.strip() else []
    if isinstance(given, Mapping):
        if (listed := given.get("test_cases") or given.get("assert_case")) is not None:
            yield from _tests(listed, row)
            return
        puts, gets = (given[name if name in given else f"{name}s"] for name in ("input", "output"))
        pairs = list(zip(puts, gets, strict=True))
        name = given.get("fn_name") or given.get("func_name")
        in_list = bool(name) and all(isinstance(got, list) and len(got) == 1 for _, got in pairs)
        yield from (_call(name, put, got, in_list) if name else Test(_text(put), _text(got)) for put, got in pairs)
        return
    texts = [each for each in given or () if isinstance(each, str)]
    if texts:
        imports = row.get("test_imports") or []
        setup = [*([imports] if isinstance(imports, str) else imports), str(row.get("test_setup_code") or "")]
        yield from _statements(texts, "\n".join(filter(None, setup)), entry_point)
    for each in given or ():
        if isinstance(each, str):
            continue
        about = {**_mapping(row.get("metadata")), **_mapping(each.get("metadata")), **each}
        kind = each.get("testtype") or each.get("type") or ("functional" if each.get("fn_name") else "stdin")
        if kind in ("functional", "function_call"):
            name = about.get("fn_name") or about.get("func_name")
            if not name:
                raise ValueError("a functional test needs fn_name, or func_name in the metadata")
            yield _call(name, each["input"], each["output"], kind == "function_call" and isinstance(each["output"], list))
        elif kind in ("stdin", "stdin_stdout"):
            yield Test(_text(each["input"]), _text(each["output"]))
        else:
            raise ValueError(f"a test has the type {kind!r}; use stdin or functional")


def _mapping(given: Any) -> Mapping[str, Any]:
    loaded = _loaded(given) if given else {}
    return loaded if isinstance(loaded, Mapping) else {}


def _call(name: Any, put: Any, got: Any, in_list: bool) -> Test:
    """Return a test that expects `name(*put) == got`. If `put` is a string, each of its lines and a string `got` are JSON."""
    if isinstance(put, str):
        put = [json.loads(line) for line in put.splitlines() if line.strip()]
        got = json.loads(got) if isinstance(got, str) else got
    if not isinstance(put, list):
        raise TypeError(f"the arguments are {put!r:.80}; give a list, or a string with one argument per line")
    call = ["__call__", [["yours", str(name)], *(harness.encode(each, list) for each in put)], {}]
    return Test(call=json.dumps(call), returned=got, in_list=in_list)


def _statements(texts: list[str], setup: str, entry_point: str) -> Iterator[Test]:
    """Yield a test for each of `texts`, which are Python statements. Raises `ValueError` if they are invalid Python, or use
    nothing of the model's program."""
    together = "\n".join([setup, *texts])
    try:
        tree = ast.parse(together)
        top = symtable.symtable(together, "tests", "exec")
    except SyntaxError as error:
        raise ValueError(f"the tests are not valid Python: {error}") from error
    bound = {each.get_name() for each in top.get_symbols() if each.is_assigned() or each.is_imported() or each.is_namespace()}
    tables, free = [top], set[str]()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        free |= {each.get_name() for each in table.get_symbols() if each.is_referenced() and (table is top or each.is_global())}
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    names = {name for name in free - bound if not hasattr(builtins, name) and not name.startswith("__")}
    modules = {name for name in names - called if name in sys.stdlib_module_names or name in _MODULES}
    names -= modules
    calls_check = bool(entry_point) and "check" in bound
    if calls_check:
        names |= set(re.findall(r"\A\w+", entry_point))
    is_imported = re.search(r"^\s*(from|import) (solution|program)\b", together, re.MULTILINE)
    if not names and not is_imported:
        names = (free - bound) & called
        if len(names) != 1:
            raise ValueError("the tests call no function of the program; name the function in entry_point")
    imports = "".join(f"import {_MODULES.get(name, name)} as {name}\n" for name in sorted(modules))
    for text in texts:
        whole = f"{imports}{setup}\n{text}\n" + (f"check({entry_point})\n" if calls_check else "")
        runs = calls_check or any(map(_does_something, ast.parse(text).body))
        yield Test(statements=json.dumps({"text": whole, "names": sorted(names), "runs": runs}))


def _does_something(node: ast.stmt) -> bool:
    """Return whether a statement does more than define a name."""
    if isinstance(node, ast.If):
        return "__name__" not in ast.unparse(node.test)  # the block of `if __name__ == "__main__":` never runs
    defines = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    return not (isinstance(node, defines) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)))


def _text(given: Any) -> str:
    if given is None or isinstance(given, dict) or (isinstance(given, list) and any(isinstance(each, list) for each in given)):
        raise TypeError(f"{given!r:.80} must be a string or a list of lines")
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _run(source: str, test: Test, limits: Limits, means: Means) -> str:
    if test.statements or test.call:
        program, files = python(Path(harness.__file__).read_text())
        served = program, {**files, "program.py": source.encode("utf-8", "replace")}
        if test.call:
            limits = replace(limits, output_bytes=max(limits.output_bytes, 16 * len(json.dumps(test.returned))))
            return _wrong_result(run(*served, test.call.encode() + b"\n", limits, means), test, limits)
        first, second = run_pair(served, (program, {**files, "tests.json": test.statements.encode()}), limits, means)
        try:
            verdict = json.loads(second.stdout)
        except ValueError:
            return _how_ended(second, limits, "ends too soon")
        if verdict["refused"]:
            raise BadReference("tests", verdict["refused"])
        if verdict["gone"]:
            return _how_ended(first, limits, "ends too soon")
        return "" if verdict["passed"] else str(verdict["problem"])[: 2 * _SHOWN_CHARACTERS]
    limits = replace(limits, output_bytes=max(limits.output_bytes, 2 * len(test.stdout)))
    ended = run(*python(source), test.stdin.encode("utf-8", "replace"), limits, means)
    if ended.exit_code != 0:
        return _how_ended(ended, limits, "")
    printed = ended.stdout.decode(errors="replace")
    if _same_lines(printed, test.stdout):
        return ""
    return f"prints {printed[:_SHOWN_CHARACTERS]!r}, not {test.stdout[:_SHOWN_CHARACTERS]!r}"


def _wrong_result(ended: Ended, test: Test, limits: Limits) -> str:
    """Return what is wrong with the result that the program's process sent; empty if it is right."""
    try:
        kind, *said = json.loads(ended.stdout)
        if kind == "raise":
            return f"{said[0][0]}: {said[1]}"[: 2 * _SHOWN_CHARACTERS]
        result = harness.decode(said[0], _refuse)  # tuples and arrays become lists, and keys become strings
        result = json.loads(json.dumps(result, default=operator.methodcaller("tolist")))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return _how_ended(ended, limits, "ends too soon" if not ended.stdout else "returns a value that is not JSON")
    if _same(result, test.returned) or (test.in_list and _same([result], test.returned)):
        return ""
    return f"returns {result!r:.80}, not {test.returned!r:.80}"


def _refuse(*what: Any) -> Any:
    raise TypeError(f"{what} is not JSON")  # making such an object here could take much time or memory


def _same(result: Any, wanted: Any) -> bool:
    """Compare two values: numbers by value, with a relative tolerance of 1e-6 if a float is expected."""
    if isinstance(wanted, list) and isinstance(result, list):
        return len(result) == len(wanted) and all(map(_same, result, wanted))
    if isinstance(wanted, dict) and isinstance(result, dict):
        return result.keys() == wanted.keys() and all(_same(result[key], wanted[key]) for key in wanted)
    if isinstance(wanted, bool) or isinstance(result, bool) or not isinstance(wanted, int | float):  # True is not 1
        return type(result) is type(wanted) and bool(result == wanted)
    if not isinstance(result, int | float):
        return False
    is_near = isinstance(wanted, float) and abs(result) < _LARGE and math.isclose(result, wanted, rel_tol=1e-6, abs_tol=1e-9)
    return is_near or result == wanted


def _how_ended(ended: Ended, limits: Limits, otherwise: str) -> str:
    if ended.timed_out:
        return f"took more than {limits.timeout_s:.2g} s"
    said = ended.stderr.decode(errors="replace").strip().splitlines()
    return said[-1][: 2 * _SHOWN_CHARACTERS] if said else otherwise or f"ends with code {ended.exit_code}"


def _same_lines(printed: str, wanted: str) -> bool:
    """Compare outputs, ignoring white space at line ends and blank lines at the end. If a line of `wanted` has a decimal point,
    compare its numbers by value."""
    pairs = [[line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, wanted)]
    return len(pairs[0]) == len(pairs[1]) and all(
        line == other or (_DECIMAL.search(other) and _same(_words(line), _words(other)))
        for line, other in zip(*pairs, strict=True)
    )


def _words(line: str) -> list[float | str]:
    return [json.loads(word) if _NUMBER.fullmatch(word) else word for word in line.split()]
