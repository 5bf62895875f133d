"""Losses as pure functions over the completion tokens of a micro-batch.

Each token's term is multiplied by its weight, and terms are summed. Weights have the totals of the whole optimizer step as
denominators, so losses of micro-batches and ranks add up to the loss of the batch, and their number never changes a gradient.
Importance weights are log π − log μ per token; they are reported unclamped whatever the loss does with them.

A mask takes tokens out of any loss where π has moved too far from the μ that sampled them. It judges log π − log μ, so it sees
policy lag and the numerical difference between actor and trainer as one. Masked tokens keep their place in the denominators, in
ESS and in the KL and entropy terms. Not here: advantages that need no model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.recipe.fields import AlgorithmConfig

Normalization = Literal["token", "sequence", "batch"]


@dataclass(frozen=True)
class BatchTotals:
    """Of all sequences of one optimizer step, over all micro-batches."""

    num_sequences: int
    num_completion_tokens: int


def token_weights(
    completion_lengths: NDArray[np.int64], normalization: Normalization, totals: BatchTotals
) -> NDArray[np.float32]:
    """float32[sum of completion_lengths]: factor of each token's term.

    `token`: 1 / tokens (DAPO, arXiv 2503.14476). `sequence`: 1 / (its length · sequences) (GRPO, arXiv 2402.03300).
    `batch`: 1 / sequences (the paper, eq. 5; no length normalisation, as Dr. GRPO, arXiv 2503.20783).
    """
    if normalization == "token":
        per_sequence = np.full(len(completion_lengths), 1.0 / totals.num_completion_tokens)
    elif normalization == "sequence":
        per_sequence = 1.0 / (completion_lengths * totals.num_sequences)
    else:
        per_sequence = np.full(len(completion_lengths), 1.0 / totals.num_sequences)
    return np.repeat(per_sequence, completion_lengths).astype(np.float32)


@dataclass(frozen=True, eq=False)
class MaskInputs:
    """Of C completion tokens of S sequences; nothing has a gradient."""

    log_weights: Tensor
    """float32[C]: log π − log μ, nats."""
    advantages: Tensor
    """float32[C]"""
    sequence_index: Tensor
    """int64[C]: its sequence, 0 .. S - 1. All completion tokens of a sequence are here."""
    num_sequences: int


def sequence_means(values: Tensor, sequence_index: Tensor, num_sequences: int) -> Tensor:
    """[C]: mean of `values` [C] over the tokens of each token's own sequence."""
    sums = values.new_zeros(num_sequences).index_add(0, sequence_index, values)
    counts = values.new_zeros(num_sequences).index_add(0, sequence_index, torch.ones_like(values))
    return (sums / counts)[sequence_index]


def nothing(inputs: MaskInputs, config: AlgorithmConfig) -> Tensor:
    return torch.zeros_like(inputs.log_weights, dtype=torch.bool)


def icepop(inputs: MaskInputs, config: AlgorithmConfig) -> Tensor:
    """Tokens with π / μ outside [mask_low, mask_high] (IcePop, arXiv 2510.18855).

    There the ratio inside the bounds is a factor of the token's loss as well; a loss that weights tokens by π / μ has it.
    """
    return _outside(inputs.log_weights, config)


def sequence(inputs: MaskInputs, config: AlgorithmConfig) -> Tensor:
    """Whole sequences whose geometric mean of π / μ is outside [mask_low, mask_high], of whatever length.

    Geometric sequence masking: Liu, Li et al., "When Speed Kills Stability" (https://richardli.xyz/rl-collapse), part 3.
    """
    return _outside(sequence_means(inputs.log_weights, inputs.sequence_index, inputs.num_sequences), config)


def off_policy_sequence(inputs: MaskInputs, config: AlgorithmConfig) -> Tensor:
    """Sequences of negative advantage with mean(log μ − log π) > mask_kl (DeepSeek-V3.2, arXiv 2512.02556)."""
    kl = -sequence_means(inputs.log_weights, inputs.sequence_index, inputs.num_sequences)
    return (inputs.advantages < 0) & (kl > config.mask_kl)


MASKS: dict[str, Callable[[MaskInputs, AlgorithmConfig], Tensor]] = {
    "none": nothing,
    "icepop": icepop,
    "sequence": sequence,
    "off_policy_sequence": off_policy_sequence,
}
"""bool[C] each: True is left out. A NaN is never left out, so that it ends in a skipped step and not in silence."""


def _outside(log_ratios: Tensor, config: AlgorithmConfig) -> Tensor:
    low = math.log(config.mask_low) if config.mask_low > 0 else -math.inf
    return (log_ratios < low) | (log_ratios > math.log(config.mask_high))


LARGEST_LOG_RATIO = 20.0
"""Bound of |log ratio| before a gradient flows through exp(): e^20 = 5e8 is far outside any clip range."""


@dataclass(frozen=True, eq=False)
class LossInputs:
    """Of C completion tokens of S sequences, float32[C] where nothing else is said; C may be 0.

    `logprobs` (and `entropy`, with a bonus) carry the gradient. All completion tokens of a sequence are in one `LossInputs`.
    """

    logprobs: Tensor
    """log π, nats."""
    behaviour_logprobs: Tensor
    """log μ, nats."""
    advantages: Tensor
    """With `values`: returns, of which they are subtracted."""
    weights: Tensor
    """Factor of each token's term; 0 masks it."""
    sequence_index: Tensor
    """int64[C]: its sequence, 0 .. S - 1."""
    num_sequences: int
    """S"""
    entropy: Tensor | None = None
    reference_logprobs: Tensor | None = None
    values: Tensor | None = None
    """v_φ before the token, the learned baseline; carries a gradient."""


@dataclass(frozen=True, eq=False)
class LossOutput:
    """`loss` has the gradient; everything else is detached."""

    loss: Tensor
    policy_loss: Tensor
    reference_kl: Tensor
    """Weighted sum of the k3 estimates, before its coefficient; 0 without a reference."""
    log_weights: Tensor
    """float32[C]: log π − log μ, unclamped."""
    clipped: Tensor
    """bool[C]: the bound was active, so a weight was truncated or a gradient cut; never of a masked token."""
    masked: Tensor
    """bool[C]: left out of the policy loss by `algorithm.mask`."""
    value_loss: Tensor
    """Weighted sum of 0.5 (v − R)², before its coefficient; 0 without values."""


PolicyTerm = Callable[[LossInputs, AlgorithmConfig], tuple[Tensor, Tensor]]
"""(per-token loss before weighting, clipped), [C] each."""


def reinforce(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The paper's equation 5: −min(c, w) · A · log π, no gradient through w."""
    log_weights = (inputs.logprobs - inputs.behaviour_logprobs).detach()
    truncated = log_weights.clamp(max=math.log(config.clamp)).exp()
    return -truncated * inputs.advantages * inputs.logprobs, log_weights > math.log(config.clamp)


def ppo_clip(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """−min(r A, clip(r, 1 − ε_low, 1 + ε_high) A) (arXiv 1707.06347, eq. 7), r = π / μ; clip-higher of DAPO."""
    return _clipped(inputs.logprobs - inputs.behaviour_logprobs, inputs.advantages, config)


def gspo(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """−min(s A, clip(s, 1 − ε_low, 1 + ε_high) A), s = exp(mean over the sequence of log ratio) (arXiv 2507.18071, eq. 5).

    In its token form (section 4.3): s is one number, and its gradient in each token's log π goes through that token's own
    term. For one advantage in a sequence that is the same gradient, and a masked token then has none.
    """
    log_ratio = inputs.logprobs - inputs.behaviour_logprobs
    of_sequence = sequence_means(log_ratio.detach(), inputs.sequence_index, inputs.num_sequences)
    own_gradient = inputs.logprobs - inputs.logprobs.detach()
    return _clipped(of_sequence + own_gradient, inputs.advantages, config)


def cispo(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """−clip(r, 1 − ε_low, 1 + ε_high) · A · log π, no gradient through r = π / μ (MiniMax-M1, arXiv 2506.13585, eq. 4)."""
    ratio = (inputs.logprobs - inputs.behaviour_logprobs).detach().exp()
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -bounded * inputs.advantages * inputs.logprobs, bounded != ratio


def _clipped(log_ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """PPO's term for a ratio given by its logarithm [C], which carries the gradient."""
    ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    free, cut = ratio * advantages, bounded * advantages
    return -torch.minimum(free, cut), (cut < free).detach()


POLICY_TERMS: dict[str, PolicyTerm] = {
    "reinforce": reinforce,
    "ppo_clip": ppo_clip,
    "grpo": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
}
"""GRPO's policy term is PPO's; its advantages and normalisation differ, and `AlgorithmConfig` defaults to them."""


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Estimate of KL(π ‖ reference) per token, never negative (GRPO, arXiv 2402.03300, eq. 4). Both [C], nats."""
    log_ratio = (reference_logprobs - logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return log_ratio.exp() - log_ratio - 1


def subtract_values(inputs: LossInputs) -> tuple[LossInputs, Tensor]:
    """The paper's equation 4: advantages R − v_φ, through which no gradient flows, and the weighted sum of 0.5 (v_φ − R)²."""
    if inputs.values is None:
        return inputs, inputs.logprobs.new_zeros(())
    error = inputs.values - inputs.advantages
    return replace(inputs, advantages=-error.detach()), (inputs.weights * 0.5 * error.square()).sum()


def compute_loss(inputs: LossInputs, config: AlgorithmConfig) -> LossOutput:
    """Policy loss + kl_coefficient · KL to the reference − entropy_coefficient · entropy + value_coefficient · value loss,
    weighted sums over tokens.

    A masked token adds 0 to the policy loss, and nothing else changes: neither the weights of the others nor the other terms.
    """
    inputs, value_loss = subtract_values(inputs)
    log_weights = (inputs.logprobs - inputs.behaviour_logprobs).detach()
    masked = MASKS[config.mask](
        MaskInputs(log_weights, inputs.advantages, inputs.sequence_index, inputs.num_sequences), config
    )
    per_token, clipped = POLICY_TERMS[config.loss](inputs, config)
    policy_loss = (inputs.weights * per_token.masked_fill(masked, 0.0)).sum()
    loss, reference_kl = policy_loss, policy_loss.new_zeros(())
    if config.kl_coefficient > 0:
        assert inputs.reference_logprobs is not None, "kl_coefficient > 0 needs reference logprobs"
        reference_kl = (inputs.weights * k3(inputs.logprobs, inputs.reference_logprobs)).sum()
        loss = loss + config.kl_coefficient * reference_kl
    if config.entropy_coefficient > 0:
        assert inputs.entropy is not None, "entropy_coefficient > 0 needs entropies"
        loss = loss - config.entropy_coefficient * (inputs.weights * inputs.entropy).sum()
    if inputs.values is not None:
        loss = loss + config.value_coefficient * value_loss
    return LossOutput(
        loss=loss,
        policy_loss=policy_loss.detach(),
        reference_kl=reference_kl.detach(),
        log_weights=log_weights,
        clipped=clipped & ~masked,
        masked=masked,
        value_loss=value_loss.detach(),
    )
