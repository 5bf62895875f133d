"""Compute in closed form the highest throughput and the largest lag of conventional RL and of the pipeline (PipelineRL paper,
appendix A).

A generator with h sequences in progress makes U(h) tokens per unit of time. A decode step takes h / U(h), and one rank trains
on a token in τ. In the paper the unit is a *flash*, the time that a token takes at full utilisation, and U is a utilisation.
With measured rates the unit is the second. All rates are completion tokens per unit of time, over all accelerators.

    r_gen  = K L̄ / Σ_l (h_l / U(h_l)),  h_l = K / N · share of the sequences with l tokens or more      conventional, generating
    r_conv = 1 / (1 / r_gen + τ / N)                                                                    conventional
    r_pipe = min(U(H) · I, (N - I) / τ)                                                                 pipeline, I generators

K = B · G sequences of mean length L̄ are generated in a phase on N accelerators, each with h_l in progress at token l. In the
pipeline, each of I generators has H in progress. Rates assume that neither side waits; `simulator.py` adds queues and chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import Recipe

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class DecodeCurve:
    """U(h) from measured `points` (h, tokens per unit of time). A decode step's time is linear between points and constant
    below the first; above the last, the rate is constant. Raises `FieldError` unless all are above 0 and h ascends."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        in_progress, rates = [h for h, _ in self.points], [rate for _, rate in self.points]
        if not self.points or min(*in_progress, *rates) <= 0 or sorted(set(in_progress)) != in_progress:
            raise FieldError("decode", self.points, "give values above 0, with ascending numbers of sequences in progress")

    def step_time(self, in_progress: Floats | float) -> Floats:
        """Return the time of one decode step of `in_progress` sequences, h / U(h)."""
        known = np.array([h for h, _ in self.points], dtype=float)
        times = known / np.array([rate for _, rate in self.points])
        beyond = np.maximum(np.asarray(in_progress, dtype=float) / known[-1], 1.0)
        return np.interp(in_progress, known, times) * beyond

    def rate(self, in_progress: float) -> float:
        """Return U(h), tokens per unit of time."""
        return float(in_progress / self.step_time(in_progress))


@dataclass(frozen=True, eq=False)
class Lengths:
    """Completion lengths int64[lengths], ascending, and their shares float64[lengths], which add up to 1."""

    tokens: NDArray[np.int64]
    shares: Floats

    @classmethod
    def of_bars(cls, bars: Iterable[tuple[int, int, float]]) -> Lengths:
        """Make lengths from the bars (first, last, weight) of a histogram, in any order. The lengths within a bar are equally
        frequent. Raises `FieldError` if the histogram is empty or invalid."""
        sums: dict[int, float] = {}
        for first, last, weight in bars:
            for tokens in range(first, last + 1):
                sums[tokens] = sums.get(tokens, 0.0) + weight / (last + 1 - first)
        kept = sorted((tokens, weight) for tokens, weight in sums.items() if weight)
        if not kept or kept[0][0] < 1 or not all(0 < weight < math.inf for _, weight in kept):
            raise FieldError("lengths", dict(kept), "give one or more lengths above 0, each with a weight above 0")
        shares = np.array([weight for _, weight in kept], dtype=float)
        return cls(np.array([tokens for tokens, _ in kept], dtype=np.int64), shares / shares.sum())

    @property
    def mean(self) -> float:
        return float(self.tokens @ self.shares)

    @property
    def longest(self) -> int:
        return int(self.tokens[-1])

    def sample(self, generator: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Draw independent lengths, int64[size]."""
        return generator.choice(self.tokens, size=size, p=self.shares)


def largest_lag(in_progress: int, batch_size: int, longest: float, mean: float) -> int:
    """Return g_max = ⌈H I L / (L̄ B)⌉ optimizer steps, the lag of the oldest token of a pipeline in which no finished sequence
    waits. `in_progress`: sequences on all generators, H · I. Lengths are in tokens."""
    return math.ceil(in_progress * longest / (mean * batch_size))


MOST_STALE = 0.01
"""Largest acceptable share of sequences dropped as stale."""


def recipe_lag(recipe: Recipe, num_actors: int, longest: float = 1.0, mean: float = 1.0) -> int:
    """Return the largest lag of a run whose actors are full. `longest`, `mean`: completion lengths in tokens. By default,
    the two are equal, which gives the smallest value. In conventional mode, the result depends only on `conventional_g`."""
    if recipe.mode == "conventional":
        return recipe.algorithm.conventional_g - 1
    in_progress = recipe.samples_in_progress * max(1, num_actors)
    return largest_lag(in_progress, recipe.trainer.batch_size, longest, mean)


def too_small_max_lag(recipe: Recipe, lag: int) -> FieldError | None:
    """Return an error if `max_lag` is below `lag`, the run's largest lag; otherwise None. With such a limit, the feeder issues
    too few groups to fill the actors, and sequences are too old when their group is complete. Both problems also
    occur with `max_lag_of: mean`."""
    max_lag = recipe.algorithm.max_lag
    if max_lag is None or lag <= max_lag:
        return None
    others = ", fewer actors, a smaller actor.sequences_in_progress, or a larger trainer.batch_size" if lag > 1 else ""
    why = f"is below the largest lag with full actors, ⌈H I L / (L̄ B)⌉ = {lag}: generation is throttled, and sequences are"
    return FieldError("algorithm.max_lag", max_lag, f"{why} dropped as stale; use at least {lag}{others}")


def conventional_rate(
    curve: DecodeCurve, training_time: float, lengths: Lengths, num_sequences: int, num_accelerators: int
) -> float:
    """Return r_conv, the rate if all accelerators generate K = `num_sequences` and then all train. `training_time`: τ, the time
    in which one accelerator trains on one token."""
    # Between two lengths that occur, the number of unfinished sequences does not change.
    unfinished = np.cumsum(lengths.shares[::-1])[::-1] * (num_sequences / num_accelerators)
    decode_steps = np.diff(lengths.tokens, prepend=0)
    time_per_token = decode_steps @ curve.step_time(unfinished) / (num_sequences * lengths.mean)
    return float(1 / (time_per_token + training_time / num_accelerators))


@dataclass(frozen=True)
class Split:
    """Accelerators divided into generators, each with H sequences in progress, and trainers. `generation`, `training` and
    `updates` are the highest rates, in tokens per unit of time, that generation, training and weight updates allow."""

    num_generators: int
    num_trainers: int
    sequences_in_progress: int
    generation: float
    training: float
    largest_lag: int
    updates: float = math.inf

    @property
    def rate(self) -> float:
        """The pipeline's rate r_pipe. A step takes at least as long as one weight update."""
        return min(self.generation, self.training, self.updates)


def split(
    curve: DecodeCurve,
    training_time: float,
    lengths: Lengths,
    batch_size: int,
    sequences_in_progress: int,
    num_generators: int,
    num_trainers: int,
    update_time: float = 0.0,
) -> Split:
    """Compute a split's rates and largest lag. `training_time`: τ; `update_time`: time of one weight update."""
    generation, training = curve.rate(sequences_in_progress) * num_generators, num_trainers / training_time
    lag = largest_lag(sequences_in_progress * num_generators, batch_size, lengths.longest, lengths.mean)
    updates = batch_size * lengths.mean / update_time if update_time else math.inf
    return Split(num_generators, num_trainers, sequences_in_progress, generation, training, lag, updates)
