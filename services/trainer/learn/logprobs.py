"""Log-probability of each sampled token, and entropy of the distribution it was sampled from.

Logits are made only where a completion token is predicted, never more than `max_logits` at a time, and made again in
the backward pass instead of kept: block by block of the vocabulary where the head is a plain linear layer
(`linear_logprobs.py`), else in chunks of tokens. Not here: top-p and top-k. A policy sampled with them is compared with
the full distribution, so keep both off (the recipes' default) when training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from services.trainer.learn.linear_logprobs import MAX_LOGITS, is_plain_linear, linear_scores


@dataclass(frozen=True, eq=False)
class TokenScores:
    """Of C completion tokens, float32[C] each, nats, at the sampling temperature."""

    logprobs: Tensor
    entropy: Tensor


def token_scores(logits: Tensor, targets: Tensor, temperature: float, entropy_grad: bool = False) -> TokenScores:
    """Scores of `targets` int64[C] under `logits` [C, vocabulary]. The entropy has a gradient only when asked for."""
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    log_distribution = torch.log_softmax(scaled, dim=-1)
    logprobs = log_distribution.gather(-1, targets[:, None]).sum(-1)
    source = log_distribution if entropy_grad else log_distribution.detach()
    # 0 · log 0 = 0: a masked vocabulary entry has logit -inf.
    entropy = -(source.exp() * source.clamp(min=torch.finfo(source.dtype).min)).sum(-1)
    return TokenScores(logprobs, entropy)


def head_scores(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    temperature: float,
    entropy_grad: bool = False,
    max_logits: int = MAX_LOGITS,
) -> TokenScores:
    """`token_scores` of `head(hidden)`, for hidden [C, width], with at most `max_logits` logits at a time.

    `head` has a `weight` [vocabulary, width]; if it does more than a linear layer does, it is called.
    """
    assert isinstance(head.weight, Tensor)
    if is_plain_linear(head):
        bias = head.bias if isinstance(head.bias, Tensor) else None
        return TokenScores(*linear_scores(hidden, head.weight, bias, targets, temperature, entropy_grad, max_logits))
    chunk_tokens = max(1, max_logits // head.weight.shape[0])
    return chunked_scores(hidden, head, targets, temperature, chunk_tokens, entropy_grad)


def chunked_scores(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperature: float,
    chunk_tokens: int,
    entropy_grad: bool = False,
) -> TokenScores:
    """`token_scores` of `head(hidden)`, for hidden [C, width], with at most `chunk_tokens` tokens' logits at a time."""

    def scores(hidden_chunk: Tensor, target_chunk: Tensor) -> tuple[Tensor, Tensor]:
        result = token_scores(head(hidden_chunk), target_chunk, temperature, entropy_grad)
        return result.logprobs, result.entropy

    if len(targets) <= chunk_tokens:
        return TokenScores(*scores(hidden, targets))
    parts = [
        checkpoint(scores, hidden_chunk, target_chunk, use_reentrant=False)
        for hidden_chunk, target_chunk in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    ]
    return TokenScores(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))
