"""The few sequences of an optimizer step that people get to see, and where their tokens stand in the step's values.

Pure. The values of a step come micro-batch after micro-batch, those of all ranks behind each other (`StepCollector.values`);
each sequence's completion tokens are one piece of them. What is written of a sample: `services/trainer/report/samples.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many

import numpy as np
from numpy.typing import NDArray

from pipelinerl.types import Sequence
from services.trainer.learn.batch import TrainingGroup, row_order

SAMPLED_WEIGHTS = "sampled_weights"
"""Key of the sampled sequences' weights among a step's figures; no key of metrics.jsonl."""


def sampled_sequences(groups: Many[TrainingGroup]) -> list[Sequence]:
    """Two of a step: its first sequence, and of the other groups' the first one that most versions sampled."""
    first, *rest = groups[0].sequences
    others = [sequence for group in groups[1:] for sequence in group.sequences] or rest
    return [first, max(others, key=lambda sequence: sequence.num_versions)] if others else [first]


def sampled_places(groups: Many[TrainingGroup], batches: Iterable[Many[int]]) -> dict[str, slice]:
    """By id of the sampled sequences, their completion tokens' places among those of the step.

    `batches`: of each micro-batch, in order of the step's values, its sequences as positions in the step.
    """
    sequences = [sequence for group in groups for sequence in group.sequences]
    wanted = {sequence.sequence_id for sequence in sampled_sequences(groups)}
    places, begin = {}, 0
    for members in batches:
        for index in row_order([sequences[member] for member in members]):
            sequence = sequences[members[index]]
            end = begin + sequence.num_completion_tokens
            if sequence.sequence_id in wanted:
                places[sequence.sequence_id] = slice(begin, end)
            begin = end
    return places


def sampled_weights(places: Mapping[str, slice], log_weights: NDArray[np.float32]) -> dict[str, NDArray[np.float64]]:
    """float64[tokens], importance weights w by id, unclamped, out of `log_weights` [C] of the step, nats."""
    with np.errstate(over="ignore"):
        return {key: np.exp(log_weights[place].astype(np.float64)) for key, place in places.items()}
