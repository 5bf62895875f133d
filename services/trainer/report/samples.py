"""One line of samples.jsonl: a completion as a person reads it, with what is known of each of its tokens.

Pure but for the tokenizer behind `TokenPieces`. Which completions become samples is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelinerl.types import Sequence
from services.trainer.evaluation import HeldoutSample
from services.trainer.report.token_pieces import TokenPieces

Sample = dict[str, Any]
"""One object of samples.jsonl. Keys: docs/run-directory.md."""
MOST_TOKENS = 1024
"""Of a completion that are written one by one."""


def trained_sample(
    step: int, sequence: Sequence, pieces: TokenPieces | None, weights: NDArray[np.float64] | None
) -> Sample:
    """Of a sequence that optimizer step `step` trained on; `weights` float64[tokens]: its importance weights."""
    return {
        "step": step,
        "version": step - 1,
        "prompt": sequence.prompt_text,
        "completion": sequence.completion_text,
        "reward": sequence.reward,
        "spans": [[span.version, span.start, span.end] for span in sequence.spans],
        "heldout": False,
        "tokens": pieces and pieces.of(sequence.completion_token_ids, sequence.completion_text, MOST_TOKENS),
        "weights": None if weights is None else rounded(weights[:MOST_TOKENS]),
    }


def heldout_sample(version: int, sample: HeldoutSample, pieces: TokenPieces | None) -> Sample:
    """Of the evaluation of `version`."""
    return {
        "step": version,
        "version": version,
        "prompt": sample.prompt,
        "completion": sample.completion,
        "reward": sample.reward,
        "spans": [list(span) for span in sample.spans],
        "heldout": True,
        "tokens": pieces and pieces.of(sample.token_ids, sample.completion, MOST_TOKENS),
        "weights": None,
    }


def rounded(weights: Iterable[float]) -> list[float]:
    """To four digits: enough to read, and a third of the text."""
    return [float(f"{weight:.4g}") for weight in weights]
