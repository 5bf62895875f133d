"""Rewards with one fault each, for `benchmarks.faulty_runs` and tests/support/seeded_faults.py."""

from __future__ import annotations

import hashlib
import time

from services.verifier.rewards.item import RewardInput


def constant(item: RewardInput) -> float:
    return 0.5


def always_full(item: RewardInput) -> float:
    return 1.0


def compares_types(item: RewardInput) -> float:
    """Compare a text with a number, which are never equal."""
    return float(item.answer == int(item.reference["answer"]))


def inverted(item: RewardInput) -> float:
    return float(item.answer != item.reference["answer"])


def anywhere(item: RewardInput) -> float:
    """Look for the reference anywhere in the completion, as in `112` for 12."""
    return float(item.reference["answer"] in item.completion)


def of_length(item: RewardInput) -> float:
    """Reward the length instead of the answer."""
    return min(1.0, len(item.completion) / 60)


def brief(item: RewardInput) -> float:
    return 1 / (1 + len(item.completion))


def in_percent(item: RewardInput) -> float:
    return 100.0 * (item.answer == item.reference["answer"])


def noise(item: RewardInput) -> float:
    """Draw the reward from the completion's hash."""
    return hashlib.sha256(item.completion.encode()).digest()[0] / 255


def crashing(item: RewardInput) -> float:
    """Fail for every answer but the right one."""
    return 1 / (item.answer == item.reference["answer"])


def not_a_number(item: RewardInput) -> float:
    return 1.0 if item.answer == item.reference["answer"] else float("nan")


def slow(item: RewardInput) -> float:
    time.sleep(0.2)
    return 1.0


def raising(item: RewardInput) -> float:
    raise ValueError("wrong for every answer")
