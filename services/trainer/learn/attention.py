"""Attention that never crosses sequences, for many sequences packed into one row of tokens.

transformers finds packed rows by their restarting position ids and gives its own `sdpa` and `eager` a block-diagonal
[T, T] mask: correct, and quadratic in the tokens of the whole row. The attention registered here does the same work per
sequence. Only inside attention are the packed tokens laid out as rows of a padded batch, so that every other layer
works on real tokens alone. Causality makes padding harmless: it comes after the tokens of its row, and its own
outputs are dropped. On a GPU with 16-bit weights it is torch's variable-length flash kernel, without any padding.

Not here: flex and flash_attention_2, which transformers provides and `model.py` selects; attention dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.errors import FieldError

if TYPE_CHECKING:
    from services.trainer.learn.context_parallel import RowPart


VARLEN = "pipelinerl_varlen"
"""Name under which transformers knows the attention of this module."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Attention arguments of some architectures that change its result and are not implemented here."""


def on_device(values: NDArray[Any], device: torch.device | str) -> Tensor:
    """`values` on `device`, in their dtype; on the CPU it is their memory. The host does not wait for the device.

    A GPU copies from page-locked memory by itself; from any other the host would feed it, behind all work queued before.
    torch keeps that memory until the copy is done.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Consecutive sequences of similar length, as a padded batch of `num_rows` × `row_tokens`."""

    first_token: int
    end_token: int
    num_rows: int
    row_tokens: int
    slots: Tensor
    """int64[tokens]: where each token of the block stands among num_rows * row_tokens slots."""
    sources: Tensor
    """int64[num_rows * row_tokens]: the block's token for each slot; any token where the slot is padding."""

    @property
    def tokens(self) -> slice:
        """The block's part of the packed row."""
        return slice(self.first_token, self.end_token)


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Where sequences begin and end in a packed row of T tokens."""

    lengths: NDArray[np.int64]
    """[sequences], in order of the row."""
    cu_seqlens: Tensor
    """int32[sequences + 1]: cumulative lengths, from 0 to T."""
    longest: int
    part: RowPart | None = None
    """Where ranks share the row: each brings its part of the tokens, and attends all of them with a part of the heads."""

    @cached_property
    def blocks(self) -> tuple[RowBlock, ...]:
        """Made when first asked for: the flash kernel never needs them."""
        ends, device = np.cumsum(self.lengths), self.cu_seqlens.device
        return tuple(_row_block(self.lengths, ends, first, end, device) for first, end in _similar_runs(self.lengths))


def packed_layout(lengths: NDArray[np.int64], device: torch.device | str = "cpu") -> PackedLayout:
    """Layout of sequences of `lengths` tokens that stand one behind the other; best in order of falling length."""
    cu_seqlens = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return PackedLayout(lengths, on_device(cu_seqlens, device), int(lengths.max()))


def _similar_runs(lengths: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Runs [first, end) of sequences at least half as long as the longest of the run, which bounds padding to half."""
    runs: list[tuple[int, int]] = []
    first, longest, shortest = 0, int(lengths[0]), int(lengths[0])
    for index, length in enumerate(lengths.tolist()):
        longest, shortest = max(longest, length), min(shortest, length)
        if 2 * shortest < longest:
            runs.append((first, index))
            first, longest, shortest = index, length, length
    return [*runs, (first, len(lengths))]


def _row_block(
    lengths: NDArray[np.int64], ends: NDArray[np.int64], first: int, end: int, device: torch.device
) -> RowBlock:
    rows = lengths[first:end]
    row_tokens, first_token = int(rows.max()), int(ends[first] - lengths[first])
    starts = np.cumsum(rows) - rows
    num_tokens = int(rows.sum())
    slots = np.arange(num_tokens) + np.repeat(np.arange(len(rows)) * row_tokens - starts, rows)
    sources = np.zeros(len(rows) * row_tokens, dtype=np.int64)
    sources[slots] = np.arange(num_tokens)
    return RowBlock(
        first_token,
        first_token + num_tokens,
        len(rows),
        row_tokens,
        on_device(slots, device),
        on_device(sources, device),
    )


class _ToRows(torch.autograd.Function):
    """x [T, heads, dim] → one [slots, heads, dim] per block. Padding has no gradient, so backward is a gather too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: PackedLayout) -> tuple[Tensor, ...]:
        ctx.layout = layout
        return tuple(x[block.tokens].index_select(0, block.sources) for block in layout.blocks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        parts = [grad.index_select(0, block.slots) for grad, block in zip(grads, ctx.layout.blocks, strict=True)]
        return _joined(parts), None


class _FromRows(torch.autograd.Function):
    """One y [slots, heads, dim] per block → [T, heads, dim], dropping the padding."""

    @staticmethod
    def forward(ctx: Any, layout: PackedLayout, *ys: Tensor) -> Tensor:
        ctx.layout = layout
        return _joined([y.index_select(0, block.slots) for y, block in zip(ys, layout.blocks, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(_spread(grads[0][block.tokens], block) for block in ctx.layout.blocks))


def _spread(grad: Tensor, block: RowBlock) -> Tensor:
    """grad [tokens of the block, heads, dim] at the block's slots, 0 at padding."""
    rows = grad.new_zeros((block.num_rows * block.row_tokens, *grad.shape[1:]))
    return rows.index_copy_(0, block.slots, grad)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _window_mask(row_tokens: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """bool[row_tokens, row_tokens], True = attend; None when plain causal attention is the same."""
    if sliding_window is None or sliding_window >= row_tokens:
        return None
    distance = torch.arange(row_tokens, device=device)[:, None] - torch.arange(row_tokens, device=device)[None, :]
    return (distance >= 0) & (distance < sliding_window)


def _attend_rows(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Attention as padded batches: query, key, value [T, heads, dim] → [T, query heads, dim]."""
    queries, keys, values = (_ToRows.apply(x, layout) for x in (query, key, value))
    outputs = []
    for q, k, v, block in zip(queries, keys, values, layout.blocks, strict=True):
        rows = (block.num_rows, block.row_tokens)
        mask = _window_mask(block.row_tokens, sliding_window, query.device)
        batched = [x.unflatten(0, rows).transpose(1, 2) for x in (q, k, v)]
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            batched[0], batched[1], batched[2], attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return _FromRows.apply(layout, *outputs)


def _attend_flash(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """torch's variable-length flash attention: query, key, value [T, heads, dim], 16 bit, CUDA."""
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        query,
        key,
        value,
        layout.cu_seqlens,
        layout.cu_seqlens,
        layout.longest,
        layout.longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out


def varlen_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, heads, T, dim] → ([1, T, heads, dim], None).

    `packed` comes with the forward call of the model. Raises `FieldError` for architectures whose attention has terms
    that are not implemented here.
    """
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise FieldError("model.attention", "auto", f"this architecture needs {name}: set eager")
    assert packed is not None, "the model was called without its packed layout"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if packed.part is None:
        return _attend(q, k, v, packed, scaling, sliding_window)[None], None
    q, k, v = packed.part.to_heads(q, k, v)
    return packed.part.to_tokens(_attend(q, k, v, packed, scaling, sliding_window))[None], None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """query, key, value [T, heads, dim] of all tokens of the row → [T, query heads, dim]."""
    flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    return (_attend_flash if flash else _attend_rows)(query, key, value, layout, scaling, sliding_window)


def register() -> None:
    """Makes transformers know `VARLEN`. Repeating it changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN, varlen_attention)


def forward_arguments(attention: str, layout: PackedLayout) -> dict[str, Any]:
    """What a model's forward call needs besides position ids, for the named attention implementation."""
    if attention == VARLEN:
        return {"packed": layout}
    if attention == "flash_attention_2":
        seqlens, longest = layout.cu_seqlens, layout.longest
        return {"cu_seq_lens_q": seqlens, "cu_seq_lens_k": seqlens, "max_length_q": longest, "max_length_k": longest}
    return {}
