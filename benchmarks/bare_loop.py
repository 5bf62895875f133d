"""What the learner is measured against: forward, backward and step of transformers and torch, and nothing beside.

Of this project it has the attention and ready micro-batches. No metrics, no entropy, no masters in float32: in 16 bit its
gradients are summed and its weights stepped in 16 bit, which is as fast as a loop can be and not how to train.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from pipelinerl.recipe.fields import TrainerConfig
from services.trainer.learn.attention import forward_arguments
from services.trainer.learn.batch import MicroBatch

MOST_LOGITS = 2**31
"""Logits (tokens × vocabulary) of one micro-batch; of more they are made in pieces, and again in the backward pass."""


class BareLoop:
    """One optimizer step on `batches`, again and again."""

    def __init__(self, model: PreTrainedModel, attention: str, batches: Sequence[MicroBatch], trainer: TrainerConfig) -> None:
        model.set_attn_implementation(attention)
        self.model, self.attention, self.batches, self.trainer = model.train(), attention, batches, trainer
        self._piece = max(1, MOST_LOGITS // model.config.vocab_size)
        self._max_norm = trainer.max_grad_norm or sum(float(batch.weights.sum()) for batch in batches)
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=trainer.learning_rate,
            betas=(trainer.beta1, trainer.beta2),
            eps=trainer.epsilon,
            weight_decay=trainer.weight_decay,
            fused=True,
        )

    def step(self) -> None:
        for batch in self.batches:
            logprobs = self._logprobs(batch)
            weights = (logprobs.detach() - batch.behaviour_logprobs).exp().clamp(max=5.0)
            (-(batch.weights * weights * batch.advantages * logprobs).sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        """float32[C], nats."""
        arguments: dict[str, Any] = {
            "input_ids": batch.row.input_ids,
            "position_ids": batch.row.position_ids,
            "use_cache": False,
            **forward_arguments(self.attention, batch.row.layout),
        }
        if len(batch.targets) <= self._piece:
            return _chosen(self.model(**arguments, logits_to_keep=batch.predictors).logits[0], batch.targets)
        hidden = self.model.base_model(**arguments).last_hidden_state[0].index_select(0, batch.predictors)
        pieces = zip(hidden.split(self._piece), batch.targets.split(self._piece), strict=True)
        return torch.cat([checkpoint(self._of_hidden, *piece, use_reentrant=False) for piece in pieces])

    def _of_hidden(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return _chosen(self.model.get_output_embeddings()(hidden), targets)


def _chosen(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of `targets` int64[C] under logits [C, vocabulary]."""
    return -F.cross_entropy(logits.float(), targets, reduction="none")
