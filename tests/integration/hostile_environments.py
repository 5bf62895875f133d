"""An environment that does what its row says, good and bad, the agent and the tools of the same tests."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping
from typing import Any

import hostile_rewards as misdeeds
import numpy as np

from pipelinerl.episodes import Done, Messages, Turn

IMPORTED_IN = os.getpid()


class Hostile:
    """`row["in_start"]` and `row["in_reply"]`: a misdeed of `hostile_rewards`. Otherwise: counts to `row["turns"]`."""

    def __init__(self, bonus: float = 0.0) -> None:
        self._bonus = bonus

    async def start(self, row: Mapping[str, Any], seed: int) -> Messages | str:
        await asyncio.sleep(0)
        self._row, self._left = row, int(row.get("turns", 1))
        assert os.getpid() != IMPORTED_IN, "the template runs no environment"
        self._do("in_start")
        drawn = f"{random.random()} {np.random.random()}"
        return [{"role": "system", "content": f"seed {seed}"}, {"role": "user", "content": drawn}]

    def reply(self, turn: Turn) -> Messages | str | Done:
        self._do("in_reply")
        self._left -= 1
        if self._left:
            return f"{self._left} left"
        said = [message["content"] for message in turn.messages if message["role"] == "assistant"]
        return Done(float(turn.text) + self._bonus, {"said": len(said)}, self._row.get("correct"))

    def _do(self, when: str) -> None:
        if misdeed := self._row.get(when):
            word, _, argument = misdeed.partition(" ")
            value = getattr(misdeeds, f"do_{word}")(argument)
            assert word != "run" or not value, "the program got out"


def multiply(a: int, b: int) -> int:
    """Product.

    Args:
        a: One factor.
        b: The other one.
    """
    return a * b


async def divide(a: float, b: float = 1.0) -> float:
    """Quotient."""
    return a / b


def repeat(text: str, times: int) -> str:
    return text * times


def table() -> dict[str, Any]:
    """Numbers."""
    return {"é": np.arange(2), "one": np.int64(1)}


def run(program: str) -> str:
    """Runs a program."""
    exec(program, {})
    return "it ran"
