"""Whether the whole completion has the wanted form, whatever it answers."""

from __future__ import annotations

import re


class FormatPattern:
    """`matches(completion)`: the pattern matches all of it, surrounding white space aside."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)

    def matches(self, completion: str) -> bool:
        return self._pattern.fullmatch(completion.strip()) is not None
