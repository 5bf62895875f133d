"""Rewards and an environment that take their time: a fault can hit meanwhile, and a run does not use a whole machine."""

import time
from collections.abc import Mapping
from typing import Any

from pipelinerl.episodes import Done, Turn
from services.verifier.rewards.item import RewardInput


def score(item: RewardInput) -> float:
    time.sleep(0.02)
    return float(item.completion_tokens % 7)


def score_slowly(item: RewardInput) -> float:
    time.sleep(0.1)
    return float(item.completion_tokens % 7)


class SlowTalk:
    """Says the same sum again until `turns` turns were sampled. `reply_s`: what it takes for each."""

    def __init__(self, turns: int = 3, reply_s: float = 0.02) -> None:
        self._left, self._reply_s = turns, reply_s

    def start(self, row: Mapping[str, Any], seed: int) -> str:
        return f"{seed % 10}+1="

    def reply(self, turn: Turn) -> str | Done:
        time.sleep(self._reply_s)
        self._left -= 1
        return "1+1=" if self._left else Done(float(len(turn.text) % 7), {"said": len(turn.text)})


def talks(**config: Any) -> dict[str, Any]:
    """A task of a recipe's `tasks` that is made of it, for the tiny model."""
    task = {"source": "environment", "name": f"{__name__}:{SlowTalk.__name__}", "config": config, "prompt_style": "plain"}
    return {"name": "talks", "max_tokens": 12, "task": task, "reward": {"scorer": "task", "answer_pattern": ""}}
