"""A Hugging Face causal language model, seen as log-probabilities, entropies and values of chosen tokens in a packed row.

All that touches the policy's parameters is one module with one forward: sharded weights are gathered when a module's
forward begins, so backbone, output head and value head must be called within one. Logits are made at completion positions
only: from hidden states, block by block, if the model is a plain backbone and linear head, and by the model itself if it
does more to its logits (soft capping, scaling). Which of the two a model needs, and whether attention really stays within a
sequence, is found out on two short sequences when the model is wrapped; an architecture that leaks is refused. Ranks that
share a row score a part of it each and have the scores of all. Not here: what is packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from pipelinerl.errors import FieldError
from services.trainer.learn.attention import PackedLayout, forward_arguments
from services.trainer.learn.batch import TokenRow, token_row
from services.trainer.learn.context_parallel import RowPart
from services.trainer.learn.logprobs import MAX_LOGITS, head_scores, token_scores
from services.trainer.learn.lora import adapters_off


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


PROBE_LENGTHS = (7, 5)
"""Tokens of the two sequences on which a model is checked."""


@dataclass(frozen=True, eq=False)
class PolicyScores:
    """Of C completion tokens, float32[C] each, at the sampling temperature. `values`: None without a value head."""

    logprobs: Tensor
    """nats"""
    entropy: Tensor
    """nats"""
    values: Tensor | None = None


class Policy:
    """A model on its device, ready to score packed rows."""

    def __init__(self, scorer: TokenScorer, device: torch.device, part: RowPart | None = None) -> None:
        self.scorer, self.device, self._part = scorer, device, part

    @property
    def model(self) -> PreTrainedModel:
        return self.scorer.model

    @property
    def attention(self) -> str:
        return self.scorer.attention

    @property
    def vocab_size(self) -> int:
        return self.model.get_output_embeddings().weight.shape[0]

    @property
    def row_multiple(self) -> int:
        """Rows must be padded to a multiple of so many tokens."""
        return 1 if self._part is None else self._part.ranks

    def scores(
        self, row: TokenRow, predictors: Tensor, targets: Tensor, temperature: float = 1.0, entropy_grad: bool = False
    ) -> PolicyScores:
        """Scores of `targets` int64[C], each predicted by the row's position `predictors` int64[C], ascending.

        Called by all ranks together; those that share a row with the same row.
        """
        if self._part is None:
            return PolicyScores(*self._score(row, predictors, targets, temperature, entropy_grad))
        counts = self._part.counts(row, predictors)
        first = sum(counts[: self._part.index])
        own = slice(first, first + counts[self._part.index])
        own_predictors = predictors[own] - self._part.first_token(row)
        scores = self._score(self._part.of(row), own_predictors, targets[own], temperature, entropy_grad)
        return PolicyScores(*self._part.collect(torch.stack(scores), counts))

    def _score(
        self, row: TokenRow, predictors: Tensor, targets: Tensor, temperature: float, entropy_grad: bool
    ) -> tuple[Tensor, ...]:
        scores: tuple[Tensor, ...] = self.scorer(
            row.input_ids, row.position_ids, row.layout, predictors, targets, temperature, entropy_grad
        )
        return scores

    @torch.no_grad()
    def sequence_logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """float32[tokens - 1]: log π(token[i] | token[:i]) for i >= 1 at temperature 1, nats, of int[tokens]."""
        tokens = np.asarray(token_ids, dtype=np.int64)
        row = token_row(tokens, np.array([len(tokens)]), self.row_multiple, self.device)
        predictors = torch.arange(len(tokens) - 1, device=self.device)
        # Compiled layers would be compiled once more for a pass without gradients, which a few sequences do not repay.
        with torch.compiler.set_stance("force_eager"):
            logprobs = self.scores(row, predictors, row.input_ids[0, 1 : len(tokens)]).logprobs.cpu().numpy()
        for module in self.scorer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # some keep gathered weights for a backward pass, and none follows
        return logprobs


class UnadaptedPolicy(Policy):
    """The policy that another one was before its adapters: the same weights, in no memory of their own."""

    def __init__(self, adapted: Policy) -> None:
        super().__init__(adapted.scorer, adapted.device, adapted._part)

    def scores(
        self, row: TokenRow, predictors: Tensor, targets: Tensor, temperature: float = 1.0, entropy_grad: bool = False
    ) -> PolicyScores:
        """Without a gradient."""
        with adapters_off(self.model), torch.no_grad():
            return super().scores(row, predictors, targets, temperature, entropy_grad)


def checked_policy(model: PreTrainedModel, attention: str, max_logits: int = MAX_LOGITS) -> Policy:
    """A policy of `model`, on its device. Raises `FieldError` when the model cannot be packed."""
    scorer = TokenScorer(model, attention, max_logits)
    scorer.own_logits = _caps_logits(model)
    policy = Policy(scorer, model.device)
    if _packing_error(policy) > _tolerance(model.dtype):
        scorer.own_logits = True
        _refuse_leaks(policy, _packing_error(policy))
    return policy


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
