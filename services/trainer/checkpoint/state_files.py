"""Save and restore a learner's state. Training waits while the state is staged in host memory, not while it is written.

The state is a set of named tensors, independent of the number of ranks that share it and of the computation's dtype:

    weight/<parameter>      float32: a trained parameter, or its master copy if it has 16 bits
    exp_avg/<parameter>     float32: AdamW's state, with exp_avg_sq/… and step/… (a scalar); 8-bit moments are dequantised
    steps_taken             int64: steps of the learning-rate schedule
    rng/<device>/<rank>     uint8: torch's random state, for `cpu` and, if there is one, `cuda`

`<parameter>` is a name in `Policy`, which includes the value head. Sharded parameters are DTensors over all ranks. Frozen
weights and the reference are not saved, because they are those of the initial model.

The files are torch.distributed.checkpoint's: each rank writes its part, and any number of ranks can read them. `.metadata` is a
pickle, so restore only the files of your own runs. A folder without `.metadata` is incomplete. `dcp.async_save` is not used,
because it needs the folder's path when it stages, and stages into new memory each time.

On rank 0's order, all ranks stage between the same two steps. Rank 0 sends the folder's path later, through a process group
that only the writing threads use, so that training never waits for it.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pipelinerl.errors import FieldError, PipelineRLError, ServiceError
from pipelinerl.run_dir import sync_path
from services.trainer.learn.step import Learner
from services.trainer.world import SAVE, Message

log = logging.getLogger(__name__)

FIELD = "checkpoint"
WEIGHT, STEPS_TAKEN, RNG = "weight", "steps_taken", "rng"


def trained_parameters(learner: Learner) -> dict[str, nn.Parameter]:
    """Return the float32 parameters that the optimizer updates, by name. They are sharded like the weights."""
    names = {id(parameter): name for name, parameter in learner.policy.named_parameters()}
    return {names[id(live)]: stepped for live, stepped in learner.optimizer.trained()}


def learner_state(learner: Learner) -> dict[str, Tensor]:
    """Return the learner's state, by name. Weights and moments are not copied, and 8-bit moments are not dequantised."""
    learner.optimizer.begin_moments()
    state: dict[str, Tensor] = {}
    for name, stepped in trained_parameters(learner).items():
        state[f"{WEIGHT}/{name}"] = stepped.detach()
        for moment, value in learner.optimizer.moments(stepped).items():
            state[f"{moment}/{name}"] = value
    state[STEPS_TAKEN] = torch.tensor(learner.optimizer.steps_taken)
    state[_random(learner, "cpu")] = torch.get_rng_state()
    if learner.policy.device.type == "cuda":
        state[_random(learner, "cuda")] = torch.cuda.get_rng_state(learner.policy.device)
    return state


def _random(learner: Learner, device_type: str) -> str:
    return f"{RNG}/{device_type}/{learner.world.layout.rank}"


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard, or the tensor itself if it is not sharded, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_quantized(tensor: Tensor) -> bool:
    """Return whether the tensor is one of torchao's quantised tensors, without importing torchao."""
    return type(local_part(tensor)) is not Tensor


def write_state(tensors: Mapping[str, Tensor], folder: Path, group: Any) -> None:
    """Write the staged tensors of all ranks, and sync them to disk. All ranks must call this, on any of their threads. `group`:
    process group of all ranks; None for one rank. Raises `ServiceError` on all ranks if one of them cannot write."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # intended for a single rank
    # Nothing is copied ahead, because torch would do that on this thread's current GPU, which is GPU 0 on every rank.
    writer = _Writer(folder, sync_files=True, per_thread_copy_ahead=0)
    try:
        dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        by_rank = sorted(error.failures.items())
        causes = "; ".join(f"rank {rank}: {failure[0]!r}" for rank, failure in by_rank)
        raise ServiceError(f"cannot write the trainer's state to {folder}: {causes}") from error
    for changed in (folder, folder.parent):
        sync_path(changed)


class _Writer(dcp.FileSystemWriter):
    """Raises the root cause of a write error, because torch sends errors to other ranks without their causes."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # torch could not write to its stream
            first: BaseException = error
            while (cause := first.__cause__ or first.__context__) is not None:
                first = cause
            raise first from None


@torch.no_grad()
def stage(learner: Learner, reused: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Copy this rank's share of `learner_state` into host memory, and wait for the copies. `reused`: an earlier result
    that is no longer needed; its memory is overwritten."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in learner_state(learner).items():
        tensors[name] = reused[name] if reused is not None else _host_memory(tensor, learner.world.host_mesh)
        local = local_part(tensor)
        local_part(tensors[name]).copy_(local.dequantize() if is_quantized(tensor) else local, non_blocking=True)
    if learner.policy.device.type == "cuda":
        torch.cuda.current_stream(learner.policy.device).synchronize()
    return tensors


def _host_memory(tensor: Tensor, host_mesh: DeviceMesh | None) -> Tensor:
    local = local_part(tensor)
    memory = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
    if not isinstance(tensor, DTensor):
        return memory
    assert host_mesh is not None, "shards belong to several ranks"
    return DTensor.from_local(memory, host_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


@torch.no_grad()
def restore(learner: Learner, folder: Path) -> None:
    """Load the state in `folder`, which any number of ranks may have written. A rank without a saved random state keeps its
    own. Raises `FieldError` if the folder has no state of this model, and `ServiceError` if it cannot be read."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # intended: each rank reads by itself
    mesh = learner.world.host_mesh
    state = {
        name: _host_memory(tensor, mesh) if is_quantized(tensor) else tensor for name, tensor in learner_state(learner).items()
    }
    saved = _saved_shapes(folder)
    wanted = {name: tensor for name, tensor in state.items() if name in saved or not name.startswith(f"{RNG}/")}
    _check_same({name: tuple(tensor.shape) for name, tensor in wanted.items()}, saved, folder)
    try:
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    except CheckpointException as error:
        raise ServiceError(f"the state in {folder} is damaged: {error.failures[0][0]!r}") from error
    for name, stepped in trained_parameters(learner).items():
        for moment, value in learner.optimizer.moments(stepped).items():
            if is_quantized(value):
                local_part(value).copy_(local_part(state[f"{moment}/{name}"]))
    learner.optimizer.publish_masters()
    learner.optimizer.steps_taken = int(state[STEPS_TAKEN])
    torch.set_rng_state(state[_random(learner, "cpu")])
    if learner.policy.device.type == "cuda":
        torch.cuda.set_rng_state(state[_random(learner, "cuda")], learner.policy.device)


def _saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    if not (folder / ".metadata").is_file():
        fix = "has no complete trainer state (no .metadata): restore the folder, and keep it on a disk that all nodes share"
        raise FieldError(FIELD, str(folder), fix)
    try:
        found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        return {name: tuple(getattr(entry, "size", ())) for name, entry in found.items()}
    except Exception as error:  # any error that a corrupt pickle may cause
        fix = "Restore the checkpoint, or remove it to resume from another one"
        raise ServiceError(f"the state in {folder} is damaged: its .metadata does not load ({error!r}). {fix}") from error


def _check_same(wanted: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raise `FieldError` for the first tensor that only the model or only the folder has, or that differs in shape."""
    for name, shape in wanted.items():
        if name not in saved:
            raise FieldError(FIELD, str(folder), f"has no {name}, which the recipe's model has: use a checkpoint of this model")
        if saved[name] != shape:
            fix = f"has {name} of shape {list(saved[name])}, not the recipe's {list(shape)}: use a checkpoint of this model"
            raise FieldError(FIELD, str(folder), fix)
    for name in saved:
        if name not in wanted and not name.startswith(f"{RNG}/"):
            raise FieldError(FIELD, str(folder), f"has {name}, which the recipe's model lacks: use a checkpoint of this model")


FOLDER, DISCARD = "folder", "discard"


class StateSaver:
    """Saves the state of one rank. All ranks stage a state, then write or abandon it. The next state reuses the memory. Ranks
    other than 0 stage when rank 0 orders it. In `follow`, they wait until rank 0 decides to write or to abandon."""

    def __init__(self, learner: Learner) -> None:
        self._learner, self._others = learner, learner.world.saving
        self.staged: dict[str, Tensor] = {}
        self._waiting, self._free = threading.Semaphore(0), threading.Event()
        """`_waiting`: 1 while a staged state waits for `write` or `abandon`. `_free`: set if no state waits or is written."""
        self._free.set()

    def stage(self) -> None:
        """Copy the state of all ranks into host memory. Drop a staged state that was never written. No write may be running."""
        self.abandon()
        assert self._free.is_set(), "the previous state is still being written from the same memory"
        self._learner.order(SAVE)
        self.staged = stage(self._learner, self.staged or None)
        self._free.clear()
        self._waiting.release()

    def write(self, folder: Path) -> None:
        """Write the staged state, and block until it is durable on all ranks. Raises `ServiceError` if a rank cannot write."""
        begun = self._waiting.acquire(blocking=False)
        assert begun, "stage a state before each write"
        try:
            self._tell(Message(FOLDER, {"folder": str(folder)}))
            write_state(self.staged, folder, self._others.group if self._others is not None else None)
        finally:
            self._free.set()

    def follow(self) -> None:
        """On ranks other than 0, write or drop the staged state when rank 0 decides. Do not call this on the compute thread."""
        assert self._others is not None, "a single rank has no rank 0 to follow"
        try:
            order = self._others.receive_order()
            if order.kind == FOLDER:
                self.write(Path(order.fields["folder"]))
        except (PipelineRLError, OSError) as error:
            log.error("this rank's part of a checkpoint was not written: %s", error)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Drop the staged state unless it is already being written."""
        if self._waiting.acquire(blocking=False):
            self._tell(Message(DISCARD))
            self._free.set()

    def end(self) -> None:
        """Wait for a state that is being written. Drop a state that is only staged."""
        self.abandon()
        self._free.wait()

    def _tell(self, message: Message) -> None:
        if self._others is not None and self._learner.world.is_first:
            self._others.broadcast(message)
