"""The small environments of the recipes guess and calculator, by hand."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from pipelinerl.episodes import Done, Turn
from pipelinerl.tasks.environments import Calculator, GuessNumber, halvings


def said(text: str) -> Turn:
    return Turn(text, (), "stop", [])


def test_a_number_is_found_by_hints() -> None:
    number = random.Random(5).randrange(100)
    assert number == 79
    environment = GuessNumber()
    assert environment.start({}, 5) == "?"
    assert [environment.reply(said(guess)) for guess in ("50", "80", "78")] == [">", "<", ">"]
    # By halving: 50, 75, 88, 82, 79.
    reported = {"legal": True, "guesses": 4, "guesses_by_halving": 5}
    assert environment.reply(said("79")) == Done(pytest.approx(0.75), reported, correct=True)


@pytest.mark.parametrize("text", ["5", "500", "5x", "", "٥٠"])
def test_what_is_no_guess_ends_the_game(text: str) -> None:
    environment = GuessNumber()
    environment.start({}, 5)
    assert environment.reply(said(text)) == Done(0.0, {"legal": False, "guesses": 13, "guesses_by_halving": 5}, correct=False)


def test_late_guesses_are_not_right_the_last_one_ends_the_game_and_halving_takes_five() -> None:
    for last, reward, guesses in (("79", 1 / 8, 8), ("10", 0, 9)):
        environment = GuessNumber(max_guesses=8)
        environment.start({}, 5)
        assert {environment.reply(said("00")) for _ in range(7)} == {">"}
        reported = {"legal": True, "guesses": guesses, "guesses_by_halving": 5}
        assert environment.reply(said(last)) == Done(pytest.approx(reward), reported, correct=False)
    # Depths of a balanced tree: 1 number in one guess, 2 in two, 4 in three and so on, what is left in the last.
    for limit, numbers_by_guesses in ((1, {1: 1}), (2, {1: 1, 2: 1}), (31, {1: 1, 2: 2, 3: 4, 4: 8, 5: 16})):
        assert Counter(halvings(number, limit) for number in range(limit)) == numbers_by_guesses
    assert Counter(halvings(number, 32) for number in range(32)) == {1: 1, 2: 2, 3: 4, 4: 8, 5: 16, 6: 1}


def test_a_calculator_costs_and_helps() -> None:
    environment = Calculator()
    assert environment.start({}, 1) == "20*44="
    assert environment.reply(said("[20*44]")) == "880;"
    assert environment.reply(said("#880")) == Done(0.8, {"right_long": True, "calls_long": 1}, True)
    by_heart = Calculator(calculator=False)
    by_heart.start({}, 1)
    assert by_heart.reply(said("[20*44]")) == "?;"
    assert by_heart.reply(said("#881")) == Done(0.0, {"right_long": False, "calls_long": 1}, False)
