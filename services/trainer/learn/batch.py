"""One packed micro-batch: sequences behind each other in one row, and for each completion token what the loss needs.

Built with NumPy without a loop over tokens, as arrays that can travel to another rank, and put on a device there. Padding,
where asked for, is a sequence of its own at the end of the row that no completion token belongs to, so it cannot change a
loss; a micro-batch without sequences is padding alone. Not here: which sequences go together
(`pipelinerl.rl.packing`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.messages.sequences import Sequence
from services.trainer.learn.attention import PackedLayout, on_device, packed_layout

Normalization = Literal["token", "sequence", "batch"]


def sequence_weights(completion_lengths: NDArray[np.int64], normalization: Normalization) -> NDArray[np.float64]:
    """[S], of all sequences of an optimizer step, over all micro-batches and ranks: factor of the term of each of its tokens.

    `token`: 1 / tokens (DAPO, arXiv 2503.14476). `sequence`: 1 / (its length · sequences) (GRPO, arXiv 2402.03300).
    `batch`: 1 / sequences (the paper, eq. 5; no length normalisation, as Dr. GRPO, arXiv 2503.20783).
    """
    num_sequences = len(completion_lengths)
    if normalization == "sequence":
        return 1.0 / (completion_lengths * num_sequences)
    return np.full(num_sequences, 1.0 / (completion_lengths.sum() if normalization == "token" else num_sequences))


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
class HostMicroBatch:
    """C completion tokens of S sequences in one row, in host memory."""

    token_ids: NDArray[np.int64]
    """[T], padding included."""
    lengths: NDArray[np.int64]
    """[S] in order of the row; [S + 1] with padding."""
    predictors: NDArray[np.int64]
    """[C], ascending: position in the row whose output predicts the token."""
    targets: NDArray[np.int64]
    """[C]: the token."""
    behaviour_logprobs: NDArray[np.float32]
    """[C]: log μ, nats."""
    advantages: NDArray[np.float32]
    """[C]: its sequence's advantage."""
    weights: NDArray[np.float32]
    """[C]: its factor in the loss (`sequence_weights`)."""
    sequence_index: NDArray[np.int64]
    """[C]: its sequence, 0 .. S - 1, in order of the row."""
    lags: NDArray[np.int64]
    """[C]: its token lag."""
    num_sequences: int
    num_tokens: int
    """Prompt and completion tokens, without padding."""

    def on(self, device: torch.device | str) -> MicroBatch:
        """The same as tensors on `device`. Does not wait for the device."""
        names = ("predictors", "targets", "behaviour_logprobs", "advantages", "weights", "sequence_index")
        tensors = {name: on_device(getattr(self, name), device) for name in names}
        row = _row(self.token_ids, self.lengths, device)
        return MicroBatch(row=row, num_sequences=self.num_sequences, **tensors)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What model and loss need of a `HostMicroBatch`, in the same shapes, on the model's device.

    All completion tokens of a sequence are in one micro-batch. C may be 0.
    """

    row: TokenRow
    predictors: Tensor
    targets: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    sequence_index: Tensor
    num_sequences: int


def token_row(
    token_ids: NDArray[np.int64], lengths: NDArray[np.int64], pad_multiple: int = 1, device: torch.device | str = "cpu"
) -> TokenRow:
    """Row of packed sequences: token_ids int64[sum of lengths], padded to a multiple of `pad_multiple` tokens."""
    return _row(*_padded(token_ids, lengths, pad_multiple), device)


def _padded(
    token_ids: NDArray[np.int64], lengths: NDArray[np.int64], multiple: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    padding = -len(token_ids) % multiple if len(token_ids) else multiple
    if padding == 0:
        return token_ids, lengths
    return np.concatenate((token_ids, np.zeros(padding, dtype=np.int64))), np.append(lengths, padding)


def _row(token_ids: NDArray[np.int64], lengths: NDArray[np.int64], device: torch.device | str) -> TokenRow:
    positions = np.arange(len(token_ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return TokenRow(
        on_device(token_ids[None], device),
        on_device(positions[None], device),
        packed_layout(lengths, device),
    )


def row_order(sequences: list[Sequence]) -> list[int]:
    """Order in which a micro-batch's row has its sequences: longest first."""
    return sorted(range(len(sequences)), key=lambda index: (-sequences[index].num_tokens, index))


def host_microbatch(
    sequences: list[Sequence],
    advantages: NDArray[np.float64],
    weights: NDArray[np.float64],
    version: int,
    pad_multiple: int = 1,
) -> HostMicroBatch:
    """Packs `sequences` with their `advantages` and `weights` [S] for the gradient at policy version `version`, in `row_order`.

    Without sequences, as for a rank that has none left while others have, it is a row of padding.
    """
    order = row_order(sequences)
    members = [sequences[index] for index in order]
    prompts = np.array([len(member.prompt_token_ids) for member in members], dtype=np.int64)
    completions = np.array([len(member.completion_token_ids) for member in members], dtype=np.int64)
    parts = [part for member in members for part in (member.prompt_token_ids, member.completion_token_ids)]
    token_ids = _joined(parts, np.int64)
    lengths = prompts + completions
    positions = _completion_positions(lengths, prompts, completions)
    lags = version - _joined([member.token_versions() for member in members], np.int64)
    assert lags.min(initial=0) >= 0, f"a token of a version after {version} cannot be trained on at {version}"
    padded_ids, padded_lengths = _padded(token_ids, lengths, pad_multiple)
    return HostMicroBatch(
        token_ids=padded_ids,
        lengths=padded_lengths,
        predictors=positions - 1,
        targets=token_ids[positions],
        behaviour_logprobs=_joined([member.behaviour_logprobs for member in members], np.float32),
        advantages=np.repeat(advantages[order], completions).astype(np.float32),
        weights=np.repeat(weights[order], completions).astype(np.float32),
        sequence_index=np.repeat(np.arange(len(members)), completions),
        lags=lags,
        num_sequences=len(members),
        num_tokens=len(token_ids),
    )


def _joined(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype=dtype), *parts]).astype(dtype)


def _completion_positions(
    lengths: NDArray[np.int64], prompts: NDArray[np.int64], completions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """int64[C]: place in the row of each completion token, sequence after sequence."""
    first_in_row = np.cumsum(lengths) - lengths + prompts
    first_in_flat = np.cumsum(completions) - completions
    return np.arange(completions.sum()) + np.repeat(first_in_row - first_in_flat, completions)
