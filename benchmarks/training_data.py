"""Batches of random tokens as actors would leave them, in uniform or long-tailed lengths. Nothing is measured here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipelinerl.messages.sequences import Sequence, VersionSpan
from services.trainer.learn.batch import TrainingGroup

GROUP_SIZE = 8
PROMPT_TOKENS = 8
VERSION = 1
"""At which the gradient of such a batch is taken."""
FILLED = 0.95
"""Share of its rows that a long-tailed batch has tokens for, so that packing has some room."""


def uniform_lengths(shortest: int, longest: int, number: int, seed: int = 0) -> list[int]:
    """`number` lengths, both ends included."""
    return np.random.default_rng(seed).integers(shortest, longest + 1, number).tolist()


def long_tailed_lengths(shortest: int, longest: int, total: int, seed: int = 0) -> list[int]:
    """Lengths that sum to at most `FILLED` of `total`, one of them `longest`; the others lognormal within the bounds.

    Their median is four times the shortest or a quarter of the longest, whichever is less.
    """
    generator = np.random.default_rng(seed)
    median, lengths = min(4 * shortest, longest / 4), [longest]
    while True:
        drawn = int(np.clip(generator.lognormal(np.log(median), 0.8), shortest, longest))
        if sum(lengths) + drawn > FILLED * total:
            return lengths
        lengths.append(drawn)


def make_groups(lengths: list[int], vocabulary: int, prompt_tokens: int = PROMPT_TOKENS, seed: int = 0) -> list[TrainingGroup]:
    """Sequences of `lengths` tokens, prompts included, of two policy versions each, in groups of up to `GROUP_SIZE`.

    Each has a prompt of its own, so that a learner computes as many tokens as a bare loop does.
    """
    generator = np.random.default_rng(seed)
    sequences = [
        _sequence(generator, index, length - prompt_tokens, prompt_tokens, vocabulary) for index, length in enumerate(lengths)
    ]
    groups = [sequences[first : first + GROUP_SIZE] for first in range(0, len(sequences), GROUP_SIZE)]
    return [TrainingGroup(tuple(group), generator.normal(size=len(group))) for group in groups]


def of_one_prompt(groups: list[TrainingGroup]) -> list[TrainingGroup]:
    """The same, where all sequences of a group have its first one's prompt."""
    return [
        replace(
            group,
            sequences=tuple(replace(each, prompt_token_ids=group.sequences[0].prompt_token_ids) for each in group.sequences),
        )
        for group in groups
    ]


def _sequence(generator: np.random.Generator, index: int, tokens: int, prompt_tokens: int, vocabulary: int) -> Sequence:
    middle = tokens // 2
    return Sequence(
        run="benchmark",
        sequence_id=f"{index // GROUP_SIZE}.{index % GROUP_SIZE}",
        group_id=str(index // GROUP_SIZE),
        sample_index=index % GROUP_SIZE,
        group_size=GROUP_SIZE,
        task="none",
        prompt_token_ids=generator.integers(0, vocabulary, prompt_tokens).astype(np.int32),
        completion_token_ids=generator.integers(0, vocabulary, tokens).astype(np.int32),
        behaviour_logprobs=np.full(tokens, -np.log(vocabulary), dtype=np.float32),
        spans=(VersionSpan(0, 0, middle), VersionSpan(VERSION, middle, tokens)),
        reward=0.0,
    )
