"""Scorer `code`: runs the program that a completion holds against the problem's tests, each in a sandbox of its own.

A problem's tests are in the forms of common data sets:

    [{"input": "2 3", "output": "5"}, ...]                        standard input and what must be printed for it
    {"inputs": ["2 3", ...], "outputs": ["5", ...]}               the same (APPS, TACO), as JSON in a text too
    {"fn_name": "add", "inputs": [[2, 3]], "outputs": [5]}        arguments and result of a function or of a method of the class
                                                                  Solution (LeetCode); [[5]] means the same (APPS)
    ["assert add(2, 3) == 5", ...], or one text                   statements that must not raise (MBPP)
    "def check(candidate): ..."  beside  entry_point: "add"       a function that checks it (HumanEval)

A program that ends before its tests have failed them. One that sets out to deceive the statements that run after it in its own
process can: prefer tests by input and output, or read some of what is rewarded.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import RewardConfig
from services.verifier.rewards.item import NO_ANSWER, BadReference, RewardInput, Score, Scorer
from services.verifier.sandbox import Ended, Limits, Means, python, run, strongest_means

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "python3", "py")
_SHOWN_CHARACTERS = 80
_BUDGET = 0.8
"""Share of `reward.timeout_s` that programs may take, so that the verifier's own deadline, which fails the item, is not met."""
_HARNESS = """\
import os, sys
def tested(passed=sys.stdin.readline()):
    program = sys.modules["program"] = type(sys)("program")
    for name in ("program.py", "tests.py"):
        exec(compile(open(name).read(), name, "exec"), program.__dict__)
    os.write(1, passed.encode())
tested()
"""
"""Says the word that it was given when the program and its tests have run to their end."""


_CALL = """\
import json
called = globals().get({0!r}) or getattr(globals()["Solution"](), {0!r})
result, expected = json.loads(json.dumps(called(*json.loads({1!r})))), json.loads({2!r})
assert expected in {3}, f"returns {{result!r:.80}}, not {{expected!r:.80}}"
"""


@dataclass(frozen=True)
class Test:
    """`stdin` and what must be printed for it or, with `statements`, what must not raise after the program."""

    stdin: str = ""
    stdout: str = ""
    statements: str = ""


def code_scorer(config: RewardConfig) -> Scorer:
    """The share of tests that pass; with `reward.binary`, the first that fails ends them. Raises `FieldError` where nothing on
    this machine would keep a program in and the recipe does not say that it need not."""
    means = Means.NONE if config.sandbox is False else strongest_means()
    if means is Means.NONE and config.sandbox is not False:
        raise FieldError(
            "reward.sandbox",
            config.sandbox,
            "scorer code runs programs that a model wrote, and this machine has neither bubblewrap with user namespaces nor "
            "Landlock with libseccomp to keep them in; install one, or trust them with everything here: sandbox: false",
        )
    memory_mib = config.memory_mib

    def score(item: RewardInput) -> Score:
        tests = tests_of(item.reference, config.tests_field)
        if item.answer is None:
            return NO_ANSWER
        source, taken = program_in(item.answer)
        deadline_s, passed, problems = time.monotonic() + _BUDGET * config.timeout_s, 0, []
        for number, test in enumerate(tests, start=1):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                problems.append(f"no time for the tests from {number} on (reward.timeout_s)")
                break
            problem = _run(source, test, Limits(min(config.test_timeout_s, left_s), memory_mib), means)
            passed += not problem
            if problem:
                problems.append(f"test {number} of {len(tests)}: {problem}")
                if config.binary:
                    break
        return Score(passed / len(tests), "; ".join((taken, *problems[:1])))

    return score


def program_in(answer: str) -> tuple[str, str]:
    """The program, and in words what was taken: the last fenced block of Python, closed or cut; without one, all of it."""
    blocks = [body for language, body in _BLOCK.findall(answer) if language.lower() in _PYTHON]
    if not blocks:
        return answer, "took the whole answer as code"
    return blocks[-1], "took its code block" if len(blocks) == 1 else f"took the last of its {len(blocks)} code blocks"


def tests_of(reference: Mapping[str, Any], field: str) -> list[Test]:
    """Raises `BadReference` for what is no test of the forms above, or none at all."""
    row = reference.get("row") or (reference.get("entry") or {}).get("metadata") or reference
    given = row.get(field)
    if isinstance(given, str) and given.lstrip().startswith(("{", "[")):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise BadReference(field, f"not JSON: {error}") from error
    try:
        tests = list(_tests(given, str(row.get("entry_point") or "")))
    except (KeyError, TypeError, ValueError) as error:
        raise BadReference(field, f"{given!r:.200} is no list of tests: {error!r:.100}") from error
    if not tests:
        raise BadReference(field, "no tests")
    if any(len(test.stdout) > Limits.output_bytes for test in tests):
        raise BadReference(field, f"expects more output than the {Limits.output_bytes} bytes that are read")
    return tests


def _tests(given: Any, entry_point: str) -> list[Test]:
    if isinstance(given, str):
        return [Test(statements=f"{given}\ncheck({entry_point})" if entry_point else given)] if given.strip() else []
    if isinstance(given, Mapping):
        pairs = list(zip(given["inputs"], given["outputs"], strict=True))
        if name := given.get("fn_name"):
            in_lists = all(isinstance(got, list) and len(got) == 1 for _, got in pairs)  # as APPS has it
            fit = "(result, [result])" if in_lists else "(result,)"
            return [Test(statements=_CALL.format(str(name), json.dumps(put), json.dumps(got), fit)) for put, got in pairs]
        return [Test(_text(put), _text(got)) for put, got in pairs]
    return [
        Test(statements=each) if isinstance(each, str) else Test(_text(each["input"]), _text(each["output"]))
        for each in given or ()
    ]


def _text(given: Any) -> str:
    """Data sets give several lines as a list, too."""
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _run(source: str, test: Test, limits: Limits, means: Means) -> str:
    """What is wrong; empty when the program passes."""
    if test.statements:
        word = secrets.token_hex(16)
        program, files = python(_HARNESS)
        files |= {"program.py": source.encode("utf-8", "replace"), "tests.py": test.statements.encode("utf-8", "replace")}
        ended = run(program, files, f"{word}\n".encode(), limits, means)
        return "" if ended.exit_code == 0 and word.encode() in ended.stdout else _how_ended(ended, limits, "it ends too soon")
    ended = run(*python(source), test.stdin.encode("utf-8", "replace"), limits, means)
    if ended.exit_code != 0:
        return _how_ended(ended, limits, "")
    printed = ended.stdout.decode(errors="replace")
    if _lines(printed) == _lines(test.stdout):
        return ""
    return f"prints {printed[:_SHOWN_CHARACTERS]!r}, not {test.stdout[:_SHOWN_CHARACTERS]!r}"


def _how_ended(ended: Ended, limits: Limits, otherwise: str) -> str:
    if ended.timed_out:
        return f"took more than {limits.timeout_s:.2g} s"
    said = ended.stderr.decode(errors="replace").strip().splitlines()
    return said[-1][: 2 * _SHOWN_CHARACTERS] if said else otherwise or f"ends with code {ended.exit_code}"


def _lines(text: str) -> list[str]:
    """White space at the ends of lines and after the last one means nothing."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
