"""All that touches a policy's parameters, as one module with one forward: log-probabilities, entropies and values of tokens.

Sharded weights are gathered when a module's forward begins, so backbone, output head and value head must be called within
one. Logits are made at completion positions only: where the model is a plain backbone and linear head from hidden states,
block by block, and where it does more to its logits (soft capping, scaling) by the model itself. Not here: what is packed, and
which of the two a model needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipelinerl.errors import FieldError
from services.trainer.learn.attention import PackedLayout, forward_arguments
from services.trainer.learn.logprobs import MAX_LOGITS, head_scores, token_scores


class TokenScorer(nn.Module):
    """`own_logits`: the model makes its logits itself. `value_head`: a linear layer to one number, or None."""

    def __init__(self, model: PreTrainedModel, attention: str, max_logits: int = MAX_LOGITS) -> None:
        super().__init__()
        self.model = model
        self.attention = attention
        self.own_logits = False
        self.value_head: nn.Linear | None = None
        self._max_logits = max_logits

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: PackedLayout,
        predictors: Tensor,
        targets: Tensor,
        temperature: float,
        entropy_grad: bool,
    ) -> tuple[Tensor, ...]:
        """float32[C] each, nats: log-probabilities and entropies of `targets` int64[C], each predicted by the position
        `predictors` int64[C] of the row input_ids int64[1, T]; and the values at those positions where there is a head."""
        arguments: dict[str, Any] = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "use_cache": False,
            **forward_arguments(self.attention, layout),
        }
        if self.own_logits:
            logits = self.model(**arguments, logits_to_keep=predictors).logits[0]
            scores = token_scores(logits, targets, temperature, entropy_grad)
            return scores.logprobs, scores.entropy
        hidden = self.model.base_model(**arguments).last_hidden_state[0].index_select(0, predictors)
        head = self.model.get_output_embeddings()
        scores = head_scores(hidden, head, targets, temperature, entropy_grad, self._max_logits)
        if self.value_head is None:
            return scores.logprobs, scores.entropy
        values = self.value_head(hidden.to(self.value_head.weight.dtype))
        return scores.logprobs, scores.entropy, values.float().sum(1)  # of one column: no view, which FSDP warns of


def add_value_head(scorer: TokenScorer) -> None:
    """A value of 0 everywhere, until it is trained. Raises `FieldError` for a model that hides what it makes logits of."""
    if scorer.own_logits:
        fix = (
            f"needs a model with a plain output head, and {type(scorer.model).__name__} has none; use another baseline"
        )
        raise FieldError("algorithm.advantage", "value", fix)
    width = scorer.model.config.get_text_config().hidden_size
    with torch.device(scorer.model.device):
        scorer.value_head = nn.Linear(width, 1, dtype=torch.float32)
    nn.init.zeros_(scorer.value_head.weight)
    nn.init.zeros_(scorer.value_head.bias)
