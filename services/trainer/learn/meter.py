"""Figures of one step: its use of the device, and statistics of its data.

Model FLOPs count matrix products only, with 2 per multiply-add. These are projections, feed-forward layers (of a mixture, the
experts that a token visits), causal attention, and the output head at predicted tokens. A training step costs three forward
passes, even if activations are recomputed. A micro-batch without a backward pass costs one, and products with frozen weights
cost two. A shared prompt counts once. Model FLOPs utilization is defined as in PaLM (arXiv 2204.02311, appendix B), but PaLM's
formula ignores causality, so the value here is lower.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from pipelinerl.messages.sequences import Sequence
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.groups import LAG_BUCKETS, lag_bucket
from pipelinerl.rl.packing import CostModel
from services.trainer.learn.batch import HostMicroBatch, TrainingGroup

TRAINING_PASSES = 3
"""Cost of a training step, in forward passes."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names under which model configurations give the number of experts."""


def cost_model_of(model: PreTrainedModel) -> CostModel:
    """Return a training step's FLOPs, divided by `TRAINING_PASSES`, as a function of sequence lengths. Products with frozen
    weights take two passes instead of three. Of a mixture's experts, only those that a token visits count."""
    text: Any = model.config.get_text_config()
    decoder, head = model.get_decoder(), model.get_output_embeddings().weight
    uncounted = {id(module.weight) for module in decoder.modules() if isinstance(module, torch.nn.Embedding)} | {id(head)}
    experts = next(filter(None, (getattr(text, name, None) for name in EXPERTS)), 0)
    visited = getattr(text, "num_experts_per_tok", experts) / experts if experts else 1.0

    def products(weight: torch.nn.Parameter, used: float = 1.0) -> float:
        return 2.0 * used * weight.numel() * (1.0 if weight.requires_grad else (TRAINING_PASSES - 1) / TRAINING_PASSES)

    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    kinds = getattr(text, "layer_types", None) or [f"{'sliding' if window else 'full'}_attention"] * text.num_hidden_layers
    windowed = kinds.count("sliding_attention") if window else 0
    heads = getattr(text, "num_attention_heads", 0)
    per_pair = 4.0 * heads * (getattr(text, "head_dim", None) or text.hidden_size // max(1, heads))
    return CostModel(
        per_token=sum(
            products(weight, visited if ".experts." in name else 1.0)
            for name, weight in decoder.named_parameters()
            if weight.ndim >= 2 and id(weight) not in uncounted and not name.endswith("bias")
        ),
        per_output_token=products(head),
        per_pair=per_pair * (sum("attention" in kind and "linear" not in kind for kind in kinds) - windowed),
        per_windowed_pair=per_pair * windowed,
        window=window if window and windowed else 0,
    )


PROCESS_STATUS = Path("/proc/self/status")


def take_memory_peak(device: torch.device) -> int:
    """Return peak memory in bytes: on a GPU, of tensors since the last call; on a CPU, of the process since its start."""
    if device.type != "cuda":
        status = dict(line.split(":", 1) for line in PROCESS_STATUS.read_text(errors="replace").splitlines())
        # Some container runtimes leave out VmHWM. Only then use `getrusage`, which may return the parent's peak.
        kib = status.get("VmHWM", "").split() or [str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)]
        return int(kib[0]) * 1024
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


@contextmanager
def measured(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the host's time inside the block to `seconds[phase]`."""
    began_at = time.monotonic()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.monotonic() - began_at


class PhaseTimer:
    """Measures time by phase without waiting for the device. On a GPU a block only queues work, so CUDA events mark its start
    and end in the CUDA stream. Work that the device has not finished when `take` is called counts in the next step."""

    def __init__(self, new_event: Callable[[], torch.cuda.Event] | None = None) -> None:
        self._new_event = new_event
        self._seconds: dict[str, float] = {}
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Measure the block as part of `phase`, which may occur many times in a step. Phases must not overlap."""
        if self._new_event is None:
            with measured(self._seconds, phase):
                yield
            return
        start, end = self._new_event(), self._new_event()
        start.record()
        try:
            yield
        finally:
            end.record()
            self._spans.append((phase, start, end))

    def take(self) -> dict[str, float]:
        """Return seconds by phase, over all blocks that have ended since the last call."""
        seconds, self._seconds = self._seconds, {}
        spans, self._spans = self._spans, []
        for phase, start, end in spans:
            if end.query():
                seconds[phase] = seconds.get(phase, 0.0) + start.elapsed_time(end) / 1000
            else:
                self._spans.append((phase, start, end))
        return seconds


SAMPLED_WEIGHTS, LAG_0_TOKENS = "sampled_weights", "lag_0_tokens"
"""Keys of a step's figures that are not in metrics.jsonl. The first has importance weights of `sampled_sequences` by id. The
second has two numbers by actor: its tokens of lag 0, and how many of these have |log π − log μ| above `bound_of`."""
BOUND_FLOAT32, BOUND_16_BIT, BOUND_QUANTIZED = 0.01, 1.0, 2.0
"""Results of `bound_of`, in nats. log π and log μ differ more in 16 bits, and most if the engine's weights are quantised."""


def in_sixteen_bits(recipe: Recipe) -> bool:
    """Return whether the trainer or the actors use 16-bit weights or computation."""
    return bool({"bfloat16", "float16"} & {recipe.model.dtype, recipe.weights.wire_dtype})


def bound_of(recipe: Recipe) -> float:
    """Return the allowed difference between log π and log μ of one token of lag 0, in nats."""
    if recipe.actor.engine.quantization:
        return BOUND_QUANTIZED
    return BOUND_16_BIT if in_sixteen_bits(recipe) else BOUND_FLOAT32


def sampled_sequences(groups: list[TrainingGroup]) -> list[Sequence]:
    """Return the sequences of a step that become samples: the first one, and then, of the other groups, the one with the most
    policy versions. If there is only one group, the second sequence also comes from this group."""
    first, *rest = groups[0].sequences
    others = [sequence for group in groups[1:] for sequence in group.sequences] or rest
    return [first, max(others, key=lambda sequence: sequence.num_versions)] if others else [first]


LARGEST_LOG_WEIGHT = 80.0
"""Upper bound on log w before e^(log w) is summed for k3, so that the sum cannot overflow. e^80 is 5e34."""
EQUAL = 1e-12
"""The returns R count as equal if variance / mean square is at most this number. Rounding alone causes about 1e-16."""


@dataclass(frozen=True, eq=False)
class TokenStatistics:
    """Statistics of one rank's sampled tokens. On rank 0, `token_figures` combines those of all ranks."""

    by_lag: NDArray[np.int64]
    """[largest lag + 1]: number of tokens of each lag."""
    by_bucket: NDArray[np.float64]
    """[lag buckets, 9]: the four `weight_sums`; sums of clipped, masked, entropy and k3; largest |log weight|, which may be
    infinite or NaN. k3 = w − 1 − log w of a token sampled from μ estimates KL(μ ‖ π)."""
    moments: NDArray[np.float64]
    """[2, 3]: number, sum and sum of squares of returns, and of returns − baseline; all 0 without a learned baseline."""
    actors: NDArray[np.int64]
    """[largest actor + 1, 2]: number of each actor's tokens of lag 0, and of those with |log weight| NaN or above the bound."""
    reported: NDArray[np.float64]
    """[R, 2]: for each token in `HostMicroBatch.reported` branches, the branch's position in the step, and the log weight."""


def token_statistics(values: NDArray[np.float32], batches: tuple[HostMicroBatch, ...], bound: float) -> TokenStatistics:
    """Return statistics of the per-token values [4, C] or [5, C] that `Learner.compute` describes. `bound`: a token of
    lag 0 with a larger |log weight| counts as a disagreement of actor and trainer."""
    of_tokens = [(one.lags, one.advantages, one.actors[one.branch_index], one.reported[one.branch_index]) for one in batches]
    lags, returns, actors, branches = map(np.concatenate, zip(*of_tokens, strict=True))
    by_lag = np.bincount(lags)
    buckets = lag_bucket(np.arange(len(by_lag))).astype(np.uint8)[lags]
    fresh, reported = actors[lags == 0], branches >= 0
    is_off = ~(np.abs(values[0, lags == 0]) <= bound)
    series = [returns.astype(np.float64), returns - values[4].astype(np.float64)] if len(values) > 4 else [np.empty(0)] * 2
    return TokenStatistics(
        by_lag,
        np.array([_bucket_sums(values[:4, buckets == bucket]) for bucket in range(len(LAG_BUCKETS))]),
        np.array([(own.size, own.sum(), own @ own) for own in series]),
        np.stack((np.bincount(fresh), np.bincount(fresh, is_off)), axis=1).astype(np.int64),
        np.stack((branches[reported], values[0, reported]), axis=1),
    )


def _bucket_sums(values: NDArray[np.float32]) -> tuple[float, ...]:
    log_weights = values[0].astype(np.float64)
    with np.errstate(invalid="ignore"):  # log weights may be infinite or NaN
        k3, others = np.expm1(np.minimum(log_weights, LARGEST_LOG_WEIGHT)) - log_weights, values[1:].sum(1, dtype=np.float64)
        return (*weight_sums(log_weights), *others, k3.sum(), np.abs(log_weights).max(initial=0.0))


def token_figures(
    parts: list[TokenStatistics], totals: NDArray[np.float64], loads: list[int], budget: int, *, applied: bool = True
) -> dict[str, Any]:
    """Return figures over all sampled tokens of one optimizer step, with the names of metrics.jsonl (docs/run-directory.md). A
    figure is None if undefined, such as `ess` with an infinite log weight. If not `applied`, no token counts as trained.
    `loads`: tokens of each micro-batch. `budget`: tokens that one may have."""
    loss, reference_kl, value_loss, _ = totals.tolist()
    by_lag, by_bucket = summed([part.by_lag for part in parts]), np.stack([part.by_bucket for part in parts])
    weights, found, num_tokens = by_bucket[..., :4], np.flatnonzero(by_lag), int(by_lag.sum())
    clipped, masked, entropy, k3 = by_bucket[..., 4:8].sum(axis=0).T
    largest, tokens_of = float(by_bucket[..., 8].max()), weights[..., 0].sum(axis=0)
    ends = np.cumsum(by_lag[found])  # sorted by lag, the tokens of a lag are at positions [end − count, end)
    p95 = np.interp(0.95 * (num_tokens - 1), np.stack((ends - by_lag[found], ends - 1), axis=1).ravel(), found.repeat(2))
    usable, has_baseline = np.isfinite(largest), any(part.moments[0, 0] for part in parts)
    present = {LAG_BUCKETS[bucket]: bucket for bucket in np.flatnonzero(tokens_of)} if usable else {}
    return {
        "loss": loss,
        "entropy": float(entropy.sum()) / num_tokens,
        "ess": effective_sample_size(weights.reshape(-1, 4)) if usable else None,
        "ess_by_lag": {label: effective_sample_size(weights[:, bucket]) for label, bucket in present.items()},
        "clip_fraction": float(clipped.sum()) / num_tokens,
        "clip_fraction_by_lag": {label: float(clipped[bucket] / tokens_of[bucket]) for label, bucket in present.items()},
        "mask_fraction": float(masked.sum()) / num_tokens,
        "mismatch_kl": float(k3[0] / tokens_of[0]) if usable and tokens_of[0] else None,
        "reference_kl": reference_kl,
        "value_loss": value_loss if has_baseline else None,
        "explained_variance": explained_variance(np.stack([part.moments for part in parts])) if has_baseline else None,
        "log_weight_abs_max": largest if usable else None,
        "lag": {"mean": float(found @ by_lag[found]) / num_tokens, "p95": float(p95), "max": int(found[-1])},
        "lag_histogram": dict(zip(found.tolist(), by_lag[found].tolist(), strict=True)) if applied else {},
        "tokens_trained": num_tokens if applied else 0,
        "tokens_computed": sum(loads),
        "microbatches": len(loads),
        "packing_fill": sum(loads) / (len(loads) * budget),
    }


def summed(arrays: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the sum of arrays whose first dimensions may differ. Missing rows count as 0."""
    return np.array([sum(rows) for rows in zip_longest(*arrays, fillvalue=0)])


def explained_variance(moments: NDArray[np.float64]) -> float | None:
    """Return 1 − Var(R − v) / Var(R) for returns R and baseline v, from `moments` [parts, 2, 3]. None if returns are equal."""
    tokens, sums, squares = moments.sum(axis=0).T
    of_returns, of_errors = (squares - sums**2 / tokens).tolist()
    return 1 - of_errors / of_returns if of_returns > EQUAL * squares[0] else None


def weight_sums(log_weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [N, l, Σ w / e^l, Σ (w / e^l)²] of N finite log weights, with w = exp(log weight) and l the largest log weight.
    Without the division by the largest weight, e^±1000 would overflow or vanish. Without tokens, l is -∞ and the sums 0."""
    largest = log_weights.max(initial=-np.inf)
    weights = np.exp(log_weights - largest)
    return np.array((len(weights), largest, weights.sum(), (weights * weights).sum()))


def effective_sample_size(sums: NDArray[np.float64]) -> float:
    """Return (Σ w)² / (N Σ w²) over all N >= 1 tokens: in (0, 1], and 1 when on-policy. Weights are not clamped. `sums`
    [parts, 4]: the `weight_sums` of each part of the tokens."""
    tokens, largest, total, squares = sums.T
    scale = np.exp(largest - largest.max())
    return min(1.0, float((total * scale).sum() ** 2 / (tokens.sum() * (squares * scale * scale).sum())))
