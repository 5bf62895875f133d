"""The small environments of the recipes guess and calculator, by hand."""

from __future__ import annotations

import random

import pytest

from pipelinerl.episodes import Done, Turn
from pipelinerl.tasks.environments import Calculator, GuessNumber


def said(text: str) -> Turn:
    return Turn(text, (), "stop", [])


def test_a_number_is_found_by_hints() -> None:
    number = random.Random(5).randrange(100)
    assert number == 79
    environment = GuessNumber()
    assert environment.start({}, 5) == "?"
    assert [environment.reply(said(guess)) for guess in ("50", "80", "78")] == [">", "<", ">"]
    assert environment.reply(said("79")) == Done(pytest.approx(0.75), {"legal": 1.0, "guesses": 4}, correct=True)


@pytest.mark.parametrize("text", ["5", "500", "5x", "", "٥٠"])
def test_what_is_no_guess_ends_the_game(text: str) -> None:
    environment = GuessNumber()
    environment.start({}, 5)
    assert environment.reply(said(text)) == Done(0.0, {"legal": 0.0}, correct=False)


def test_late_guesses_are_not_right_and_the_last_one_ends_the_game() -> None:
    for last, done in (("79", Done(pytest.approx(1 / 8), {"legal": 1.0, "guesses": 8}, False)), ("10", None)):
        environment = GuessNumber(max_guesses=8)
        environment.start({}, 5)
        assert {environment.reply(said("00")) for _ in range(7)} == {">"}
        assert environment.reply(said(last)) == (done or Done(0.0, {"legal": 1.0}, False))


def test_a_calculator_costs_and_helps() -> None:
    environment = Calculator()
    assert environment.start({}, 1) == "20*44="
    assert environment.reply(said("[20*44]")) == "880;"
    assert environment.reply(said("#880")) == Done(0.8, {"right_long": True, "calls_long": 1}, True)
    by_heart = Calculator(calculator=False)
    by_heart.start({}, 1)
    assert by_heart.reply(said("[20*44]")) == "?;"
    assert by_heart.reply(said("#881")) == Done(0.0, {"right_long": False, "calls_long": 1}, False)
