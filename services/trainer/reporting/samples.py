"""Samples: completions as a person reads them, each token with its piece of the text and its importance weight.

Pure. `learn.meter.sampled_sequences` chooses the completions.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from pipelinerl.messages.sequences import Sequence, TokenIds
from services.trainer.data.evaluation import HeldoutSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Sample = dict[str, Any]
"""One object of samples.jsonl. Keys: docs/run-directory.md."""
MOST_TOKENS = 1024
"""Of a completion that are written one by one."""
MOST_WITH_TOKENS = 500
"""Steps of a run whose samples are written token by token: a sample so has up to 20 KB, and without them 1 to 4."""


def has_tokens(step: int, steps: int) -> bool:
    """Whether the samples of `step` of a run of `steps` are written with tokens and weights: about `MOST_WITH_TOKENS` steps,
    the first and the last among them. Pure."""
    return step <= 1 or step == steps or step % -(-steps // MOST_WITH_TOKENS) == 0


def trained_sample(
    step: int, sequence: Sequence, tokenizer: PreTrainedTokenizerBase | None, weights: NDArray[np.float64] | None
) -> Sample:
    """Of a sequence that optimizer step `step` trained on; `weights` float64[tokens]: its importance weights, which are written
    with four digits: enough to read, and a third of the text."""
    return {
        "step": step,
        "version": step - 1,
        "prompt": sequence.prompt_text,
        "completion": sequence.completion_text,
        "reward": sequence.reward,
        "spans": [[span.version, span.start, span.end] for span in sequence.spans],
        "heldout": False,
        "tokens": token_pieces(tokenizer, sequence.completion_token_ids, sequence.completion_text, MOST_TOKENS),
        "weights": None if weights is None else [float(f"{one:.4g}") for one in weights[:MOST_TOKENS]],
    }


def heldout_sample(version: int, sample: HeldoutSample, tokenizer: PreTrainedTokenizerBase | None) -> Sample:
    """Of the evaluation of `version`."""
    return {
        "step": version,
        "version": version,
        "prompt": sample.prompt,
        "completion": sample.completion,
        "reward": sample.reward,
        "spans": [list(span) for span in sample.spans],
        "heldout": True,
        "tokens": token_pieces(tokenizer, sample.token_ids, sample.completion, MOST_TOKENS),
        "weights": None,
    }


def token_pieces(
    tokenizer: PreTrainedTokenizerBase | None, token_ids: TokenIds, text: str, limit: int
) -> list[str] | None:
    """The pieces of `text`, to which `token_ids` were decoded, that the first `limit` of them make.

    A character of several tokens stands at the last of them, and special tokens have no text. None where tokens and text
    cannot be matched: without a tokenizer, with one that is not of the tokenizers library, or when it fails.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    stream = DecodeStream(skip_special_tokens=True)
    try:
        pieces = [stream.step(backend, int(token)) or "" for token in token_ids[:limit]]
    except Exception:  # noqa: BLE001 - the library has no type of its own; samples are for people, and no run ends for one
        _tell_of_failing(backend)
        return None
    return pieces if text.startswith("".join(pieces)) else None


@functools.cache
def _tell_of_failing(tokenizer: Tokenizer) -> None:  # once of each, not with each sample
    log.warning("samples are written without their tokens where the tokenizer fails", exc_info=True)
