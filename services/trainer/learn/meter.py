"""Figures of one step: its use of the device, and statistics of its data.

Model FLOPs count matrix products only, with 2 per multiply-add: projections, feed-forward layers (in a mixture of experts, the
experts that a token visits), attention over the pairs that a causal query sees, and the head at predicted tokens. A training
step counts as three forward passes, one for the forward and two for the backward pass, even if activations are recomputed.
Model FLOPs utilization is defined as in PaLM (arXiv 2204.02311, appendix B), but PaLM's formula ignores causality, so this
figure is lower. A shared prompt counts once, and a micro-batch without a backward pass counts one of the three passes. Norms,
activations, the optimizer and a KL reference's forward pass are not counted. If only adapters are trained, products with frozen
weights count two of the three.

Per-token results stay on the device until one transfer at the end of the step. NumPy computes the figures from the unclamped
weights of all ranks. A step's values (`Learner.compute`) are concatenated over micro-batches and ranks.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PretrainedConfig, PreTrainedModel

from pipelinerl.messages.sequences import Sequence
from pipelinerl.rl.groups import LAG_BUCKETS, effective_sample_size, ess_by_lag, lag_bucket
from pipelinerl.rl.packing import CostModel
from services.trainer.learn.batch import HostMicroBatch, TrainingGroup
from services.trainer.learn.lora import has_adapters

TRAINING_PASSES = 3
"""Cost of a training step, in forward passes."""

GATED_MODELS = frozenset(
    {
        "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
        "granite", "hunyuan_v1_dense", "llama", "ministral", "mistral", "mixtral", "olmo", "olmo2", "olmo3",
        "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3",
    }
)  # fmt: skip
"""Values of `model_type` with grouped-query attention and a feed-forward layer of three matrices."""


def model_flops(config: PretrainedConfig, num_parameters: int) -> CostModel:
    """Return the FLOPs of one forward pass of a decoder-only model, as a function of sequence lengths. For an unknown
    architecture, each token costs twice `num_parameters` (a tied embedding counts once); attention is left out, and all experts
    of a mixture count."""
    text: Any = config.get_text_config()
    if text.model_type not in GATED_MODELS:
        return CostModel(per_token=2.0 * num_parameters)
    hidden, heads = text.hidden_size, text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or hidden // heads
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    attention = 2 * hidden * head_dim * (heads + key_value_heads)
    windowed = _windowed_layers(text)
    per_pair = 4 * heads * head_dim
    return CostModel(
        per_token=2.0 * (text.num_hidden_layers * attention + sum(_feed_forward(text))),
        per_output_token=2.0 * hidden * text.vocab_size,
        per_pair=float(per_pair * (text.num_hidden_layers - windowed)),
        per_windowed_pair=float(per_pair * windowed),
        window=text.sliding_window if windowed else 0,
    )


def frozen_flops(forward: CostModel, num_trained: int) -> CostModel:
    """Return a training step's cost / `TRAINING_PASSES`, if the weights of `forward` are frozen and only `num_trained` adapter
    weights are trained. Frozen weights get no gradients, so their matrix products take two passes instead of three. Every token
    uses the adapters. Attention has no weights, so its cost does not change."""
    share = (TRAINING_PASSES - 1) / TRAINING_PASSES
    return replace(
        forward, per_token=share * forward.per_token + 2.0 * num_trained, per_output_token=share * forward.per_output_token
    )


def _windowed_layers(text: Any) -> int:
    if not getattr(text, "sliding_window", None) or not getattr(text, "use_sliding_window", True):
        return 0
    kinds: list[str] | None = getattr(text, "layer_types", None)
    return text.num_hidden_layers if kinds is None else sum(kind == "sliding_attention" for kind in kinds)


def _feed_forward(text: Any) -> list[int]:
    """Return, for each layer, the number of feed-forward weights that one token uses."""
    dense = 3 * text.hidden_size * text.intermediate_size
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    if not experts:
        return [dense] * text.num_hidden_layers
    expert_size = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    shared_size = getattr(text, "shared_expert_intermediate_size", None) or 0
    shared = 3 * shared_size * text.hidden_size + (text.hidden_size if shared_size else 0)
    sparse = 3 * text.hidden_size * expert_size * text.num_experts_per_tok + shared + text.hidden_size * experts
    every, dense_layers = getattr(text, "decoder_sparse_step", 1), getattr(text, "mlp_only_layers", None) or []
    return [dense if layer in dense_layers or (layer + 1) % every else sparse for layer in range(text.num_hidden_layers)]


def mfu(flops: float, seconds: float, num_devices: int, peak: float | None) -> float | None:
    """Return model FLOPs utilization, relative to `num_devices` with `peak` FLOP/s each. None if the peak is unknown or no time
    has passed."""
    if peak is None or seconds <= 0:
        return None
    return flops / (seconds * num_devices * peak)


PROCESS_STATUS = Path("/proc/self/status")


def cost_model_of(model: PreTrainedModel) -> CostModel:
    """Return a training step's cost / `TRAINING_PASSES`: one forward pass or, with adapters, `frozen_flops`."""
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    frozen = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
    if not has_adapters(model):
        return model_flops(model.config, trained + frozen)
    return frozen_flops(model_flops(model.config, frozen), trained)


def take_memory_peak(device: torch.device) -> int:
    """Return peak memory in bytes: on a GPU, of tensors since the last call; on a CPU, of the process since its start."""
    if device.type != "cuda":
        return process_memory_peak()
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def process_memory_peak() -> int:
    """Return the process's peak resident memory in bytes. `getrusage` may return the parent's peak before exec."""
    if PROCESS_STATUS.is_file():
        for line in PROCESS_STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def measured(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the host's time inside the block to `seconds[phase]`."""
    began_at = time.monotonic()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.monotonic() - began_at


class PhaseTimer:
    """Measures time by phase without waiting for the device: `measure` each piece of work, and `take` the times once per step.
    On a GPU a block only queues work, so `new_event` marks its beginning and end in the stream, and the phase lasts from one
    event to the other. Work that the device has not finished when the times are taken counts in the next step."""

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


SAMPLED_WEIGHTS, LOG_WEIGHTS = "sampled_weights", "log_weights"
"""Keys of a step's figures that are not in metrics.jsonl: importance weights of samples, and log π − log μ [C]."""


def sampled_sequences(groups: list[TrainingGroup]) -> list[Sequence]:
    """Return two sequences of a step: the first, and the one that the most versions sampled (of another group, if there is
    one)."""
    first, *rest = groups[0].sequences
    others = [sequence for group in groups[1:] for sequence in group.sequences] or rest
    return [first, max(others, key=lambda sequence: sequence.num_versions)] if others else [first]


def tokens_of_samples(groups: list[TrainingGroup], token_branches: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """Return the positions, in the step's values, of the tokens of each of `sampled_sequences`, by sequence id.
    `token_branches`: for each of the step's tokens, its branch as a position in `all_branches(groups)`."""
    owners = [sequence.sequence_id for group in groups for sequence in group.sequences for _ in sequence.all_branches]
    by_branch = np.argsort(token_branches, kind="stable")
    tokens = {}
    for sequence in sampled_sequences(groups):
        own = [branch for branch, owner in enumerate(owners) if owner == sequence.sequence_id]
        tokens[sequence.sequence_id] = by_branch[np.isin(token_branches[by_branch], own)]
    return tokens


def importance_weights(log_weights: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return unclamped importance weights. Those that overflow are infinite."""
    with np.errstate(over="ignore"):
        return np.exp(log_weights.astype(np.float64))


LARGEST_LOG_WEIGHT = 80.0
"""Maximum log w in means of w (5e34), which could otherwise overflow. ESS does not need it."""


def token_figures(
    values: NDArray[np.float32],
    totals: NDArray[np.float64],
    batches: list[HostMicroBatch],
    budget: int,
    *,
    applied: bool = True,
) -> dict[str, Any]:
    """Return figures over all sampled tokens of one optimizer step, with the names of metrics.jsonl (docs/run-directory.md). A
    figure is None if no token gives a value. A step that was not `applied` counts no trained tokens. `batches`: in the order of
    `values`. `budget`: maximum tokens of a micro-batch."""
    log_weights, clipped, masked, entropy, *baseline = values.astype(np.float64)
    loss, reference_kl, value_loss, _ = totals.tolist()
    returns = np.concatenate([batch.advantages for batch in batches])
    lags = np.concatenate([batch.lags for batch in batches])
    loads = [batch.num_tokens for batch in batches if batch.num_branches]
    usable = bool(np.isfinite(log_weights).all())
    by_lag = ess_by_lag(log_weights, lags) if usable else {}
    buckets, fresh = lag_bucket(lags), log_weights[lags == 0]
    found, counts = np.unique(lags, return_counts=True)
    return {
        "loss": loss,
        "entropy": _mean(entropy),
        "ess": effective_sample_size(log_weights) if usable else None,
        "ess_by_lag": by_lag,
        "clip_fraction": float(clipped.mean()),
        "clip_fraction_by_lag": {label: float(clipped[buckets == LAG_BUCKETS.index(label)].mean()) for label in by_lag},
        "mask_fraction": float(masked.mean()),
        # k3: w − 1 − log w of a token sampled from μ estimates KL(μ ‖ π), and is never negative.
        "mismatch_kl": _mean(np.expm1(np.minimum(fresh, LARGEST_LOG_WEIGHT)) - fresh) if usable else None,
        "reference_kl": reference_kl,
        "value_loss": value_loss if baseline else None,
        "explained_variance": explained_variance(baseline[0], returns) if baseline else None,
        "log_weight_abs_max": float(np.abs(log_weights).max()) if usable else None,
        "lag": {"mean": float(lags.mean()), "p95": float(np.percentile(lags, 95)), "max": int(lags.max())},
        "lag_histogram": dict(zip(found.tolist(), counts.tolist(), strict=True)) if applied else {},
        "tokens_trained": len(lags) if applied else 0,
        "tokens_computed": sum(loads),
        "microbatches": len(loads),
        "packing_fill": sum(loads) / (len(loads) * budget),
    }


def explained_variance(baseline: NDArray[np.float64], returns: NDArray[np.floating]) -> float | None:
    """Return 1 − Var(R − v) / Var(R) for `baseline` v and `returns` R, each [C]; None if all returns are equal."""
    spread = float(np.var(returns.astype(np.float64)))
    return 1 - float(np.var(returns - baseline)) / spread if spread > 0 else None


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if values.size else None
