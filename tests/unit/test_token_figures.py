"""The figures of a step come from statistics of each rank's tokens, and are those of all tokens together."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.rl.groups import LAG_BUCKETS, lag_bucket
from services.trainer.learn.meter import TokenStatistics, effective_sample_size, token_figures, token_statistics, weight_sums

TOTALS = np.array([0.5, 0.0, 0.25, 1.0])
BOUND = 0.5


def rows(lags: np.ndarray, returns: np.ndarray, actors: np.ndarray | None = None) -> Any:
    """Micro-batches of at most seven tokens, each of a branch of its own. Every third branch is reported."""
    numbers = np.arange(len(lags))
    actors = np.zeros(len(lags), np.int64) if actors is None else actors
    reported = np.where(numbers % 3 == 0, numbers, -1)
    return tuple(
        SimpleNamespace(
            lags=lags[part],
            advantages=returns[part],
            actors=actors[part],
            reported=reported[part],
            branch_index=np.arange(len(part)),
        )
        for part in np.split(numbers, range(7, len(lags), 7))
    )


def statistics(values: np.ndarray, lags: np.ndarray, returns: np.ndarray, actors: np.ndarray | None = None) -> TokenStatistics:
    return token_statistics(values.astype(np.float32), rows(lags, returns.astype(np.float32), actors), BOUND)


def plain_ess(log_weights: np.ndarray) -> float:
    weights = np.exp(log_weights - log_weights.max())
    return weights.sum() ** 2 / (len(weights) * (weights**2).sum())


def plain_figures(values: np.ndarray, lags: np.ndarray, returns: np.ndarray) -> dict[str, Any]:
    """All tokens at once."""
    log_weights, clipped, masked, entropy, *baseline = values.astype(np.float64)
    buckets, fresh = lag_bucket(lags), log_weights[lags == 0]
    labels = {LAG_BUCKETS[bucket]: buckets == bucket for bucket in np.unique(buckets)}
    found, counts = np.unique(lags, return_counts=True)
    spread = float(np.var(returns.astype(np.float64)))
    explained = 1 - float(np.var(returns - baseline[0])) / spread if baseline and np.ptp(returns) > 0 else None
    return {
        "entropy": entropy.mean(),
        "ess": plain_ess(log_weights),
        "ess_by_lag": {label: plain_ess(log_weights[own]) for label, own in labels.items()},
        "clip_fraction": clipped.mean(),
        "clip_fraction_by_lag": {label: clipped[own].mean() for label, own in labels.items()},
        "mask_fraction": masked.mean(),
        "mismatch_kl": np.mean(np.expm1(np.minimum(fresh, 80)) - fresh) if len(fresh) else None,
        "explained_variance": explained,
        "log_weight_abs_max": np.abs(log_weights).max(),
        "lag": {"mean": lags.mean(), "p95": np.percentile(lags, 95), "max": lags.max()},
        "lag_histogram": dict(zip(found.tolist(), counts.tolist(), strict=True)),
        "tokens_trained": len(lags),
    }


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1e-3, 1.0, 300.0]),
    st.integers(1, 40),
    st.booleans(),
)
def test_figures_of_ranks_are_those_of_all_tokens(sizes: list[int], seed: int, scale: float, lag: int, baseline: bool) -> None:
    """Some ranks may have no token, and weights up to e^±1000 occur."""
    rng, num_tokens = np.random.default_rng(seed), sum(sizes)
    values = rng.normal(0, 1, (5 if baseline else 4, num_tokens)).astype(np.float32)
    values[0] *= scale
    values[1:3] = values[1:3] > 0.5
    lags, returns = rng.integers(0, lag, num_tokens), rng.integers(0, 3, num_tokens).astype(np.float32)
    ends = np.cumsum(sizes)[:-1]
    divided = zip(np.split(values, ends, axis=1), np.split(lags, ends), np.split(returns, ends), strict=True)
    figures = token_figures([statistics(*part) for part in divided], TOTALS, [30, 50], 64)
    for name, expected in plain_figures(values, lags, returns).items():
        assert figures[name] == (None if expected is None else pytest.approx(expected, rel=1e-9, abs=1e-12)), name
    assert (figures["value_loss"] is not None) == baseline
    assert (figures["microbatches"], figures["tokens_computed"], figures["packing_fill"]) == (2, 80, 80 / 128)
    assert json.loads(json.dumps(figures))["loss"] == 0.5


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_give_no_figures_and_count_as_off(broken: float) -> None:
    values = np.zeros((4, 5))
    values[0] = [0.1, broken, 0.6, -0.7, 5.0]
    values[1, 2] = 1.0
    part = statistics(values, np.array([0, 0, 0, 0, 1]), np.zeros(5), np.array([0, 0, 2, 0, 1]))
    figures = token_figures([statistics(np.zeros((4, 1)), np.zeros(1, np.int64), np.zeros(1)), part], TOTALS, [6], 6)
    assert [figures[name] for name in ("ess", "mismatch_kl", "log_weight_abs_max")] == [None, None, None]
    assert (figures["ess_by_lag"], figures["clip_fraction_by_lag"], figures["clip_fraction"]) == ({}, {}, pytest.approx(1 / 6))
    assert part.actors.tolist() == [[3, 2], [0, 0], [1, 1]], "0.1 is below the bound of 0.5, and only lag 0 counts"
    assert part.reported.tolist() == [[0.0, pytest.approx(0.1)], [3.0, pytest.approx(-0.7)]]


def test_equal_returns_explain_nothing_however_they_are_divided() -> None:
    """0.1 is no binary fraction, so that the means of the ranks may be rounded differently."""
    sizes, baseline = (3, 7, 0, 11), 0.25
    parts = [statistics(np.full((5, size), baseline), np.zeros(size, np.int64), np.full(size, 0.1)) for size in sizes]
    assert token_figures(parts, TOTALS, [1], 1)["explained_variance"] is None


def test_a_rank_reports_as_much_however_many_tokens_it_has() -> None:
    def num_bytes(tokens: int) -> int:
        part = token_statistics(np.zeros((5, tokens), np.float32), (batch_of(tokens),), BOUND)
        return sum(array.nbytes for array in vars(part).values())

    def batch_of(tokens: int) -> Any:
        lags, one, index = np.arange(tokens) % 9, np.array([0]), np.zeros(tokens, np.int64)
        returns = np.ones(tokens, np.float32)
        return SimpleNamespace(lags=lags, advantages=returns, actors=one, reported=one - 1, branch_index=index)

    assert num_bytes(20_000) == num_bytes(20) < 1000


@pytest.mark.parametrize(
    ("log_weights", "ratio"),
    [
        (np.log([1.0, 3.0]), 0.8),  # (1 + 3)² / (2 · (1 + 9))
        (np.zeros(100), 1.0),
        (np.log([1.0, 1.0, 1.0, 97.0]), 100**2 / (4 * (3 + 97**2))),  # clamped at 5 this would be 0.57
        (np.array([2000.0, 2000.0, -2000.0]), 2 / 3),  # weights that no float holds
        (np.array([-2000.0, -2000.0]), 1.0),
    ],
)
def test_ess_by_hand(log_weights: np.ndarray, ratio: float) -> None:
    """In one part, or divided into three, one of which is empty."""
    assert effective_sample_size(weight_sums(log_weights)[None]) == pytest.approx(ratio)
    parts = [weight_sums(own) for own in (log_weights[:1], log_weights[:0], log_weights[1:])]
    assert effective_sample_size(np.array(parts)) == pytest.approx(ratio)
