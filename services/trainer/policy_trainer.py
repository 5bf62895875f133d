"""The compute side of the optimizer loop over torch: steps, snapshots, the probe, checkpoints of one policy.

Everything here blocks and belongs to one thread; the event loop calls it through an executor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipelinerl.errors import FieldError
from pipelinerl.initial_model import model_source
from pipelinerl.messages.sequences import Logprobs, PolicyVersion, TokenIds
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.settings import RankSettings, TrainerSettings
from pipelinerl.transfer.group import HOST, Backend, GroupStore, on_device
from pipelinerl.transfer.manifest import aligned
from services.trainer.checkpoint.export import PolicyExport, StagedExport
from services.trainer.checkpoint.run_state import Start
from services.trainer.checkpoint.state_files import PendingState
from services.trainer.learn.batch import TrainingGroup
from services.trainer.learn.metrics import SAMPLED_WEIGHTS
from services.trainer.learn.model import DTYPES
from services.trainer.learn.step import Learner, PreparedStep, StepOutcome
from services.trainer.loading import load_learner
from services.trainer.rank_zero import RankZero
from services.trainer.records import StepWork, throughput_figures
from services.trainer.weight_sync.sender import CollectivePort, Snapshot, WeightSender, adapter_factors, whole_weights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

STALL_TIMEOUT_S = 10.0
"""The longest that one chunk of a transfer may take before its group counts as broken."""


@dataclass(frozen=True, eq=False)
class PendingCheckpoint:
    """One version in host memory, on all ranks. `write` is called once, before the next one begins."""

    version: int
    trainer: TorchPolicyTrainer
    state: PendingState
    export: StagedExport

    def write(self, folder: Path) -> None:
        """The export into `folder`, which is there, and what training goes on from into `resume/state` in it.

        Blocks, on a thread that does not compute. The state is durable then; files of the export are the caller's to sync.
        Raises `ServiceError` when a rank cannot write, and `OSError`.
        """
        try:
            self.trainer.write_export(self.export, folder, self.version)
        except BaseException:
            self.state.abandon()  # the other ranks wait to hear where
            raise
        self.state.write(folder / "resume" / "state")


class TorchPolicyTrainer:
    """See `services.trainer.loop.PolicyTrainer`."""

    def __init__(
        self,
        lead: RankZero,
        tokenizer: PreTrainedTokenizerBase,
        sender: WeightSender,
        port: CollectivePort,
        recipe: Recipe,
        version: int = 0,
    ) -> None:
        """`version`: of the weights as they are."""
        self._lead, self._sender, self._recipe = lead, sender, recipe
        self.tokenizer, self.port = tokenizer, port
        self.vocab_size = lead.learner.policy.vocab_size
        self._export = PolicyExport(lead.learner.policy.model, tokenizer, DTYPES[recipe.model.dtype])
        self._version = version
        """Of the weights as they are; on the compute thread, ahead of the loop's while a step's result is on its way."""

    @property
    def num_ranks(self) -> int:
        return self._lead.num_ranks

    def prepare(self, groups: list[TrainingGroup], version: int) -> PreparedStep:
        return self._lead.prepare(groups, version)

    def train_step(self, prepared: PreparedStep) -> Mapping[str, Any]:
        began_at = time.perf_counter()
        outcome = self._lead.train_step(prepared)
        seconds = time.perf_counter() - began_at
        self._version = prepared.version + 1
        if not outcome.applied:
            ids = ",".join(prepared.sequence_ids)
            log.error("step skipped, loss or gradient not finite", extra={"sequences": ids})
        figures = {**step_figures(outcome, self._recipe), **self._throughput(outcome, seconds)}
        return {**figures, SAMPLED_WEIGHTS: outcome.sampled_weights}

    def _throughput(self, outcome: StepOutcome, seconds: float) -> dict[str, Any]:
        work = StepWork(
            tokens_trained=outcome.tokens.completion_tokens if outcome.applied else 0,
            tokens_computed=outcome.tokens.tokens,
            seconds=seconds,
            flops=outcome.flops,
            num_devices=self._lead.num_ranks,
            peak_flops=self._lead.learner.meter.peak_flops,
            memory_peak_bytes=outcome.memory_peak_bytes,
            imbalance=outcome.imbalance,
            phases_s=outcome.phases_s,
        )
        return throughput_figures(work)

    def snapshot(self, version: PolicyVersion) -> Snapshot:
        sent = self._lead.adapter() if sends_adapter(self._recipe) else self._lead.weights()
        return self._sender.snapshot(version, sent)

    def score(self, token_ids: TokenIds) -> Logprobs:
        return self._lead.score(token_ids)

    def beat(self) -> None:
        self._lead.beat()

    def end(self) -> None:
        self._lead.end()

    def begin_checkpoint(self) -> PendingCheckpoint:
        """Copies state and export on all ranks. The one before must have been written, or never will be."""
        return PendingCheckpoint(self._version, self, self._lead.stage(), self.stage_export())

    def stage_export(self) -> StagedExport:
        """See `PolicyExport.stage`."""
        return self._export.stage(self._lead)

    def write_export(self, staged: StagedExport, folder: Path, version: int) -> None:
        """See `PolicyExport.write`."""
        self._export.write(staged, folder, self._about(version))

    def _about(self, version: int) -> dict[str, Any]:
        """pipelinerl.json of a checkpoint."""
        return {"recipe": self._recipe.name, "policy_version": version, "seed": self._recipe.seed}


def load_policy_trainer(
    recipe: Recipe, settings: TrainerSettings, ranks: RankSettings, start: Start | None = None
) -> TorchPolicyTrainer:
    """Rank 0: loads model and tokenizer (seconds to minutes), and the state of `start`'s checkpoint.

    Raises `FieldError` for what the user can mend, `ServiceError` for a checkpoint that cannot be read.
    """
    start = start or Start()
    backend = transfer_backend(recipe.weights.backend, torch.cuda.is_available())
    source = model_source(recipe, settings)
    tokenizer = load_tokenizer(source, recipe)
    lead = RankZero(load_learner(recipe, source, ranks, resume=start.tensors))
    log.info("policy ready", extra=policy_facts(lead.learner))
    sender = weight_sender(lead.learner, recipe, backend)
    store = GroupStore(settings.transfer_host, settings.transfer_port)
    port = CollectivePort(sender, store, host=settings.advertise_host, backend=backend)
    return TorchPolicyTrainer(lead, tokenizer, sender, port, recipe, start.version)


def policy_facts(learner: Learner) -> dict[str, Any]:
    """Of the policy and its ranks, for the log."""
    layout, parameters = learner.world.layout, list(learner.policy.scorer.parameters())
    return {
        "ranks": layout.size,
        "shard_ranks": layout.shard_ranks,
        "context_parallel": layout.sequence_ranks,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trained": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "value_head": learner.policy.scorer.value_head is not None,
        "attention": learner.policy.attention,
    }


def weight_sender(learner: Learner, recipe: Recipe, backend: Backend) -> WeightSender:
    """Sends what actors serve of this learner's policy. Sharded weights are collected in host memory: the second copy that a
    snapshot is may not fit the one device that sends it."""
    sharded, wire_dtype = learner.world.mesh is not None, str(recipe.weights.wire_dtype)
    if wire_dtype == "model":  # sharded weights are kept in float32, and served in the model's dtype
        wire_dtype = recipe.model.dtype if sharded else ""
    chunk_bytes = aligned(int(recipe.weights.chunk_mib * 1024**2))
    described = adapter_factors if sends_adapter(recipe) else whole_weights
    manifest = described(learner.policy.model, wire_dtype=wire_dtype, chunk_bytes=chunk_bytes)
    of_groups = on_device(learner.policy.device) if backend == "nccl" else HOST
    of_snapshots = HOST if sharded else of_groups
    return WeightSender(manifest, stall_timeout_s=STALL_TIMEOUT_S, placement=of_snapshots, group_placement=of_groups)


def sends_adapter(recipe: Recipe) -> bool:
    """Whether actors get factors of adapters instead of weights."""
    return recipe.trainer.lora is not None and recipe.trainer.lora.send == "adapter"


def transfer_backend(wanted: str, on_gpu: bool) -> Backend:
    """Which backend a recipe's `weights.backend` means here. Raises `FieldError`. Pure."""
    if wanted == "nccl" and not on_gpu:
        raise FieldError("weights.backend", wanted, "this trainer has no GPU: use gloo, or auto")
    return "nccl" if wanted == "nccl" or (wanted == "auto" and on_gpu) else "gloo"


def load_tokenizer(source: str, recipe: Recipe) -> PreTrainedTokenizerBase:
    """That of folder (or hub id) `source`, at the recipe's revision. Raises `FieldError` when there is none."""
    from transformers import AutoTokenizer

    hub: dict[str, Any] = {"trust_remote_code": recipe.model.trust_remote_code}
    if recipe.model.revision and not Path(source).is_dir():
        hub["revision"] = recipe.model.revision
    try:
        return AutoTokenizer.from_pretrained(source, **hub)
    except (OSError, ValueError) as error:
        raise FieldError("model.name", source, f"its tokenizer does not load: {error}") from error


def step_figures(outcome: StepOutcome, recipe: Recipe) -> dict[str, Any]:
    """One step under the names of metrics.jsonl (docs/run-directory.md); a skipped one trained on nothing. Pure."""
    tokens, applied = outcome.tokens, outcome.applied
    return {
        "loss": tokens.loss,
        "skipped": outcome.optimizer.skipped,
        "grad_norm": outcome.optimizer.grad_norm,
        "learning_rate": outcome.optimizer.learning_rate,
        "entropy": tokens.entropy,
        "ess": tokens.ess,
        "ess_by_lag": {label: bucket.ess for label, bucket in tokens.by_lag.items()},
        "clip_fraction": tokens.clip_fraction,
        "clip_fraction_by_lag": {label: bucket.clip_fraction for label, bucket in tokens.by_lag.items()},
        "mask_fraction": tokens.mask_fraction,
        "mismatch_kl": tokens.mismatch_kl,
        "reference_kl": tokens.reference_kl if recipe.algorithm.kl_coefficient > 0 else None,
        "value_loss": tokens.value_loss,
        "explained_variance": tokens.explained_variance,
        "log_weight_abs_max": tokens.log_weight_abs_max,
        "lag": {"mean": tokens.lag_mean, "p95": tokens.lag_p95, "max": tokens.lag_max},
        "lag_histogram": tokens.lag_histogram if applied else {},
        "advantage_abs_mean": outcome.advantage_abs_mean,
        "sequences_trained": tokens.sequences if applied else 0,
        "tokens_trained": tokens.completion_tokens if applied else 0,
        "tokens_computed": tokens.tokens,
        "microbatches": tokens.microbatches,
        "packing_fill": tokens.packing_fill,
    }
