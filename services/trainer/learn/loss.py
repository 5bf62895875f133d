"""Losses as pure functions over the sampled tokens of a micro-batch.

The loss is the weighted sum of a term for each token. The weights (`sequence_weights`) depend on the whole optimizer step, so
the number of micro-batches and ranks does not change the gradient.

A mask excludes tokens from the policy loss if π is too far from μ. Masked tokens still count in the weights' denominators, in
ESS, and in the KL and entropy terms. Losses and masks over whole sequences treat each branch as one sequence, with the sampled
tokens of all its turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipelinerl.recipe.fields import AlgorithmConfig
from services.trainer.learn.batch import MicroBatch
from services.trainer.learn.policy import TokenScores


def branch_means(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return [C]: for each token, the mean of `values` [C] over the sampled tokens of its branch."""
    zeros = values.new_zeros(batch.num_branches)
    sums = zeros.index_add(0, batch.branch_index, values)
    counts = zeros.index_add(0, batch.branch_index, torch.ones_like(values))
    return (sums / counts)[batch.branch_index]


def icepop(log_weights: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> Tensor:
    """Mask tokens with π / μ outside [mask_low, mask_high] (IcePop, arXiv 2510.18855, without the weighting by π / μ)."""
    low = math.log(config.mask_low) if config.mask_low > 0 else -math.inf
    return (log_weights < low) | (log_weights > math.log(config.mask_high))


def mask_sequence(log_weights: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> Tensor:
    """Mask whole branches whose geometric mean of π / μ is outside [mask_low, mask_high]: Liu, Li et al., "When Speed Kills
    Stability" (https://richardli.xyz/rl-collapse), part 3."""
    return icepop(branch_means(log_weights, batch), batch, config)


def off_policy_sequence(log_weights: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> Tensor:
    """Mask branches of negative advantage with mean(log μ − log π) > mask_kl (DeepSeek-V3.2, arXiv 2512.02556)."""
    kl = -branch_means(log_weights, batch)
    return (batch.advantages < 0) & (kl > config.mask_kl)


MASKS: dict[str, Callable[[Tensor, MicroBatch, AlgorithmConfig], Tensor]] = {
    "none": lambda log_weights, batch, config: torch.zeros_like(log_weights, dtype=torch.bool),
    "icepop": icepop,
    "sequence": mask_sequence,
    "off_policy_sequence": off_policy_sequence,
}
"""Functions from log π − log μ [C] in nats to bool[C]; True excludes the token. NaN gives False and stays in the loss."""


LARGEST_LOG_RATIO = 20.0
"""Bound of |log ratio| wherever a gradient flows through exp(). e^20 = 5e8 is far outside any clip range."""


@dataclass(frozen=True, eq=False)
class LossOutput:
    """Result of `compute_loss`. Only `loss` has a gradient."""

    loss: Tensor
    reference_kl: Tensor
    """Weighted sum of the k3 estimates, without the coefficient; 0 without a reference."""
    log_weights: Tensor
    """float32[C]: log π − log μ, unclamped."""
    clipped: Tensor
    """bool[C]: the loss truncated the token's importance weight or cut its gradient. False for masked tokens."""
    masked: Tensor
    """bool[C]: `algorithm.mask` excludes the token from the policy loss."""
    value_loss: Tensor
    """Weighted sum of 0.5 (v − R)², without the coefficient; 0 without a value head."""


def reinforce(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The paper's equation 5: −min(c, w) · A · log π with w = π / μ and c = `clamp`. No gradient flows through w."""
    log_weights = (logprobs - batch.behaviour_logprobs).detach()
    truncated = log_weights.clamp(max=math.log(config.clamp)).exp()
    return -truncated * batch.advantages * logprobs, log_weights > math.log(config.clamp)


def ppo_clip(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """−min(r A, clip(r, 1 − ε_low, 1 + ε_high) A) (arXiv 1707.06347, eq. 7), r = π / μ; separate bounds as in DAPO."""
    return _clipped(logprobs - batch.behaviour_logprobs, batch.advantages, config)


def gspo(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """−min(s A, clip(s, 1 − ε_low, 1 + ε_high) A), s = exp(mean over the branch of log ratio) (arXiv 2507.18071, eq. 5). In
    this token form (section 4.3), a term has only the gradient of its own token's log π. If a branch's advantages are equal,
    the gradient is that of the sequence form."""
    log_ratio = logprobs - batch.behaviour_logprobs
    of_branch = branch_means(log_ratio.detach(), batch)
    own_gradient = logprobs - logprobs.detach()
    return _clipped(of_branch + own_gradient, batch.advantages, config)


def cispo(logprobs: Tensor, batch: MicroBatch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """−clip(r, 1 − ε_low, 1 + ε_high) · A · log π, no gradient through r = π / μ (MiniMax-M1, arXiv 2506.13585, eq. 4)."""
    ratio = (logprobs - batch.behaviour_logprobs).detach().exp()
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -bounded * batch.advantages * logprobs, bounded != ratio


def _clipped(log_ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Return PPO's term for the ratio exp(`log_ratio`), and whether it is clipped, both [C]."""
    ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    free, cut = ratio * advantages, bounded * advantages
    return -torch.minimum(free, cut), (cut < free).detach()


POLICY_TERMS: dict[str, Callable[[Tensor, MicroBatch, AlgorithmConfig], tuple[Tensor, Tensor]]] = {
    "reinforce": reinforce,
    "ppo_clip": ppo_clip,
    "grpo": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
}
"""Functions from log π [C] to (per-token loss before weighting, clipped), each [C]. GRPO has PPO's policy term. It differs in
advantages and normalisation, whose defaults `AlgorithmConfig` sets."""


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return an estimate of KL(π ‖ reference) per token, never negative (GRPO, arXiv 2402.03300, eq. 4). Inputs: [C], nats."""
    log_ratio = (reference_logprobs - logprobs).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return log_ratio.exp() - log_ratio - 1


def compute_loss(
    batch: MicroBatch, scores: TokenScores, config: AlgorithmConfig, reference_logprobs: Tensor | None = None
) -> LossOutput:
    """Return policy loss + kl_coefficient · KL to the reference − entropy_coefficient · entropy + value_coefficient · value
    loss, as weighted sums over tokens. With a value head, the batch's advantages are returns, from which the values v_φ are
    subtracted without a gradient (the paper, eq. 4)."""
    value_loss = scores.logprobs.new_zeros(())
    if scores.values is not None:
        error = scores.values - batch.advantages
        value_loss = (batch.weights * 0.5 * error.square()).sum()
        batch = replace(batch, advantages=-error.detach())
    log_weights = (scores.logprobs - batch.behaviour_logprobs).detach()
    masked = MASKS[config.mask](log_weights, batch, config)
    per_token, clipped = POLICY_TERMS[config.loss](scores.logprobs, batch, config)
    loss = (batch.weights * per_token.masked_fill(masked, 0.0)).sum()
    reference_kl = loss.new_zeros(())
    if config.kl_coefficient > 0:
        assert reference_logprobs is not None, "kl_coefficient > 0 needs reference logprobs"
        reference_kl = (batch.weights * k3(scores.logprobs, reference_logprobs)).sum()
        loss = loss + config.kl_coefficient * reference_kl
    if config.entropy_coefficient > 0:
        loss = loss - config.entropy_coefficient * (batch.weights * scores.entropy).sum()
    return LossOutput(
        loss=loss + config.value_coefficient * value_loss,
        reference_kl=reference_kl.detach(),
        log_weights=log_weights,
        clipped=clipped & ~masked,
        masked=masked,
        value_loss=value_loss.detach(),
    )
