"""Finds the answer in a completion. It judges nothing, and a pattern that takes for ever is the worker's deadline's."""

from __future__ import annotations

import re


class AnswerPattern:
    """`last_answer(completion)`: group 1 of the last match, stripped; without a pattern, the whole completion."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern) if pattern else None

    def last_answer(self, completion: str) -> str | None:
        """None when the pattern does not match, or its last match leaves group 1 out."""
        if self._pattern is None:
            return completion.strip()
        answer = None
        for match in self._pattern.finditer(completion):
            answer = match.group(1)
        return None if answer is None else answer.strip()
