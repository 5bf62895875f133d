"""Two families for reasoning-gym: repeated additions and one-line programs. `pipelinerl.tasks.source` registers them."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from reasoning_gym.factory import ProceduralDataset


@dataclass
class RepeatedAdditionConfig:
    """Arguments of `repeated_addition`. Bounds are inclusive. The number of additions follows a truncated Pareto distribution
    with α = `tail_index`. Most problems are short and a few are very long, like the completions of reasoning models."""

    min_start: int = 1000
    max_start: int = 9000
    min_step: int = 2
    max_step: int = 9
    min_times: int = 2
    max_times: int = 50
    tail_index: float = 1.0
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """Raise `AssertionError` for wrong bounds, as reasoning-gym's own families do."""
        for name in ("start", "step", "times"):
            lowest, highest = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            assert 0 <= lowest <= highest, f"max_{name} must be >= min_{name}, and both >= 0"
        assert self.min_times > 0, "min_times must be positive"
        assert self.tail_index > 0, "tail_index must be positive"


class RepeatedAdditionDataset(ProceduralDataset):
    """Problems such as `12 x 7 + 1037`: add 7 to 1037, 12 times. The 12 is padded with zeros to the width of `max_times`."""

    def __init__(self, config: RepeatedAdditionConfig) -> None:
        super().__init__(config=config, seed=config.seed, size=config.size)

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng, config = random.Random(self.seed + index), self.config
        start = rng.randint(config.min_start, config.max_start)
        step = rng.randint(config.min_step, config.max_step)
        times = pareto(rng.random(), config.min_times, config.max_times, config.tail_index)
        width = len(str(config.max_times))
        return {
            "question": f"Add {step} to {start}, {times} times. What is the result? Give only the number.",
            "answer": str(start + step * times),
            "metadata": {"expression": f"{times:0{width}} x {step} + {start}", "times": times},
        }


def pareto(quantile: float, lowest: int, highest: int, tail_index: float) -> int:
    """Return the integer at `quantile`, in [0, 1), of a Pareto distribution truncated to [`lowest`, `highest`]."""
    cut_off = (lowest / (highest + 1)) ** tail_index
    return int(lowest * (1 - quantile * (1 - cut_off)) ** (-1 / tail_index))


_DO = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_INPUTS = (-3, 0, 1, 10)


@dataclass
class OneLineFunctionConfig:
    """Arguments of `one_line_function`. Bounds are inclusive."""

    min_operations: int = 2
    max_operations: int = 4
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """Raise `AssertionError` for wrong bounds, as reasoning-gym's own families do."""
        assert 1 <= self.min_operations <= self.max_operations, "max_operations must be >= min_operations >= 1"


class OneLineFunctionDataset(ProceduralDataset):
    """Problems such as `+3 *2 -1`, which lists operations on x in their order. The answer is a Python function such as
    `def f(x):return (x+3)*2-1`. The model must learn where brackets belong. The metadata holds tests for the scorer `code`."""

    def __init__(self, config: OneLineFunctionConfig) -> None:
        super().__init__(config=config, seed=config.seed, size=config.size)

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(self.seed + index)
        number = rng.randint(self.config.min_operations, self.config.max_operations)
        operations = [f"{rng.choice('+-*')}{rng.randint(2, 9)}" for _ in range(number)]
        return {
            "question": f"Write `def f(x):return ...` in Python. From x on, do in this order: {', '.join(operations)}.",
            "answer": f"def f(x):return {in_brackets(operations, [True] * number)}",
            "metadata": {
                "expression": " ".join(operations),
                "tests": "".join(f"assert f({x}) == {reduce(_apply, operations, x)}\n" for x in _INPUTS),
            },
        }


def _apply(value: int, operation: str) -> int:
    return int(_DO[operation[0]](value, int(operation[1:])))


def in_brackets(operations: Sequence[str], are_set: Sequence[bool]) -> str:
    """Return an expression that applies `operations` to x. `are_set`: for each operation, whether to write needed brackets."""
    expression = "x"
    for operation, is_set in zip(operations, are_set, strict=True):
        is_sum = "+" in expression.split(")")[-1] or "-" in expression.split(")")[-1]
        expression = f"({expression})" * (is_set and operation[0] == "*" and is_sum) or expression
        expression += operation
    return expression


FAMILIES = {
    "repeated_addition": (RepeatedAdditionDataset, RepeatedAdditionConfig),
    "one_line_function": (OneLineFunctionDataset, OneLineFunctionConfig),
}
