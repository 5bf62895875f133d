"""Make the source of problems that a recipe's task section names. A source is a pure function of split and index.

The same (split, index) gives the same problem in every process of every run with the same settings, so that a feeder can
resume from a number. Held-out problems never occur in training. The trainer turns problems into tokens.

Rows of files or of the hub (`rows`) are all read and checked at start, and bad rows are reported in one error with their
places. The seed draws the held-out problems at random, since files are often sorted; training goes through the others in a
shuffled order, epoch after epoch.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from math import floor, isfinite
from typing import Any, Protocol

import numpy as np

from pipelinerl.errors import FieldError, UserError, counted
from pipelinerl.recipe.fields import TaskConfig
from pipelinerl.tasks.rows import ABSENT, BadRow, Row, rows_of, value_in


class Split(StrEnum):
    TRAIN = "train"
    HELDOUT = "heldout"


@dataclass(frozen=True)
class Problem:
    """One problem. `reference` holds JSON values: `answer`; `row`, the whole row if it has more than prompt and answer; for
    reasoning-gym also `dataset` and `entry`, which its scorer needs.

    `messages`: the prompt in OpenAI's form, if the file has it so; `question` is then its JSON.
    """

    question: str
    reference: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    line: int = field(default=0, compare=False)
    """Number of the problem's line or row, from 1; 0 for a generated problem."""
    unit: str = field(default="line", compare=False)
    file: str = field(default="", compare=False)
    """Rest of the file's path after `task.path`, if that stands for several files."""

    @property
    def place(self) -> str:
        """The problem's place for messages, such as `line 7` or `line 7 of /part-2.jsonl`; empty for a generated problem."""
        return f"{self.unit} {self.line}{f' of {self.file}' if self.file else ''}" if self.line else ""

    @property
    def texts(self) -> list[str]:
        """Texts of the messages, or the question."""
        return [str(message["content"]) for message in self.messages] or [self.question]

    @property
    def reference_json(self) -> str:
        return json.dumps(self.reference, separators=(",", ":"), default=str)


class Source(Protocol):
    num_heldout: int

    def problem(self, split: Split, index: int) -> Problem:
        """Return a problem. Training problems are endless; the number of held-out ones is `num_heldout`."""
        ...


class Interleaving:
    """Assign a run's problems to several tasks by their weights, as a pure function of the problem's number.

    Among the first n problems, each task has its share, off by at most half the number of tasks. Each task takes its share,
    evenly spaced, of the problems that the tasks before it leave.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(weight) for weight in weights]
        self._shares = [weight / sum(exact[position:]) for position, weight in enumerate(exact)]

    def place(self, number: int) -> tuple[int, int]:
        """Return the position of the task and the problem's index within the task, both from 0."""
        for position, share in enumerate(self._shares):
            index = floor(number * share + Fraction(1, 2))
            if floor((number + 1) * share + Fraction(1, 2)) > index:
                return position, index
            number -= index
        raise AssertionError("the last task takes what is left")


def make_source(config: TaskConfig, seed: int, *, is_trained_on: bool = True) -> Source:
    """Make the source of a task and import the libraries that it needs (about a second). Raises `FieldError` or `UserError`
    for a user's mistake. `is_trained_on`: False if all problems of a file may be evaluated."""
    if config.path:  # files, or a data set of the hub
        return FileSource(config, seed, is_trained_on=is_trained_on)
    if config.is_episodic:
        return SeededSource(config)
    from pipelinerl.tasks.reasoning_gym import ReasoningGymSource

    return ReasoningGymSource(config, seed)


def episode_seed(run_seed: int, split: Split, index: int) -> int:
    """Return the seed, below 2^62, from which an environment draws a problem: equal for all its samples, unique to it."""
    drawn = np.random.SeedSequence((run_seed, list(Split).index(split), index)).generate_state(1, np.uint64)
    return int(drawn[0] >> 2)


class SeededSource:
    """Problems that an environment draws itself from the episode's seed. An environment of the package verifiers, whose tasks
    are numbered, gets split and index as its row."""

    def __init__(self, config: TaskConfig) -> None:
        self._name, self.num_heldout = config.name, config.heldout_problems
        self._is_numbered = config.source == "verifiers"

    def problem(self, split: Split, index: int) -> Problem:
        row = {"split": split, "index": index} if self._is_numbered else {}
        return Problem(f"{self._name}, problem {index}", {"row": row})


class Division:
    """A seeded division of `size` problems into held-out and training ones. Training indices continue into further epochs; a
    set that is not trained on has only held-out problems. Raises `FieldError` that names `where` if there are too few."""

    def __init__(self, size: int, config: TaskConfig, seed: int, *, is_trained_on: bool, where: str) -> None:
        self.num_heldout = config.heldout_problems if is_trained_on else min(config.heldout_problems, size)
        if not size:
            raise FieldError("task.path", where, "contains no problems; give another file")
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
    """Problems of files or of the hub. Raises `FieldError`, or `UserError` with the places of bad rows."""

    def __init__(self, config: TaskConfig, seed: int, *, is_trained_on: bool = True) -> None:
        self.path = config.path
        distinct: dict[str, Problem] = {}
        self.num_repeated, self.first_repeated, self.num_contradicted = 0, "", 0
        """Problems left out because they repeat a prompt; `num_contradicted` of them have another answer."""
        for problem in _problems(config):
            known = distinct.setdefault(problem.question, problem)
            if known is not problem:
                self.first_repeated = self.first_repeated or problem.place
                self.num_repeated += 1
                self.num_contradicted += _answer(problem) != _answer(known)
        self.problems = list(distinct.values())
        self.unanswered = [one for one in self.problems if not str(one.reference.get("answer", "-")).strip()]
        """Problems whose answer is empty."""
        self._division = Division(len(self.problems), config, seed, is_trained_on=is_trained_on, where=config.path)
        self.num_heldout = self._division.num_heldout

    def problem(self, split: Split, index: int) -> Problem:
        return self.problems[self._division.number(split, index)]


def _answer(problem: Problem) -> Any:
    return problem.reference.get("answer", problem.reference)


def _problems(config: TaskConfig) -> Iterator[Problem]:
    told, num_rows, num_wrong, absent, fields = list[str](), 0, 0, Counter[str](), ""
    for row in rows_of(config):
        num_rows += 1
        try:
            problem = _problem(row, config)
        except BadRow as wrong:
            num_wrong += 1
            absent[wrong.absent] += 1
            fields = fields or ", ".join(_fields(row.values))
            if num_wrong <= _MOST_TOLD:
                told.append(f"{row.place}: {wrong}".removeprefix(f"{config.path}, "))
        else:
            yield problem
    for name in (key for key, count in absent.items() if key and count == num_rows):
        keys = {config.prompt_field: "prompt_field", config.answer_field: "answer_field"}
        key = "prompt_template" if name in _names(config.prompt_template) else keys[name]
        raise FieldError(f"task.{key}", name, f"{config.path} has no such field; name one of those that it has: {fields}")
    if num_wrong == 1:
        raise UserError(f"{config.path}, {told[0]}")
    if num_wrong:
        more = [f"and {num_wrong - len(told)} more"] if num_wrong > len(told) else []
        raise UserError("\n      ".join([f"{config.path}: {num_wrong} rows cannot be used", *told, *more]))


_MOST_TOLD = 10
"""Number of bad rows that are reported individually."""


def _fields(row: Mapping[str, Any] | BadRow, prefix: str = "") -> Iterator[str]:
    """Yield the names of a row's fields, with dotted names for nested objects."""
    for name, value in row.items() if isinstance(row, Mapping) else ():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _fields(value, f"{prefix}{name}.")


_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_][\w. -]*)\}\}|\{([A-Za-z_][\w. -]*)\}")
"""Name of a row's field in `task.prompt_template`. Double braces become single ones; all other braces stay as they are."""


def _names(template: str) -> list[str]:
    return [field for _, field in _PLACEHOLDER.findall(template) if field]


def _problem(given: Row, config: TaskConfig) -> Problem:
    """Return the problem in a row. Raises `BadRow`."""
    row = given.values
    if isinstance(row, BadRow):
        raise row
    question, messages = prompt_of(row, config)
    place = given.file.removeprefix(config.path)
    return Problem(question, _reference(row, config), tuple(messages), given.number, given.unit, place)


def prompt_of(row: Mapping[str, Any], config: TaskConfig) -> tuple[str, list[Any]]:
    """Return the prompt as text, and its messages if the row has it in that form. Raises `BadRow`."""
    if config.source in ("environment", "agent"):  # they may read any field of the row
        return _text(json.dumps(row, ensure_ascii=False, default=str), "the row"), []
    if config.prompt_template:
        filled = _PLACEHOLDER.sub(
            lambda found: f"{{{found[1]}}}" if found[1] else _text_at(row, found[2]), config.prompt_template
        )
        return filled, []
    messages: Any = value_in(row, config.prompt_field)
    if isinstance(messages, list) and config.source in ("jsonl", "hub"):
        messages = [_without_nulls(message) for message in messages]
        if wrong := _wrong_with(messages, config):
            raise BadRow(f"field {config.prompt_field!r} {wrong}")
        return _text(json.dumps(messages, ensure_ascii=False, default=str), f"field {config.prompt_field!r}"), messages
    question = _text_at(row, config.prompt_field)
    if not question.strip():
        raise BadRow(f"field {config.prompt_field!r} is empty")
    return question, []


def _text_at(row: Mapping[str, Any], name: str) -> str:
    """Return a text or a number of the row as text; a list with one item counts as its item. Raises `BadRow`."""
    value = value_in(row, name)
    if value is ABSENT:
        raise BadRow(f"has no field {name!r}, only {', '.join(_fields(row)) or 'an empty object'}", name)
    only = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(only, str | int | float | Decimal) or isinstance(only, bool):
        inside = (
            f", such as {next(_fields(only, f'{name}.'))!r}" if only is value and isinstance(only, Mapping) and only else ""
        )
        raise BadRow(f"field {name!r} is {value!r:.200}; it must be a text or a number{inside}")
    if not isinstance(only, str) and not isfinite(only):
        raise BadRow(f"field {name!r} is {only}, which is not a finite number; leave the row out")
    return _text(str(only), f"field {name!r}")


def _without_nulls(message: Any) -> Any:
    """Return the message in the form that chat templates expect: text parts are joined, and null keys, which Parquet adds if
    other messages have a value, are left out."""
    if not isinstance(message, Mapping):
        return message
    kept = {key: value for key, value in message.items() if value is not None}
    if kept.get("tool_calls"):
        kept.setdefault("content", "")
    parts = kept.get("content")
    if isinstance(parts, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        kept["content"] = "".join(str(part.get("text") or "") for part in parts)
    return kept


def _text(text: str, what: str) -> str:
    """Return the text. Raises `BadRow` for one half of a surrogate pair, which JSON can express and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):x}"
        raise BadRow(f"{what} holds {half}, one half of a surrogate pair, which is not a character; remove it") from None
    return text


def _wrong_with(messages: list[Any], config: TaskConfig) -> str:
    """Return why a prompt of messages cannot be used; empty if it can."""
    if config.prompt_style != "chat":
        return f"is a list of messages, which task.prompt_style = {config.prompt_style!r} does not take; use chat"
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            return f"has {message!r:.100}, which is not a message: an object with texts role and content (or parts of text)"
    if not messages or messages[-1]["role"] == "assistant":
        return "must end with a message for the policy to answer, not with one of the assistant"
    return ""


def _reference(row: Mapping[str, Any], config: TaskConfig) -> Mapping[str, Any]:
    """Return the reference answer, and the whole row if a reward may read more of it than texts. Environments, agents and
    conversations need no answer unless the recipe names its field. Raises `BadRow` if a needed answer is missing or
    `task.answer_pattern` does not find it."""
    answer: dict[str, Any] = {}
    may_lack = config.source in ("environment", "agent") or isinstance(row.get(config.prompt_field), list)
    may_lack = may_lack and config.answer_field == TaskConfig.model_fields["answer_field"].default
    if config.answer_field and not (may_lack and value_in(row, config.answer_field) is ABSENT):
        answer = {"answer": _answer_in(_text_at(row, config.answer_field), config)}
    is_more_than_text = config.prompt_style == "chat" or not isinstance(row.get(config.answer_field, ""), str)
    has_more = config.is_episodic or is_more_than_text or bool(row.keys() - {config.prompt_field, config.answer_field})
    return {**answer, "row": dict(row)} if has_more else answer


def _answer_in(text: str, config: TaskConfig) -> str:
    if not config.answer_pattern:
        return text
    *_, last = None, *re.finditer(config.answer_pattern, text)
    if last is None or last[1] is None:
        raise BadRow(f"task.answer_pattern finds nothing in field {config.answer_field!r}: {text!r:.200}")
    return str(last[1]).strip()
