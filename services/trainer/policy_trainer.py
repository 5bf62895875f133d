"""Rank 0 of the trainer: the policy as the optimizer loop uses it, over torch.

`Learner` takes steps and scores, on all ranks. `PolicyTrainer` adds checkpoints, and snapshots for actors. All methods block.
Call them on one thread, except `Learner.prepare` and the writing of a copied checkpoint. The loop counts the versions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipelinerl.errors import FieldError
from pipelinerl.initial_model import model_source
from pipelinerl.messages.control import Backend
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.prompts import use_chat_template
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.settings import RankSettings, TrainerSettings
from pipelinerl.transfer.group import HOST, GroupStore, on_device, transfer_backend
from pipelinerl.transfer.manifest import chunk_size
from services.trainer.checkpoint.checkpointer import PolicyExport
from services.trainer.checkpoint.run_state import RESUME, STATE, Start
from services.trainer.checkpoint.state_files import StateSaver
from services.trainer.distributed.world import ADAPTER, END, HEARTBEAT, WEIGHTS
from services.trainer.learn.model import DTYPES, hub_arguments
from services.trainer.learn.step import Learner, PreparedStep
from services.trainer.loading import load_learner
from services.trainer.weight_sync.sender import (
    Snapshot,
    WeightSender,
    adapter_factors,
    as_in_files,
    converted_parameters,
    whole_weights,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class PolicyTrainer:
    """Steps, snapshots and checkpoints of the policy. `sender`: the trainer's end of weight transfers."""

    def __init__(self, learner: Learner, tokenizer: PreTrainedTokenizerBase, sender: WeightSender, recipe: Recipe) -> None:
        self.learner, self._recipe = learner, recipe
        self.tokenizer, self.sender, self.vocab_size = tokenizer, sender, learner.policy.vocab_size
        self.num_ranks = learner.world.layout.size
        self._converted = frozenset() if sends_adapter(recipe) else converted_parameters(learner.policy.model)
        self._version: int | None = None
        """Version of the weights; None before this process's first step."""
        self._state = StateSaver(learner)
        self._export = PolicyExport(learner.policy.model, tokenizer, DTYPES[recipe.model.dtype])

    def step(self, prepared: PreparedStep) -> dict[str, Any]:
        figures = self.learner.step(prepared)
        self._version = prepared.version + 1  # a skipped step counts, too
        if figures["skipped"]:
            ids = ",".join(prepared.sequence_ids)
            log.error("step skipped, loss or gradient not finite", extra={"sequences": ids})
        return figures

    def heartbeat(self) -> None:
        """Send the other ranks a heartbeat instead of an order."""
        self.learner.order(HEARTBEAT)

    def end(self) -> None:
        """Order the other ranks to end. Wait for a checkpoint that is being written; drop a checkpoint that is only staged."""
        self.learner.order(END)
        self._state.end()

    def snapshot(self, version: PolicyVersion) -> Snapshot:
        """Copy the current weights, which must be of `version`, in the form that actors receive."""
        if sends_adapter(self._recipe):
            return self.sender.snapshot(version, self.learner.gather(ADAPTER))
        weights = as_in_files(self.learner.policy.model, self.learner.gather(WEIGHTS), self._converted)
        return self.sender.snapshot(version, weights)

    def begin_checkpoint(self, version: int) -> Callable[[Path], None]:
        """Copy the training state and the export of the current weights, which must be of `version`, on all ranks.

        Return a function that writes the export into an existing folder, and the training state into `resume/state` below it.
        Call that function at most once, before the next checkpoint begins, on a thread that does not compute. When it returns,
        the state is durable, but the caller must sync the files of the export. It raises `OSError`, and `ServiceError` if a
        rank cannot write.
        """
        assert self._version in (None, version), f"weights of {self._version}, the rest of version {version}"
        self._state.stage()
        self._export.stage(self.learner)
        about = {"recipe": self._recipe.name, "policy_version": version, "seed": self._recipe.seed}

        def write(folder: Path) -> None:
            try:
                self._export.write(folder, about)
            except BaseException:
                self._state.abandon()  # the other ranks wait for the folder's name
                raise
            self._state.write(folder / RESUME / STATE)

        return write


def load_policy_trainer(
    recipe: Recipe, settings: TrainerSettings, ranks: RankSettings, start: Start | None = None
) -> PolicyTrainer:
    """Rank 0: load model and tokenizer (seconds to minutes), and the state of `start`'s checkpoint. Raises `FieldError` for a
    mistake of the user, and `ServiceError` if the checkpoint cannot be read."""
    backend = transfer_backend(recipe.weights.backend, torch.cuda.is_available())
    source = model_source(recipe, settings)
    tokenizer = load_tokenizer(source, recipe)
    learner = load_learner(recipe, source, ranks, start.tensors if start else None, settings.revision)
    layout, policy = learner.world.layout, learner.policy
    facts = {
        "ranks": layout.size,
        "shard_ranks": layout.shard_ranks,
        "context_parallel": layout.sequence_ranks,
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "trained": sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad),
        "value_head": policy.value_head is not None,
        "attention": learner.policy.attention,
    }
    log.info("policy ready", extra=facts)
    store = GroupStore(settings.transfer_host, settings.transfer_port, settings.advertise_host)
    sender = weight_sender(learner, recipe, backend, store, settings.advertise_host)
    return PolicyTrainer(learner, tokenizer, sender, recipe)


def weight_sender(
    learner: Learner, recipe: Recipe, backend: Backend, store: GroupStore | None = None, host: str = "127.0.0.1"
) -> WeightSender:
    """Return the sender of this learner's weights or adapters to actors. Its snapshots are further copies of the weights. With
    sharded weights, snapshots are kept in host memory, because the one device that sends may lack room."""
    sharded, wire_dtype = learner.world.mesh is not None, str(recipe.weights.wire_dtype)
    if wire_dtype == "model":  # sharded weights are kept in float32, and served in the model's dtype
        wire_dtype = recipe.model.dtype if sharded else ""
    chunk_bytes = chunk_size(recipe.weights.chunk_mib, backend)
    described = adapter_factors if sends_adapter(recipe) else whole_weights
    manifest = described(learner.policy.model, wire_dtype=wire_dtype, chunk_bytes=chunk_bytes)
    of_groups = on_device(learner.policy.device) if backend == "nccl" else HOST
    of_snapshots = HOST if sharded else of_groups
    return WeightSender(manifest, placement=of_snapshots, group_placement=of_groups, store=store, host=host, backend=backend)


def sends_adapter(recipe: Recipe) -> bool:
    """Return whether actors receive adapter factors instead of weights."""
    return recipe.trainer.lora is not None and recipe.trainer.lora.send == "adapter"


def load_tokenizer(source: str, recipe: Recipe) -> PreTrainedTokenizerBase:
    """Return the tokenizer of folder (or hub id) `source`, at the recipe's revision, with its template. Raises `FieldError`."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **hub_arguments(source, recipe.model))
    except (OSError, ValueError) as error:
        raise FieldError("model.name", source, f"its tokenizer does not load: {error}") from error
    use_chat_template(tokenizer, recipe.model)
    return tokenizer
