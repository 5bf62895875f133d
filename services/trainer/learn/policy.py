"""A Hugging Face causal language model, seen as: log-probabilities of chosen tokens in a packed row.

Output logits are made at completion positions only. Where the model is a plain backbone and linear head, they are made
from hidden states here, block by block; where it does more to its logits (soft capping, scaling), the model makes them
itself. Which of the two holds is found out on two short sequences when the model is wrapped, together with whether
attention really stays within a sequence; an architecture that leaks is refused there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipelinerl.errors import FieldError
from services.trainer.learn.attention import forward_arguments
from services.trainer.learn.batch import TokenRow, token_row
from services.trainer.learn.logprobs import MAX_LOGITS, TokenScores, head_scores, token_scores

PROBE_LENGTHS = (7, 5)
"""Tokens of the two sequences on which a model is checked."""


class Policy:
    """A model on its device, ready to score packed rows. Raises `FieldError` when the model cannot be packed."""

    def __init__(self, model: PreTrainedModel, attention: str, max_logits: int = MAX_LOGITS) -> None:
        self.model = model
        self.attention = attention
        self.device: torch.device = model.device
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self._max_logits = max_logits
        self._head = None if _caps_logits(model) else model.get_output_embeddings()
        if _packing_error(self) > _tolerance(model.dtype):
            self._head = None
            _refuse_leaks(self, _packing_error(self))

    def scores(
        self, row: TokenRow, predictors: Tensor, targets: Tensor, temperature: float = 1.0, entropy_grad: bool = False
    ) -> TokenScores:
        """Scores of `targets` int64[C], each predicted by the row's position `predictors` int64[C]."""
        if self._head is None:
            logits = self._forward(self.model, row, logits_to_keep=predictors).logits[0]
            return token_scores(logits, targets, temperature, entropy_grad)
        hidden = self._forward(self.model.base_model, row).last_hidden_state[0].index_select(0, predictors)
        return head_scores(hidden, self._head, targets, temperature, entropy_grad, self._max_logits)

    def _forward(self, module: nn.Module, row: TokenRow, **arguments: Any) -> Any:
        return module(
            input_ids=row.input_ids,
            position_ids=row.position_ids,
            use_cache=False,
            **forward_arguments(self.attention, row.layout),
            **arguments,
        )

    @torch.no_grad()
    def sequence_logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """float32[tokens - 1]: log π(token[i] | token[:i]) for i >= 1 at temperature 1, nats, of int[tokens]."""
        tokens = np.asarray(token_ids, dtype=np.int64)
        row = token_row(tokens, np.array([len(tokens)]), device=self.device)
        predictors = torch.arange(len(tokens) - 1, device=self.device)
        # Compiled layers would be compiled once more for a pass without gradients, which a few sequences do not repay.
        with torch.compiler.set_stance("force_eager"):
            return self.scores(row, predictors, row.input_ids[0, 1:]).logprobs.cpu().numpy()


def _caps_logits(model: PreTrainedModel) -> bool:
    """Soft capping hardly shows on the small logits of an untrained model, so it is looked up and not measured."""
    return getattr(model.config.get_text_config(), "final_logit_softcapping", None) is not None


def _tolerance(dtype: torch.dtype) -> float:
    """Nats by which two ways of computing the same log-probability may differ."""
    return 1e-3 if dtype == torch.float32 else 0.25


def _refuse_leaks(policy: Policy, error: float) -> None:
    if error > _tolerance(policy.model.dtype):
        raise FieldError(
            "model.attention",
            policy.attention,
            f"{type(policy.model).__name__} scores packed sequences {error:.2g} nats off what it gives each alone; "
            "try sdpa or eager, or another architecture",
        )


@torch.no_grad()
def _packing_error(policy: Policy) -> float:
    """Largest difference, nats, between two packed sequences and the model's own plain forward pass of each."""
    generator = np.random.default_rng(0)
    probes = [generator.integers(0, policy.vocab_size, size=length) for length in PROBE_LENGTHS]
    row = token_row(np.concatenate(probes), np.array(PROBE_LENGTHS), device=policy.device)
    first, second = PROBE_LENGTHS
    predictors = torch.cat((torch.arange(first - 1), torch.arange(first, first + second - 1))).to(policy.device)
    packed = policy.scores(row, predictors, row.input_ids[0, predictors + 1]).logprobs
    return float((packed - torch.cat([_plain_logprobs(policy, probe) for probe in probes])).abs().max())


def _plain_logprobs(policy: Policy, tokens: np.ndarray) -> Tensor:
    """As any user of transformers would compute them, with the model's standard attention."""
    ids = torch.from_numpy(tokens)[None].to(policy.device)
    policy.model.set_attn_implementation("eager")
    try:
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, :-1]
    finally:
        policy.model.set_attn_implementation(policy.attention)
    return token_scores(logits, ids[0, 1:], temperature=1.0).logprobs
