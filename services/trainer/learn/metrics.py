"""What one optimizer step says about its data: ESS, lag, clipping, entropy, mismatch, and the weights of sampled sequences.

Micro-batches leave their per-token results on the device; one transfer at the end of the step brings them over, those of
all ranks come together on rank 0, and NumPy does the rest, from unclamped weights. The values of a step (`ShareResult.values`)
come micro-batch after micro-batch, those of all ranks behind each other; a sequence's completion tokens are one piece of them.
Not here: rewards, throughput, names in Prometheus.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelinerl.messages.sequences import Sequence
from pipelinerl.rl.groups import LAG_BUCKETS, effective_sample_size, ess_by_lag, lag_bucket
from services.trainer.learn.batch import HostMicroBatch, TrainingGroup, row_order

SAMPLED_WEIGHTS = "sampled_weights"
"""Key of the sampled sequences' weights among a step's figures; no key of metrics.jsonl."""


def sampled_sequences(groups: list[TrainingGroup]) -> list[Sequence]:
    """Two of a step: its first sequence, and of the other groups' the first one that most versions sampled."""
    first, *rest = groups[0].sequences
    others = [sequence for group in groups[1:] for sequence in group.sequences] or rest
    return [first, max(others, key=lambda sequence: sequence.num_versions)] if others else [first]


def sampled_places(groups: list[TrainingGroup], batches: Iterable[list[int]]) -> dict[str, slice]:
    """By id of the sampled sequences, their completion tokens' places among those of the step.

    `batches`: of each micro-batch, in order of the step's values, its sequences as positions in the step.
    """
    sequences = [sequence for group in groups for sequence in group.sequences]
    wanted = {sequence.sequence_id for sequence in sampled_sequences(groups)}
    places, begin = {}, 0
    for members in batches:
        for index in row_order([sequences[member] for member in members]):
            sequence = sequences[members[index]]
            end = begin + sequence.num_completion_tokens
            if sequence.sequence_id in wanted:
                places[sequence.sequence_id] = slice(begin, end)
            begin = end
    return places


def sampled_weights(places: Mapping[str, slice], log_weights: NDArray[np.float32]) -> dict[str, NDArray[np.float64]]:
    """float64[tokens], importance weights w by id, unclamped, out of `log_weights` [C] of the step, nats."""
    with np.errstate(over="ignore"):
        return {key: np.exp(log_weights[place].astype(np.float64)) for key, place in places.items()}


LARGEST_LOG_WEIGHT = 80.0
"""Cap of log w in means of w (5e34), which would otherwise overflow. ESS needs no cap."""


def token_figures(
    values: NDArray[np.float32],
    totals: NDArray[np.float64],
    batches: list[HostMicroBatch],
    budget: int,
    *,
    applied: bool = True,
) -> dict[str, Any]:
    """Of all completion tokens of one optimizer step, under the names of metrics.jsonl (docs/run-directory.md); None where no
    token could tell. A step that was not `applied` trained on nothing.

    `values` of all ranks, `totals` of the step, its `batches` in the order of `values`; `budget`: tokens of a micro-batch at
    most.
    """
    log_weights, clipped, masked, entropy, *baseline = values.astype(np.float64)
    loss, reference_kl, value_loss = totals.tolist()
    returns = np.concatenate([batch.advantages for batch in batches])
    lags = np.concatenate([batch.lags for batch in batches])
    loads = [batch.num_tokens for batch in batches if batch.num_sequences]
    usable = bool(np.isfinite(log_weights).all())
    by_lag = ess_by_lag(log_weights, lags) if usable else {}
    buckets = lag_bucket(lags)
    return {
        "loss": loss,
        "entropy": _mean(entropy),
        "ess": effective_sample_size(log_weights) if usable else None,
        "ess_by_lag": by_lag,
        "clip_fraction": float(clipped.mean()),
        "clip_fraction_by_lag": {label: float(clipped[buckets == LAG_BUCKETS.index(label)].mean()) for label in by_lag},
        "mask_fraction": float(masked.mean()),
        "mismatch_kl": _mean(_k3(log_weights[lags == 0])) if usable else None,
        "reference_kl": reference_kl,
        "value_loss": value_loss if baseline else None,
        "explained_variance": explained_variance(baseline[0], returns) if baseline else None,
        "log_weight_abs_max": float(np.abs(log_weights).max()) if usable else None,
        "lag": {"mean": float(lags.mean()), "p95": float(np.percentile(lags, 95)), "max": int(lags.max())},
        "lag_histogram": _histogram(lags) if applied else {},
        "sequences_trained": sum(batch.num_sequences for batch in batches) if applied else 0,
        "tokens_trained": len(lags) if applied else 0,
        "tokens_computed": sum(loads),
        "microbatches": len(loads),
        "packing_fill": sum(loads) / (len(loads) * budget),
    }


def explained_variance(baseline: NDArray[np.float64], returns: NDArray[np.floating]) -> float | None:
    """1 − Var(R − v) / Var(R), of `baseline` v and `returns` R, [C] each; None where all returns are equal."""
    spread = float(np.var(returns.astype(np.float64)))
    return 1 - float(np.var(returns - baseline)) / spread if spread > 0 else None


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if values.size else None


def _k3(log_weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Estimate of KL(μ ‖ π) per token sampled from μ: w − 1 − log w, never negative."""
    return np.expm1(np.minimum(log_weights, LARGEST_LOG_WEIGHT)) - log_weights


def _histogram(lags: NDArray[np.int64]) -> dict[int, int]:
    values, counts = np.unique(lags, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))
