"""The compact form of reasoning-gym's chain_sum: `12 + 7 - 5` asked as `12+7-5=`.

For models with a character tokenizer, to which the task's English sentence means nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelinerl.errors import FieldError


def compact_question(entry: Mapping[str, Any]) -> str:
    """The bare expression and `=`. Raises `FieldError` for an entry without an expression."""
    expression = entry.get("metadata", {}).get("expression")
    if not isinstance(expression, str):
        raise FieldError("task.prompt_style", "compact", "only chain_sum has a compact form; use plain or chat")
    return expression.replace(" ", "") + "="
