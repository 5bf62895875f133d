"""Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13): a slope before the limit instead of a cliff at it."""

from __future__ import annotations


def overlong_penalty(completion_tokens: int, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """`penalty` times the equation: 0 up to `max_tokens - buffer_tokens`, -1 from `max_tokens` on, linear between.

    Lengths in tokens; L_max is `max_tokens`, L_cache is `buffer_tokens` (at least 1).
    """
    over = completion_tokens - (max_tokens - buffer_tokens)
    return 0.0 - penalty * min(max(over / buffer_tokens, 0.0), 1.0)
