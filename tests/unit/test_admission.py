"""Each way in which a finished sequence cannot be trained on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipelinerl.messages.sequences import Sequence, VersionSpan
from pipelinerl.rl.grouping import untrainable_reason

GOOD = Sequence(
    run="r",
    sequence_id="a.0",
    group_id="a",
    sample_index=0,
    group_size=2,
    task="t",
    prompt_token_ids=np.array([1, 2], dtype=np.int32),
    completion_token_ids=np.array([3, 4, 5], dtype=np.int32),
    behaviour_logprobs=np.array([-1.0, -2.0, -0.5], dtype=np.float32),
    spans=(VersionSpan(0, 0, 2), VersionSpan(1, 2, 3)),
    reward=1.0,
)


def test_a_good_sequence_at_the_edge_of_context_and_vocabulary() -> None:
    assert untrainable_reason(GOOD, max_context=5, vocab_size=6) == ""


EMPTY = np.array([], dtype=np.int32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"failure": "verifier timeout"}, "verifier timeout"),
        ({"prompt_token_ids": EMPTY}, "empty prompt"),
        ({"completion_token_ids": EMPTY, "behaviour_logprobs": EMPTY, "spans": ()}, "empty completion"),
        ({"prompt_token_ids": np.array([1, 1, 1], dtype=np.int32)}, "longer than the context"),
        ({"reward": math.nan}, "reward not finite"),
        ({"reward": -math.inf}, "reward not finite"),
        ({"behaviour_logprobs": np.array([-1.0, -2.0], dtype=np.float32)}, "logprobs and tokens differ in number"),
        ({"behaviour_logprobs": np.array([-1.0, math.nan, -1.0])}, "logprob not finite"),
        ({"behaviour_logprobs": np.array([-1.0, -math.inf, -1.0])}, "logprob not finite"),
        ({"completion_token_ids": np.array([3, 6, 5], dtype=np.int32)}, "token outside the vocabulary"),
        ({"prompt_token_ids": np.array([1, -1], dtype=np.int32)}, "token outside the vocabulary"),
        ({"spans": (VersionSpan(0, 0, 1), VersionSpan(1, 2, 3))}, "version spans have gaps"),
        ({"spans": (VersionSpan(0, 0, 2),)}, "version spans have gaps"),
    ],
)
def test_each_reason(change: dict[str, Any], reason: str) -> None:
    assert untrainable_reason(replace(GOOD, **change), max_context=5, vocab_size=6) == reason
