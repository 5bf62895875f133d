"""One row of tokens shared by several ranks: each rank scores its part of the tokens, and gets the scores of all parts.

All-to-all exchanges before and after attention turn [tokens / P, heads] into [tokens, heads / P] and back, so that any
attention over whole sequences can be used (DeepSpeed-Ulysses, arXiv 2309.14509). Every rank of the row collects all scores and
computes the same loss. Gradients flow only through a rank's own part, so that the gradients of all ranks add up. Ring
attention, which would allow more ranks than heads, is not implemented.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipelinerl.errors import FieldError
from services.trainer.learn.batch import TokenRow


class _AllToAll(torch.autograd.Function):
    """Map x [P, ...]: part p is sent to rank p, and the part received from rank p becomes part p of the result. The map is its
    own inverse and transpose."""

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
    """Return how often to repeat each key-value head so that the heads divide among `ranks`. Raises `FieldError`."""
    if query_heads % ranks:
        fix = f"does not divide the {query_heads} attention heads of the model; use a divisor of them"
        raise FieldError("trainer.context_parallel", ranks, fix)
    share = query_heads // key_heads
    return next(repeat for repeat in range(1, share + 1) if share % repeat == 0 and key_heads * repeat % ranks == 0)


class Collected(torch.autograd.Function):
    """Map x [k, own tokens] → [k, tokens of all ranks]. Backward returns the gradient of the rank's own tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], rank: int, group: Any) -> Tensor:
        ctx.own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        padded = x.new_zeros((x.shape[0], max(counts)))
        padded[:, : x.shape[1]] = x
        everything = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(everything, padded, group=group)
        return torch.cat([part[:, :count] for part, count in zip(everything, counts, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0][:, ctx.own].contiguous(), None, None, None


@dataclass(frozen=True, eq=False)
class RowPart:
    """Rank `index` of the `ranks` that share each row."""

    index: int
    ranks: int
    group: Any

    def tokens(self, row: TokenRow) -> slice:
        """Return this rank's slice of `row`. The row's length must be a multiple of `ranks`."""
        length = row.input_ids.shape[1] // self.ranks
        assert length * self.ranks == row.input_ids.shape[1], "the row is padded to a multiple of its ranks"
        return slice(self.index * length, (self.index + 1) * length)

    def of(self, row: TokenRow) -> TokenRow:
        """Return this rank's tokens of `row`, with the layout of the whole row."""
        own = self.tokens(row)
        return TokenRow(row.input_ids[:, own], row.position_ids[:, own], replace(row.layout, part=self))

    def counts(self, row: TokenRow, predictors: Tensor) -> list[int]:
        """Return how many of `predictors` (int64[C], ascending) lie in each part. Waits for the device unless the row has a
        host copy of them."""
        places = predictors.cpu().numpy() if row.predictors is None else row.predictors
        edges = np.arange(1, self.ranks) * (row.input_ids.shape[1] // self.ranks)
        ends = [*np.searchsorted(places, edges).tolist(), len(places)]
        return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Map each [tokens / P, heads, dim] → [tokens, heads / P, dim]. Key-value heads are repeated as often as needed to
        divide among the ranks."""
        repeats = key_repeats(query.shape[1], key.shape[1], self.ranks)
        key, value = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (key, value))
        parts = (x.unflatten(1, (self.ranks, -1)).transpose(0, 1).contiguous() for x in (query, key, value))
        return tuple(_AllToAll.apply(part, self.group).flatten(0, 1) for part in parts)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Map [tokens, heads / P, dim] → [tokens / P, heads, dim]."""
        parts = x.unflatten(0, (self.ranks, -1)).contiguous()
        return _AllToAll.apply(parts, self.group).transpose(0, 1).flatten(1, 2)
