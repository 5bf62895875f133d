"""Two small environments, for the recipes guess and calculator, whose models read and write single characters."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from pipelinerl.episodes import Done, Turn


class GuessNumber:
    """Find a number from 0 to `limit` - 1 in few guesses. The reply `<` or `>` means: the number is below or above the guess.

        ?  50  >  75  <  62        a hit, which ends the episode

    A hit with the first guess earns 1, and each further guess costs 1 / `max_guesses`. A guess must have as many digits as
    `limit` - 1. An episode with a malformed guess or without a hit earns 0 and counts as `max_guesses` + 1 guesses. An episode
    is correct if it needs no more guesses than halving the range does in the worst case.
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
    """Return how many guesses find `number` (0 to `limit` - 1) if each guess halves the remaining range."""
    lowest, end, guesses = 0, limit, 1
    while (middle := (lowest + end) // 2) != number:
        lowest, end, guesses = (middle + 1, end, guesses + 1) if middle < number else (lowest, middle, guesses + 1)
    return guesses


class Calculator:
    """Compute a product. A calculator helps but costs reward. Half of the problems have one-digit factors.

        37*24=  [37*24]  888;  #888        with a call
        7*8=    #56                        without one

    A right answer earns 1, minus `cost` for each call, but at least 0. If `calculator` is false, the reply to a call is `?;`.
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
