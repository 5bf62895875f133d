"""A user's own reward function, by import path: `my_pkg.rewards:score`.

    def score(item):  # services.verifier.rewards.item.RewardInput
        return 1.0 if item.answer == item.reference["answer"] else 0.0

It returns a number, or a mapping of named numbers that are added up. It is trusted code, run where untrusted
completions are: in a worker process, with a deadline and a memory limit.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from collections.abc import Mapping
from typing import Any

from pipelinerl.errors import FieldError
from services.verifier.rewards.item import BadReward, RewardInput, Score, Scorer


def user_scorer(path: str) -> Scorer:
    """Imports the function. Raises `FieldError` when there is none, or it cannot be called with one item."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        traceback.print_exc()  # standard error of a worker ends in the verifier's log
        problem = f"cannot import {module_name} ({error!r}); is it on PYTHONPATH?"
        raise FieldError("reward.scorer", path, problem) from error
    function = getattr(module, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, [key for key, value in vars(module).items() if callable(value)])
        hint = f"; did you mean {near[0]}?" if near else ""
        raise FieldError("reward.scorer", path, f"{module_name} has no function {name}{hint}")
    if inspect.iscoroutinefunction(function):
        raise FieldError("reward.scorer", path, "an async function; give a plain one, items already run side by side")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise FieldError("reward.scorer", path, f"must take one argument, the item ({error})") from error

    def score(item: RewardInput) -> Score:
        returned = function(item)
        if isinstance(returned, Mapping):
            parts = {str(name): _number(value, f"part {name!r}") for name, value in returned.items()}
            return Score(sum(parts.values()), parts=parts)
        return Score(_number(returned, "the reward"))

    return score


def _number(value: Any, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise BadReward(f"{what} is {value!r:.100}, not a number") from error
