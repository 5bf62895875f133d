"""The learner: one optimizer step on this rank's share, together with the learners of the other ranks.

A step is planned and packed once, in NumPy, before any device is touched. Weights of tokens come from totals of the whole
step, so that losses and gradients of all shares add up to those of one rank. Synchronous: it reads no stream and sends no
weights. The caller decides which groups make a step, what version results, what becomes of the sequences of a skipped step,
and tells the other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.messages.sequences import Logprobs, Sequence, TokenIds
from pipelinerl.recipe.fields import AlgorithmConfig, TrainerConfig
from pipelinerl.rl.packing import UNIT_COST, CostModel, plan_step
from services.trainer.distributed.world import Message, World, alone
from services.trainer.learn.batch import HostMicroBatch, MicroBatch, TrainingGroup, host_microbatch
from services.trainer.learn.lora import adapter_weights, served_weights, whole_parameters
from services.trainer.learn.loss import BatchTotals, LossInputs, Normalization, compute_loss
from services.trainer.learn.meter import PhaseTimer, StepMeter, mark_for, training_flops
from services.trainer.learn.metrics import StepCollector, sampled_places, sampled_weights, token_figures
from services.trainer.learn.model import initial_policy
from services.trainer.learn.optimizer import OptimizerReport, PolicyOptimizer
from services.trainer.learn.policy import Policy, add_value_head

TRAIN = "train"
_COUNTS = ("num_sequences", "num_tokens")


@dataclass(frozen=True, eq=False)
class StepShare:
    """Micro-batches of one row of ranks; all shares of a step have equally many."""

    version: int
    """Policy version that the gradient is taken at."""
    batches: tuple[HostMicroBatch, ...]

    def to_message(self) -> Message:
        arrays, counts = {}, []
        for index, batch in enumerate(self.batches):
            counts.append({name: getattr(batch, name) for name in _COUNTS})
            for name in _array_names():
                arrays[f"{index}/{name}"] = getattr(batch, name)
        return Message(TRAIN, {"version": self.version, "counts": counts}, arrays)

    @classmethod
    def from_message(cls, message: Message) -> StepShare:
        """Inverse of `to_message`."""
        batches = []
        for index, counts in enumerate(message.fields["counts"]):
            arrays: dict[str, Any] = {name: message.arrays[f"{index}/{name}"] for name in _array_names()}
            batches.append(HostMicroBatch(**arrays, **counts))
        return cls(message.fields["version"], tuple(batches))


def _array_names() -> list[str]:
    return [field.name for field in fields(HostMicroBatch) if field.name not in _COUNTS]


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """A step, ready to be computed."""

    version: int
    shares: tuple[StepShare, ...]
    """One for each row that is computed at the same time."""
    sequence_ids: tuple[str, ...]
    advantage_abs_mean: float
    """Over sequences; 0 means that no group told anything."""
    imbalance: float
    """Share of the ranks' compute time in which they wait for each other (`StepPlan.imbalance`)."""
    flops: float
    """Model FLOPs of the whole step."""
    phases_s: Mapping[str, float]
    """Seconds in `plan` and `build`, beside the step before."""
    sampled: Mapping[str, slice] = field(default_factory=dict)
    """Where the completion tokens of sequences that people get to see stand among those of `batches`."""

    @property
    def batches(self) -> list[HostMicroBatch]:
        """Of all shares, one share after the other."""
        return [batch for share in self.shares for batch in share.batches]


def prepare_step(
    groups: list[TrainingGroup],
    version: int,
    normalization: Normalization,
    budget: int,
    *,
    data_ranks: int = 1,
    pad_multiple: int = 1,
    cost_model: CostModel = UNIT_COST,
) -> PreparedStep:
    """Plans and packs one optimizer step on `groups` at policy version `version`, for `data_ranks` rows at a time.

    `budget`: tokens of a micro-batch, `pad_multiple`: what its row is rounded up to. Raises `FieldError` when a sequence
    exceeds the budget.
    """
    sequences = [sequence for group in groups for sequence in group.sequences]
    advantages = np.concatenate([group.advantages for group in groups])
    totals = BatchTotals(len(sequences), sum(sequence.num_completion_tokens for sequence in sequences))

    def packed(members: list[int]) -> HostMicroBatch:
        chosen: list[Sequence] = [sequences[index] for index in members]
        return host_microbatch(chosen, advantages[members], version, normalization, totals, pad_multiple)

    lengths = [sequence.num_tokens for sequence in sequences]
    outputs = [sequence.num_completion_tokens for sequence in sequences]
    timer = PhaseTimer()
    with timer.measure("plan"):
        plan = plan_step(lengths, budget, data_ranks, cost_model, outputs)
    with timer.measure("build"):
        shares = [
            StepShare(version, tuple(packed(members) for members in plan.of_rank(rank))) for rank in range(data_ranks)
        ]
    return PreparedStep(
        version=version,
        shares=tuple(shares),
        sequence_ids=tuple(sequence.sequence_id for sequence in sequences),
        advantage_abs_mean=float(np.abs(advantages).mean()),
        imbalance=plan.imbalance,
        flops=training_flops(cost_model, lengths, outputs),
        phases_s=timer.take(),
        sampled=sampled_places(groups, (members for rank in range(data_ranks) for members in plan.of_rank(rank))),
    )


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


@dataclass(frozen=True, eq=False)
class StepOutcome:
    """What one optimizer step did."""

    metrics: dict[str, Any]
    """Of the step's data and weights, under the names of metrics.jsonl; alike on any machine."""
    phases_s: Mapping[str, float]
    """Seconds in `plan`, `build` (both beside the step before), `to_device`, `forward_backward`, `totals`, `optimizer`."""
    memory_peak_bytes: int
    """Of the rank that needed most."""
    sampled_weights: Mapping[str, NDArray[np.float64]]
    """Importance weights of the completion tokens of sequences that people get to see, by id; unclamped."""

    @property
    def applied(self) -> bool:
        """Whether weights changed, so that there is a version + 1."""
        return not self.metrics["skipped"]


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

    def prepare(self, groups: list[TrainingGroup], version: int) -> PreparedStep:
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

    def train_step(self, groups: list[TrainingGroup], version: int) -> StepOutcome:
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

    def outcome(self, prepared: PreparedStep, results: list[ShareResult]) -> StepOutcome:
        """What the step did, from `results` of each share of `prepared`, in their order."""
        values = np.concatenate([result.values for result in results], axis=1)
        report, budget = results[0].report, self.trainer.tokens_per_microbatch
        tokens = token_figures(values, results[0].totals, prepared.batches, budget, applied=not report.skipped)
        if self.reference is None:
            tokens["reference_kl"] = None
        of_batch = {"advantage_abs_mean": prepared.advantage_abs_mean, "imbalance": prepared.imbalance}
        return StepOutcome(
            metrics={**tokens, **asdict(report), **of_batch},
            phases_s={**prepared.phases_s, **results[0].phases_s},
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
