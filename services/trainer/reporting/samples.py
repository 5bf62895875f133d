"""Samples: completions for people to read, with the text and importance weight of each token. Pure."""

from __future__ import annotations

import functools
import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from pipelinerl.messages.sequences import Sequence, TokenIds, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Sample = dict[str, Any]
"""One object of samples.jsonl. docs/run-directory.md documents its keys."""
MOST_TOKENS = 1024
"""A sample lists the text and the importance weight of its first sampled tokens, at most this number."""
MOST_WITH_TOKENS = 500
"""Approximate number of steps per run whose samples list tokens (up to 20 KB each). Other samples take 1 to 4 KB."""


def has_tokens(step: int, steps: int) -> bool:
    """Return whether samples of `step` list tokens: at about `MOST_WITH_TOKENS` steps, including the first and last. Pure."""
    return step <= 1 or step == steps or step % -(-steps // MOST_WITH_TOKENS) == 0


def sample_of(
    sequence: Sequence,
    tokenizer: PreTrainedTokenizerBase | None,
    weights: NDArray[np.float64] | None = None,
    *,
    step: int,
    version: int,
    heldout: bool = False,
) -> Sample:
    """Return the sample of a sequence. `weights`: importance weights in training, float64[sampled tokens]; None = unknown."""
    sample: Sample = {
        "step": step,
        "version": version,
        "heldout": heldout,
        "task": sequence.task,
        "prompt": sequence.prompt_text,
        "completion": sequence.completion_text,
        "reward": None if sequence.failure else sequence.reward,
        "terms": sequence.reward_components,
        "metrics": sequence.metrics,
        "reference": reference_answer(sequence.reference_json),
        "answer": sequence.answer,
        "reason": sequence.failure or sequence.reason,
        "spans": [[span.version, span.start, span.end] for span in sequence.spans],
    }
    digits = None if weights is None else [float(f"{one:.4g}") for one in weights]
    if sequence.turns:
        branches = _branches(sequence, tokenizer, digits)
        prompt = branches[0]["prompt"] or sequence.prompt_text
        return sample | {"prompt": prompt, "tokens": None, "weights": None, "branches": branches}
    tokens = token_pieces(tokenizer, sequence.completion_token_ids, sequence.completion_text, MOST_TOKENS)
    return sample | {"tokens": tokens, "weights": digits and digits[:MOST_TOKENS]}


def reference_answer(text: str) -> Any:
    """Return the reference answer that the reward compares with; None if the task has none."""
    try:
        reference = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return reference.get("answer") if isinstance(reference, dict) else None


def _branches(
    sequence: Sequence, tokenizer: PreTrainedTokenizerBase | None, weights: list[float] | None
) -> list[dict[str, Any]]:
    """Return an episode's branches, with special tokens, which mark the roles. `weights`: one per sampled token."""
    branches, written = [], 0
    for branch in sequence.all_branches:
        pieces, parts, end = _pieces(tokenizer, branch.completion_token_ids) or [], [], 0
        for turn in branch.turns or (Turn(0, branch.num_completion_tokens, sequence.finish_reason),):
            if end < turn.start:
                text = "".join(pieces[end : turn.start])
                parts.append({"role": "observation", "start": end, "end": turn.start, "text": text})
            own = slice(written, written + turn.end - turn.start)
            written, end, room = own.stop, turn.end, max(0, MOST_TOKENS - own.start)
            of_turn = pieces[turn.start : end]
            parts.append(
                {
                    "role": "assistant",
                    "start": turn.start,
                    "end": end,
                    "text": "".join(of_turn),
                    "finish_reason": turn.finish_reason,
                    "tokens": of_turn[:room] if pieces else None,
                    "weights": weights and weights[own][:room],
                }
            )
        prompt = "".join(_pieces(tokenizer, branch.prompt_token_ids) or [])
        spans = [[span.version, span.start, span.end] for span in branch.spans]
        branches.append({"prompt": prompt, "spans": spans, "parts": parts})
    return branches


def without_tokens(sample: Sample) -> Sample:
    bare = {**sample, "tokens": None, "weights": None}
    if "branches" in sample:
        bare["branches"] = [
            {**branch, "parts": [part | {"tokens": None, "weights": None} for part in branch["parts"]]}
            for branch in sample["branches"]
        ]
    return bare


def token_pieces(tokenizer: PreTrainedTokenizerBase | None, token_ids: TokenIds, text: str, limit: int) -> list[str] | None:
    """Split `text`, the decoded `token_ids`, into one piece for each of the first `limit` tokens. If several tokens make one
    character, the last of them gets it. Special tokens have no text. Return None if `text` does not begin with the pieces."""
    pieces = _pieces(tokenizer, token_ids[:limit], skip_special_tokens=True)
    return pieces if pieces is not None and text.startswith("".join(pieces)) else None


def _pieces(
    tokenizer: PreTrainedTokenizerBase | None, token_ids: TokenIds, *, skip_special_tokens: bool = False
) -> list[str] | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    stream = DecodeStream(skip_special_tokens=skip_special_tokens)
    try:
        return [stream.step(backend, int(token)) or "" for token in token_ids]
    except Exception:  # noqa: BLE001 - the library has no error type; a failed sample must not end a run
        _tell_of_failing(backend)
        return None


@functools.cache
def _tell_of_failing(tokenizer: Tokenizer) -> None:  # once per tokenizer
    log.warning("samples are written without their tokens because the tokenizer fails", exc_info=True)
