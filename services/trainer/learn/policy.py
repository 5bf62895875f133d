"""A Hugging Face causal language model, seen as log-probabilities, entropies and values of chosen tokens in a packed row.

All that touches the policy's parameters is one module with one forward: sharded weights are gathered when a module's
forward begins, so backbone, output head and value head must be called within one. Logits are made at completion positions
only: from hidden states, block by block, if the model is a plain backbone and linear head, and by the model itself if it
does more to its logits (soft capping, scaling). Which of the two a model needs, and whether attention really stays within a
sequence, is found out on two short sequences when the model is wrapped; an architecture that leaks is refused. Ranks that
share a row score a part of it each and have the scores of all. Not here: what is packed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from pipelinerl.errors import FieldError
from services.trainer.learn.attention import forward_arguments
from services.trainer.learn.batch import TokenRow, token_row
from services.trainer.learn.context_parallel import Collected, RowPart
from services.trainer.learn.logprobs import MAX_LOGITS, TokenScores, head_scores, token_scores


class Policy(nn.Module):
    """A model on its device, ready to score packed rows. Its forward is for itself alone: call `scores`.

    `own_logits`: the model makes its logits itself. `value_head`: a linear layer to one number, or None.
    """

    def __init__(self, model: PreTrainedModel, attention: str, *, own_logits: bool = False) -> None:
        super().__init__()
        self.model = model
        self.attention = attention
        self.own_logits = own_logits
        self.value_head: nn.Linear | None = None
        self.max_logits = MAX_LOGITS
        self.device: torch.device = model.device
        self.part: RowPart | None = None
        """This rank's of each row; None when it has whole rows."""

    @property
    def vocab_size(self) -> int:
        return self.model.get_output_embeddings().weight.shape[0]

    @property
    def row_multiple(self) -> int:
        """Rows must be padded to a multiple of so many tokens."""
        return 1 if self.part is None else self.part.ranks

    def scores(
        self, row: TokenRow, predictors: Tensor, targets: Tensor, temperature: float = 1.0, entropy_grad: bool = False
    ) -> TokenScores:
        """Scores of `targets` int64[C], each predicted by the row's position `predictors` int64[C], ascending.

        Called by all ranks together; those that share a row with the same row.
        """
        if self.part is None:
            return TokenScores(*self(row, predictors, targets, temperature, entropy_grad))
        counts = self.part.counts(row, predictors)
        first = sum(counts[: self.part.index])
        own = slice(first, first + counts[self.part.index])
        own_predictors = predictors[own] - self.part.tokens(row).start
        scores = self(self.part.of(row), own_predictors, targets[own], temperature, entropy_grad)
        return TokenScores(*Collected.apply(torch.stack(scores), counts, self.part.index, self.part.group))

    def forward(
        self, row: TokenRow, predictors: Tensor, targets: Tensor, temperature: float, entropy_grad: bool
    ) -> tuple[Tensor, ...]:
        """Fields of `TokenScores`, of this rank's part of the row."""
        arguments: dict[str, Any] = {
            "input_ids": row.input_ids,
            "position_ids": row.position_ids,
            "use_cache": False,
            **forward_arguments(self.attention, row.layout),
        }
        if self.own_logits:
            logits = self.model(**arguments, logits_to_keep=predictors).logits[0]
            scores = token_scores(logits, targets, temperature, entropy_grad)
            return scores.logprobs, scores.entropy
        hidden = self.model.base_model(**arguments).last_hidden_state[0].index_select(0, predictors)
        head = self.model.get_output_embeddings()
        scores = head_scores(hidden, head, targets, temperature, entropy_grad, self.max_logits)
        if self.value_head is None:
            return scores.logprobs, scores.entropy
        values = self.value_head(hidden.to(self.value_head.weight.dtype))
        return scores.logprobs, scores.entropy, values.float().sum(1)  # of one column: no view, which FSDP warns of

    @torch.no_grad()
    def sequence_logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """float32[tokens - 1]: log π(token[i] | token[:i]) for i >= 1 at temperature 1, nats, of int[tokens]."""
        tokens = np.asarray(token_ids, dtype=np.int64)
        row = token_row(tokens, np.array([len(tokens)]), self.row_multiple, self.device)
        predictors = torch.arange(len(tokens) - 1, device=self.device)
        # Compiled layers would be compiled once more for a pass without gradients, which a few sequences do not repay.
        with torch.compiler.set_stance("force_eager"):
            logprobs = self.scores(row, predictors, row.input_ids[0, 1 : len(tokens)]).logprobs.cpu().numpy()
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # some keep gathered weights for a backward pass, and none follows
        return logprobs


def add_value_head(policy: Policy) -> None:
    """A value of 0 everywhere, until it is trained. Raises `FieldError` for a model that hides what it makes logits of."""
    model = policy.model
    if policy.own_logits:
        fix = f"needs a model with a plain output head, and {type(model).__name__} has none; use another baseline"
        raise FieldError("algorithm.advantage", "value", fix)
    with torch.device(model.device):
        policy.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=torch.float32)
    nn.init.zeros_(policy.value_head.weight)
    nn.init.zeros_(policy.value_head.bias)


PROBE_LENGTHS = (7, 5)
"""Tokens of the two sequences on which a model is checked."""


def checked_policy(model: PreTrainedModel, attention: str) -> Policy:
    """A policy of `model`, on its device. Raises `FieldError` when the model cannot be packed."""
    # Soft capping hardly shows on the small logits of an untrained model, so it is looked up and not measured.
    caps_logits = getattr(model.config.get_text_config(), "final_logit_softcapping", None) is not None
    policy = Policy(model, attention, own_logits=caps_logits)
    tolerance = (
        1e-3 if model.dtype == torch.float32 else 0.25
    )  # nats, of two ways of computing the same log-probability
    if _packing_error(policy) > tolerance:
        policy.own_logits = True
        if (error := _packing_error(policy)) > tolerance:
            raise FieldError(
                "model.attention",
                attention,
                f"{type(model).__name__} scores packed sequences {error:.2g} nats off what it gives each alone; "
                "try sdpa or eager, or another architecture",
            )
    return policy


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
