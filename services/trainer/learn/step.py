"""The learner takes optimizer steps on this rank's share of a batch, together with the learners of the other ranks.

Rank 0 plans and packs each step, in NumPy. A token's weight in the loss depends on the whole step, so losses and gradients of
all shares add up to those of a single rank. Rank 0 sends its actions to the other ranks as orders, which `worker.py` executes.
Devices are idle between two steps. To keep this time short, batches are sent during the previous step, and ranks return only
statistics of their tokens. The caller counts versions and handles the sequences of a skipped step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.messages.sequences import Branch, Logprobs, TokenIds
from pipelinerl.recipe.fields import AlgorithmConfig, TrainerConfig
from pipelinerl.rl.memory import peak_flops
from pipelinerl.rl.packing import StepPlan, plan_step
from services.trainer.learn import meter
from services.trainer.learn.batch import HostMicroBatch, MicroBatch, TrainingGroup, host_microbatch, sequence_weights
from services.trainer.learn.lora import adapter_weights, adapters_off, served_weights, whole
from services.trainer.learn.loss import compute_loss
from services.trainer.learn.optimizer import PolicyOptimizer
from services.trainer.learn.policy import Policy
from services.trainer.world import ADAPTER, BATCHES, END, SCORE, TRAIN, USE, WEIGHTS, Message, RankLayout, World

Share = tuple[HostMicroBatch, ...]
"""Micro-batches of one rank, or of several ranks that split each row. All shares of a step have equally many micro-batches."""


def batch_message(version: int, share: Share) -> Message:
    content = {f"{index}/{name}": value for index, batch in enumerate(share) for name, value in vars(batch).items()}
    arrays = {name: value for name, value in content.items() if isinstance(value, np.ndarray)}
    others = {name: value for name, value in content.items() if name not in arrays}
    return Message(BATCHES, {"version": version, "size": len(share), **others}, arrays)


def share_of(message: Message) -> Share:
    content, names = {**message.fields, **message.arrays}, [field.name for field in fields(HostMicroBatch)]
    return tuple(
        HostMicroBatch(**{name: content[f"{index}/{name}"] for name in names}) for index in range(message.fields["size"])
    )


@dataclass(frozen=True, eq=False)
class PreparedStep:
    """An optimizer step that is ready to be computed."""

    version: int
    shares: tuple[Share, ...]
    sending: list[Any]
    """Unfinished sends of the shares to the other ranks. `Learner.step` waits for them."""
    sequence_ids: tuple[str, ...]
    figures: Mapping[str, float]
    """`advantage_abs_mean`: mean absolute advantage of sequences. `imbalance`: planned share of time in which ranks wait."""
    flops: float
    """Model FLOPs of the whole step."""
    phases_s: Mapping[str, float]
    """Seconds of the phases `plan` and `build`. They run during the previous step if the batch is complete in time."""
    sampled: Mapping[str, list[int]]
    """For each of `meter.sampled_sequences`, by id: the positions of its branches among all branches of the step."""
    actors: tuple[str, ...]
    """Names of the actors that sampled the sequences. `HostMicroBatch.actors` has indices into it."""


class Learner:
    """A policy and its optimizer on one rank, with a frozen reference policy if `kl_coefficient` > 0."""

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
        bound: float = meter.BOUND_16_BIT,
    ) -> None:
        """`temperature`: sampling temperature of μ. `reference`: policy of the KL term, whose adapters are ignored; may be
        `policy`. `compute_dtype`: dtype of matrix products, if not that of the weights. `bound`: from `meter.bound_of`."""
        assert algorithm.advantage != "value" or policy.value_head is not None, "advantage: value needs a value head"
        assert algorithm.kl_coefficient == 0 or reference is not None, "kl_coefficient > 0 needs a reference"
        self.policy = policy
        self.algorithm = algorithm
        self.trainer = trainer
        self.temperature, self._bound = temperature, bound
        self.world = world or World(RankLayout(), policy.device)
        self.reference = reference if algorithm.kl_coefficient > 0 else None
        self.optimizer = PolicyOptimizer(policy.model.parameters(), trainer, policy.value_head)
        self.cost_model = meter.cost_model_of(policy.model)
        device_name = torch.cuda.get_device_name(policy.device) if policy.device.type == "cuda" else ""
        self.peak_flops = peak_flops(device_name, str(compute_dtype or policy.model.dtype).removeprefix("torch."))
        """Peak FLOP/s of the device; None if unknown, for example for a CPU."""
        self._phases = meter.PhaseTimer(partial(torch.cuda.Event, enable_timing=True) if policy.device.type == "cuda" else None)
        other_terms = self.reference is not None or algorithm.entropy_coefficient > 0
        self._sent: set[PreparedStep] = set()
        """Steps with unfinished sends, kept here because gloo would stop delivering if Python deleted a send too early."""
        self._only_advantages = algorithm.advantage != "value" and not other_terms
        """True if a sequence with advantage 0 has no gradient."""

    def prepare(self, groups: list[TrainingGroup], version: int) -> PreparedStep:
        """Plan and pack one optimizer step of all ranks on `groups` at policy version `version`. On rank 0, also begin to send
        each rank its batches. Any thread may call this. Steps must be taken in the order of their preparation. Raises
        `FieldError` if a branch exceeds `tokens_per_microbatch`, and `RuntimeError` if a rank is gone."""
        sequences = [sequence for group in groups for sequence in group.sequences]
        branches = [branch for sequence in sequences for branch in sequence.all_branches]
        owners = np.repeat(np.arange(len(sequences)), [len(sequence.all_branches) for sequence in sequences])
        of_sequences = np.concatenate([group.advantages for group in groups])
        sampled_tokens = np.bincount(owners, weights=[branch.num_sampled_tokens for branch in branches]).astype(np.int64)
        weights = sequence_weights(sampled_tokens, self.algorithm.normalization)[owners]
        advantages, share_prompts = of_sequences[owners], self.policy.shares_prompts
        names, numbers = np.unique([sequence.actor for sequence in sequences], return_inverse=True)
        actors, ids, reported = numbers[owners], [sequence.sequence_id for sequence in sequences], np.full(len(branches), -1)
        chosen = (sequence.sequence_id for sequence in meter.sampled_sequences(groups))
        sampled = {name: np.flatnonzero(owners == ids.index(name)).tolist() for name in chosen}
        for own in sampled.values():
            reported[own] = own

        def packed(members: list[int], has_gradient: bool) -> HostMicroBatch:
            of_chosen = ([branches[index] for index in members], advantages[members], weights[members], version)
            options: dict[str, Any] = {"actors": actors[members], "reported": reported[members], "has_gradient": has_gradient}
            return host_microbatch(*of_chosen, share_prompts=share_prompts, **options)

        phases_s: dict[str, float] = {}
        with meter.measured(phases_s, "plan"):
            plan, num_forward = self._plan_passes(branches, (advantages == 0) & self._only_advantages)
        members_of = [plan.of_rank(rank) for rank in range(self.world.layout.data_ranks)]
        with meter.measured(phases_s, "build"):
            shares = tuple(tuple(packed(members, at >= num_forward) for at, members in enumerate(own)) for own in members_of)
        prepared = PreparedStep(
            version=version,
            shares=shares,
            sending=self._send(version, shares),
            sequence_ids=tuple(ids),
            figures={"advantage_abs_mean": float(np.abs(of_sequences).mean()), "imbalance": plan.imbalance},
            flops=meter.TRAINING_PASSES * sum(map(sum, plan.costs)),
            phases_s=phases_s,
            sampled=sampled,
            actors=tuple(names.tolist()),
        )
        if prepared.sending:
            self._sent.add(prepared)
        return prepared

    def _plan_passes(self, branches: list[Branch], silent: NDArray[np.bool_]) -> tuple[StepPlan, int]:
        """Return a plan, and how many slots (one micro-batch per rank) at its start need no backward pass. `silent`: mask of
        the branches without a gradient."""
        plan = self._plan(branches, np.arange(len(silent)))
        if silent.any() and not silent.all():
            forward, both = self._plan(branches, np.flatnonzero(silent)), self._plan(branches, np.flatnonzero(~silent))
            # Separate slots save backward passes, but with more slots, several ranks would gather all weights more often.
            if self.world.layout.data_ranks == 1 or len(forward.slots) + len(both.slots) <= len(plan.slots):
                forward_costs = [[cost / meter.TRAINING_PASSES for cost in costs] for costs in forward.costs]
                return StepPlan(forward.slots + both.slots, forward_costs + both.costs), len(forward.slots)
        return plan, 0

    def _plan(self, branches: list[Branch], members: NDArray[np.int64]) -> StepPlan:
        """Return a plan for the `branches` at positions `members`. It contains these positions."""
        chosen = [branches[index] for index in members]
        lengths = [branch.num_tokens - 1 for branch in chosen]  # the last token predicts nothing
        outputs = np.array([branch.num_sampled_tokens for branch in chosen])
        texts = [branch.prompt_token_ids for branch in chosen]
        prompts = [(text.tobytes(), len(text)) for text in texts] if self.policy.shares_prompts else None
        budget, ranks = self.trainer.tokens_per_microbatch, self.world.layout.data_ranks
        plan = plan_step(lengths, budget, ranks, self.cost_model, outputs, prompts)
        return StepPlan([[[int(members[index]) for index in bin_] for bin_ in bins] for bins in plan.slots], plan.costs)

    def order(self, kind: str, arrays: Mapping[str, NDArray[Any]] | None = None, **fields: Any) -> None:
        if self.world.is_first and self.world.links is not None:
            self.world.links.broadcast(Message(kind, fields, arrays or {}))
            if kind == END and self.world.batches is not None:
                self.world.batches.broadcast(Message(END))

    def use(self, trainer: TrainerConfig) -> None:
        """Use the learning rates, schedule, gradient bound and packing of `trainer` in later steps, on all ranks."""
        if trainer != self.trainer:
            self.order(USE, trainer=trainer.model_dump(mode="json"))
        self.trainer = trainer
        self.optimizer.use(trainer)

    def _send(self, version: int, shares: tuple[Share, ...]) -> list[Any]:
        layout, links = self.world.layout, self.world.batches
        if links is None or not self.world.is_first:
            return []
        messages = [batch_message(version, share) for share in shares]
        begun = [links.begin_send(messages[rank // layout.sequence_ranks], rank) for rank in range(1, layout.size)]
        return [work for works in begun for work in works]

    def step(self, prepared: PreparedStep) -> dict[str, Any]:
        """Rank 0: take one step on all ranks. Return figures (docs/run-directory.md), `SAMPLED_WEIGHTS` and `LAG_0_TOKENS`.
        Raises `RuntimeError` if a rank is gone."""
        began_at = time.perf_counter()
        layout, links = self.world.layout, self.world.links
        self.order(TRAIN, version=prepared.version)
        for work in prepared.sending:
            work.wait()
        self._sent.discard(prepared)
        first, totals, figures = self.compute(prepared.shares[0])
        parts = [first]
        if links is not None:
            for report in links.receive(*range(layout.sequence_ranks, layout.size, layout.sequence_ranks)):  # one rank per row
                parts.append(meter.TokenStatistics(**report.arrays))
                figures["memory_peak_gib"] = max(figures["memory_peak_gib"], report.fields["memory_peak_gib"])
        loads = [len(batch.token_ids) for share in prepared.shares for batch in share if len(batch.lengths)]
        figures |= meter.token_figures(parts, totals, loads, self.trainer.tokens_per_microbatch, applied=not figures["skipped"])
        figures["sequences_trained"] = 0 if figures["skipped"] else len(prepared.sequence_ids)
        figures |= prepared.figures
        if self.reference is None:
            figures["reference_kl"] = None
        figures["compute_s"] = {**prepared.phases_s, **figures["compute_s"]}
        seconds = time.perf_counter() - began_at
        figures["tokens_per_s"] = {kind: figures[f"tokens_{kind}"] / seconds for kind in ("trained", "computed")}
        peak = self.peak_flops
        figures["mfu"] = None if peak is None else prepared.flops / (seconds * layout.size * peak)
        branches, log_weights = np.concatenate([part.reported for part in parts]).T
        with np.errstate(over="ignore"):  # weights that overflow are infinite
            weights = np.exp(log_weights)
        figures[meter.SAMPLED_WEIGHTS] = {
            name: np.concatenate([weights[branches == branch] for branch in own]) for name, own in prepared.sampled.items()
        }
        of_actors = meter.summed([part.actors for part in parts]).tolist()  # up to the last actor that has a token of lag 0
        figures[meter.LAG_0_TOKENS] = dict(zip(prepared.actors, of_actors, strict=False))
        return figures

    def compute(self, share: Share) -> tuple[meter.TokenStatistics, NDArray[np.float64], dict[str, Any]]:
        """Compute this rank's `share` of one optimizer step. Return statistics of the share's tokens, totals and figures.

        Totals [4] cover the whole step: loss, KL to the reference, value loss, sum of the weights. Figures are those of
        `PolicyOptimizer.step`, and this rank's `memory_peak_gib` and `compute_s`.
        """
        values, terms = [], []
        for host_batch in share:
            with self._phases.measure("to_device"):
                batch = host_batch.on(self.policy.device, self.policy.row_multiple)
            with self._phases.measure("forward_backward"):
                its_values, its_terms = self.microbatch(batch)
            values.append(its_values)
            terms.append(its_terms)
        with self._phases.measure("totals"):
            totals = self.world.sum(torch.stack(terms).double().sum(0)).cpu().numpy()
        with self._phases.measure("optimizer"):
            figures = self.optimizer.step(loss=float(totals[0]), total_weight=float(totals[3]))
        of_tokens = torch.cat(values, dim=1).cpu().numpy()  # this waits for the device to finish the step
        figures["memory_peak_gib"] = meter.take_memory_peak(self.policy.device) / 1024**3
        figures["compute_s"] = self._phases.take()
        return meter.token_statistics(of_tokens, share, self._bound), totals, figures

    def microbatch(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Accumulate a micro-batch's gradient. Return, on the device, values [4 or 5, C]: log weight, clipped, masked, entropy
        and, with a value head, the value; and totals [4] (see `compute`)."""
        given, reference = (batch.row, batch.predictors, batch.targets, self.temperature), None
        with torch.set_grad_enabled(batch.has_gradient):
            scores = self.policy.scores(*given, self.algorithm.entropy_coefficient > 0)
            if self.reference is not None:
                with torch.no_grad(), adapters_off(self.reference.model):
                    reference = self.reference.scores(*given).logprobs
            output = compute_loss(batch, scores, self.algorithm, reference)
        if batch.has_gradient:
            output.loss.backward()
        values = [output.log_weights, output.clipped.float(), output.masked.float(), scores.entropy.detach()]
        if scores.values is not None:
            values.append(scores.values.detach())
        terms = (output.loss.detach(), output.reference_kl, output.value_loss, batch.weights.sum())
        return torch.stack(values).float(), torch.stack(terms)

    def score(self, token_ids: TokenIds, *, adapters: bool = True) -> Logprobs:
        """Return float32[tokens - 1]: log π(token[i] | token[:i]) for i >= 1 under the current weights, at temperature 1.
        `adapters=False`: disable the adapters, if there are any."""
        self.order(SCORE, {"token_ids": np.asarray(token_ids)}, adapters=adapters)
        with nullcontext() if adapters else adapters_off(self.policy.model):
            return self.policy.sequence_logprobs(token_ids)

    def gather(self, kind: str, dtype: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield (name in checkpoints, whole parameter). All ranks must iterate to the end. `kind`: `WEIGHTS` (the weights that
        actors serve), `VALUE_HEAD`, or `ADAPTER` (A and B of each adapted layer). `dtype`: for `WEIGHTS`, name of the dtype to
        which the caller will round and in which shards are gathered; empty = no rounding."""
        self.order(kind, dtype=dtype)
        if kind == WEIGHTS:
            return served_weights(self.policy.model, getattr(torch, dtype) if dtype else None)
        if kind == ADAPTER:
            return adapter_weights(self.policy.model)
        head = self.policy.value_head
        return iter(()) if head is None else ((name, whole(weight)) for name, weight in head.named_parameters())
