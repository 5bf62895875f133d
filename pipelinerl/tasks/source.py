"""Make the source of problems that a recipe's task section describes.

With the same settings, the same split and index give the same problem in every process, so that a run can resume from a
problem's number. Held-out questions of files, the hub and reasoning-gym never occur in training. All rows are read at the
start. The seed selects held-out rows at random, because files are often sorted, and shuffles the other rows for each pass.

A reasoning-gym family generates problems in blocks of `BLOCK`. A block's seed is derived from the split, the block's number
and, for training, the run's seed. A training problem whose question is held out is replaced with another one. For some
families of reasoning-gym 0.1.25 (isomorphic_strings, polynomial_multiplication, ransom_note, word_ladder), processes generate
the same problems only with the same PYTHONHASHSEED, because the families iterate over Python sets.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import random
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from functools import cached_property, lru_cache
from math import floor, isfinite
from typing import Any, Protocol

import numpy as np

from pipelinerl.errors import FieldError, UserError, counted, one_of
from pipelinerl.recipe.fields import TaskConfig
from pipelinerl.tasks.rows import ABSENT, BadRow, Row, rows_of, value_in


class Split(StrEnum):
    TRAIN = "train"
    HELDOUT = "heldout"


@dataclass(frozen=True)
class Problem:
    question: str
    """Text of the prompt. It is JSON if the prompt is messages or a row for an environment or agent, and a label such as
    `guess, problem 7` if an environment draws the problem from a seed."""
    reference: Mapping[str, Any] = field(default_factory=dict)
    """JSON values: `answer`, and the whole `row` if a reward may need it. For reasoning-gym, also `dataset` and `entry`."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The prompt's messages, if the row has a list of OpenAI messages; otherwise empty."""
    place: str = field(default="", compare=False)
    """Place of the problem's row, such as `line 7` or `line 7 of /part-2.jsonl`; empty for a generated problem."""
    file: str = field(default="", compare=False)
    """Path of the row's file, without a leading `task.path`; empty if `task.path` is the file, and for a generated problem."""

    @property
    def texts(self) -> list[str]:
        """Texts of the messages; without messages, the question."""
        return [str(message["content"]) for message in self.messages] or [self.question]

    @property
    def reference_json(self) -> str:
        return json.dumps(self.reference, separators=(",", ":"), default=str)


class Source(Protocol):
    num_heldout: int

    def problem(self, split: Split, index: int) -> Problem:
        """Return a problem. `index` is at least 0 and, for held-out problems, below `num_heldout`."""


class Interleaving:
    """Assign a run's problems to several tasks in proportion to the tasks' weights, as a pure function of the problem's number.
    A task's count among the first n problems differs from its exact proportion by at most half the number of tasks."""

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(weight) for weight in weights]
        self._shares = [weight / sum(exact[position:]) for position, weight in enumerate(exact)]

    def place(self, number: int) -> tuple[int, int]:
        """Return the position of the task that has the run's problem `number`, and the index within this task, both from 0."""
        # Each task takes evenly spaced problems of those that the earlier tasks have left.
        for position, share in enumerate(self._shares):
            index = floor(number * share + Fraction(1, 2))
            if floor((number + 1) * share + Fraction(1, 2)) > index:
                return position, index
            number -= index
        raise AssertionError("the last task takes what is left")


def make_source(config: TaskConfig, seed: int, *, is_trained_on: bool = True) -> Source:
    """Make the source of a task. Importing its libraries takes about a second. If `is_trained_on` is False, the task is only
    evaluated, and all problems of a file may be held out. Raises `UserError` for a user's mistake."""
    if config.path:
        return FileSource(config, seed, is_trained_on=is_trained_on)
    if config.is_episodic:
        return SeededSource(config)
    return ReasoningGymSource(config, seed)


def episode_seed(run_seed: int, split: Split, index: int) -> int:
    """Return the seed, below 2^62, from which an environment draws a problem. All samples of a problem have the same seed."""
    drawn = np.random.SeedSequence((run_seed, list(Split).index(split), index)).generate_state(1, np.uint64)
    return int(drawn[0] >> 2)


class SeededSource:
    """Problems that an environment draws from the episode's seed or, with source `verifiers`, selects by split and index."""

    def __init__(self, config: TaskConfig) -> None:
        self._name, self.num_heldout = config.name, config.heldout_problems
        self._is_numbered = config.source == "verifiers"

    def problem(self, split: Split, index: int) -> Problem:
        row = {"split": split, "index": index} if self._is_numbered else {}
        return Problem(f"{self._name}, problem {index}", {"row": row})


class Division:
    """A seeded division of problems into held-out and training problems. Training problems are shuffled anew for each pass.
    Raises `FieldError` if there are too few problems."""

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
    """Problems of files or of the hub. Raises a `UserError` that names the first bad rows, if there are any."""

    def __init__(self, config: TaskConfig, seed: int, *, is_trained_on: bool = True) -> None:
        self.path = config.path
        distinct: dict[str, Problem] = {}
        self.num_repeated, self.first_repeated, self.num_contradicted = 0, "", 0
        """Number of rows that repeat a question, the first such row, and number of such rows with another answer."""
        for problem in _problems(config):
            known = distinct.setdefault(problem.question, problem)
            if known is not problem:
                self.first_repeated = self.first_repeated or f"{problem.place} ({problem.question!r:.80})"
                self.num_repeated += 1
                answers = [one.reference.get("answer", one.reference) for one in (problem, known)]
                self.num_contradicted += answers[0] != answers[1]
        self.problems = list(distinct.values())
        self.unanswered = [one for one in self.problems if not str(one.reference.get("answer", "-")).strip()]
        """Problems whose answer is empty."""
        where = f"{config.path}, which repeats {self.first_repeated}," if self.num_repeated else config.path
        self._division = Division(len(self.problems), config, seed, is_trained_on=is_trained_on, where=where)
        self.num_heldout = self._division.num_heldout

    def problem(self, split: Split, index: int) -> Problem:
        return self.problems[self._division.number(split, index)]


def _problems(config: TaskConfig) -> Iterator[Problem]:
    told, num_rows, num_wrong, absent, found = list[str](), 0, 0, Counter[str](), ""
    for row in rows_of(config):
        num_rows += 1
        try:
            problem = _problem(row, config)
        except BadRow as wrong:
            num_wrong += 1
            absent[wrong.absent] += 1
            found = found or ", ".join(field_names(row.values))
            if num_wrong <= _MOST_TOLD:
                told.append(f"{row.file}, {row.place}: {wrong}".removeprefix(f"{config.path}, "))
        else:
            yield problem
    for name in (key for key, count in absent.items() if key and count == num_rows):
        keys = {config.prompt_field: "prompt_field", config.answer_field: "answer_field"}
        key = "prompt_template" if name in _names(config.prompt_template) else keys[name]
        raise FieldError(f"task.{key}", name, f"{config.path} has no such field; name one of its fields: {found}")
    if num_wrong == 1:
        raise UserError(f"{config.path}, {told[0]}")
    if num_wrong:
        more = [f"and {num_wrong - len(told)} more"] if num_wrong > len(told) else []
        raise UserError("\n      ".join([f"{config.path}: {num_wrong} rows cannot be used", *told, *more]))


_MOST_TOLD = 10
"""Maximum number of bad rows in one error message."""


def field_names(row: Mapping[str, Any] | BadRow, prefix: str = "") -> Iterator[str]:
    """Yield the names of a row's fields. A field within an object is named `a.b`."""
    for name, value in row.items() if isinstance(row, Mapping) else ():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from field_names(value, f"{prefix}{name}.")


_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_][\w. -]*)\}\}|\{([A-Za-z_][\w. -]*)\}")
"""Placeholders in `task.prompt_template`: `{field}` for a row's field, and `{{field}}` for the text `{field}`."""


def _names(template: str) -> list[str]:
    return [field for _, field in _PLACEHOLDER.findall(template) if field]


def _problem(given: Row, config: TaskConfig) -> Problem:
    row = given.values
    if isinstance(row, BadRow):
        raise row
    question, messages = prompt_of(row, config)
    file = given.file.removeprefix(config.path)
    place = f"{given.place} of {file}" if file else given.place
    return Problem(question, _reference(row, config), tuple(messages), place, file)


def prompt_of(row: Mapping[str, Any], config: TaskConfig) -> tuple[str, list[Any]]:
    """Return the prompt as text, and its messages if the row has a list of them. Raises `BadRow` if the prompt is unusable."""
    if config.source in ("environment", "agent"):  # Environments and agents may read any field of the row.
        return _text(json.dumps(row, ensure_ascii=False, default=str), "the row"), []
    if config.prompt_template:
        return _PLACEHOLDER.sub(lambda one: f"{{{one[1]}}}" if one[1] else _text_at(row, one[2]), config.prompt_template), []
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


def conversation(messages: Sequence[Mapping[str, Any]], config: TaskConfig) -> list[dict[str, Any]]:
    """Return a problem's messages with the recipe's instruction and system prompt."""
    *before, last = map(dict, messages)
    if config.instruction:
        last["content"] = f"{last['content']}\n{config.instruction}"
    is_told = not config.system_prompt or (before or [last])[0]["role"] == "system"
    return [*([] if is_told else [{"role": "system", "content": config.system_prompt}]), *before, last]


def _text_at(row: Mapping[str, Any], name: str) -> str:
    """Return a field's text or number, or the only one in its list, as text. Raises `BadRow` for other values."""
    value = value_in(row, name)
    if value is ABSENT:
        raise BadRow(f"has no field {name!r}, only {', '.join(field_names(row)) or 'an empty object'}", name)
    only = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(only, str | int | float | Decimal) or isinstance(only, bool):
        inside = next(field_names(only, f"{name}."), "") if only is value and isinstance(only, Mapping) else ""
        such = f"; try field {inside!r}" if inside else f", such as {str(only).lower()!r}" if isinstance(only, bool) else ""
        raise BadRow(f"field {name!r} is {value!r:.200}; it must be a text or a number{such}")
    if not isinstance(only, str) and not isfinite(only):
        raise BadRow(f"field {name!r} is {only}, which is not a finite number; leave the row out")
    return _text(str(only), f"field {name!r}")


def _without_nulls(message: Any) -> Any:
    """Join the message's text parts, and remove null values, which Parquet adds and chat templates do not expect."""
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
    """Return the text. Raises `BadRow` if it has half a surrogate pair, which JSON can express but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):x}"
        raise BadRow(f"{what} holds {half}, half of a surrogate pair and not a character; remove it") from None
    return text


def _wrong_with(messages: list[Any], config: TaskConfig) -> str:
    """Return what makes a list of messages unusable as a prompt; empty if nothing does."""
    if config.prompt_style != "chat":
        return f"is a list of messages, which task.prompt_style = {config.prompt_style!r} does not take; use chat"
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            return f"has {message!r:.100}, which is not a message; give an object whose role and content are texts"
    if not messages or messages[-1]["role"] == "assistant":
        return "must end with a message for the policy to answer, not with one of role assistant"
    return ""


def _reference(row: Mapping[str, Any], config: TaskConfig) -> Mapping[str, Any]:
    """Return the reference answer, and the whole row if a reward may need more than the texts of prompt and answer. Raises
    `BadRow` if the row lacks `answer_field`."""
    answer: dict[str, Any] = {}
    # With the default `answer_field`, a conversation, or a row for an environment or agent, may lack the answer.
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


BLOCK = 256
MOST_TRIES = 64
_OURS = ("seed", "size")
"""Arguments that this module sets for every family."""
_LIST_FAMILIES = 'python -c "from reasoning_gym.factory import DATASETS; print(*sorted(DATASETS))"'
HELDOUT_SEED = 0
"""Seed of held-out problems. It is the same for all runs, so that the accuracies of runs can be compared."""


class ReasoningGymSource:
    """Problems of a family. Raises `FieldError` if the family is unknown, refuses the arguments or has too few problems."""

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self._family, self._config, self._seed = config.name, config.config, seed
        self.num_heldout, self._compact = config.heldout_problems, config.prompt_style == "compact"
        check_family(self._family)
        check_arguments(self._family, self._config)
        self._block = lru_cache(maxsize=8)(self._make_block)
        self._entry(Split.HELDOUT, 0, 0)

    def problem(self, split: Split, index: int) -> Problem:
        heldout, questions = self._heldout
        if split is Split.HELDOUT:
            return heldout[index]
        for attempt in range(MOST_TRIES):
            problem = self._candidate(split, index, attempt)
            if problem.question not in questions:
                return problem
        raise self._too_few()

    @cached_property
    def _heldout(self) -> tuple[list[Problem], Collection[str]]:
        """The held-out problems and their questions."""
        found: dict[str, Problem] = {}
        for index in range(MOST_TRIES * self.num_heldout):
            problem = self._candidate(Split.HELDOUT, index, 0)
            found.setdefault(problem.question, problem)
            if len(found) == self.num_heldout:
                return list(found.values()), found.keys()
        raise self._too_few()

    def _candidate(self, split: Split, index: int, attempt: int) -> Problem:
        # Attempts after the first use blocks with negative numbers, which no first attempt uses.
        block, within = divmod(index, BLOCK)
        entry = self._entry(split, block if attempt == 0 else -(attempt + MOST_TRIES * block), within)
        question = entry["question"]
        if self._compact:  # the expression, such as `12+7-5=`, for models that know no words
            expression = entry.get("metadata", {}).get("expression")
            if not isinstance(expression, str):
                raise FieldError("task.prompt_style", "compact", "this family's problems have no expression; use plain or chat")
            question = expression.replace(" ", "") + "="
        return Problem(question, {"answer": entry["answer"], "dataset": self._family, "entry": entry})

    def _entry(self, split: Split, block: int, within: int) -> dict[str, Any]:
        """Return one entry. Only this entry is generated, because a slow family takes a second for each."""
        try:
            dataset, seed = self._block(split, block)
            with _global_random(seed + within):
                return dict(dataset[within])
        except Exception as error:  # Families raise errors of any type.
            raise FieldError("task.config", self._config, f"{self._family} refuses it: {error}") from error

    def _make_block(self, split: Split, block: int) -> tuple[Any, int]:
        """Return a data set of `BLOCK` entries, none of which is generated yet, and its seed."""
        from reasoning_gym import create_dataset

        run_seed = HELDOUT_SEED if split is Split.HELDOUT else self._seed
        digest = hashlib.blake2b(f"{run_seed}/{split}/{block}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") % 2**31
        with _global_random(seed):
            return create_dataset(self._family, seed=seed, size=BLOCK, **self._config), seed

    def _too_few(self) -> FieldError:
        fix = f"{self._family} with {self._config} has too few distinct problems; lower this number, or change task.config"
        return FieldError("task.heldout_problems", self.num_heldout, fix)


@contextmanager
def _global_random(seed: int) -> Iterator[None]:
    """Seed Python's global random generator temporarily, because some families, such as list_functions, draw from it."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


def _families() -> Mapping[str, tuple[Any, Any]]:
    """Return each family's classes of data set and configuration. Raises `FieldError` without reasoning-gym."""
    # reasoning-gym imports matplotlib, which warns about a home that is read-only.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        from reasoning_gym.factory import DATASETS, register_dataset

        from pipelinerl.tasks.families import FAMILIES
    except ImportError as error:
        raise FieldError("task.source", "reasoning_gym", f"{error}; pip install 'pipelinerl[local]'") from error
    for name, (dataset, config) in FAMILIES.items():
        if name not in DATASETS:
            register_dataset(name, dataset, config)
    return dict(DATASETS)


def check_family(family: str) -> None:
    """Raise `FieldError`, which suggests similar names, if reasoning-gym has no family `family`."""
    families = _families()
    if family not in families:
        near = difflib.get_close_matches(family, families, n=3)
        hint = f"did you mean {one_of(near)}?" if near else f"list its {len(families)} families: {_LIST_FAMILIES}"
        raise FieldError("task.name", family, f"is not a reasoning-gym family; {hint}")


def check_arguments(family: str, config: Mapping[str, Any]) -> None:
    """Raise `FieldError` for a key of `config` that `family` does not take, or that this module sets."""
    known = [field.name for field in fields(_families()[family][1]) if field.name not in _OURS]
    for key, value in config.items():
        if key in _OURS:
            raise FieldError(f"task.config.{key}", value, "leave it out: PipelineRL sets seed and size")
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            allowed = f"allowed: {', '.join(known)}" if known else f"{family} takes none"
            raise FieldError(f"task.config.{key}", value, f"{family} has no such argument; {hint}{allowed}")
