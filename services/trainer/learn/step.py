"""The learner: one optimizer step on this rank's share, together with the learners of the other ranks.

A step is planned and packed once, in NumPy, before any device is touched. Weights of tokens come from totals of the whole
step, so that losses and gradients of all shares add up to those of one rank. Synchronous: it reads no stream and sends no
weights. The caller decides which groups make a step, what version results, what becomes of the sequences of a skipped step,
and tells the other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.messages.sequences import Logprobs, Sequence, TokenIds
from pipelinerl.recipe.fields import AlgorithmConfig, TrainerConfig
from pipelinerl.rl.packing import UNIT_COST, CostModel, plan_step
from services.trainer.distributed.world import ADAPTER, WEIGHTS, Message, World, alone
from services.trainer.learn.batch import (
    HostMicroBatch,
    MicroBatch,
    Normalization,
    TrainingGroup,
    host_microbatch,
    sequence_weights,
)
from services.trainer.learn.lora import adapter_weights, adapters_off, has_adapters, served_weights, whole
from services.trainer.learn.loss import compute_loss
from services.trainer.learn.meter import (
    PhaseTimer,
    cost_model_of,
    mark_for,
    peak_flops,
    take_memory_peak,
    training_flops,
)
from services.trainer.learn.metrics import sampled_places, sampled_weights, token_figures
from services.trainer.learn.model import frozen_copy
from services.trainer.learn.optimizer import PolicyOptimizer
from services.trainer.learn.policy import Policy, add_value_head

TRAIN = "train"

Share = tuple[HostMicroBatch, ...]
"""Micro-batches of one row of ranks; all shares of a step have equally many."""


def train_order(version: int, share: Share) -> Message:
    """Rank 0's order to take a step at policy `version` on `share`."""
    arrays: dict[str, NDArray[Any]] = {}
    counts = []
    for index, batch in enumerate(share):
        content = vars(batch)
        arrays |= {f"{index}/{name}": value for name, value in content.items() if isinstance(value, np.ndarray)}
        counts.append({name: value for name, value in content.items() if not isinstance(value, np.ndarray)})
    return Message(TRAIN, {"version": version, "counts": counts}, arrays)


def share_of(order: Message) -> Share:
    """What `train_order` was given."""
    batches = []
    for index, counts in enumerate(order.fields["counts"]):
        names = [field.name for field in fields(HostMicroBatch) if field.name not in counts]
        arrays: dict[str, Any] = {name: order.arrays[f"{index}/{name}"] for name in names}
        batches.append(HostMicroBatch(**arrays, **counts))
    return tuple(batches)


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """A step, ready to be computed."""

    version: int
    shares: tuple[Share, ...]
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
        return [batch for share in self.shares for batch in share]


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
    lengths = [sequence.num_tokens for sequence in sequences]
    outputs = [sequence.num_completion_tokens for sequence in sequences]
    weights = sequence_weights(np.array(outputs), normalization)

    def packed(members: list[int]) -> HostMicroBatch:
        chosen: list[Sequence] = [sequences[index] for index in members]
        return host_microbatch(chosen, advantages[members], weights[members], version, pad_multiple)

    timer = PhaseTimer()
    with timer.measure("plan"):
        plan = plan_step(lengths, budget, data_ranks, cost_model, outputs)
    with timer.measure("build"):
        shares = tuple(tuple(packed(members) for members in plan.of_rank(rank)) for rank in range(data_ranks))
    return PreparedStep(
        version=version,
        shares=shares,
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

    report: dict[str, Any]
    """Of the optimizer (`PolicyOptimizer.step`)."""
    totals: NDArray[np.float64]
    """[3]: loss, KL to the reference, value loss; sums over micro-batches."""
    values: NDArray[np.float32]
    """[4, C] of this rank's share: log weight, clipped, masked, entropy of each completion token; [5, C] with its learned
    baseline last."""
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
        world: World | None = None,
        reference: Policy | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        """`temperature` is the one that μ samples at.

        `reference`: the policy that the KL term is to, what `policy` is now when None. `compute_dtype`: of matrix products,
        where it is not that of the weights.
        """
        self.policy = policy
        self.algorithm = algorithm
        self.trainer = trainer
        self.temperature = temperature
        self.pad_multiple = policy.row_multiple
        """What packed rows are rounded up to."""
        self.world = world or alone(policy.device)
        if algorithm.advantage == "value" and policy.value_head is None:
            add_value_head(policy)
        if reference is None and algorithm.kl_coefficient > 0:  # what adapters adapt stays as it is
            reference = policy if has_adapters(policy.model) else frozen_copy(policy)
        self.reference = reference if algorithm.kl_coefficient > 0 else None
        self.optimizer = PolicyOptimizer(policy.parameters(), trainer)
        self.cost_model = cost_model_of(policy.model)
        device_name = torch.cuda.get_device_name(policy.device) if policy.device.type == "cuda" else ""
        self.peak_flops = peak_flops(device_name, str(compute_dtype or policy.model.dtype).removeprefix("torch."))
        """Of the device, FLOP/s; None where it is not known, as of a CPU."""
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
            cost_model=self.cost_model,
        )

    def train_step(self, groups: list[TrainingGroup], version: int) -> StepOutcome:
        """One optimizer step of a learner that is alone, on `groups` at policy version `version`."""
        prepared = self.prepare(groups, version)
        return self.outcome(prepared, [self.compute(prepared.shares[0])])

    def compute(self, share: Share) -> ShareResult:
        """One optimizer step; `share` is this rank's, or that of its row."""
        values, terms = [], []
        for host_batch in share:
            with self._phases.measure("to_device"):
                batch = host_batch.on(self.policy.device)
            with self._phases.measure("forward_backward"):
                of_tokens, of_batch = self._backward(batch)
            values.append(of_tokens)
            terms.append(of_batch)
        with self._phases.measure("totals"):
            totals = self.world.sum(torch.stack(terms).double().sum(0))
            loss = float(totals[0])
        with self._phases.measure("optimizer"):
            report = self.optimizer.step(loss)
        there = torch.cat(values, dim=1).cpu().numpy()  # for which the device has come to the end of the step
        memory = take_memory_peak(self.policy.device)
        return ShareResult(report, totals.cpu().numpy(), there, memory, self._phases.take())

    def outcome(self, prepared: PreparedStep, results: list[ShareResult]) -> StepOutcome:
        """What the step did, from `results` of each share of `prepared`, in their order."""
        values = np.concatenate([result.values for result in results], axis=1)
        report, budget = results[0].report, self.trainer.tokens_per_microbatch
        tokens = token_figures(values, results[0].totals, prepared.batches, budget, applied=not report["skipped"])
        if self.reference is None:
            tokens["reference_kl"] = None
        of_batch = {"advantage_abs_mean": prepared.advantage_abs_mean, "imbalance": prepared.imbalance}
        return StepOutcome(
            metrics={**tokens, **report, **of_batch},
            phases_s={**prepared.phases_s, **results[0].phases_s},
            memory_peak_bytes=max(result.memory_peak_bytes for result in results),
            sampled_weights=sampled_weights(prepared.sampled, values[0]),
        )

    def _backward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Adds one micro-batch's gradient; its part of `ShareResult.values` and `totals`, on the device."""
        scores = self.policy.scores(
            batch.row, batch.predictors, batch.targets, self.temperature, self.algorithm.entropy_coefficient > 0
        )
        output = compute_loss(batch, scores, self.algorithm, self._reference_logprobs(batch))
        output.loss.backward()
        values = [output.log_weights, output.clipped.float(), output.masked.float(), scores.entropy.detach()]
        if scores.values is not None:
            values.append(scores.values.detach())
        return torch.stack(values).float(), torch.stack((output.loss.detach(), output.reference_kl, output.value_loss))

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        if self.reference is None:
            return None
        with adapters_off(self.reference.model):
            return self.reference.scores(batch.row, batch.predictors, batch.targets, self.temperature).logprobs

    def score(self, token_ids: TokenIds) -> Logprobs:
        """float32[tokens - 1]: log π(token[i] | token[:i]) for i >= 1 under the current weights, at temperature 1."""
        return self.policy.sequence_logprobs(token_ids)

    def gather(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters by their checkpoint names, one after the other. All ranks go through it.

        `WEIGHTS`: what actors serve, with adapters merged in. `VALUE_HEAD`: nothing where there is none. `ADAPTER`: A and B of
        each adapted layer; nothing where all weights are trained.
        """
        if kind == WEIGHTS:
            return served_weights(self.policy.model)
        if kind == ADAPTER:
            return adapter_weights(self.policy.model)
        head = self.policy.value_head
        return iter(()) if head is None else ((name, whole(weight)) for name, weight in head.named_parameters())
