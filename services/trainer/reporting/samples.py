"""Samples: completions as a person reads them, each token with its piece of the text and its importance weight.

Pure but for the tokenizer behind `TokenPieces`. `learn.metrics.sampled_sequences` chooses the completions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipelinerl.messages.sequences import Sequence, TokenIds
from services.trainer.data.evaluation import HeldoutSample

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
    step: int, sequence: Sequence, pieces: TokenPieces | None, weights: NDArray[np.float64] | None
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
        "tokens": pieces and pieces.of(sequence.completion_token_ids, sequence.completion_text, MOST_TOKENS),
        "weights": None if weights is None else [float(f"{one:.4g}") for one in weights[:MOST_TOKENS]],
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


UNFINISHED = "\ufffd"
"""What decoders put where bytes make no whole character yet."""
MOST_UNFINISHED = 16
"""Tokens without text in a row, behind which a completion is told no further: a character has at most 4 bytes, and a few
special tokens may stand before it."""


class Decoder(Protocol):
    """The part of a tokenizer that is needed."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any: ...


class TokenPieces:
    """A completion's text in pieces, one for each token.

    The tokenizer is asked about each token id once, as long as the texts of single tokens make up the completion, or those
    behind another word do. If neither do (characters made of several tokens, tokenizers that glue words), text is decoded token
    by token beside what stands before.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._alone = cache(lambda token: self._text([token]))
        self._behind = cache(lambda anchor, token: self._text([anchor, token])[len(self._alone(anchor)) :])
        self._anchor: int | None = None
        """The first token that was seen to be a word of its own."""
        self._warned = False

    def of(self, token_ids: TokenIds, text: str, limit: int) -> list[str] | None:
        """Pieces of the first `limit` of `token_ids`, which were decoded to `text`; None where they cannot be told apart, or
        the tokenizer fails: samples are for people, and no run ends for one.

        The pieces of all tokens, joined, are `text`. A character of several tokens stands at the last of them, and special
        tokens have no text.
        """
        try:
            return self._of([int(token) for token in token_ids], text, limit)
        except Exception:
            if not self._warned:
                log.warning("samples are written without tokens where the tokenizer fails", exc_info=True)
            self._warned = True
            return None

    def _of(self, ids: list[int], text: str, limit: int) -> list[str] | None:
        for split in (self._each_alone, self._each_behind_a_word):
            pieces = split(ids)
            if "".join(pieces) == text:
                return pieces[:limit]
        pieces = list(self._one_by_one(ids[:limit]))
        return pieces if text.startswith("".join(pieces)) else None

    def _each_alone(self, ids: list[int]) -> list[str]:
        return [self._alone(token) for token in ids]

    def _each_behind_a_word(self, ids: list[int]) -> list[str]:
        """For decoders that drop the space of the first word: the others are decoded behind a word that is always the same."""
        if self._anchor is None:
            words = (token for token in ids if (text := self._alone(token)).strip() and UNFINISHED not in text)
            self._anchor = next(words, None)
        if self._anchor is None:
            return self._each_alone(ids)
        return [*self._each_alone(ids[:1]), *(self._behind(self._anchor, token) for token in ids[1:])]

    def _one_by_one(self, ids: list[int]) -> Iterator[str]:
        """Each token's text is what it adds to that of the tokens since the last whole character but one. Where more than
        `MOST_UNFINISHED` add nothing, they make no text, and all that follow are left to the text."""
        begin, whole = 0, 0  # tokens [begin, whole) give the context, and their text has been told
        for end in range(1, len(ids) + 1):
            if end - whole > MOST_UNFINISHED:
                yield from [""] * (len(ids) - end + 1)
                return
            before, now = self._text(ids[begin:whole]), self._text(ids[begin:end])
            if now.endswith(UNFINISHED) or not now.startswith(before) or len(now) == len(before):
                yield ""
                continue
            yield now[len(before) :]
            begin, whole = whole, end

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
