"""An environment that takes its time, for `benchmarks.episodes`: a verifier imports it, and nothing else of that."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.episode_cases import OBSERVATION_WORDS, PROMPT_WORDS, TURNS, words
from pipelinerl.episodes import Done, Turn


class WaitingEnvironment:
    """Random words of the episode's seed, before each turn; `wait_s` of the row before each of them but the first, and before
    the reward."""

    def start(self, row: Mapping[str, Any], seed: int) -> str:
        self._wait_s, self._left, self._rng = float(row["wait_s"]), TURNS, random.Random(seed)
        return words(self._rng, PROMPT_WORDS)

    def reply(self, turn: Turn) -> str | Done:
        time.sleep(self._wait_s)
        self._left -= 1
        return words(self._rng, OBSERVATION_WORDS) if self._left else Done(1.0)
