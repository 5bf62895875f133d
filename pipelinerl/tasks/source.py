"""What a source of problems is, a pure function of split and index, and which one a recipe's task section names.

The same (split, index) gives the same problem in every process of every run with the same settings, so that a feeder
resumes from a number. Held-out problems never occur in training. How a problem becomes tokens is the trainer's business.

A file of prompts and answers, JSONL or Parquet, is read and checked whole at start: bad lines are one error with their numbers,
not a surprise hours later. The seed draws its held-out problems, since files are often sorted; training goes through the others
in a shuffled order, epoch after epoch.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from math import floor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipelinerl.errors import FieldError, MissingPackage, UserError, counted
from pipelinerl.recipe.fields import TaskConfig


class Split(StrEnum):
    TRAIN = "train"
    HELDOUT = "heldout"


@dataclass(frozen=True)
class Problem:
    """One problem. `reference` is JSON-able: `answer`; `row`, all of a line that has more than prompt and answer; for
    reasoning-gym `dataset` and `entry` (what its scorer needs).

    `messages`: the prompt as an OpenAI-compatible server takes it, of a file that has it so; `question` is then its JSON.
    """

    question: str
    reference: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    line: int = field(default=0, compare=False)
    """Of its file (in Parquet its row), from 1; 0 where no file has it."""

    @property
    def texts(self) -> list[str]:
        """What is asked, without the form of messages."""
        return [str(message["content"]) for message in self.messages] or [self.question]

    @property
    def reference_json(self) -> str:
        return json.dumps(self.reference, separators=(",", ":"), default=str)


class Source(Protocol):
    num_heldout: int

    def problem(self, split: Split, index: int) -> Problem:
        """Training problems go on without end; held-out ones are `num_heldout`, as a rule `task.heldout_problems`."""
        ...


class Interleaving:
    """Which of several tasks a problem of a run is of, by their weights: a function of the problem's number alone.

    Of any n problems from the first on, a task has its share, off by at most half as many as there are tasks. Each task takes
    its share, evenly spaced, of what those before it leave.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(weight) for weight in weights]
        self._shares = [weight / sum(exact[position:]) for position, weight in enumerate(exact)]

    def place(self, number: int) -> tuple[int, int]:
        """(position of the task, the problem's index among the task's own), both from 0."""
        for position, share in enumerate(self._shares):
            index = floor(number * share + Fraction(1, 2))
            if floor((number + 1) * share + Fraction(1, 2)) > index:
                return position, index
            number -= index
        raise AssertionError("the last task takes what is left")


def make_source(config: TaskConfig, seed: int, *, is_trained_on: bool = True) -> Source:
    """Raises `FieldError` or `UserError` for what the user can mend. Imports what the source needs (about a second).
    `is_trained_on`: False where a file's problems may all be evaluated."""
    if config.path:
        return FileSource(config, seed, is_trained_on=is_trained_on)
    if config.is_episodic:
        return SeededSource(config)
    from pipelinerl.tasks.reasoning_gym import ReasoningGymSource

    return ReasoningGymSource(config, seed)


def episode_seed(run_seed: int, split: Split, index: int) -> int:
    """What an environment draws a problem from: below 2^62, the same for all samples, and no other problem's."""
    drawn = np.random.SeedSequence((run_seed, list(Split).index(split), index)).generate_state(1, np.uint64)
    return int(drawn[0] >> 2)


class SeededSource:
    """Problems of an environment that makes them by itself, of the episode's seed. One of the package verifiers, which has
    numbered tasks, gets split and index as its row."""

    def __init__(self, config: TaskConfig) -> None:
        self._name, self.num_heldout = config.name, config.heldout_problems
        self._is_numbered = config.source == "verifiers"

    def problem(self, split: Split, index: int) -> Problem:
        row = {"split": split, "index": index} if self._is_numbered else {}
        return Problem(f"{self._name}, problem {index}", {"row": row})


class Division:
    """Numbers of `size` problems, divided by the seed. Training indices go on after the end, into another epoch; what is not
    trained on has held-out problems alone. Raises `FieldError`, naming `where` they are, when there are too few."""

    def __init__(self, size: int, config: TaskConfig, seed: int, *, is_trained_on: bool, where: str) -> None:
        self.num_heldout = config.heldout_problems if is_trained_on else min(config.heldout_problems, size)
        if not size:
            raise FieldError("task.path", where, "holds no problem; give a file that does")
        if is_trained_on and size <= self.num_heldout:
            fix = f"{where} has {counted(size, 'distinct problem')}; some must be left for training"
            raise FieldError("task.heldout_problems", self.num_heldout, fix)
        self._heldout = random.Random(f"{seed}/heldout").sample(range(size), self.num_heldout)
        self._train = sorted(set(range(size)) - set(self._heldout))
        self._order = lru_cache(maxsize=2)(self._shuffled)
        self._seed = seed

    def number(self, split: Split, index: int) -> int:
        if split is Split.HELDOUT:
            return self._heldout[index]
        epoch, position = divmod(index, len(self._train))
        return self._train[self._order(epoch)[position]]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._train)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


class FileSource:
    """Raises `FieldError` or `UserError` with the lines of what is wrong."""

    def __init__(self, config: TaskConfig, seed: int, *, is_trained_on: bool = True) -> None:
        self.path = config.path
        distinct: dict[str, Problem] = {}
        self.repeated: list[Problem] = []
        """Those that are left out, since their prompt was there before."""
        for problem in _problems(config):
            if distinct.setdefault(problem.question, problem) is not problem:
                self.repeated.append(problem)
        self.contradicted = [one for one in self.repeated if one.reference != distinct[one.question].reference]
        """Those of them whose reference is another one."""
        self.problems = list(distinct.values())
        self.unanswered = [one for one in self.problems if not str(one.reference.get("answer", "-")).strip()]
        """Those whose answer is empty."""
        self._division = Division(len(self.problems), config, seed, is_trained_on=is_trained_on, where=config.path)
        self.num_heldout = self._division.num_heldout

    def problem(self, split: Split, index: int) -> Problem:
        return self.problems[self._division.number(split, index)]


def _problems(config: TaskConfig) -> Iterator[Problem]:
    path, readers = Path(config.path), {".parquet": _parquet_rows, ".jsonl": _jsonl_rows}
    if not path.is_file():
        raise FieldError("task.path", str(path), f"there is no such file{'' if path.is_absolute() else f' in {Path.cwd()}'}")
    if path.suffix not in readers:
        raise FieldError("task.path", str(path), "give a .jsonl or a .parquet file")
    told, num_rows, absent, fields = list[str](), 0, Counter[str](), ""
    unit, num_wrong = "row" if path.suffix == ".parquet" else "line", 0
    for number, row in readers[path.suffix](path):
        num_rows += 1
        try:
            problem = _problem(row, config, number)
        except _BadRow as wrong:
            num_wrong += 1
            absent[wrong.absent] += 1
            fields = fields or ", ".join(map(str, row if isinstance(row, Mapping) else ()))
            if num_wrong <= _MOST_TOLD:
                told.append(f"{unit} {number}: {wrong}")
        else:
            yield problem
    for name in (key for key, count in absent.items() if key and count == num_rows):
        key = "prompt_field" if name == config.prompt_field else "answer_field"
        raise FieldError(f"task.{key}", name, f"{path} has no such field; name one of those that it has: {fields}")
    if num_wrong == 1:
        raise UserError(f"{path}, {told[0]}")
    if num_wrong:
        more = [f"and {num_wrong - len(told)} more"] if num_wrong > len(told) else []
        raise UserError("\n      ".join([f"{path}: {num_wrong} {unit}s cannot be used", *told, *more]))


_MOST_TOLD = 10
"""Bad lines of a file, one by one."""


class _BadRow(Exception):
    """`absent`: the field that the row lacks."""

    def __init__(self, problem: str, absent: str = "") -> None:
        self.absent = absent
        super().__init__(problem)


def _problem(row: Mapping[str, Any] | _BadRow, config: TaskConfig, line: int) -> Problem:
    """Raises `_BadRow`."""
    if isinstance(row, _BadRow):
        raise row
    if config.source in ("environment", "agent"):  # what they read of a row is theirs
        question = json.dumps(row, ensure_ascii=False, default=str)
        return Problem(_text(question, "the line"), _reference(row, config), line=line)
    messages: Any = row.get(config.prompt_field)
    in_messages = isinstance(messages, list) and config.source == "jsonl"
    for name in filter(None, (config.prompt_field, config.answer_field)[in_messages:]):
        if name not in row:
            raise _BadRow(f"has no field {name!r}, only {', '.join(map(str, row)) or 'an empty object'}", name)
        if not isinstance(row[name], str | int | float) or isinstance(row[name], bool):
            raise _BadRow(f"field {name!r} is {row[name]!r:.200}; it must be a text or a number")
        _text(str(row[name]), f"field {name!r}")
    if in_messages:
        if wrong := _wrong_with(messages, config):
            raise _BadRow(f"field {config.prompt_field!r} {wrong}")
        question = _text(json.dumps(messages, ensure_ascii=False), f"field {config.prompt_field!r}")
        return Problem(question, _reference(row, config), tuple(messages), line)
    question = str(row[config.prompt_field])
    if not question.strip():
        raise _BadRow(f"field {config.prompt_field!r} is empty")
    return Problem(question, _reference(row, config), line=line)


def _text(text: str, what: str) -> str:
    """JSON can write what no text holds: one half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):x}"
        raise _BadRow(f"{what} holds {half}, one half of a surrogate pair, which is no character; remove it") from None
    return text


def _wrong_with(messages: list[Any], config: TaskConfig) -> str:
    """What keeps a prompt of messages from being used; empty when nothing does."""
    if config.prompt_style != "chat":
        return f"is a list of messages, which task.prompt_style = {config.prompt_style!r} does not take; use chat"
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            return f"has {message!r:.100}, which is no message: an object with the texts role and content"
    if not messages or messages[-1]["role"] == "assistant":
        return "must end with a message that the policy answers, not one of its own"
    return ""


def _reference(row: Mapping[str, Any], config: TaskConfig) -> Mapping[str, Any]:
    """The whole row too, where somebody may read more of it than the texts of prompt and answer."""
    answer = {"answer": str(row[config.answer_field])} if config.answer_field in row else {}
    is_more_than_text = config.prompt_style == "chat" or not isinstance(row.get(config.answer_field, ""), str)
    has_more = config.is_episodic or is_more_than_text or bool(row.keys() - {config.prompt_field, config.answer_field})
    return {**answer, "row": dict(row)} if has_more else answer


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | _BadRow]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if not text:
                    continue
                row = json.loads(text)
            except UnicodeDecodeError as error:
                row = _BadRow(f"not UTF-8: {error.reason} at byte {error.start + 1}")
            except (ValueError, RecursionError) as error:
                at = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
                row = _BadRow(f"not JSON: {at}")
            if not isinstance(row, dict | _BadRow):
                row = _BadRow(f"{type(row).__name__} where an object with the problem's fields is needed")
            yield number, row


def _parquet_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | _BadRow]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise MissingPackage("reading Parquet needs pyarrow: pip install pyarrow, or convert it to JSONL") from error
    number = 0
    try:
        for batch in ParquetFile(path).iter_batches():
            try:
                rows = batch.to_pylist()
            except (ValueError, OverflowError):  # one by one, which is slower
                rows = [_parquet_row(batch.slice(row, 1)) for row in range(batch.num_rows)]
            yield from enumerate(rows, start=number + 1)
            number += len(rows)
    except (ArrowException, OSError) as error:
        raise UserError(f"{path}: not a Parquet file: {error}") from error


def _parquet_row(batch: Any) -> Mapping[str, Any] | _BadRow:
    """Of a batch that is one row."""
    try:
        row: Mapping[str, Any] = batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return _BadRow(f"a text is not UTF-8: {error.reason} at byte {error.start + 1}")
    except (ValueError, OverflowError) as error:  # a date that Python does not have
        return _BadRow(f"a value cannot be read: {error}")
    return row
