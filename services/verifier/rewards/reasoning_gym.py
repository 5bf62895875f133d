"""reasoning-gym's own scorers, by family, on entries that have been through JSON.

Many families give a little credit to wrong answers; whether that counts is `reward.binary`, not decided here. Some evaluate
the answer: theirs is scored only when it is harmless to evaluate (`untrusted.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from pipelinerl.errors import FieldError
from services.verifier.rewards.item import NO_ANSWER, BadReference, RewardInput, Score, Scorer
from services.verifier.rewards.untrusted import GUARDS

_COMPARES_TUPLES = frozenset({"arc_agi", "rearc"})
"""Families whose scorer compares grids of tuples, which JSON turned into lists."""

AnswerScorer = Callable[..., float]
"""`(answer=str | None, entry=dict) -> float` in [0, 1]."""

REFUSED = Score(
    0.0, "not evaluated: this family's scorer would run it as code, and it is more than numbers and formulas"
)


def reasoning_gym_scorer(family: str) -> Scorer:
    """A scorer that takes the family from each reference. Imports reasoning-gym (about a second).

    Raises `FieldError` when `family`, the recipe's task, is not one of reasoning-gym's.
    """
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.factory import DATASETS

    if family not in DATASETS:
        near = difflib.get_close_matches(family, DATASETS, n=3) or sorted(DATASETS)[:5]
        raise FieldError("task.name", family, f"not a reasoning-gym family; did you mean {', '.join(near)}?")

    @lru_cache(maxsize=256)
    def scorer_of(dataset: str) -> AnswerScorer:
        if dataset not in DATASETS:
            raise BadReference("dataset", f"{dataset!r} is not a reasoning-gym family")
        return get_score_answer_fn(dataset)

    scorer_of(family)

    def score(item: RewardInput) -> Score:
        dataset = _dataset(item.reference)
        score_answer, entry = scorer_of(dataset), _entry(item.reference)
        if item.answer is None:
            return NO_ANSWER
        guard = GUARDS.get(dataset)
        if guard is not None and not guard(item.answer):
            return REFUSED
        return _judge(score_answer, item.answer, entry)

    return score


def _dataset(reference: Mapping[str, Any]) -> str:
    dataset = reference.get("dataset")
    if not isinstance(dataset, str):
        raise BadReference("dataset", f"{dataset!r} where the name of a reasoning-gym family is needed")
    return dataset


def _entry(reference: Mapping[str, Any]) -> dict[str, Any]:
    entry = reference.get("entry")
    if not isinstance(entry, dict) or "answer" not in entry or not isinstance(entry.get("metadata"), dict):
        raise BadReference("entry", "a reasoning-gym entry with answer and metadata is needed")
    return _with_tuples(entry) if reference["dataset"] in _COMPARES_TUPLES else entry


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tuples(inner) for key, inner in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _judge(score_answer: AnswerScorer, answer: str, entry: dict[str, Any]) -> Score:
    """Some families raise on an answer that is not of their form (prime_factorization on a word): that answer is wrong.

    Whether the entry is at fault instead shows in scoring the entry's own answer.
    """
    try:
        return Score(float(score_answer(answer=answer, entry=entry)))
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - third-party code on untrusted text
        raised = error
    try:
        score_answer(answer=entry["answer"], entry=entry)
    except Exception as error:
        raise BadReference("entry", f"its own answer cannot be scored: {error!r}"[:200]) from error
    return Score(0.0, f"not an answer of this family's form ({type(raised).__name__})")
