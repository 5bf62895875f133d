"""Writes checkpoints beside training: one at a time, on a thread of its own, and a folder that is there is whole.

Everything goes into a hidden folder beside the final one, onto the disk, and is renamed then: a crash at any point leaves the
checkpoint before. It decides neither when one is due nor what is in it.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipelinerl.run_dir import CHECKPOINTS
from services.trainer.checkpoint.files import partial_folder, prune, put_in_place, sync_folder, sync_tree
from services.trainer.checkpoint.run_state import RESUME, RunState

log = logging.getLogger(__name__)


class PendingCheckpoint(Protocol):
    """Tensors of one version, in host memory: training may go on."""

    @property
    def version(self) -> int: ...

    def write(self, folder: Path) -> None:
        """The policy's export into `folder`, the tensors to go on with into `resume/state` in it. Blocks."""
        ...


@dataclass(frozen=True)
class WrittenCheckpoint:
    """On disk."""

    folder: Path
    version: int
    position: int
    """Of SEQUENCES: what is up to there will not be read again."""
    seconds: float


class CheckpointWriter:
    """`before_rename` runs on the writing thread when all but the name is on disk; what it raises is a failed checkpoint."""

    def __init__(self, run_dir: Path, keep: int, before_rename: Callable[[], None] = lambda: None) -> None:
        self._run_dir, self._keep, self._before_rename = run_dir, keep, before_rename
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending = 0

    @property
    def busy(self) -> bool:
        return self._pending > 0

    def write(self, pending: PendingCheckpoint, state: RunState) -> Future[WrittenCheckpoint]:
        """Of the same version; called on one thread. The future carries whatever went wrong."""
        assert pending.version == state.policy_version, f"tensors of {pending.version}, books of {state.policy_version}"
        self._pending += 1
        job = self._thread.submit(self._write, pending, state)
        job.add_done_callback(self._written)
        return job

    def close(self) -> None:
        """One under way is left to itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _written(self, job: Future[WrittenCheckpoint]) -> None:
        self._pending -= 1

    def _write(self, pending: PendingCheckpoint, state: RunState) -> WrittenCheckpoint:
        began_s = time.monotonic()
        folder = self._run_dir / CHECKPOINTS / f"step-{state.policy_version}"
        partial = partial_folder(folder)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            (partial / RESUME).mkdir(parents=True)
            pending.write(partial)
            state.save(partial / RESUME)
            sync_tree(partial)
            self._before_rename()
            put_in_place(partial, folder)
            sync_folder(folder.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        prune(folder.parent, self._keep)
        return WrittenCheckpoint(folder, state.policy_version, state.position, time.monotonic() - began_s)


def link_export(step_folder: Path, folder: Path) -> Path:
    """Makes `folder` the policy's export that is in a checkpoint: the same files, where the file system can, else copies."""
    partial = partial_folder(folder)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(step_folder, partial, ignore=shutil.ignore_patterns(RESUME), copy_function=_link)
        put_in_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
