"""Two small environments for models that read and write single characters, of the recipes guess and calculator.

Each makes its problem of the episode's seed. `benchmarks.small_models` has taught a small model each.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from pipelinerl.episodes.environment import Done, Turn


class GuessNumber:
    """A number from 0 to `limit` - 1, to be found in few guesses, each of which is told `<` or `>`: what the number is.

        ?  50  >  75  <  62        a hit: nothing more is said

    A hit by the first guess earns 1, by each further one 1 / `max_guesses` less. No hit, or what is no number of this form,
    earns 0 and counts as one guess more than are allowed. An episode is right with no more guesses than halving the range ever
    needs; what halving needs for its number is reported beside `guesses`.
    """

    def __init__(self, limit: int = 100, max_guesses: int = 12) -> None:
        self.limit, self.width = limit, len(str(limit - 1))
        self._max_guesses, self._guesses = max_guesses, 0

    def start(self, row: Mapping[str, Any], seed: int) -> str:
        self._number = random.Random(seed).randrange(self.limit)
        return "?"

    def reply(self, turn: Turn) -> str | Done:
        self._guesses += 1
        is_legal = re.fullmatch(rf"\d{{{self.width}}}", turn.text, re.ASCII) is not None
        is_hit = is_legal and int(turn.text) == self._number
        if is_legal and not is_hit and self._guesses < self._max_guesses:
            return ">" if int(turn.text) < self._number else "<"
        guesses = self._guesses if is_hit else self._max_guesses + 1
        reported = {"legal": is_legal, "guesses": guesses, "guesses_by_halving": halvings(self._number, self.limit)}
        return Done(1.0 - (guesses - 1) / self._max_guesses, reported, is_hit and guesses <= self.limit.bit_length())


def halvings(number: int, limit: int) -> int:
    """Guesses in which `number`, from 0 to `limit` - 1, is found by always guessing the middle of what is left."""
    lowest, end, guesses = 0, limit, 1
    while (middle := (lowest + end) // 2) != number:
        lowest, end, guesses = (middle + 1, end, guesses + 1) if middle < number else (lowest, middle, guesses + 1)
    return guesses


class Calculator:
    """A product of two numbers, half of them of one digit and half of two, with a calculator that costs something.

        37*24=  [37*24]  888;  #888        called
        7*8=    #56                        known by heart

    A right answer earns 1, less `cost` for each call. `calculator` false: calls are answered `?;`.
    """

    def __init__(self, cost: float = 0.2, calculator: bool = True) -> None:
        self._cost, self._calculator, self._calls = cost, calculator, 0

    def start(self, row: Mapping[str, Any], seed: int) -> str:
        rng = random.Random(seed)
        self._is_long = rng.random() < 0.5
        lowest, highest = (12, 98) if self._is_long else (2, 9)
        self._factors = rng.randint(lowest, highest), rng.randint(lowest, highest)
        return "{}*{}=".format(*self._factors)

    def reply(self, turn: Turn) -> str | Done:
        if call := re.fullmatch(r"\[(\d{1,9})\*(\d{1,9})\]", turn.text, re.ASCII):
            self._calls += 1
            return f"{int(call[1]) * int(call[2])};" if self._calculator else "?;"
        is_right = turn.text == f"#{self._factors[0] * self._factors[1]}"
        length = "long" if self._is_long else "short"
        reward = max(0.0, is_right - self._cost * self._calls)
        return Done(reward, {f"right_{length}": is_right, f"calls_{length}": self._calls}, is_right)
