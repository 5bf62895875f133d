"""One row of tokens shared by several ranks: each scores its part of the tokens, and has the scores of all.

Attention is `exchange.py`'s. What a loss needs of the tokens is collected from all parts; the loss is computed alike on every
rank of the row, and each rank's gradient goes through its own part only, so that gradients of all ranks add up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.learn.batch import TokenRow
from services.trainer.ranks.exchange import HeadExchange


class _Collected(torch.autograd.Function):
    """x [k, own tokens] → [k, tokens of all ranks]. The gradient of a rank is that of its own tokens."""

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

    def of(self, row: TokenRow) -> TokenRow:
        """This rank's tokens of `row`, whose length the ranks divide, with the layout of all."""
        own = self._tokens(row)
        layout = replace(row.layout, exchange=HeadExchange(self.ranks, self.group))
        return TokenRow(row.input_ids[:, own], row.position_ids[:, own], layout)

    def counts(self, row: TokenRow, predictors: Tensor) -> list[int]:
        """How many of `predictors` int64[C], ascending, lie in each part. Waits for the device."""
        edges = torch.arange(1, self.ranks, device=predictors.device) * (row.input_ids.shape[1] // self.ranks)
        ends = [*torch.searchsorted(predictors, edges).tolist(), len(predictors)]
        return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]

    def first_token(self, row: TokenRow) -> int:
        return self._tokens(row).start

    def collect(self, values: Tensor, counts: list[int]) -> Tensor:
        """values [k, own] of each rank → [k, sum of counts]."""
        return _Collected.apply(values, counts, self.index, self.group)

    def _tokens(self, row: TokenRow) -> slice:
        length = row.input_ids.shape[1] // self.ranks
        assert length * self.ranks == row.input_ids.shape[1], "the row is padded to a multiple of its ranks"
        return slice(self.index * length, (self.index + 1) * length)
