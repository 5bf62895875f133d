"""The learner: one optimizer step on this rank's share, together with the learners of the other ranks.

Synchronous: it reads no stream and sends no weights. The caller decides which groups make a step, what version results,
and what becomes of the sequences of a skipped step. Who tells the other ranks is `ranks/lead.py`'s question.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.config.recipe import AlgorithmConfig, TrainerConfig
from pipelinerl.types import Logprobs, TokenIds
from services.trainer.learn.batch import MicroBatch, TrainingGroup
from services.trainer.learn.loss import LossInputs, compute_loss
from services.trainer.learn.meter import StepMeter
from services.trainer.learn.metrics import StepCollector, TokenMetrics, token_metrics
from services.trainer.learn.model import initial_policy
from services.trainer.learn.optimizer import OptimizerReport, PolicyOptimizer
from services.trainer.learn.phases import PhaseTimer, mark_for
from services.trainer.learn.policy import Policy
from services.trainer.learn.sampled import sampled_weights
from services.trainer.learn.scorer import add_value_head
from services.trainer.learn.share import PreparedStep, StepShare, prepare_step
from services.trainer.learn.weights import adapter_weights, served_weights, whole_parameters
from services.trainer.ranks.world import World, alone


@dataclass(frozen=True, eq=False)
class ShareResult:
    """What computing a share gave. `report` and `totals` are those of the whole step, alike on every rank."""

    report: OptimizerReport
    totals: NDArray[np.float64]
    """See `StepCollector.totals`."""
    values: NDArray[np.float32]
    """See `StepCollector.values`; of this rank's share."""
    memory_peak_bytes: int
    """Of this rank."""
    phases_s: Mapping[str, float]
    """Seconds by phase, of this rank."""


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did."""

    version: int
    """Policy version that the gradient was taken at."""
    optimizer: OptimizerReport
    tokens: TokenMetrics
    advantage_abs_mean: float
    """Over sequences; 0 means that no group told anything."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds in `plan`, `build` (both beside the step before), `to_device`, `forward_backward`, `totals`, `optimizer`."""
    imbalance: float = 0.0
    """Share of the ranks' compute time in which they wait for each other (`StepPlan.imbalance`)."""
    flops: float = 0.0
    """Model FLOPs of the step, over all ranks."""
    memory_peak_bytes: int = 0
    """Of the rank that needed most."""
    sampled_weights: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Importance weights of the completion tokens of sequences that people get to see, by id; unclamped."""

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
            "imbalance": self.imbalance,
        }


class Learner:
    """A policy and its optimizer, on one rank of `world`. With `kl_coefficient` > 0 there is a frozen reference policy.

    Every rank calls the same methods in the same order.
    """

    def __init__(
        self,
        policy: Policy,
        algorithm: AlgorithmConfig,
        trainer: TrainerConfig,
        *,
        temperature: float = 1.0,
        pad_multiple: int = 1,
        world: World | None = None,
        reference: Policy | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        """`temperature` is the one that μ samples at; `pad_multiple` rounds packed rows up, for kernels that like it.

        `reference`: the policy that the KL term is to, what `policy` is now when None. `compute_dtype`: of matrix products,
        where it is not that of the weights.
        """
        self.policy = policy
        self.algorithm = algorithm
        self.trainer = trainer
        self.temperature = temperature
        self.pad_multiple = pad_multiple * policy.row_multiple
        self.world = world or alone(policy.device)
        if algorithm.advantage == "value" and policy.scorer.value_head is None:
            add_value_head(policy.scorer)
        self.reference = (reference or initial_policy(policy)) if algorithm.kl_coefficient > 0 else None
        self.optimizer = PolicyOptimizer(policy.scorer.parameters(), trainer)
        self.meter = StepMeter(policy.model, compute_dtype)
        self._phases = PhaseTimer(mark_for(policy.device))

    def prepare(self, groups: Sequence[TrainingGroup], version: int) -> PreparedStep:
        """Plans one optimizer step for all ranks. Any thread may do so while another step is computed.

        Raises `FieldError` when a sequence exceeds `tokens_per_microbatch`.
        """
        return prepare_step(
            groups,
            version,
            self.algorithm.normalization,
            self.trainer.tokens_per_microbatch,
            data_ranks=self.world.layout.data_ranks,
            pad_multiple=self.pad_multiple,
            cost_model=self.meter.cost_model,
        )

    def train_step(self, groups: Sequence[TrainingGroup], version: int) -> StepOutcome:
        """One optimizer step of a learner that is alone, on `groups` at policy version `version`."""
        prepared = self.prepare(groups, version)
        return self.outcome(prepared, [self.compute(prepared.shares[0])])

    def compute(self, share: StepShare) -> ShareResult:
        """One optimizer step; `share` is this rank's, or that of its row."""
        collector = StepCollector()
        for share_batch in share.batches:
            with self._phases.measure("to_device"):
                batch = share_batch.on(self.policy.device)
            with self._phases.measure("forward_backward"):
                self._accumulate(batch, collector)
        with self._phases.measure("totals"):
            totals = self.world.sum(collector.totals())
            loss = float(totals[0])
        with self._phases.measure("optimizer"):
            report = self.optimizer.step(loss)
        values = collector.values()  # for which the device has come to the end of the step
        return ShareResult(report, totals.cpu().numpy(), values, self.meter.take_memory_peak(), self._phases.take())

    def outcome(self, prepared: PreparedStep, results: Sequence[ShareResult]) -> StepOutcome:
        """What the step did, from `results` of each share of `prepared`, in their order."""
        values = np.concatenate([result.values for result in results], axis=1)
        budget = self.trainer.tokens_per_microbatch
        return StepOutcome(
            version=prepared.version,
            optimizer=results[0].report,
            tokens=token_metrics(values, results[0].totals, prepared.batches, budget),
            advantage_abs_mean=prepared.advantage_abs_mean,
            phases_s={**prepared.phases_s, **results[0].phases_s},
            imbalance=prepared.imbalance,
            flops=prepared.flops,
            memory_peak_bytes=max(result.memory_peak_bytes for result in results),
            sampled_weights=sampled_weights(prepared.sampled, values[0]),
        )

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
                values=scores.values,
            ),
            self.algorithm,
        )
        output.loss.backward()
        collector.add(output, scores.entropy, scores.values)

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        if self.reference is None:
            return None
        return self.reference.scores(batch.row, batch.predictors, batch.targets, self.temperature).logprobs

    def score(self, token_ids: TokenIds) -> Logprobs:
        """float32[tokens - 1]: log π(token[i] | token[:i]) for i >= 1 under the current weights, at temperature 1."""
        return self.policy.sequence_logprobs(token_ids)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """What actors serve: every parameter by its checkpoint name, whole, one after the other. All ranks go through it."""
        return served_weights(self.policy.model)

    def value_head(self) -> Iterator[tuple[str, Tensor]]:
        """The same of the value head; nothing where there is none."""
        head = self.policy.scorer.value_head
        return iter(()) if head is None else whole_parameters(head)

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Of adapters, A and B of each layer, likewise; nothing where all weights are trained."""
        return adapter_weights(self.policy.model)
