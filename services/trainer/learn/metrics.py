"""What one optimizer step says about its data: ESS, lag, clipping, entropy, mismatch, and the weights of sampled sequences.

Micro-batches leave their per-token results on the device; one transfer at the end of the step brings them over, those of
all ranks come together on rank 0, and NumPy does the rest, from unclamped weights. The values of a step come micro-batch after
micro-batch, those of all ranks behind each other (`StepCollector.values`); a sequence's completion tokens are one piece of
them. Not here: rewards, throughput, names in Prometheus.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.messages.sequences import Sequence
from pipelinerl.rl.lag import LAG_BUCKETS, EssSums, ess_by_lag, lag_bucket
from services.trainer.learn.batch import HostMicroBatch, TrainingGroup, row_order
from services.trainer.learn.loss import LossOutput

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


@dataclass(frozen=True)
class LagBucketMetrics:
    """Of the completion tokens of one lag bucket."""

    tokens: int
    ess: float
    clip_fraction: float


@dataclass(frozen=True)
class TokenMetrics:
    """Of all completion tokens of one optimizer step. Fields are None where no token could tell."""

    loss: float
    policy_loss: float
    reference_kl: float
    """Weighted like the loss; 0 without a reference."""
    value_loss: float | None
    """Weighted like the loss, before its coefficient; None without a value head."""
    explained_variance: float | None
    """1 − Var(R − v) / Var(R) over tokens: 1 for a perfect learned baseline, 0 for a constant one; None without a value head,
    or where all returns are equal."""
    ess: float | None
    entropy: float | None
    """Mean, nats."""
    clip_fraction: float
    mask_fraction: float
    """Share of tokens that `algorithm.mask` left out of the policy loss."""
    mismatch_kl: float | None
    """Mean k3 estimate of KL(μ ‖ π) over sampled tokens of lag 0, nats: numerics and stale KV, no policy change."""
    log_weight_abs_max: float | None
    """max |log w|, nats."""
    weight_mean: float | None
    """Mean w; 1 in expectation when tokens were sampled by what μ says."""
    lag_mean: float
    lag_p95: float
    lag_max: int
    lag_histogram: dict[int, int]
    """Tokens by lag."""
    by_lag: dict[str, LagBucketMetrics]
    sequences: int
    completion_tokens: int
    tokens: int
    """Prompt and completion tokens that went through the model."""
    microbatches: int
    packing_fill: float
    """`tokens` / (micro-batches × token budget); low for a batch smaller than the budget."""


class StepCollector:
    """Collects the micro-batches of one rank's share of an optimizer step: `add` each, then read."""

    def __init__(self) -> None:
        self._per_token: list[Tensor] = []
        self._scalars: list[Tensor] = []

    def add(self, output: LossOutput, entropy: Tensor, values: Tensor | None = None) -> None:
        """`entropy` float32[C], nats, of the micro-batch's completion tokens; `values` float32[C], the learned baseline."""
        rows = [output.log_weights, output.clipped.float(), output.masked.float(), entropy.detach()]
        if values is not None:
            rows.append(values.detach())
        self._per_token.append(torch.stack(rows))
        scalars = (output.loss.detach(), output.policy_loss, output.reference_kl, output.value_loss)
        self._scalars.append(torch.stack(scalars))

    def totals(self) -> Tensor:
        """float64[4] on the device: loss, policy loss, KL to the reference, value loss; sums over micro-batches."""
        return torch.stack(self._scalars).double().sum(0)

    def values(self) -> NDArray[np.float32]:
        """[4, C]: log weight, clipped, masked, entropy of each completion token; [5, C] with its learned baseline last. Waits
        for the device."""
        return torch.cat(self._per_token, dim=1).float().cpu().numpy()


def token_metrics(
    values: NDArray[np.float32], totals: NDArray[np.float64], batches: list[HostMicroBatch], budget: int
) -> TokenMetrics:
    """Of one optimizer step: `values` of all ranks, `totals` of the step, and its `batches` in the order of `values`.

    `budget`: tokens of a micro-batch at most.
    """
    log_weights, clipped, masked, entropy, *baseline = values.astype(np.float64)
    loss, policy_loss, reference_kl, value_loss = totals.tolist()
    returns = np.concatenate([batch.advantages for batch in batches])
    lags = np.concatenate([batch.lags for batch in batches])
    loads = [batch.num_tokens for batch in batches if batch.num_sequences]
    usable = bool(np.isfinite(log_weights).all())
    return TokenMetrics(
        loss=loss,
        policy_loss=policy_loss,
        reference_kl=reference_kl,
        value_loss=value_loss if baseline else None,
        explained_variance=explained_variance(baseline[0], returns) if baseline else None,
        ess=EssSums.of(log_weights).ratio if usable else None,
        entropy=_mean(entropy),
        clip_fraction=float(clipped.mean()),
        mask_fraction=float(masked.mean()),
        mismatch_kl=_mean(_k3(log_weights[lags == 0])) if usable else None,
        log_weight_abs_max=float(np.abs(log_weights).max()) if usable else None,
        weight_mean=_mean(np.exp(np.minimum(log_weights, LARGEST_LOG_WEIGHT))) if usable else None,
        lag_mean=float(lags.mean()),
        lag_p95=float(np.percentile(lags, 95)),
        lag_max=int(lags.max()),
        lag_histogram=_histogram(lags),
        by_lag=_by_lag(log_weights, clipped, lags) if usable else {},
        sequences=sum(batch.num_sequences for batch in batches),
        completion_tokens=len(lags),
        tokens=sum(loads),
        microbatches=len(loads),
        packing_fill=sum(loads) / (len(loads) * budget),
    )


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


def _by_lag(
    log_weights: NDArray[np.float64], clipped: NDArray[np.float64], lags: NDArray[np.int64]
) -> dict[str, LagBucketMetrics]:
    buckets, result = lag_bucket(lags), {}
    for label, sums in ess_by_lag(log_weights, lags).items():
        inside = buckets == LAG_BUCKETS.index(label)
        result[label] = LagBucketMetrics(sums.count, sums.ratio or 0.0, float(clipped[inside].mean()))
    return result
