"""Rewards that take their time, so that a fault can hit while one is computed, and a run does not use a whole machine."""

import time

from services.verifier.rewards.item import RewardInput


def score(item: RewardInput) -> float:
    time.sleep(0.02)
    return float(item.completion_tokens % 7)


def score_slowly(item: RewardInput) -> float:
    """With two workers, about one batch of 16 a second."""
    time.sleep(0.1)
    return float(item.completion_tokens % 7)
