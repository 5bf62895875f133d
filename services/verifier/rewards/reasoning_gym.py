"""Score answers with the scorers of reasoning-gym's families.

Some families' scorers call `eval` on the answer, directly or through SymPy. These families have a guard, which parses the
answer without running it. Only answers that the guard accepts are scored; they call only known mathematical functions and
access no attribute. Many families give a little credit to wrong answers; `reward.binary` decides whether this credit counts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pipelinerl.tasks.source import check_family
from services.verifier.rewards.item import NO_ANSWER, BadReference, RewardInput, Score, Scorer

_COMPARES_TUPLES = frozenset({"arc_agi", "rearc"})
"""Families whose scorer compares grids of tuples, which JSON has turned into lists."""

REFUSED = Score(0.0, "not evaluated: the family's scorer runs answers as code, and this one is not just a formula or numbers")

_OPERATORS = (ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UAdd, ast.USub)
_TRIGONOMETRY = {"sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan"}
_FUNCTIONS = _TRIGONOMETRY | {"sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs"}
_WORDS = re.compile(r"[A-Za-z0-9_\s]*")
_EXPRESSION = re.compile(r"[A-Za-z0-9_+\-*/.() \t]*")
"""Characters that Python's parser and SymPy's tokenizer read alike: no quotes, brackets, commas, comments or line ends."""


def is_board(answer: str) -> bool:
    """Accept words and numbers separated by white space, or a Python literal."""
    if _WORDS.fullmatch(answer):
        return True
    try:
        ast.literal_eval(answer.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def is_arithmetic(answer: str) -> bool:
    """Accept numbers, parentheses, and the operators + - * / **."""
    return _every_node(answer, _is_number_or_operator)


def is_formula(answer: str) -> bool:
    """Accept arithmetic with variables of one letter, pi, and the usual functions. `Integral(...)` is refused, because an
    unevaluated integral would be a right answer to every integration problem."""
    return _every_node(answer, _is_of_a_formula)


GUARDS: dict[str, Callable[[str], bool]] = {
    "binary_matrix": is_board,
    "countdown": is_arithmetic,
    "intermediate_integration": is_formula,
    "n_queens": is_board,
    "polynomial_multiplication": is_formula,
    "puzzle24": is_arithmetic,
    "simple_integration": is_formula,
    "spiral_matrix": is_board,
    "string_insertion": is_board,
}
"""For each family whose scorer runs the answer as code: a function that returns whether an answer may be run."""


def _every_node(answer: str, allowed: Callable[[ast.AST], bool]) -> bool:
    if not _EXPRESSION.fullmatch(answer.strip()):
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval")
        return all(allowed(node) for node in ast.walk(tree.body))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _is_number_or_operator(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    return isinstance(node, _OPERATORS)


def _is_of_a_formula(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), args=[_], keywords=[]):
            return name in _FUNCTIONS
        case ast.Name(id=name):
            return (len(name) == 1 and name.isascii()) or name in _FUNCTIONS or name == "pi"
        case ast.Load():
            return True
    return _is_number_or_operator(node)


def reasoning_gym_scorer(family: str) -> Scorer:
    """Return a scorer that calls reasoning-gym's scorer of the family in each item's reference. Raises `FieldError` if the
    recipe's `family` is unknown."""
    check_family(family)
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.factory import DATASETS

    @lru_cache(maxsize=256)
    def scorer_of(dataset: str) -> Callable[..., float]:
        if dataset not in DATASETS:
            raise BadReference("dataset", f"{dataset!r} is not a reasoning-gym family")
        return get_score_answer_fn(dataset)

    scorer_of(family)

    def score(item: RewardInput) -> Score:
        dataset = item.reference.get("dataset")
        if not isinstance(dataset, str):
            raise BadReference("dataset", f"must be the name of a reasoning-gym family, not {dataset!r}")
        score_answer, entry = scorer_of(dataset), item.reference.get("entry")
        if not isinstance(entry, dict) or "answer" not in entry or not isinstance(entry.get("metadata"), dict):
            raise BadReference("entry", "a reasoning-gym entry with answer and metadata is needed")
        if dataset in _COMPARES_TUPLES:
            entry = _with_tuples(entry)
        if item.answer is None:
            return NO_ANSWER
        guard = GUARDS.get(dataset)
        if guard is not None and not guard(item.answer):
            return REFUSED
        return _judge(score_answer, item.answer, entry)

    return score


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tuples(inner) for key, inner in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _judge(score_answer: Callable[..., float], answer: str, entry: dict[str, Any]) -> Score:
    """Score an answer; 0 if the scorer raises. Raises `BadReference` if it also raises for the entry's own answer."""
    try:
        return Score(float(score_answer(answer=answer, entry=entry)))
    except MemoryError:
        raise
    except Exception as raised:  # noqa: BLE001 - third-party code on untrusted text
        try:
            score_answer(answer=entry["answer"], entry=entry)
        except Exception as error:
            raise BadReference("entry", f"its own answer cannot be scored: {error!r}"[:200]) from error
        return Score(0.0, f"not an answer of this family's form ({type(raised).__name__})")
