"""From a recipe's words to the reward they mean: weighted terms, kept apart, that add up to it.

reward = correct * score + format_weight * [the form matches] + overlong penalty

With `truncated: zero`, a completion that was cut has nothing but the penalty, and the term `truncated` says so.

A scorer may be a user's own function, `my_pkg.rewards:score`:

    def score(item):  # services.verifier.rewards.item.RewardInput
        return 1.0 if item.answer == item.reference["answer"] else 0.0

It returns a number, or a mapping of named numbers that are added up. It is trusted code, run where untrusted
completions are: in a worker process, with a deadline and a memory limit.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from pipelinerl.errors import FieldError, as_unicode, located
from pipelinerl.recipe.fields import RewardConfig, TaskConfig
from services.verifier.rewards.answers import exact, json_schema_scorer, judge_scorer, regex
from services.verifier.rewards.code import code_scorer
from services.verifier.rewards.item import BadReference, BadReward, RewardInput, Score, Scorer
from services.verifier.rewards.mathematics import math_scorer
from services.verifier.rewards.reasoning_gym import reasoning_gym_scorer

MOST_TERMS, TERM_CHARACTERS = 128, 100
"""That a user's function returns, and of the name of one: all are kept with each sequence."""
_ALMOST = 1e-9
"""How far below 1 a score may be and still count as right: room for a scorer's rounding."""


class ComposedReward:
    """A recipe's reward. `graded`: the scorer's number counts as it is, whatever `binary` says (a user's function, a
    judge)."""

    def __init__(self, config: RewardConfig, scorer: Scorer, *, graded: bool = False) -> None:
        self._config, self._scorer = config, scorer
        self._binary = config.binary and not graded
        self._answer = re.compile(config.answer_pattern) if config.answer_pattern else None
        self._format = re.compile(config.format_pattern) if config.format_pattern else None

    def find_answer(self, completion: str) -> str | None:
        """Group 1 of the last match of `answer_pattern`, stripped; None when nothing matches, or the last match leaves the
        group out. Without a pattern, the whole completion."""
        if self._answer is None:
            return completion.strip()
        answer = None
        for match in self._answer.finditer(completion):
            answer = match.group(1)
        return None if answer is None else answer.strip()

    def __call__(self, item: RewardInput) -> Score:
        """A finite value and the terms that add up to it. Raises `BadReference`, `BadReward`, and whatever a scorer raises."""
        cut = self._config.truncated == "zero" and item.finish_reason == "length"
        score = Score(0.0, "cut at its length limit (reward.truncated)") if cut else self._scorer(item)
        terms, reasons = self._answer_terms(score), [score.reason] if score.reason else []
        if cut:
            terms["truncated"] = 0.0
        if self._format is not None and not cut:
            matches = self._format.fullmatch(item.completion.strip()) is not None
            terms["format"] = self._config.format_weight * matches
            reasons += [] if matches else ["the completion does not match reward.format_pattern"]
        if self._config.overlong.buffer_tokens:
            terms["overlong"] = self._overlong(item)
        total = sum(terms.values())
        if not math.isfinite(total):
            listed = ", ".join(f"{name} = {term}" for name, term in terms.items())
            raise BadReward(f"not a finite number: {listed}"[:200])
        return Score(total, "; ".join(reasons), terms)

    def _answer_terms(self, score: Score) -> dict[str, float]:
        if score.parts and not self._binary:
            return {f"answer.{name}": self._config.correct * part for name, part in score.parts.items()}
        if math.isnan(score.value):
            raise BadReward("the scorer returned nan")
        value = float(score.value >= 1.0 - _ALMOST) if self._binary else score.value
        return {"answer": self._config.correct * value}

    def _overlong(self, item: RewardInput) -> float:
        overlong = self._config.overlong
        if item.max_tokens < 1:
            raise BadReference("max_tokens", "0, and reward.overlong needs the limit the completion was sampled under")
        return overlong_penalty(item.completion_tokens, item.max_tokens, overlong.buffer_tokens, overlong.penalty)


def overlong_penalty(completion_tokens: int, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13): a slope before the limit instead of a cliff at it.

    `penalty` times the equation: 0 up to `max_tokens - buffer_tokens`, -1 from `max_tokens` on, linear between.
    Lengths in tokens; L_max is `max_tokens`, at which the completion would be cut, L_cache is `buffer_tokens` (at least 1), and
    no more than L_max.
    """
    zone = min(buffer_tokens, max_tokens)
    over = completion_tokens - (max_tokens - zone)
    return 0.0 - penalty * min(max(over / zone, 0.0), 1.0)


def make_reward(config: RewardConfig, task: TaskConfig) -> ComposedReward:
    """Raises `FieldError` for a reasoning-gym family or a function that does not exist, with near names."""
    match config.scorer:
        case "task" if task.source == "reasoning_gym":
            scorer = reasoning_gym_scorer(task.name)
        case "task" | "exact":
            scorer = exact
        case "regex":
            scorer = regex
        case "math" | "math_boxed":
            scorer = math_scorer(config.timeout_s, boxed=config.scorer == "math_boxed")
        case "json_schema":
            scorer = json_schema_scorer(config.json_schema)
        case "code":
            scorer = code_scorer(config)
        case "judge":
            assert config.judge is not None, "a rule of the recipe"
            return ComposedReward(config, judge_scorer(config.judge), graded=True)
        case path:
            return ComposedReward(config, user_scorer(path), graded=True)
    return ComposedReward(config, scorer)


def imported(field: str, path: str) -> Callable[..., Any]:
    """The function or class `pkg.module:name`. Raises `FieldError` on `field`, with near names, when there is none."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        traceback.print_exc()  # standard error of a worker ends in the verifier's log
        absent = "; is it on PYTHONPATH?" if isinstance(error, ModuleNotFoundError) else ""
        raise FieldError(field, path, f"cannot import {module_name}: {located(error)}{absent}") from error
    found = getattr(module, name, None)
    if not callable(found):
        near = difflib.get_close_matches(name, [key for key, value in vars(module).items() if callable(value)])
        hint = f"; did you mean {near[0]}?" if near else ""
        raise FieldError(field, path, f"{module_name} has no function {name}{hint}")
    returned: Callable[..., Any] = found
    return returned


def user_scorer(path: str) -> Scorer:
    """Imports the function. Raises `FieldError` when there is none, or it cannot be called with one item."""
    function = imported("reward.scorer", path)
    for body in (function, getattr(function, "__call__", None)):  # noqa: B004 - of an object, its method
        if inspect.iscoroutinefunction(body):
            raise FieldError("reward.scorer", path, "an async function; give a plain one, items already run side by side")
        if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
            raise FieldError("reward.scorer", path, "a generator function (it yields); return the reward instead")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise FieldError("reward.scorer", path, f"must take one argument, the item ({error})") from error

    def score(item: RewardInput) -> Score:
        returned = function(item)
        if isinstance(returned, Mapping):
            if len(returned) > MOST_TERMS:
                raise BadReward(f"the reward has {len(returned):,} terms; return at most {MOST_TERMS}")
            parts = {_term(name): _number(value, f"part {name!r}") for name, value in returned.items()}
            return Score(sum(parts.values()), parts=parts)
        return Score(_number(returned, "the reward"))

    return score


def _term(name: Any) -> str:
    term = as_unicode(str(name))
    if len(term) > TERM_CHARACTERS:
        raise BadReward(f"the name of a term has {len(term):,} characters; use at most {TERM_CHARACTERS}: {term:.40}...")
    return term


def _number(value: Any, what: str) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError("a text")
        return float(value)
    except (TypeError, ValueError) as error:
        raise BadReward(f"{what} is {value!r:.100}, not a number") from error
