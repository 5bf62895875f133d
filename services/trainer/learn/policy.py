"""A Hugging Face causal language model, seen as: log-probabilities of chosen tokens in a packed row.

Whether output logits can be made from hidden states here (`scorer.py`) is found out on two short sequences when the model
is wrapped, together with whether attention really stays within a sequence; an architecture that leaks is refused there.
Where ranks share a row, each scores its part of it and has the scores of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from pipelinerl.errors import FieldError
from services.trainer.learn.batch import TokenRow, token_row
from services.trainer.learn.logprobs import MAX_LOGITS, token_scores
from services.trainer.learn.lora import adapters_off
from services.trainer.learn.scorer import TokenScorer
from services.trainer.ranks.rows import RowPart

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
