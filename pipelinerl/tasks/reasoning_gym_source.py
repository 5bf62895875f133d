"""Problems of any reasoning-gym family, without end, held-out ones apart from training ones.

A family generates from a seed, in blocks of `BLOCK` problems whose seed is derived from the run's seed, the split and the
block's number. A training problem whose question is in the held-out split is replaced by the next candidate.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

from pipelinerl.errors import FieldError
from pipelinerl.tasks.chain_sum_prompt import compact_question
from pipelinerl.tasks.source import Problem, Split

BLOCK = 256
MOST_TRIES = 64
HELDOUT_SEED = 0
"""Held-out problems are the same for all seeds of a run, so that accuracies compare."""


class ReasoningGymSource:
    """See the module. Raises `FieldError` for an unknown family or arguments it refuses."""

    num_train: int | None = None

    def __init__(
        self, family: str, config: Mapping[str, Any], *, seed: int, num_heldout: int, compact: bool = False
    ) -> None:
        self._family, self._config, self._seed = family, dict(config), seed
        self._num_heldout, self._compact = num_heldout, compact
        check_family(family)
        self._block = lru_cache(maxsize=8)(self._generate)
        self._block(Split.HELDOUT, 0)

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
        for index in range(MOST_TRIES * self._num_heldout):
            problem = self._candidate(Split.HELDOUT, index, 0)
            found.setdefault(problem.question, problem)
            if len(found) == self._num_heldout:
                return list(found.values())
        raise self._too_few()

    @cached_property
    def _heldout_questions(self) -> frozenset[str]:
        return frozenset(problem.question for problem in self._heldout)

    def _candidate(self, split: Split, index: int, attempt: int) -> Problem:
        # Later attempts come from blocks that no index reaches at first.
        block, within = divmod(index, BLOCK)
        entry = self._block(split, block if attempt == 0 else -(attempt + MOST_TRIES * block))[within]
        question = compact_question(entry) if self._compact else entry["question"]
        reference = {"answer": entry["answer"], "dataset": self._family, "entry": entry}
        return Problem(self._family, question, reference)

    def _generate(self, split: Split, block: int) -> list[dict[str, Any]]:
        from reasoning_gym import create_dataset

        run_seed = HELDOUT_SEED if split is Split.HELDOUT else self._seed
        try:
            dataset = create_dataset(
                self._family, seed=derived_seed(run_seed, split, block), size=BLOCK, **self._config
            )
            return [dict(dataset[position]) for position in range(BLOCK)]
        except (TypeError, ValueError, AssertionError) as error:
            raise FieldError("task.config", self._config, f"{self._family} refuses it: {error}") from error

    def _too_few(self) -> FieldError:
        return FieldError(
            "task.heldout_problems",
            self._num_heldout,
            f"{self._family} with {self._config} has too few distinct problems; lower it or make the task larger",
        )


def derived_seed(run_seed: int, split: Split, block: int) -> int:
    """A seed below 2^31 that depends on all three."""
    digest = hashlib.blake2b(f"{run_seed}/{split}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**31


def check_family(family: str) -> None:
    """Raises `FieldError` naming near matches when reasoning-gym has no such family."""
    from reasoning_gym.factory import DATASETS

    if family not in DATASETS:
        near = difflib.get_close_matches(family, DATASETS, n=3) or sorted(DATASETS)[:5]
        raise FieldError("task.name", family, f"not a reasoning-gym family; did you mean {', '.join(near)}?")
