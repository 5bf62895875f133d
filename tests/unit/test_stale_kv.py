"""How the divergence of a stale KV cache is estimated and told by position, with numbers by hand."""

import math

import numpy as np
import pytest

from benchmarks.stale_kv import Sampled, divergence, mean_by_position, mean_lags
from pipelinerl.messages.sequences import FinishReason, VersionSpan
from services.actor.engine import Generation


def test_divergence_is_exact_over_known_tokens_and_counts_all_others_as_one() -> None:
    """Of (0.75, 0.25) from (0.5, 0.5); and where only 0.5 and 0.25 are known of both, with 0.25 and 0.25 left."""
    sampling, newest = np.log([[0.75, 0.25], [0.5, 0.25]]), np.log([[0.5, 0.5], [0.25, 0.5]])
    first, second = divergence(sampling, newest)
    assert first == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert second == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5))
    assert divergence(np.log([[0.1]]), np.log([[0.3]]))[0] == pytest.approx(0.1 * math.log(1 / 3) + 0.9 * math.log(0.9 / 0.7))
    rounded = np.log([[0.5, 0.4999999]])
    assert divergence(rounded, rounded)[0] == 0


def test_means_are_over_tokens_and_their_errors_over_sequences() -> None:
    """Positions 0-1 hold the sums 3 and 9 of two tokens each: mean 3, and both are off by 3 from what two tokens of it are. The
    last bucket has everything from position 2 on, of one sequence."""
    divergences = [np.array([1.0, 2.0, 5.0, 6.0, 7.0]), np.array([4.0, 5.0])]
    first, last = mean_by_position(divergences, between=2, buckets=2)
    assert first == pytest.approx((3.0, math.sqrt(3**2 + 3**2) / 4, 4))
    assert last == pytest.approx((6.0, 0.0, 3))


def test_lag_counts_from_the_policy_that_sampled_a_token_to_the_newest() -> None:
    spans = (VersionSpan(0, 0, 2), VersionSpan(1, 2, 3), VersionSpan(2, 3, 4))
    tokens = np.zeros(4, np.int32)
    generation = Generation(tokens, np.zeros(4, np.float32), spans, FinishReason.STOP)
    sampled = Sampled(tokens[:1], generation, np.zeros((4, 1), np.int64), np.zeros((4, 1)))
    assert mean_lags([sampled], updates=2, between=2, buckets=2) == [2.0, 0.5]
