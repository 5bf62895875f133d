"""One packed micro-batch: sequences behind each other in one row, and for each completion token what the loss needs.

Built with NumPy without a loop over tokens. Padding, where asked for, is a sequence of its own at the end of the row
that no completion token belongs to, so it cannot change a loss. Not here: which sequences go together
(`pipelinerl.algorithms.packing`).
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.algorithms.staleness import token_lags
from pipelinerl.types import Sequence
from services.trainer.learn.attention import PackedLayout, packed_layout
from services.trainer.learn.normalization import BatchTotals, Normalization, token_weights


@dataclass(frozen=True, eq=False)
class TrainingGroup:
    """Good sequences of one group, each with at least one prompt and one completion token, and their advantages [n]."""

    sequences: tuple[Sequence, ...]
    advantages: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TokenRow:
    """What a model's forward pass takes: T tokens of packed sequences, padding included."""

    input_ids: Tensor
    """int64[1, T]"""
    position_ids: Tensor
    """int64[1, T], from 0 in each sequence."""
    layout: PackedLayout


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """C completion tokens of S sequences in one row. All tensors are on the model's device, arrays on the CPU."""

    row: TokenRow
    predictors: Tensor
    """int64[C]: position in the row whose output predicts the token."""
    targets: Tensor
    """int64[C]: the token."""
    behaviour_logprobs: Tensor
    """float32[C]: log μ, nats."""
    advantages: Tensor
    """float32[C]: its sequence's advantage."""
    weights: Tensor
    """float32[C]: its factor in the loss (`normalization.token_weights`)."""
    sequence_index: Tensor
    """int64[C]: its sequence, 0 .. S - 1, in order of the row."""
    lags: NDArray[np.int64]
    """int64[C]: its token lag."""
    num_sequences: int
    num_tokens: int
    """Prompt and completion tokens, without padding."""


def token_row(
    token_ids: NDArray[np.int64], lengths: NDArray[np.int64], pad_multiple: int = 1, device: torch.device | str = "cpu"
) -> TokenRow:
    """Row of packed sequences: token_ids int64[sum of lengths], padded to a multiple of `pad_multiple` tokens."""
    padding = -len(token_ids) % pad_multiple
    if padding:
        token_ids = np.concatenate((token_ids, np.zeros(padding, dtype=np.int64)))
        lengths = np.append(lengths, padding)
    positions = np.arange(len(token_ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return TokenRow(
        torch.from_numpy(token_ids)[None].to(device),
        torch.from_numpy(positions)[None].to(device),
        packed_layout(lengths, device),
    )


def build_microbatch(
    sequences: Many[Sequence],
    advantages: NDArray[np.float64],
    version: int,
    normalization: Normalization,
    totals: BatchTotals,
    *,
    pad_multiple: int = 1,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Packs `sequences` with their `advantages` [S] for the gradient at policy version `version`, longest first."""
    order = sorted(range(len(sequences)), key=lambda index: (-sequences[index].num_tokens, index))
    members = [sequences[index] for index in order]
    prompts = np.array([len(member.prompt_token_ids) for member in members])
    completions = np.array([len(member.completion_token_ids) for member in members])
    parts = [part for member in members for part in (member.prompt_token_ids, member.completion_token_ids)]
    token_ids = np.concatenate(parts).astype(np.int64)
    lengths = prompts + completions
    positions = _completion_positions(lengths, prompts, completions)
    lags = token_lags(np.concatenate([member.token_versions() for member in members]), version)
    assert lags.min() >= 0, f"a token of a version after {version} cannot be trained on at {version}"

    def on_device(values: NDArray, dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=dtype)).to(device, non_blocking=True)

    return MicroBatch(
        row=token_row(token_ids, lengths, pad_multiple, device),
        predictors=on_device(positions - 1, np.int64),
        targets=on_device(token_ids[positions], np.int64),
        behaviour_logprobs=on_device(np.concatenate([member.behaviour_logprobs for member in members]), np.float32),
        advantages=on_device(np.repeat(advantages[order], completions), np.float32),
        weights=on_device(token_weights(completions, normalization, totals), np.float32),
        sequence_index=on_device(np.repeat(np.arange(len(members)), completions), np.int64),
        lags=lags,
        num_sequences=len(members),
        num_tokens=len(token_ids),
    )


def _completion_positions(
    lengths: NDArray[np.int64], prompts: NDArray[np.int64], completions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """int64[C]: place in the row of each completion token, sequence after sequence."""
    first_in_row = np.cumsum(lengths) - lengths + prompts
    first_in_flat = np.cumsum(completions) - completions
    return np.arange(completions.sum()) + np.repeat(first_in_row - first_in_flat, completions)
