"""One packed micro-batch: branches in one row, and for each sampled token the inputs of the loss.

A branch is one linear token sequence of an episode; without episodes, each sequence has one branch. The row has each branch's
prompt and completion, except the last token, which predicts nothing. Observations within a completion are context without a
loss. Branches with the same prompt may share its tokens; `places` then maps each branch to its tokens. Padding is an extra
branch without sampled tokens at the end of the row, so it cannot change a loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.messages.sequences import Branch, Sequence
from services.trainer.learn.attention import PackedLayout, on_device, ranges


def sequence_weights(sampled_tokens: NDArray[np.int64], normalization: str) -> NDArray[np.float64]:
    """Return float64[S]: the factor of a token's term in the loss, for each sequence of an optimizer step.

    `sampled_tokens` int64[S]: each sequence's number of sampled tokens, over all branches. `normalization`:
    `token` = 1 / tokens of the step (DAPO, arXiv 2503.14476), `sequence` = 1 / (tokens of the sequence · sequences) (GRPO,
    arXiv 2402.03300), or `batch` = 1 / sequences (the paper, eq. 5; Dr. GRPO, arXiv 2503.20783).
    """
    num_sequences = len(sampled_tokens)
    if normalization == "sequence":
        return 1.0 / (sampled_tokens * num_sequences)
    return np.full(num_sequences, 1.0 / (sampled_tokens.sum() if normalization == "token" else num_sequences))


@dataclass(frozen=True, eq=False)
class TrainingGroup:
    """Trainable sequences of one group, and the advantage of each. No prompt is empty, and each sequence has sampled tokens."""

    sequences: tuple[Sequence, ...]
    advantages: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TokenRow:
    """Inputs of a model's forward pass: T tokens of packed branches, including padding."""

    input_ids: Tensor
    """int64[1, T]"""
    position_ids: Tensor
    """int64[1, T]: position of each token in its branch, from 0, counted through prompt and completion."""
    layout: PackedLayout
    predictors: NDArray[np.int64] | None = None
    """`HostMicroBatch.predictors`, which the host can read without waiting for the device."""


@dataclass(frozen=True, eq=False)
class HostMicroBatch:
    """A micro-batch in host memory: one row of T tokens that packs S branches, in which C tokens were sampled."""

    token_ids: NDArray[np.int64]
    """[T], without padding."""
    lengths: NDArray[np.int64]
    """[S]: number of tokens of each branch in the row, including its prompt."""
    places: NDArray[np.int64]
    """[sum of lengths]: each token's position in the row, branch after branch; 0 .. T - 1 if no prompt is shared."""
    predictors: NDArray[np.int64]
    """[C]: the position in the row that predicts each sampled token. Ascending if no prompt is shared."""
    targets: NDArray[np.int64]
    """[C]: id of the sampled token."""
    behaviour_logprobs: NDArray[np.float32]
    """[C]: log μ, nats."""
    advantages: NDArray[np.float32]
    """[C]: advantage of the token's sequence; with a learned baseline, the sequence's return."""
    weights: NDArray[np.float32]
    """[C]: the token's factor in the loss (`sequence_weights`)."""
    branch_index: NDArray[np.int64]
    """[C]: the token's branch, 0 .. S - 1, in order of the row."""
    lags: NDArray[np.int64]
    """[C]: the token's lag."""
    actors: NDArray[np.int64]
    """[S]: index in `PreparedStep.actors` of the actor that sampled the branch."""
    reported: NDArray[np.int64]
    """[S]: position of the branch among all branches of the step if its log weights are reported to rank 0, else -1."""
    has_gradient: bool = True
    """False if no backward pass is needed. The n-th micro-batches of all ranks have the same value."""

    def on(self, device: torch.device | str, pad_multiple: int = 1) -> MicroBatch:
        """Return the micro-batch on `device`, with a row padded to a multiple of `pad_multiple` tokens."""
        names = ("predictors", "targets", "behaviour_logprobs", "advantages", "weights", "branch_index")
        tensors = {name: on_device(getattr(self, name), device) for name in names}
        row = token_row(self.token_ids, self.lengths, pad_multiple, device, self.places)
        row = replace(row, predictors=self.predictors)
        return MicroBatch(row=row, num_branches=len(self.lengths), has_gradient=self.has_gradient, **tensors)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Inputs of model and loss on the device, shaped as in `HostMicroBatch`. C, the number of sampled tokens, may be 0."""

    row: TokenRow
    predictors: Tensor
    targets: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    branch_index: Tensor
    num_branches: int
    has_gradient: bool = True


def token_row(
    token_ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    pad_multiple: int = 1,
    device: torch.device | str = "cpu",
    places: NDArray[np.int64] | None = None,
) -> TokenRow:
    """Return a row of packed branches, padded to a multiple of `pad_multiple` tokens. `places`: as in `PackedLayout`."""
    num_tokens, places = len(token_ids), np.arange(len(token_ids)) if places is None else places
    if padding := -num_tokens % pad_multiple if num_tokens else pad_multiple:
        token_ids = np.concatenate((token_ids, np.zeros(padding, dtype=np.int64)))
        lengths, places = np.append(lengths, padding), np.append(places, np.arange(num_tokens, num_tokens + padding))
    positions = np.empty(len(token_ids), dtype=np.int64)
    positions[places] = ranges(np.zeros_like(lengths), lengths)
    layout = PackedLayout(lengths, device, places if len(places) > len(token_ids) else None)
    return TokenRow(on_device(token_ids[None], device), on_device(positions[None], device), layout)


def host_microbatch(
    branches: Iterable[Branch],
    advantages: NDArray[np.float64],
    weights: NDArray[np.float64],
    version: int,
    *,
    share_prompts: bool = False,
    has_gradient: bool = True,
    actors: NDArray[np.int64] | None = None,
    reported: NDArray[np.int64] | None = None,
) -> HostMicroBatch:
    """Pack `branches` into a row, longest first. The arrays have one entry per branch. `branches` may be empty, because all
    ranks need the same number of micro-batches. `version`: policy version before the step, from which lags are counted.
    `share_prompts`: put a prompt of several branches into the row once."""
    given = list(branches)
    order = sorted(range(len(given)), key=lambda index: -given[index].num_tokens)
    members = [given[index] for index in order]
    prompts = np.array([len(member.prompt_token_ids) for member in members], dtype=np.int64)
    completions = np.array([len(member.completion_token_ids) for member in members], dtype=np.int64)
    outputs = np.array([member.num_sampled_tokens for member in members], dtype=np.int64)
    lengths = prompts + completions - 1
    token_ids, prompt_starts, completion_starts = _row_tokens(members, share_prompts)
    # Each branch is two pieces of the row, its prompt and its completion.
    starts, sizes = np.stack((prompt_starts, completion_starts), 1), np.stack((prompts, completions - 1), 1)
    places = ranges(starts.ravel(), sizes.ravel())
    last_of_prompts = np.cumsum(lengths) - lengths + prompts - 1
    spans = [(span.start, span.end, span.version) for member in members for span in member.spans]
    firsts, ends, versions = np.array(spans, dtype=np.int64).reshape(-1, 3).T  # the spans cover the sampled tokens in order
    sampled = ranges(firsts, ends - firsts)
    lags = version - np.repeat(versions, ends - firsts)
    assert lags.min(initial=0) >= 0, f"a token was sampled by a version after {version}"
    completion_ids = _joined([member.completion_token_ids for member in members], np.int64)
    return HostMicroBatch(
        token_ids=token_ids,
        lengths=lengths,
        places=places,
        predictors=places[np.repeat(last_of_prompts, outputs) + sampled],
        targets=completion_ids[np.repeat(np.cumsum(completions) - completions, outputs) + sampled],
        behaviour_logprobs=_joined([member.behaviour_logprobs for member in members], np.float32),
        advantages=np.repeat(advantages[order], outputs).astype(np.float32),
        weights=np.repeat(weights[order], outputs).astype(np.float32),
        branch_index=np.repeat(np.arange(len(members)), outputs),
        lags=lags,
        actors=np.zeros(len(members), dtype=np.int64) if actors is None else actors[order],
        reported=np.full(len(members), -1) if reported is None else reported[order],
        has_gradient=has_gradient,
    )


def _row_tokens(members: list[Branch], share_prompts: bool) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the row's tokens [T], and the positions where each member's prompt [S] and completion [S] start in the row."""
    parts: list[NDArray[Any]] = []
    prompt_starts, completion_starts, begin = [], [], 0
    known: dict[bytes, int] = {}
    for member in members:
        key = member.prompt_token_ids.tobytes()
        if not share_prompts or key not in known:
            known[key] = begin
            parts.append(member.prompt_token_ids)
            begin += len(member.prompt_token_ids)
        prompt_starts.append(known[key])
        completion_starts.append(begin)
        parts.append(member.completion_token_ids[:-1])
        begin += len(member.completion_token_ids) - 1
    return _joined(parts, np.int64), np.array(prompt_starts, np.int64), np.array(completion_starts, np.int64)


def _joined(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype=dtype), *parts]).astype(dtype)
