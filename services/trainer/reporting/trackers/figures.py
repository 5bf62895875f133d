"""A step's record, a summary and a recipe, as trackers take them: flat names with one value each. Pure.

Leaves out what is no number, and what is none: a tracker gets no point where there is nothing to show.

Takes secrets out of a text before it is logged: values of the environment's secret variables, logins in addresses. Pure.

What is secret is told by the variable's name. It knows no other source of secrets, such as a library's own files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.lag import LAG_BUCKETS, lag_bucket

_ELSEWHERE = frozenset({"step", "lag_histogram", "skipped", "joins"})
"""Keys of a step's record that are told otherwise, or are the axis."""


def step_figures(record: Mapping[str, Any]) -> dict[str, float]:
    """`{"lag": {"mean": 2}}` becomes `lag/mean`. Evaluations are left out: they have an axis of their own."""
    plain = {key: value for key, value in record.items() if key not in _ELSEWHERE and not key.startswith("heldout_")}
    tokens = tokens_by_lag(record.get("lag_histogram", {}))
    return flat(
        {
            **plain,
            "skipped": bool(record.get("skipped")),
            "joins": len(record.get("joins", ())),
            "tokens_by_lag": tokens,
        }
    )


def tokens_by_lag(histogram: Mapping[Any, int]) -> dict[str, int]:
    """Tokens by lag bucket: of lags there is no end, of buckets there are few."""
    tokens: dict[str, int] = {}
    for lag, count in histogram.items():
        bucket = LAG_BUCKETS[int(lag_bucket(np.array([int(lag)]))[0])]
        tokens[bucket] = tokens.get(bucket, 0) + count
    return tokens


def flat(values: Mapping[str, Any]) -> dict[str, float]:
    """Every finite number in `values`, by its path. `17+` becomes `17-up`: not every tracker takes a plus."""
    return dict(_numbers(values, ""))


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{path}/{key}" if path else str(key))
    elif isinstance(value, bool | int | float | np.bool_ | np.number) and math.isfinite(float(value)):
        yield path.replace("+", "-up"), float(value)


def recipe_params(recipe: Recipe) -> dict[str, str | int | float | bool]:
    """Each field of the recipe by its dotted path; lists and free-form mappings as JSON."""
    return dict(_fields(recipe.model_dump(mode="json"), ""))


def _fields(value: Any, path: str) -> Iterator[tuple[str, str | int | float | bool]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _fields(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, str | bool | int | float):
        yield path, value
    else:
        yield path, json.dumps(value, ensure_ascii=False)


_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_ADDRESS = re.compile(r"UR[IL]S?$", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)\S+@")
"""Up to the last @: a password may have / and @ in it."""
_LONGEST = 400


def scrubbed(text: str, environment: Mapping[str, str]) -> str:
    """`text` in one line of at most 400 characters, with `***` in place of each secret."""
    secrets = [value for name, value in environment.items() if is_secret(name, value) and len(value) > 3]
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return " ".join(_LOGIN.sub("***@", text).split())[:_LONGEST]


def is_secret(name: str, value: str) -> bool:
    """Of an environment variable; an address with a login is one as a whole."""
    return bool(_SECRET.search(name)) or bool(_ADDRESS.search(name) and "://" in value and "@" in value)
