"""Scorers that compare an answer with the reference: as text, by a pattern, by a JSON Schema, by a judge.

Libraries are imported by the scorer that needs them. Schemas cannot fetch other schemas, so that the network is never used.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import JudgeConfig
from services.verifier.rewards.item import NO_ANSWER, BadReference, BadReward, RewardInput, Score, Scorer, reference_answer


def exact(item: RewardInput) -> Score:
    """Score 1 if answer and reference are the same text, apart from surrounding white space."""
    wanted = reference_answer(item)
    if item.answer is None:
        return NO_ANSWER
    return Score(1.0) if item.answer == wanted else Score(0.0, "differs from the reference answer")


def regex(item: RewardInput) -> Score:
    """Score 1 if the reference answer, as a regular expression, matches the whole answer. Its `.` also matches line ends."""
    pattern = _compiled(reference_answer(item))
    if item.answer is None:
        return NO_ANSWER
    return Score(1.0) if pattern.fullmatch(item.answer) else Score(0.0, "does not match the reference pattern")


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise BadReference("answer", f"{pattern[:80]!r} is not a regular expression: {error}") from error


def json_schema_scorer(schema: Mapping[str, Any]) -> Scorer:
    """Return a scorer that gives 1 if the answer is JSON that fits `schema` or, if that is empty, the reference's schema.

    Raises `FieldError` if `schema` is not a JSON Schema.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError, best_match
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    def validator(wanted: Mapping[str, Any]) -> Any:
        kind = validator_for(wanted, default=Draft202012Validator)
        kind.check_schema(wanted)
        return kind(wanted, registry=Registry())

    @lru_cache(maxsize=1024)
    def of_reference(text: str) -> Any:
        try:
            parsed = json.loads(text)
            if not isinstance(parsed, dict):
                raise BadReference("answer", "not a JSON Schema: an object is needed")
            return validator(parsed)
        except (SchemaError, ValueError) as error:
            problem = error.message if isinstance(error, SchemaError) else error
            raise BadReference("answer", f"not a JSON Schema: {problem}") from error

    try:
        of_recipe = validator(schema) if schema else None
    except SchemaError as error:
        raise FieldError("reward.json_schema", schema, f"not a JSON Schema: {error.message}") from error

    def score(item: RewardInput) -> Score:
        checks = of_recipe or of_reference(reference_answer(item))
        if item.answer is None:
            return NO_ANSWER
        try:
            problem = best_match(checks.iter_errors(json.loads(item.answer)))
        except (ValueError, RecursionError) as error:
            return Score(0.0, f"not JSON: {error}")
        except Unresolvable as error:
            raise BadReference("schema", f"refers to {error.ref}, which is not part of it") from error
        return Score(0.0, f"{problem.json_path}: {problem.message}"[:200]) if problem else Score(1.0)

    return score


def judge_scorer(config: JudgeConfig) -> Scorer:
    """Return a scorer that gives the judge's number, divided by its full marks. If the number is missing or out of range, the
    item fails, since that is not the policy's fault."""
    pattern = re.compile(config.pattern)

    def score(item: RewardInput) -> Score:
        found = [match[1] for match in pattern.finditer(item.judgement)]
        try:
            value = float(found[-1]) / config.full_marks
        except (IndexError, TypeError, ValueError):
            value = math.nan
        if not 0 <= value <= 1:
            told = f"reward.judge.pattern finds no number from 0 to {config.full_marks:g}"
            raise BadReward(f"{told} in the judge's answer: {item.judgement[-200:]!r}")
        return Score(value, f"the judge says: {item.judgement[-400:].strip()}")

    return score
