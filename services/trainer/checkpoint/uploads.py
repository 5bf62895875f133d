"""Upload each checkpoint's model to `checkpoint.upload`. Training never waits for uploads.

Input: checkpoints as they are written (`take`). Output: complete models in the store, and `uploaded.json`. A newer checkpoint
replaces a waiting one. Each attempt is a separate process, so that a store that hangs blocks nothing else. The files are first
linked into another folder, since the checkpoint may be removed meanwhile. A run's next trainer continues an unfinished upload.
The training state is not uploaded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from pipelinerl.errors import ServiceError
from pipelinerl.local.die_with_parent import guarded
from pipelinerl.run_dir import CHECKPOINTS, read_json, resumable
from pipelinerl.service.logs import without_secrets
from pipelinerl.service.retry import Backoff, retry_forever
from services.trainer.checkpoint.checkpointer import link_export
from services.trainer.checkpoint.files import tidy, write_json_durably

log = logging.getLogger(__name__)

UPLOADED = "uploaded.json"
"""File in the run's folder with `{"version", "url", "at_s"}` of the last upload."""
BACKOFF = Backoff(first_s=1.0, most_s=60.0, jitter=0.2)
TRY_S = 4 * 3600
"""Maximum seconds of one attempt. After that, the store counts as hanging."""


@dataclass(frozen=True)
class _Waiting:
    version: int
    folder: Path
    since_s: float
    """Unix time at which the oldest checkpoint since the last upload was written."""


class UploadObserver(Protocol):
    """Receives the events of uploads. The upload metrics implement it."""

    def took_over(self, version: int, at_s: float) -> None: ...

    def uploaded(self, version: int, seconds: float) -> None: ...

    def failed(self) -> None: ...


class Uploads:
    """Uploads of one run. An empty `url` disables them. Use it on one event loop."""

    def __init__(self, url: str, run_dir: Path, run: str, observer: UploadObserver) -> None:
        self._root = f"{url.rstrip('/')}/{run}/{CHECKPOINTS}" if url else ""
        self._run_dir, self._aside, self._observer = run_dir, run_dir / "uploading", observer
        self._waiting: _Waiting | None = None
        self._trying: Path | None = None
        self._last: int | None = None
        """Version of the last upload."""
        self._arrived, self._done, self._changing_files = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._done.set()

    @property
    def waiting_s(self) -> float | None:
        """Return the seconds that a checkpoint has waited for its upload; 0 if none waits, None if uploads are disabled."""
        if not self._root:
            return None
        waiting = self._waiting  # another thread may end it
        return max(0.0, time.time() - waiting.since_s) if waiting else 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Upload inside the block. If an upload is running at the end of the block, the run's next trainer continues it."""
        if not self._root:
            yield
            return
        await self._take_over()
        uploading = asyncio.create_task(self._run())
        try:
            yield
        finally:
            uploading.cancel()
            await asyncio.wait({uploading})

    async def take(self, checkpoint: Path, version: int) -> None:
        """Accept a checkpoint. When this returns, its folder may be removed. Errors are logged, and training continues."""
        if not self._root or version == (self._waiting.version if self._waiting else self._last):
            return
        async with self._changing_files:
            try:
                folder = await asyncio.to_thread(link_export, checkpoint, self._aside / checkpoint.name)
            except OSError as error:
                log.error("the checkpoint of version %d will not be uploaded: %s", version, error)
                return
            self._waiting = _Waiting(version, folder, self._waiting.since_s if self._waiting else _written_s(folder))
            await self._tidy()
        self._done.clear()
        self._arrived.set()

    async def all_done(self) -> None:
        """Wait until every accepted checkpoint, or a later one, has been uploaded."""
        await self._done.wait()

    async def _take_over(self) -> None:
        """Continue an earlier trainer's uploads: read its last upload, and accept the newest checkpoint if that differs."""
        tidy(self._aside)
        last, found = read_json(self._run_dir / UPLOADED), resumable(self._run_dir)
        if str(last.get("url", "")).startswith(f"{self._root}/"):
            self._last = last["version"]
            self._observer.took_over(last["version"], last["at_s"])
        if found:
            await self.take(found[max(found)].parent.parent, max(found))

    async def _run(self) -> None:
        def can_heal(error: Exception) -> bool:
            return isinstance(error, ServiceError | OSError)

        while True:
            await self._arrived.wait()
            self._arrived.clear()
            if self._waiting is not None:  # a retry of the previous upload may have sent this one
                await retry_forever(self._try, "upload a checkpoint", retried=can_heal, backoff=BACKOFF)

    async def _try(self) -> None:
        """Upload the newest waiting checkpoint."""
        assert self._waiting is not None, "one has arrived"
        tried, began_s = self._waiting, time.monotonic()
        url, self._trying = f"{self._root}/{tried.folder.name}", tried.folder
        try:
            await _put(tried.folder, url)
            last = {"version": tried.version, "url": url, "at_s": time.time()}
            await asyncio.to_thread(write_json_durably, self._run_dir / UPLOADED, last)
        except (ServiceError, OSError):
            self._observer.failed()
            raise
        finally:
            self._trying = None
        self._last, seconds = tried.version, time.monotonic() - began_s
        self._observer.uploaded(tried.version, seconds)
        log.info("checkpoint of version %d is uploaded to %s, after %.2f s", tried.version, url, seconds)
        async with self._changing_files:
            another = None if self._waiting is tried else self._waiting  # it arrived meanwhile
            self._waiting = another and replace(another, since_s=_written_s(another.folder))
            await self._tidy()
            if another is None:
                self._done.set()

    async def _tidy(self) -> None:
        """Remove copies that are neither waiting nor being uploaded."""
        kept = {self._waiting.folder if self._waiting else None, self._trying}
        for folder in self._aside.iterdir():
            if folder not in kept:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _written_s(folder: Path) -> float:
    """Return the Unix time at which the checkpoint was written. Its copy keeps this time."""
    return folder.stat().st_mtime


async def _put(folder: Path, url: str) -> None:
    """Upload in a subprocess. Raises `ServiceError` with the error that the subprocess printed."""
    command = (sys.executable, "-m", "services.trainer.checkpoint.store", str(folder), url)
    process = await asyncio.create_subprocess_exec(
        *guarded(command, signal.SIGKILL), stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(TRY_S):
            _, said = await process.communicate()
    except TimeoutError as error:
        raise ServiceError(f"the upload to {url} did not finish within {TRY_S} s") from error
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else f"the process that uploads ended with code {process.returncode}"
        raise ServiceError(without_secrets(last, os.environ))
