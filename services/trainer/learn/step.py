"""The learner: complete groups in, one optimizer step, what happened out.

Synchronous and single-process: it reads no stream and sends no weights. The caller decides which groups make a step,
what version results, and what becomes of the sequences of a skipped step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pipelinerl.algorithms.packing import plan_microbatches
from pipelinerl.config.recipe import AlgorithmConfig, TrainerConfig
from pipelinerl.types import Logprobs, TokenIds
from services.trainer.learn.batch import MicroBatch, TrainingGroup, build_microbatch
from services.trainer.learn.loss import LossInputs, compute_loss
from services.trainer.learn.metrics import StepCollector, TokenMetrics
from services.trainer.learn.normalization import BatchTotals
from services.trainer.learn.optimizer import OptimizerReport, PolicyOptimizer
from services.trainer.learn.policy import Policy


@dataclass(frozen=True)
class StepOutcome:
    """What one call of `train_step` did."""

    version: int
    """Policy version that the gradient was taken at."""
    optimizer: OptimizerReport
    tokens: TokenMetrics
    advantage_abs_mean: float
    """Over sequences; 0 means that no group told anything."""

    @property
    def applied(self) -> bool:
        """Whether weights changed, so that there is a version + 1."""
        return not self.optimizer.skipped

    @property
    def metrics(self) -> dict[str, Any]:
        """Everything, JSON-able, under the names of metrics.jsonl."""
        return {
            **self.tokens.as_dict(),
            "learning_rate": self.optimizer.learning_rate,
            "grad_norm": self.optimizer.grad_norm,
            "skipped": self.optimizer.skipped,
            "advantage_abs_mean": self.advantage_abs_mean,
        }


class Learner:
    """A policy and its optimizer. With `kl_coefficient` > 0 it keeps a frozen copy of the policy it was made with."""

    def __init__(
        self,
        policy: Policy,
        algorithm: AlgorithmConfig,
        trainer: TrainerConfig,
        *,
        temperature: float = 1.0,
        pad_multiple: int = 1,
    ) -> None:
        """`temperature` is the one that μ samples at; `pad_multiple` rounds packed rows up, for kernels that like it."""
        self.policy = policy
        self.algorithm = algorithm
        self.trainer = trainer
        self.temperature = temperature
        self.pad_multiple = pad_multiple
        self.reference = _frozen_copy(policy) if algorithm.kl_coefficient > 0 else None
        self.optimizer = PolicyOptimizer(policy.model.parameters(), trainer)

    def train_step(self, groups: Sequence[TrainingGroup], version: int) -> StepOutcome:
        """One optimizer step on `groups` at policy version `version`.

        Raises `FieldError` when a sequence exceeds `tokens_per_microbatch`.
        """
        sequences = [sequence for group in groups for sequence in group.sequences]
        advantages = np.concatenate([group.advantages for group in groups])
        totals = BatchTotals(len(sequences), sum(sequence.num_completion_tokens for sequence in sequences))
        lengths = [sequence.num_tokens for sequence in sequences]
        collector = StepCollector(self.trainer.tokens_per_microbatch)
        for members in plan_microbatches(lengths, self.trainer.tokens_per_microbatch):
            batch = build_microbatch(
                [sequences[index] for index in members],
                advantages[members],
                version,
                self.algorithm.normalization,
                totals,
                pad_multiple=self.pad_multiple,
                device=self.policy.device,
            )
            self._accumulate(batch, collector)
        tokens = collector.result()
        return StepOutcome(version, self.optimizer.step(tokens.loss), tokens, float(np.abs(advantages).mean()))

    def _accumulate(self, batch: MicroBatch, collector: StepCollector) -> None:
        """Adds one micro-batch's gradient."""
        scores = self.policy.scores(
            batch.row, batch.predictors, batch.targets, self.temperature, self.algorithm.entropy_coefficient > 0
        )
        output = compute_loss(
            LossInputs(
                logprobs=scores.logprobs,
                behaviour_logprobs=batch.behaviour_logprobs,
                advantages=batch.advantages,
                weights=batch.weights,
                sequence_index=batch.sequence_index,
                num_sequences=batch.num_sequences,
                entropy=scores.entropy,
                reference_logprobs=self._reference_logprobs(batch),
            ),
            self.algorithm,
        )
        output.loss.backward()
        collector.add(batch, output, scores.entropy)

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> torch.Tensor | None:
        if self.reference is None:
            return None
        return self.reference.scores(batch.row, batch.predictors, batch.targets, self.temperature).logprobs

    def score(self, token_ids: TokenIds) -> Logprobs:
        """float32[tokens - 1]: log π(token[i] | token[:i]) for i >= 1 under the current weights, at temperature 1."""
        return self.policy.sequence_logprobs(token_ids)

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer, for a checkpoint. The reference is not part: it is the initial policy."""
        return {"model": self.policy.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policy.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def _frozen_copy(policy: Policy) -> Policy:
    """A policy with weights of its own that no optimizer changes."""
    model = copy.deepcopy(policy.model)
    model.requires_grad_(False)
    model.eval()
    return Policy(model, policy.attention)
