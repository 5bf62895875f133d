"""Attention of ranks that share the tokens of a row: parts of tokens with all heads become all tokens with a part of the heads.

All-to-all exchanges before and after attention turn [tokens / P, heads] into [tokens, heads / P] and back, so that any
attention over whole sequences stays as it is (DeepSpeed-Ulysses, arXiv 2309.14509). Not here: ring attention, which would
allow more ranks than heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipelinerl.errors import FieldError


class _AllToAll(torch.autograd.Function):
    """x [P, ...]: part p goes to rank p; what comes from rank p is part p of the result. Its own inverse, and transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        result = torch.empty_like(x)
        dist.all_to_all_single(result, x, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0].contiguous(), ctx.group), None


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """Between parts of tokens with all heads, and all tokens with a part of the heads."""

    ranks: int
    group: Any

    def to_heads(self, x: Tensor) -> Tensor:
        """[tokens / P, heads, dim] → [tokens, heads / P, dim]."""
        tokens, heads, dim = x.shape
        parts = x.view(tokens, self.ranks, heads // self.ranks, dim).transpose(0, 1).contiguous()
        return _AllToAll.apply(parts, self.group).flatten(0, 1)

    def to_tokens(self, x: Tensor) -> Tensor:
        """[tokens, heads / P, dim] → [tokens / P, heads, dim]."""
        parts = x.unflatten(0, (self.ranks, -1)).contiguous()
        return _AllToAll.apply(parts, self.group).transpose(0, 1).flatten(1, 2)

    def shared_out(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`to_heads` of each [tokens / P, heads, dim]; key-value heads that are too few for the ranks are repeated."""
        repeats = key_repeats(query.shape[1], key.shape[1], self.ranks)
        key, value = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (key, value))
        return self.to_heads(query), self.to_heads(key), self.to_heads(value)


def key_repeats(query_heads: int, key_heads: int, ranks: int) -> int:
    """How often each key-value head must be repeated for the heads to divide among `ranks`. Raises `FieldError`."""
    if query_heads % ranks:
        fix = f"does not divide the {query_heads} attention heads of the model; use a divisor of them"
        raise FieldError("trainer.context_parallel", ranks, fix)
    share = query_heads // key_heads
    return next(repeat for repeat in range(1, share + 1) if share % repeat == 0 and key_heads * repeat % ranks == 0)
