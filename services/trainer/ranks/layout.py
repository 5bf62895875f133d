"""Which part of the work each rank has, as a pure function of its number and the recipe.

Ranks that share the tokens of a row (sequence parallelism) are neighbours, and so are those that share one copy of the
weights: both talk most, and neighbours are on one node. Opens no connection.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelinerl.errors import FieldError


@dataclass(frozen=True)
class RankLayout:
    """One rank among `size`. Raises `FieldError` for numbers that do not divide."""

    rank: int = 0
    size: int = 1
    sequence_ranks: int = 1
    """Ranks that share the tokens of one row."""
    shard_ranks: int = 1
    """Ranks that share one copy of weights, gradients and optimizer state; each group of them has a copy."""

    def __post_init__(self) -> None:
        for name, value in (("context_parallel", self.sequence_ranks), ("shard_ranks", self.shard_ranks)):
            if self.size % value:
                fix = f"does not divide the {self.size} ranks of the trainer; use one of {divisors(self.size)}"
                raise FieldError(f"trainer.{name}", value, fix)

    @property
    def data_ranks(self) -> int:
        """Rows that are computed at the same time."""
        return self.size // self.sequence_ranks

    @property
    def data_index(self) -> int:
        """Which of those rows this rank has (a part of)."""
        return self.rank // self.sequence_ranks

    @property
    def sequence_index(self) -> int:
        """Which part of its row."""
        return self.rank % self.sequence_ranks

    @property
    def copies(self) -> int:
        """Copies of the weights: more than one is hybrid sharding."""
        return self.size // self.shard_ranks


def rank_layout(rank: int, size: int, context_parallel: int, shard_ranks: int) -> RankLayout:
    """Of a recipe's `trainer.context_parallel` and `trainer.shard_ranks` (0 = all ranks)."""
    return RankLayout(rank, size, context_parallel, shard_ranks or size)


def divisors(number: int) -> list[int]:
    """Ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
