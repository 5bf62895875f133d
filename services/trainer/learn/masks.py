"""Which completion tokens are left out of the policy loss, because π has moved too far from the μ that sampled them.

Pure, and apart from the loss that it is combined with. A mask judges log π − log μ, so it sees policy lag and the numerical
difference between actor and trainer as one. Masked tokens keep their place in the denominators of the normalisation, in
ESS and in the KL and entropy terms; not here: weights that are truncated instead of left out (`loss.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipelinerl.config.recipe import AlgorithmConfig


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
