"""Decide when to write checkpoints. Each one holds one policy version. Its folder appears only when it is complete.

Tensors and other state are captured at the same moment between two steps. During the next steps, a separate thread writes one
checkpoint at a time to a hidden folder, which is then renamed. A checkpoint that falls due during a write begins afterwards.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import shutil
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from pipelinerl.audit.journal import Journal
from pipelinerl.errors import FieldError, ServiceError
from pipelinerl.recipe.fields import CheckpointConfig
from pipelinerl.run_dir import CHECKPOINTS, resumable, sync_path
from pipelinerl.transfer.chunks import dtype_name
from services.trainer.checkpoint.files import replacing
from services.trainer.checkpoint.run_state import RESUME, RunState, Start
from services.trainer.learn.lora import has_adapters, peft_config
from services.trainer.learn.policy import Policy
from services.trainer.learn.step import Learner
from services.trainer.world import ADAPTER, VALUE_HEAD, WEIGHTS

log = logging.getLogger(__name__)

RUN_ENDED = "the run has ended: no more checkpoints are written"
WriteTensors = Callable[[Path], None]
"""Function that writes one version's tensors from host memory into a checkpoint's folder. It blocks."""


@dataclass(frozen=True)
class WrittenCheckpoint:
    folder: Path
    version: int
    position: int
    """Position in SEQUENCES of the last message that was read before the checkpoint."""
    seconds: float


def write_checkpoint(
    run_dir: Path, keep: int, write_tensors: WriteTensors, state: RunState, before_rename: Callable[[], None] = lambda: None
) -> WrittenCheckpoint:
    """Write a checkpoint, block until it is on disk, and remove all but the newest `keep`. `write_tensors` and `state` must be
    of the same version. `before_rename` runs just before the rename; an error in it makes the checkpoint fail."""
    began_s = time.monotonic()
    folder = run_dir / CHECKPOINTS / f"step-{state.policy_version}"
    with replacing(folder) as partial:
        (partial / RESUME).mkdir(parents=True)
        write_tensors(partial)
        state.save(partial / RESUME)
        for path in (*partial.rglob("*"), partial):
            sync_path(path)
        before_rename()
    sync_path(folder.parent)
    for old in list(resumable(run_dir).values())[:-keep]:
        shutil.rmtree(old.parent.parent, ignore_errors=True)
    return WrittenCheckpoint(folder, state.policy_version, state.position, time.monotonic() - began_s)


class Checkpointer:
    """Writes checkpoints. `begin(version)` copies the tensors and returns a function that writes them. `capture()` returns a
    copy of all other state. `written` is awaited after each successful write."""

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        journal: Journal,
        start: Start,
        begin: Callable[[int], Awaitable[WriteTensors]],
        capture: Callable[[], RunState],
        written: Callable[[WrittenCheckpoint], Awaitable[None]],
    ) -> None:
        self._run_dir, self._config, self._journal = run_dir, config, journal
        self._begin, self._capture, self._written = begin, capture, written
        self.positions = dict(start.positions)
        """By version of a kept checkpoint: position of the last message in SEQUENCES that was read before it."""
        self.saved_at_s = start.saved_at_s
        """Unix time of the newest checkpoint, or of the start of training if there is none. None before training."""
        self._began_version, self._began_s = start.version, time.monotonic()
        self._newest: tuple[int, asyncio.Task[WrittenCheckpoint]] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._boundary = asyncio.Lock()
        self._over = False
        self._interrupted = False
        """True if a step was cancelled or failed. The weights may then contain a step that the ledger lacks."""

    @property
    def _busy(self) -> bool:
        return self._newest is not None and not self._newest[1].done()

    def close(self) -> None:
        """Begin no more checkpoints. A running write finishes by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def if_due(self, version: int) -> None:
        """Begin a checkpoint if one is due and none is being written. Return when its tensors are copied. Log later errors."""
        steps, minutes = self._config.every_steps, self._config.every_minutes
        by_steps = steps > 0 and version // steps > self._began_version // steps
        by_time = minutes > 0 and time.monotonic() - self._began_s >= 60 * minutes
        if not self._busy and version > self._began_version and (by_steps or by_time):
            async with self._boundary:
                await self._start()

    @asynccontextmanager
    async def step(self) -> AsyncIterator[None]:
        """Context to compute and record a step. No checkpoint begins in it. After `write(last=True)`, no step can begin."""
        async with self._boundary:
            if self._over:
                await asyncio.Event().wait()  # waits until the process ends
            try:
                yield
            except BaseException:
                self._interrupted = True
                raise

    async def write(self, *, anew: bool = False, last: bool = False) -> WrittenCheckpoint:
        """Write a checkpoint now, or after the running step, and return when it is on disk. `anew`: write even if the version
        has a checkpoint. `last`: let no further step begin. Raises `ServiceError` if writing fails or the run has ended."""
        while True:
            async with self._boundary:
                if self._interrupted:
                    raise ServiceError(RUN_ENDED)
                self._over = self._over or last
                if last:
                    await self._idle()
                if not self._busy:
                    task = await self._start(anew=anew)
                    break
            await self._idle()  # training continues meanwhile
        return await asyncio.shield(task)

    async def _idle(self) -> None:
        """Wait until no checkpoint is being written, because the next one is copied into the same memory."""
        while self._newest is not None and self._busy:
            await asyncio.wait({self._newest[1]})

    async def _start(self, *, anew: bool = False) -> asyncio.Task[WrittenCheckpoint]:
        """Return the task that writes the current version: a new one if `anew`, or if none is running or succeeded."""
        state = self._capture()
        version = state.policy_version
        if not anew and self._newest is not None and self._newest[0] == version:
            newest = self._newest[1]
            if self._busy or (not newest.cancelled() and newest.exception() is None):
                return newest
        self._began_version, self._began_s = version, time.monotonic()
        write_tensors = await self._begin(version)
        job = self._thread.submit(write_checkpoint, self._run_dir, self._config.keep, write_tensors, state, self._journal.sync)
        task = asyncio.create_task(self._finish(job, version))
        self._newest = version, task
        task.add_done_callback(self._ended)
        return task

    async def _finish(self, job: Future[WrittenCheckpoint], version: int) -> WrittenCheckpoint:
        try:
            written = await asyncio.wrap_future(job)
        except Exception as error:  # an error of the disk, torch or another rank; the run continues
            raise ServiceError(
                f"the checkpoint of version {version} could not be written: {str(error) or repr(error)}"
            ) from error
        log.info("wrote the checkpoint of version %d to %s in %.2f s", version, written.folder, written.seconds)
        self.saved_at_s = time.time()
        others = {known: position for known, position in self.positions.items() if known != version}
        self.positions = dict([*others.items(), (version, written.position)][-self._config.keep :])
        self._journal.write({"event": "checkpoint", "version": version, "position": written.position})
        self._journal.flush()
        await self._written(written)
        return written

    def _ended(self, task: asyncio.Task[WrittenCheckpoint]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("%s; the previous checkpoint is kept", task.exception())


VALUE_HEAD_FILE = Path("value_head") / "model.safetensors"
"""Path of the value head within a checkpoint: `weight` [1, hidden size] and `bias` [1]. The folder is separate, because vLLM
loads every safetensors file beside the model as weights."""
_KEPT = ("_weight_conversions", "peft_config")
"""Attributes of a model that `save_pretrained` uses, in addition to the model's class and configuration."""


class PolicyExport:
    """Exports a policy in `dtype` as a Hugging Face folder. Training waits during `stage`, and continues during `write`. The
    tensors of a `stage` must be written before the next one, which overwrites them."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> None:
        with torch.device("meta"):  # without tensors, so that `write` reads nothing that training changes
            self.form: PreTrainedModel = type(model)(copy.deepcopy(model.config))  # without its adapters
        self.form.to(dtype)  # type: ignore[arg-type]
        for name in _KEPT:
            if (value := getattr(model, name, None)) is not None:
                setattr(self.form, name, copy.deepcopy(value))
        self._generation, self.form.generation_config = copy.deepcopy(model.generation_config), GenerationConfig()
        self._tokenizer, self._dtype = tokenizer, dtype
        self.staged: dict[str, dict[str, Tensor]] = {}
        """Tensors of one version in host memory, by kind (`WEIGHTS`, `VALUE_HEAD`, `ADAPTER`) and then by name in the files."""

    @torch.no_grad()
    def stage(self, learner: Learner) -> None:
        """On rank 0, gather the policy's tensors from all ranks into host memory. Call this on the compute thread."""
        there = {WEIGHTS: True, VALUE_HEAD: learner.policy.value_head is not None, ADAPTER: has_adapters(self.form)}
        for kind in (kind for kind, has in there.items() if has):
            copies = self.staged.setdefault(kind, {})
            for name, tensor in learner.gather(kind, dtype_name(self._dtype) if kind == WEIGHTS else ""):
                if name not in copies:
                    dtype = self._dtype if kind == WEIGHTS else tensor.dtype
                    copies[name] = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
                copies[name].copy_(tensor, non_blocking=True)
        device = learner.policy.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def write(self, folder: Path, info: Mapping[str, Any]) -> None:
        """Write the model, the tokenizer and `info` (pipelinerl.json) into the existing `folder`. Any thread may call this."""
        self.form.save_pretrained(folder, state_dict=self.staged[WEIGHTS], safe_serialization=True)
        if self._generation is not None:  # `save_pretrained` would refuse the settings of some public models
            self._generation.to_json_file(folder / "generation_config.json")
        self._tokenizer.save_pretrained(folder)
        if VALUE_HEAD in self.staged:
            (folder / VALUE_HEAD_FILE).parent.mkdir()
            save_file(self.staged[VALUE_HEAD], folder / VALUE_HEAD_FILE)
        if ADAPTER in self.staged:  # files for `PeftModel.from_pretrained`: the factors and their configuration
            (folder / "adapter").mkdir()
            peft_config(self.form).save_pretrained(str(folder / "adapter"))
            named = {f"base_model.model.{name}": tensor for name, tensor in self.staged[ADAPTER].items()}
            save_file(named, folder / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
        about = folder / "pipelinerl.json"
        about.write_text(json.dumps(dict(info), indent=2) + "\n", encoding="utf-8")
        mode = stat.S_IMODE(about.stat().st_mode)
        for file in folder.rglob("*"):  # safetensors files are made readable only by their owner, despite the umask
            if file.is_file():
                file.chmod(mode)


def load_value_head(policy: Policy, folder: Path) -> None:
    """Load a checkpoint's value head, if `folder` and `policy` have one. Raises `FieldError` if it does not fit `policy`."""
    if not (folder / VALUE_HEAD_FILE).is_file() or policy.value_head is None:
        return
    try:
        policy.value_head.load_state_dict(load_file(folder / VALUE_HEAD_FILE))
    except RuntimeError as error:
        raise FieldError("model.name", str(folder), f"its {VALUE_HEAD_FILE} does not fit this model: {error}") from error
