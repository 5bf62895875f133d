"""The compute side of the optimizer loop over torch: steps, snapshots, the probe, checkpoints of one policy.

Everything here blocks and belongs to one thread; the event loop calls it through an executor.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipelinerl.config.recipe import Recipe
from pipelinerl.config.settings import TrainerSettings
from pipelinerl.errors import FieldError
from pipelinerl.types import Logprobs, PolicyVersion, TokenIds
from pipelinerl.weights.manifest import aligned
from pipelinerl_torch.chunks import describe
from pipelinerl_torch.group import Backend, GroupStore
from pipelinerl_torch.placement import HOST, on_device
from services.trainer.checkpoint import export_policy, prune
from services.trainer.learn.batch import TrainingGroup
from services.trainer.learn.model import load_policy
from services.trainer.learn.step import Learner, StepOutcome
from services.trainer.weights.port import CollectivePort
from services.trainer.weights.sender import Snapshot, WeightSender

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

STALL_TIMEOUT_S = 10.0
"""The longest that one chunk of a transfer may take before its group counts as broken."""


class TorchPolicyTrainer:
    """See `services.trainer.loop.PolicyTrainer`."""

    def __init__(
        self,
        learner: Learner,
        tokenizer: PreTrainedTokenizerBase,
        sender: WeightSender,
        port: CollectivePort,
        recipe: Recipe,
        run_dir: Path,
    ) -> None:
        self._learner, self._sender, self._recipe, self._run_dir = learner, sender, recipe, run_dir
        self.tokenizer, self.port = tokenizer, port
        self.vocab_size = learner.policy.vocab_size
        self._version = 0
        """Of the weights as they are; on the compute thread, ahead of the loop's while a step's result is on its way."""

    def train_step(self, groups: list[TrainingGroup], version: int) -> Mapping[str, Any]:
        outcome = self._learner.train_step(groups, version)
        self._version = version + 1
        if not outcome.applied:
            ids = [sequence.sequence_id for group in groups for sequence in group.sequences]
            log.error("step skipped, loss or gradient not finite", extra={"sequences": ",".join(ids)})
        return step_figures(outcome, self._recipe)

    def snapshot(self, version: PolicyVersion) -> Snapshot:
        return self._sender.snapshot(version, self._learner.policy.model.named_parameters())

    def score(self, token_ids: TokenIds) -> Logprobs:
        return self._learner.score(token_ids)

    def checkpoint(self, final: bool) -> tuple[str, int]:
        """`checkpoint/` for the last one, `checkpoints/step-<version>/` on the way."""
        version = self._version
        info = {"recipe": self._recipe.name, "policy_version": version, "seed": self._recipe.seed}
        steps = self._run_dir / "checkpoints"
        folder = self._run_dir / "checkpoint" if final else steps / f"step-{version}"
        export_policy(self._learner.policy.model, self.tokenizer, folder, info)
        if not final:
            prune(steps, self._recipe.checkpoint.keep)
        return str(folder), version


def load_policy_trainer(recipe: Recipe, settings: TrainerSettings) -> TorchPolicyTrainer:
    """Loads model and tokenizer (seconds to minutes). Raises `FieldError` for what the user can mend."""
    on_gpu = torch.cuda.is_available()
    backend = transfer_backend(recipe.weights.backend, on_gpu)
    if recipe.trainer.threads:
        torch.set_num_threads(recipe.trainer.threads)
    torch.manual_seed(recipe.seed)
    source = settings.model_dir or recipe.model.name
    policy = load_policy(
        source,
        recipe.model,
        gradient_checkpointing=recipe.trainer.gradient_checkpointing,
        compiled=recipe.trainer.compile,
        device="cuda" if on_gpu else "cpu",
    )
    learner = Learner(policy, recipe.algorithm, recipe.trainer, temperature=recipe.sampling.temperature)
    wire_dtype = "" if recipe.weights.wire_dtype == "model" else recipe.weights.wire_dtype
    chunk_bytes = aligned(int(recipe.weights.chunk_mib * 1024**2))
    manifest = describe(policy.model.named_parameters(), wire_dtype=wire_dtype, chunk_bytes=chunk_bytes)
    placement = on_device(torch.device("cuda", torch.cuda.current_device())) if backend == "nccl" else HOST
    sender = WeightSender(manifest, stall_timeout_s=STALL_TIMEOUT_S, placement=placement)
    store = GroupStore(settings.transfer_host, settings.transfer_port)
    port = CollectivePort(sender, store, host=settings.advertise_host, backend=backend)
    return TorchPolicyTrainer(learner, load_tokenizer(source, recipe), sender, port, recipe, settings.run_dir)


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
        "mismatch_kl": tokens.mismatch_kl,
        "reference_kl": tokens.reference_kl if recipe.algorithm.kl_coefficient > 0 else None,
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
