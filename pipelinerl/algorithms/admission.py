"""Can a finished sequence be trained on at all? Checked once, when it arrives, so that the learner may trust its input.

Not here: staleness (`staleness.py`) and whether the message parses (`pipelinerl.codec`).
"""

from __future__ import annotations

import math

import numpy as np

from pipelinerl.types import Sequence, TokenIds


def untrainable_reason(sequence: Sequence, max_context: int, vocab_size: int) -> str:
    """Why `sequence` ends as failed, short and from a fixed set except for the actor's own reason; "" when it is good.

    `max_context`: prompt plus completion tokens at most. `vocab_size`: token ids are below it.
    """
    if sequence.failure:
        return sequence.failure
    if len(sequence.prompt_token_ids) == 0:
        return "empty prompt"
    if len(sequence.completion_token_ids) == 0:
        return "empty completion"
    if sequence.num_tokens > max_context:
        return "longer than the context"
    return _number_problem(sequence, vocab_size)


def _number_problem(sequence: Sequence, vocab_size: int) -> str:
    if not math.isfinite(sequence.reward):
        return "reward not finite"
    if len(sequence.behaviour_logprobs) != len(sequence.completion_token_ids):
        return "logprobs and tokens differ in number"
    if not np.isfinite(sequence.behaviour_logprobs).all():
        return "logprob not finite"
    if not (
        _in_vocabulary(sequence.prompt_token_ids, vocab_size)
        and _in_vocabulary(sequence.completion_token_ids, vocab_size)
    ):
        return "token outside the vocabulary"
    return "" if _spans_cover(sequence) else "version spans have gaps"


def _in_vocabulary(token_ids: TokenIds, vocab_size: int) -> bool:
    return bool(token_ids.min() >= 0 and token_ids.max() < vocab_size)


def _spans_cover(sequence: Sequence) -> bool:
    position = 0
    for span in sequence.spans:
        if span.start != position or span.end <= span.start:
            return False
        position = span.end
    return position == sequence.num_completion_tokens
