"""What a service answers to /metrics, without the label that is the same on every line."""

from __future__ import annotations

import re

_RUN = re.compile(r'\{run="[^"]*"\}|run="[^"]*",|,run="[^"]*"')


def without_run(text: str) -> str:
    """The exposition text without the label `run`. Pure."""
    return _RUN.sub("", text)
