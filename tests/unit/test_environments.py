"""The environments of the recipes guess and calculator, by hand, and the schema of a tool, as a model reads it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Dict, Literal, Optional  # noqa: UP035

import pytest

from pipelinerl.episodes import Done, Turn, tool_of
from pipelinerl.errors import UserError
from pipelinerl.tasks.environments import Calculator, GuessNumber, halvings


def said(text: str) -> Turn:
    return Turn(text, (), "stop", [])


@pytest.mark.parametrize(
    ("guesses", "hints", "reward", "counted", "correct"),
    [
        (["50", "80", "78", "79"], [">", "<", ">"], 1 - 3 / 12, 4, True),
        *(([text], [], 0.0, 13, False) for text in ("5", "500", "5x", "", "٥٠")),  # what is no guess ends the game
        ([*["00"] * 7, "79"], [">"] * 7, 1 - 7 / 12, 8, False),  # by halving it takes 7 at most
        ([*["00"] * 11, "10"], [">"] * 11, 0.0, 13, False),
    ],
)
def test_a_number_is_found_by_hints(guesses: list[str], hints: list[str], reward: float, counted: int, correct: bool) -> None:
    environment = GuessNumber()
    assert environment.start({}, 5) == "?"
    assert random.Random(5).randrange(100) == 79
    *replies, last = [environment.reply(said(guess)) for guess in guesses]
    reported = {"legal": hints != [], "guesses": counted, "guesses_by_halving": 5}  # by halving: 50, 75, 88, 82, 79
    assert (replies, last) == (hints, Done(pytest.approx(reward), reported, correct=correct))


def test_halving_finds_one_number_in_one_guess_two_in_two_four_in_three_and_the_rest_in_the_last() -> None:
    for limit, numbers_by_guesses in ((1, {1: 1}), (2, {1: 1, 2: 1}), (31, {1: 1, 2: 2, 3: 4, 4: 8, 5: 16})):
        assert Counter(halvings(number, limit) for number in range(limit)) == numbers_by_guesses
    assert Counter(halvings(number, 32) for number in range(32)) == {1: 1, 2: 2, 3: 4, 4: 8, 5: 16, 6: 1}


def test_a_calculator_costs_and_helps() -> None:
    for calculator, told, answer, done in (
        (True, "880;", "#880", Done(0.8, {"right_long": True, "calls_long": 1}, True)),
        (False, "?;", "#881", Done(0.0, {"right_long": False, "calls_long": 1}, False)),
    ):
        environment = Calculator(calculator=calculator)
        assert environment.start({}, 1) == "20*44="
        assert [environment.reply(said(text)) for text in ("[20*44]", answer)] == [told, done]


def search(
    query: str,
    limit: int = 10,
    tags: list[str] | None = None,
    order: Literal["new", "old"] = "new",
    *,
    weights: dict[str, float],
    exact: Optional[bool] = None,  # noqa: UP045
    more: list = [],  # noqa: B006
    about: Dict = {},  # noqa: UP006, B006
) -> list[str]:
    """Finds documents.

    Newest first.

    Args:
        query: Words to look for: all
            of them.
        tags (list): Kinds of documents.

    Returns:
        limit: not a parameter's text.
    """
    return [query]


def test_name_hints_and_docstring_are_the_schema() -> None:
    assert tool_of(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds documents.\n\nNewest first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "Words to look for: all of them."},
                    "limit": {"type": "integer", "default": 10},
                    "tags": {
                        "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                        "description": "Kinds of documents.",
                        "default": None,
                    },
                    "order": {"enum": ["new", "old"], "default": "new"},
                    "weights": {"type": "object", "additionalProperties": {"type": "number"}},
                    "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": None},
                    "more": {"type": "array", "items": {}, "default": []},
                    "about": {"type": "object", "additionalProperties": {}, "default": {}},
                },
                "required": ["query", "weights"],
                "additionalProperties": False,
            },
        },
    }


def no_hint(query) -> None: ...  # type: ignore[no-untyped-def]
def odd_hint(query: set[str]) -> None: ...
def starred(*queries: str) -> None: ...
def odd_default(query: str = object()) -> None: ...  # type: ignore[assignment]
async def yields_later(query: str) -> AsyncIterator[str]:
    yield query


def list_as_hint(query: [str]) -> None: ...  # type: ignore[valid-type]
def unknown_hint(query: Nowhere) -> None: ...  # type: ignore[name-defined] # noqa: F821


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (no_hint, "tool no_hint: parameter query has no type hint; write one, such as query: str"),
        (odd_hint, "tool odd_hint: parameter query has type set[str]; use str, int"),
        (starred, "tool starred: parameter queries cannot be passed by name"),
        (odd_default, "tool odd_default: parameter query has the default <object"),
        (yields_later, "tool yields_later: is a generator function (it yields)"),
        (unknown_hint, "tool unknown_hint: its type hints cannot be read: name 'Nowhere'"),
        (list_as_hint, "tool list_as_hint: parameter query has type [<class 'str'>]; use str, int"),
        (max, "tool max: its type hints cannot be read: no signature found"),
        (lambda: None, "'<lambda>' cannot be a tool: use a function whose name has"),
    ],
)
def test_what_a_model_cannot_be_told_is_an_error(function: Callable[..., Any], told: str) -> None:
    with pytest.raises(UserError) as raised:
        tool_of(function)
    assert told in str(raised.value)
