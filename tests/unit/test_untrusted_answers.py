"""Answers that some scorers would evaluate: nothing that a model wrote is run."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

from services.verifier.rewards.item import RewardInput
from services.verifier.rewards.reasoning_gym import (
    GUARDS,
    REFUSED,
    is_arithmetic,
    is_board,
    is_formula,
    reasoning_gym_scorer,
)

EVALUATES = re.compile(r"\b(eval|exec|parse_expr|parse_latex|sympify|__import__)\(")
ON_ITS_OWN_TEXT = {
    "basic_arithmetic": "the problem that it makes",
    "bitwise_arithmetic": "the problem in the entry",
    "codeio": "the program that it makes problems of",
    "number_sorting": "the entry's answer",
    "propositional_logic": "by a parser of its own, which evaluates nothing",
}
"""Families whose module evaluates something other than the answer."""


def scored(family: str, answer: str, seed: int = 3) -> object:
    import reasoning_gym

    entry = json.loads(json.dumps(reasoning_gym.create_dataset(family, size=1, seed=seed)[0]))
    reference = {"answer": entry["answer"], "dataset": family, "entry": entry}
    answer = answer or entry["answer"]
    return reasoning_gym_scorer(family)(RewardInput(prompt="", completion=answer, answer=answer, reference=reference))


@pytest.mark.parametrize("family", sorted(GUARDS))
@pytest.mark.parametrize(
    "attack",
    [
        "__import__('pathlib').Path({path!r}).touch()",
        "[__import__('pathlib').Path({path!r}).touch()]",
        "1 + (lambda: __import__('pathlib').Path({path!r}).touch())()",
        "[].__class__.__base__.__subclasses__()[0] if open({path!r}, 'w') else 1",
        "f\"{{open({path!r}, 'w')}}\"",
    ],
)
def test_an_answer_that_is_code_is_not_run(family: str, attack: str, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    assert scored(family, attack.format(path=str(touched))) == REFUSED
    assert not touched.exists()


def test_the_attack_works_without_the_guard(tmp_path: Path) -> None:
    from reasoning_gym import get_score_answer_fn

    touched = tmp_path / "touched"
    attack = f"__import__('pathlib').Path({str(touched)!r}).touch()"
    get_score_answer_fn("n_queens")(answer=attack, entry={"answer": "", "metadata": {"valid_answers": []}})
    assert touched.exists()


@pytest.mark.parametrize("family", sorted(GUARDS))
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4])
def test_a_guarded_family_accepts_its_own_answers(family: str, seed: int) -> None:
    assert scored(family, "", seed).value == 1.0  # type: ignore[attr-defined]


def test_every_family_that_evaluates_answers_is_guarded() -> None:
    from reasoning_gym.factory import DATASETS

    modules = {family: inspect.getmodule(dataset) for family, (dataset, _) in DATASETS.items()}
    evaluate = {family for family, module in modules.items() if EVALUATES.search(inspect.getsource(module))}
    assert evaluate - set(ON_ITS_OWN_TEXT) == set(GUARDS)


@pytest.mark.parametrize(
    ("guard", "answer", "passes"),
    [
        (is_arithmetic, " 42*(30 - 4 - 23) ", True),
        (is_arithmetic, "-2**3/4.5", True),
        (is_arithmetic, "x + 1", False),
        (is_arithmetic, "1 if 2 else 3", False),
        (is_arithmetic, "(1).real", False),
        (is_arithmetic, "True", False),
        (is_formula, "-2*x**3*cos(x) + sqrt(X)/pi + C", True),
        (is_formula, "Integral(x**2*cos(x), x)", False),
        (is_formula, "exit(x)", False),
        (is_formula, "sin(x, y)", False),
        (is_formula, "sin(x).func", False),
        (is_formula, "open + x", False),
        (is_formula, "lambda x: x", False),
        (is_board, "_ Q\nQ _", True),
        (is_board, "[['_', 'Q'], ['Q', '_']]", True),
        (is_board, "[exit()]", False),
        (is_board, "(" * 10_000, False),
    ],
)
def test_what_a_guard_lets_through(guard: object, answer: str, passes: bool) -> None:
    assert guard(answer) is passes  # type: ignore[operator]
