"""A reward that takes its time, so that a fault can hit while it is computed."""

from __future__ import annotations

import time

from services.verifier.rewards.item import RewardInput


def score(item: RewardInput) -> float:
    time.sleep(0.02)
    return float(item.completion_tokens % 7)
