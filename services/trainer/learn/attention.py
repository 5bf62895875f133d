"""Attention that never crosses sequences, for many sequences packed into one row of tokens.

With transformers' `sdpa` and `eager`, a packed row has a [T, T] mask, which is quadratic in the row's tokens. The attention
registered here copies the sequences into padded batches. Padding is harmless: it follows the tokens of a sequence, attention is
causal, and outputs of padding are dropped. On a GPU in 16 bits, torch's variable-length flash kernel is used instead.

Sequences with the same prompt may share its tokens in the packed row. Attention copies these tokens for each sequence, and the
backward pass adds up the gradients of all copies.

If P ranks share a row, all-to-all exchanges around attention turn [tokens / P, heads] into [tokens, heads / P] and back
(DeepSpeed-Ulysses, arXiv 2309.14509). Every rank of the row collects all scores and computes the same loss. Gradients flow only
through a rank's own part, so the sum over ranks is the row's gradient. P must divide the number of attention heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.errors import FieldError

VARLEN = "pipelinerl_varlen"
"""Name by which this module's attention is registered with transformers."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments that some architectures pass to attention. They change its result, and this module does not implement them."""


def on_device(values: NDArray[Any], device: torch.device | str) -> Tensor:
    """Return `values` on `device`. A CPU tensor may share their memory. A copy to a GPU does not wait for queued work."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Slots:
    """Slots in which attention processes a packed row of T tokens: one for each token of each sequence, and perhaps padding."""

    sources: Tensor
    """int64[slots]: each slot's token, as its index in the row; 0 for padding."""
    first: Tensor
    """int64[T]: for each token, one of its slots."""
    by_token: Tensor
    """int64[slots without padding]: slots grouped by token."""
    begins: Tensor
    """int64[T]: start of each token's group in `by_token`."""


class _AllToAll(torch.autograd.Function):
    """Send part p of x [P, ...] to rank p, and receive part p from rank p. This map is its own inverse and transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        result = torch.empty_like(x)
        dist.all_to_all_single(result, x, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0].contiguous(), ctx.group), None


def key_repeats(query_heads: int, key_heads: int, ranks: int) -> int:
    """Return the fewest copies of each key-value head with which all copies can be divided evenly among `ranks`. Raises
    `FieldError` if `ranks` does not divide `query_heads`."""
    if query_heads % ranks:
        fix = f"does not divide the model's {query_heads} attention heads; use a divisor of {query_heads}"
        raise FieldError("trainer.context_parallel", ranks, fix)
    share = query_heads // key_heads
    return next(repeat for repeat in range(1, share + 1) if share % repeat == 0 and key_heads * repeat % ranks == 0)


@dataclass(frozen=True, eq=False)
class RowPart:
    """Rank `index` of the `ranks` (P) that share each row. `group`: their process group."""

    index: int
    ranks: int
    group: Any

    def tokens(self, length: int) -> slice:
        """Return this rank's slice of a row of `length` tokens, which must be a multiple of `ranks`."""
        own, rest = divmod(length, self.ranks)
        assert not rest, "the row is padded to a multiple of its ranks"
        return slice(self.index * own, (self.index + 1) * own)

    def counts(self, length: int, predictors: Tensor, host: NDArray[np.int64] | None) -> list[int]:
        """Return how many positions in `predictors` (int64[C], ascending) each rank's slice has. `host`: CPU copy or None."""
        places = predictors.cpu().numpy() if host is None else host
        edges = np.arange(1, self.ranks) * (length // self.ranks)
        ends = [*np.searchsorted(places, edges).tolist(), len(places)]
        return np.diff(ends, prepend=0).tolist()

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Map each [tokens / P, heads, dim] → [tokens, heads / P, dim]. Repeat key-value heads until P divides their number."""
        repeats = key_repeats(query.shape[1], key.shape[1], self.ranks)
        key, value = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (key, value))
        parts = (x.unflatten(1, (self.ranks, -1)).transpose(0, 1).contiguous() for x in (query, key, value))
        return tuple(_AllToAll.apply(part, self.group).flatten(0, 1) for part in parts)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Map [tokens, heads / P, dim] → [tokens / P, heads, dim]."""
        parts = x.unflatten(0, (self.ranks, -1)).contiguous()
        return _AllToAll.apply(parts, self.group).transpose(0, 1).flatten(1, 2)

    def collected(self, x: Tensor, counts: list[int]) -> Tensor:
        """Gather the scores [k, tokens] of all ranks. `counts`: tokens by rank. Only this rank's scores have a gradient."""
        padded = x.new_zeros((x.shape[0], max(counts)))
        padded[:, : x.shape[1]] = x.detach()
        everything = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(everything, padded, group=self.group)
        parts = [part[:, :count] for part, count in zip(everything, counts, strict=True)]
        return torch.cat([*parts[: self.index], x, *parts[self.index + 1 :]], dim=1)


@dataclass(frozen=True, eq=False)
class PackedLayout:
    """Boundaries of the sequences in a packed row of T tokens."""

    lengths: NDArray[np.int64]
    """[sequences]: number of tokens of each, including its prompt. Sorted lengths need the fewest padded batches."""
    device: torch.device | str = "cpu"
    places: NDArray[np.int64] | None = None
    """[sum of lengths]: each token's position in the row, sequence after sequence. None if no tokens are shared."""
    part: RowPart | None = None
    """None unless ranks share the row. Each of these ranks then attends to all tokens with a part of the heads."""

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Return the cumulative lengths, int32[sequences + 1]. The last is T, or more if sequences share tokens."""
        return on_device(np.concatenate(([0], np.cumsum(self.lengths))).astype(np.int32), self.device)

    @cached_property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """Return (number of sequences, length of the longest) for each padded batch of consecutive sequences. Each sequence of
        a batch has at least half the longest length, so at most half of the batch is padding."""
        blocks: list[tuple[int, int]] = []
        rows, longest, shortest = 0, 0, int(self.lengths[0])
        for length in self.lengths.tolist():
            if 2 * min(shortest, length) < max(longest, length):
                blocks.append((rows, longest))
                rows, longest, shortest = 0, length, length
            rows, longest, shortest = rows + 1, max(longest, length), min(shortest, length)
        return *blocks, (rows, longest)

    @cached_property
    def padded(self) -> Slots:
        row_tokens = np.repeat([tokens for _, tokens in self.blocks], [rows for rows, _ in self.blocks])
        return self._slots(np.cumsum(row_tokens) - row_tokens, int(row_tokens.sum()))

    @cached_property
    def unpadded(self) -> Slots:
        """Return the slots without padding: sequence after sequence, each with its own copy of the prompt."""
        return self._slots(np.cumsum(self.lengths) - self.lengths, int(self.lengths.sum()))

    def _slots(self, starts: NDArray[np.int64], num_slots: int) -> Slots:
        slots = ranges(starts, self.lengths)
        places = np.arange(len(slots)) if self.places is None else self.places
        sources = np.zeros(num_slots, dtype=np.int64)
        sources[slots] = places
        order = np.argsort(places, kind="stable")
        by_token, begins = slots[order], np.flatnonzero(np.diff(places[order], prepend=-1))
        return Slots(*(on_device(x, self.device) for x in (sources, by_token[begins], by_token, begins)))


def ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the ranges [start, start + length) of integers, concatenated."""
    return np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)


class _ToSlots(torch.autograd.Function):
    """Map x [T, heads, dim] → [slots, heads, dim]. A token's gradient is the sum over its slots."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Slots) -> Tensor:
        ctx.slots = slots
        return x.index_select(0, slots.sources)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # This adds rows in a fixed order. A scatter-add on a GPU would not.
        sums = F.embedding_bag(ctx.slots.by_token, grads[0].flatten(1), ctx.slots.begins, mode="sum")
        return sums.unflatten(1, grads[0].shape[1:]), None


def _attend_rows(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Attend in padded batches: query, key, value [T, heads, dim] → [T, query heads, dim]."""
    sizes = [rows * tokens for rows, tokens in layout.blocks]
    split = [_ToSlots.apply(x, layout.padded).split(sizes) for x in (query, key, value)]
    outputs = []
    for *of_block, block in zip(*split, layout.blocks, strict=True):
        mask = None
        if sliding_window is not None and sliding_window < block[1]:
            positions = torch.arange(block[1], device=query.device)
            distance = positions[:, None] - positions
            mask = (distance >= 0) & (distance < sliding_window)
        q, k, v = (x.unflatten(0, block).transpose(1, 2) for x in of_block)
        gqa = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=gqa)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).index_select(0, layout.padded.first)


def _attend_flash(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Attend with torch's variable-length flash attention: 16-bit query, key, value [T, heads, dim] on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    if layout.places is not None:
        query, key, value = (_ToSlots.apply(x, layout.unpadded) for x in (query, key, value))
    ends, longest, gqa = layout.cu_seqlens, int(layout.lengths.max()), query.shape[1] != key.shape[1]
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    out = varlen_attn(query, key, value, ends, ends, longest, longest, scale=scaling, window_size=window, enable_gqa=gqa)
    assert isinstance(out, Tensor)
    return out if layout.places is None else out.index_select(0, layout.unpadded.first)


def varlen_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: PackedLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with transformers' interface: query [1, heads, T, dim] → ([1, T, heads, dim], None). Raises `FieldError` if the
    architecture passes `UNSUPPORTED` arguments, or does not pass `packed`. Stores the window as `module.packed_window`."""
    vars(module)["packed_window"] = sliding_window
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise FieldError("model.attention", "auto", f"this architecture needs {name}, which auto lacks: set eager")
    if packed is None:
        raise FieldError("model.attention", "auto", "this architecture does not pass on the sequences' boundaries: set eager")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if packed.part is not None:
        q, k, v = packed.part.to_heads(q, k, v)
    attend = _attend_flash if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) else _attend_rows
    out = attend(q, k, v, packed, scaling, sliding_window)
    return (out if packed.part is None else packed.part.to_tokens(out))[None], None


def forward_arguments(attention: str, layout: PackedLayout) -> dict[str, Any]:
    """Return the extra arguments that a model's forward call needs for this attention implementation."""
    if attention == VARLEN:
        return {"packed": layout}
    if attention == "flash_attention_2":
        seqlens, longest = layout.cu_seqlens, int(layout.lengths.max())
        return {"cu_seq_lens_q": seqlens, "cu_seq_lens_k": seqlens, "max_length_q": longest, "max_length_k": longest}
    return {}
