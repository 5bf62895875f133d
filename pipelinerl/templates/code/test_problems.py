"""Check the first problem's tests with a right and a wrong program. If you change problems.jsonl, change these tests too."""

import json
from pathlib import Path

import pytest

FIRST = json.loads(Path(__file__).with_name("problems.jsonl").read_text().splitlines()[0])


def passes(program):
    names = {}
    exec("\n".join([program, *FIRST["tests"]]), names)


def test_a_right_program_passes():
    passes("def f(x):return (x+3)*2-5")


def test_a_program_without_brackets_fails():
    with pytest.raises(AssertionError):
        passes("def f(x):return x+3*2-5")
