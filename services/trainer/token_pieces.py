"""A completion's text in pieces, one for each token: what a person needs to see which token is where.

Knows nothing of policies. A tokenizer is asked about each token id once, as long as the texts of single tokens make up the
completion; where they do not (characters made of several tokens, tokenizers that glue words), text is decoded token by token
beside what stands before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from pipelinerl.types import TokenIds

UNFINISHED = "\ufffd"
"""What decoders put where bytes make no whole character yet."""


class Decoder(Protocol):
    """The part of a tokenizer that is needed."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any: ...


class TokenPieces:
    """Pieces of completions of one tokenizer. Keeps the text of each token id that it has seen."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, token_ids: TokenIds, text: str, limit: int) -> list[str] | None:
        """Pieces of the first `limit` of `token_ids`, which were decoded to `text`; None where they cannot be told apart.

        The pieces of all tokens, joined, are `text`. A character of several tokens stands at the last of them, and special
        tokens have no text.
        """
        ids = [int(token) for token in token_ids]
        pieces = [self._alone(token) for token in ids]
        if "".join(pieces) != text:
            ids = ids[:limit]
            pieces = list(self._one_by_one(ids))
            if not text.startswith("".join(pieces)):
                return None
        return pieces[:limit]

    def _alone(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._text([token])
        return self._known[token]

    def _one_by_one(self, ids: Sequence[int]) -> Iterator[str]:
        """Each token's text is what it adds to that of the tokens since the last whole character but one."""
        begin, whole = 0, 0  # tokens [begin, whole) give the context, and their text has been told
        for end in range(1, len(ids) + 1):
            before, now = self._text(ids[begin:whole]), self._text(ids[begin:end])
            if now.endswith(UNFINISHED) or not now.startswith(before) or len(now) == len(before):
                yield ""
                continue
            yield now[len(before) :]
            begin, whole = whole, end

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
