"""Answers that are JSON of a given shape. A schema may not fetch other schemas: nothing here uses the network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pipelinerl.errors import FieldError
from services.verifier.rewards.item import NO_ANSWER, BadReference, RewardInput, Score, Scorer, reference_answer


def json_schema_scorer(schema: Mapping[str, Any]) -> Scorer:
    """1 when the answer is JSON that `schema` accepts; an empty `schema` means that each reference answer is one.

    Raises `FieldError` when `schema` is not a JSON Schema.
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
            return validator(_schema(text))
        except SchemaError as error:
            raise BadReference("answer", f"not a JSON Schema: {error.message}") from error

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


def _schema(text: str) -> Mapping[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise BadReference("answer", f"not a JSON Schema: {error}") from error
    if not isinstance(schema, dict):
        raise BadReference("answer", "not a JSON Schema: an object is needed")
    return schema
