"""Generate endless problems of any reasoning-gym family, ours included, with disjoint training and held-out splits.

A family generates blocks of `BLOCK` problems from a seed that is derived from the run's seed, the split and the block's number.
A training problem whose question is in the held-out split is replaced by the next candidate.

A few families (isomorphic_strings, polynomial_multiplication, ransom_note, word_ladder in 0.1.25) iterate over sets; another
process generates the same problems only with the same PYTHONHASHSEED.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property, lru_cache
from typing import Any

from pipelinerl.errors import FieldError, one_of
from pipelinerl.recipe.fields import TaskConfig
from pipelinerl.tasks.source import Problem, Split


def compact_question(entry: Mapping[str, Any]) -> str:
    """Return chain_sum's `12 + 7 - 5` as `12+7-5=`, for models with a character tokenizer that know no English. Raises
    `FieldError` for an entry without an expression."""
    expression = entry.get("metadata", {}).get("expression")
    if not isinstance(expression, str):
        fix = "this family's problems have no expression, such as chain_sum's have; use plain or chat"
        raise FieldError("task.prompt_style", "compact", fix)
    return expression.replace(" ", "") + "="


BLOCK = 256
MOST_TRIES = 64
_OURS = ("seed", "size")
"""Arguments that every family takes and that this module sets."""
_LIST_FAMILIES = 'python -c "from reasoning_gym.factory import DATASETS; print(*sorted(DATASETS))"'
HELDOUT_SEED = 0
"""Held-out problems are the same for all seeds of a run, so that accuracies can be compared."""


class ReasoningGymSource:
    """Problems of a family. Raises `FieldError` if it is unknown, refuses its arguments or has too few distinct problems."""

    def __init__(self, config: TaskConfig, seed: int) -> None:
        self._family, self._config, self._seed = config.name, config.config, seed
        self.num_heldout, self._compact = config.heldout_problems, config.prompt_style == "compact"
        check_family(self._family)
        check_arguments(self._family, self._config)
        self._block = lru_cache(maxsize=8)(self._make_block)
        self._entry(Split.HELDOUT, 0, 0)

    def problem(self, split: Split, index: int) -> Problem:
        if split is Split.HELDOUT:
            return self._heldout[index]
        for attempt in range(MOST_TRIES):
            problem = self._candidate(split, index, attempt)
            if problem.question not in self._heldout_questions:
                return problem
        raise self._too_few()

    @cached_property
    def _heldout(self) -> list[Problem]:
        """The first `num_heldout` distinct candidates."""
        found: dict[str, Problem] = {}
        for index in range(MOST_TRIES * self.num_heldout):
            problem = self._candidate(Split.HELDOUT, index, 0)
            found.setdefault(problem.question, problem)
            if len(found) == self.num_heldout:
                return list(found.values())
        raise self._too_few()

    @cached_property
    def _heldout_questions(self) -> frozenset[str]:
        return frozenset(problem.question for problem in self._heldout)

    def _candidate(self, split: Split, index: int, attempt: int) -> Problem:
        # Later attempts come from blocks that no index reaches at first.
        block, within = divmod(index, BLOCK)
        entry = self._entry(split, block if attempt == 0 else -(attempt + MOST_TRIES * block), within)
        question = compact_question(entry) if self._compact else entry["question"]
        reference = {"answer": entry["answer"], "dataset": self._family, "entry": entry}
        return Problem(question, reference)

    def _entry(self, split: Split, block: int, within: int) -> dict[str, Any]:
        """Generate one entry on demand, since an entry of a slow family takes a second."""
        try:
            dataset, seed = self._block(split, block)
            with _global_random(seed + within):
                return dict(dataset[within])
        except (TypeError, ValueError, AssertionError) as error:
            raise FieldError("task.config", self._config, f"{self._family} refuses it: {error}") from error

    def _make_block(self, split: Split, block: int) -> tuple[Any, int]:
        """Return a data set of `BLOCK` entries, which are not generated yet, and its seed."""
        from reasoning_gym import create_dataset

        run_seed = HELDOUT_SEED if split is Split.HELDOUT else self._seed
        digest = hashlib.blake2b(f"{run_seed}/{split}/{block}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") % 2**31
        with _global_random(seed):
            return create_dataset(self._family, seed=seed, size=BLOCK, **self._config), seed

    def _too_few(self) -> FieldError:
        return FieldError(
            "task.heldout_problems",
            self.num_heldout,
            f"{self._family} with {self._config} has too few distinct problems; lower it or make the task larger",
        )


@contextmanager
def _global_random(seed: int) -> Iterator[None]:
    """Seed Python's global generator temporarily, since some families (list_functions) also draw from it."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


def _families() -> Mapping[str, tuple[Any, Any]]:
    """Return data set and configuration of each family, ours included. Raises `FieldError` without reasoning-gym."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # imported by reasoning-gym; warns if the home is read-only
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
    """Raise `FieldError` with similar names if reasoning-gym has no such family."""
    families = _families()
    if family not in families:
        near = difflib.get_close_matches(family, families, n=3)
        hint = f"did you mean {one_of(near)}?" if near else f"list its {len(families)} families: {_LIST_FAMILIES}"
        raise FieldError("task.name", family, f"not a reasoning-gym family; {hint}")


def check_arguments(family: str, config: Mapping[str, Any]) -> None:
    """Raise `FieldError` for the first key of `config` that `family` does not take, with similar and allowed names."""
    known = [field.name for field in fields(_families()[family][1]) if field.name not in _OURS]
    for key, value in config.items():
        if key in _OURS:
            raise FieldError(f"task.config.{key}", value, "leave it out: seed and size follow from the recipe's seed")
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            allowed = f"allowed: {', '.join(known)}" if known else f"{family} takes none"
            raise FieldError(f"task.config.{key}", value, f"{family} has no such argument; {hint}{allowed}")
