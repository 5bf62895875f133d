"""Models in an object store: the models of checkpoints are uploaded to `checkpoint.upload`, and initial models are fetched.

A folder in the store has a `pipelinerl-manifest.json`, which first marks the model as incomplete. The files are written, read
back and compared. Then the manifest gets the size and the SHA-256 of every file. The object `latest` beside the folders names
the newest complete folder. A folder without a manifest comes from other tools and is not checked. Old models are not deleted.

Training never waits for uploads. A newer checkpoint replaces a waiting one. A checkpoint's files are first linked into another
folder, because the checkpoint may be removed before the upload ends. A restarted trainer uploads the newest checkpoint if it
has not yet been uploaded. Each attempt has its own thread, because a store may hang.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from threading import Event
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from prometheus_client import Counter, Histogram

from pipelinerl.errors import FieldError, PipelineRLError, ServiceError, first_line
from pipelinerl.initial_model import COMPLETE
from pipelinerl.run_dir import CHECKPOINTS, read_json, resumable, write_whole
from pipelinerl.service.lifecycle import background
from pipelinerl.service.logs import without_secrets
from pipelinerl.service.retry import Backoff, retry_forever
from pipelinerl.transfer.stores import PIECE_BYTES, open_files, watched, write_object
from services.trainer.checkpoint.files import link_export, link_tree, tidy

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

log = logging.getLogger(__name__)

MANIFEST, LATEST = "pipelinerl-manifest.json", "latest"
_FORMAT = 1
_FIELD = "the URL of a model"

Digest: TypeAlias = tuple[int, str]
"""Number of bytes, and hexadecimal SHA-256."""


def put_model(folder: Path, url: str, is_given_up: Callable[[], bool] = lambda: False) -> int:
    """Upload all files of `folder` to the folder `url`, verify them, point `latest` at `url`, and return the number of bytes. A
    model already at `url` counts as incomplete once the upload begins. Raises `ServiceError` if a stored file differs or
    `is_given_up()` is true, and the store's `OSError`."""
    store, root = open_files(_FIELD, url)

    def put(path: str, parts: Iterable[bytes]) -> Digest:
        if is_given_up():  # a later attempt may have moved `latest`
            raise ServiceError(f"the upload to {url} was given up")
        num_bytes, sha256 = write_object(store, path, parts)
        return num_bytes, sha256.hex()

    def put_manifest(files: dict[str, Digest] | None) -> None:
        put(f"{root}/{MANIFEST}", [json.dumps({"format": _FORMAT, "files": files}).encode() + b"\n"])

    put_manifest(None)
    files: dict[str, Digest] = {}
    for name in sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()):
        with (folder / name).open("rb") as source:
            files[name] = put(f"{root}/{name}", iter(partial(source.read, PIECE_BYTES), b""))
    for name, sent in files.items():
        with store.open_input_stream(f"{root}/{name}") as stored:
            if (found := _copy(stored)) != sent:
                raise ServiceError(f"{url}/{name} differs from the sent file (stored {found[0]} bytes, sent {sent[0]})")
    put_manifest(files)
    parent, _, name = root.rpartition("/")
    put(f"{parent}/{LATEST}", [name.encode()])
    return sum(size for size, _ in files.values())


def fetch_model(url: str, folder: Path) -> str:
    """Fill the empty `folder` with the model at `url`, which may end in `latest`. Return the URL of the folder that was read.
    Raises `FieldError` if the model is missing or incomplete, `ServiceError` if it is damaged, and the store's `OSError`."""
    store, root = open_files(_FIELD, url)
    parent, _, name = root.rpartition("/")
    try:
        if name == LATEST:
            with store.open_input_stream(root) as stream:
                name = stream.read(256).decode(errors="replace")
            root, url = f"{parent}/{_safe(name, url)}", f"{url.rpartition('/')[0]}/{name}"
        files = _listed(store, root, url)
        for name, said in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with store.open_input_stream(f"{root}/{name}") as source, (folder / name).open("xb") as target:
                found = _copy(source, target)
            if said is not None and found != said:
                raise ServiceError(f"{url}/{name} does not match {MANIFEST}: it is damaged or being replaced; try again")
    except FileNotFoundError as error:
        raise FieldError("model.name", url, f"there is no model: {first_line(error)}; give the URL of one") from error
    return url


def fetch_initial(name: str, run_dir: Path, folder: Path) -> str:
    """Fill the empty `folder` with the model `name`: a URL, or a folder relative to `run_dir`'s parent or else to the current
    folder. A run's `checkpoints/latest` means its newest checkpoint. Return its source. Raises like `fetch_model`."""
    if "://" in name:
        found = fetch_model(name, folder)
    else:
        source = next((one for root in (run_dir.parent, Path()) if (one := _newest(root / name)).is_dir()), None)
        if source is None:
            raise FieldError("model.name", name, f"no such folder in {run_dir.parent.resolve()} or the current folder")
        try:
            link_tree(source, folder)
        except OSError as error:
            raise ServiceError(f"{source} cannot be copied, or was removed meanwhile: {first_line(error)}") from error
        found = str(source)
    if not (folder / COMPLETE).is_file():
        raise FieldError("model.name", name, f"has no {COMPLETE}; give the folder of a Hugging Face model")
    return found


def _newest(folder: Path) -> Path:
    """Return the newest checkpoint if `folder` is a run's `checkpoints/latest`, and any other folder unchanged."""
    found = resumable(folder.parent.parent) if (folder.parent.name, folder.name) == (CHECKPOINTS, LATEST) else {}
    return found[max(found)].parent.parent if found else folder


def _listed(store: FileSystem, root: str, url: str) -> dict[str, Digest | None]:
    """Return the names of a model's files, relative to its folder, with their digests if there is a manifest."""
    from pyarrow.fs import FileSelector, FileType

    if store.get_file_info(f"{root}/{MANIFEST}").type == FileType.NotFound:
        found = store.get_file_info(FileSelector(root, recursive=True))
        names = [PurePosixPath(info.path).relative_to(root).as_posix() for info in found if info.type == FileType.File]
        return {_safe(name, url): None for name in names}
    with store.open_input_stream(f"{root}/{MANIFEST}") as stream:
        text = stream.read()
    try:
        manifest = json.loads(text)
        if manifest["format"] != _FORMAT or manifest["files"] is None:
            raise ValueError("its upload has not ended")
        return {_safe(name, url): (int(size), str(sha256)) for name, (size, sha256) in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fix = f"is incomplete according to its {MANIFEST} ({error}): wait for the upload, or use another checkpoint"
        raise FieldError("model.name", url, fix) from error


def _safe(name: str, url: str) -> str:
    if not name or name.startswith("/") or ".." in PurePosixPath(name).parts or "\0" in name:
        raise FieldError("model.name", url, f"has a file with the unsafe name {name!r}; use another model")
    return name


def _copy(source: IO[bytes], target: IO[bytes] | None = None) -> Digest:
    size, sha256 = 0, hashlib.sha256()
    while chunk := source.read(PIECE_BYTES):
        sha256.update(chunk)
        size += len(chunk)
        if target is not None:
            target.write(chunk)
    return size, sha256.hexdigest()


UPLOADED = "uploaded.json"
"""File in the run's folder with `{"version", "url", "at_s"}` of the last upload."""
BACKOFF = Backoff(first_s=1.0, most_s=60.0, jitter=0.2)
_RETRIED = (PipelineRLError, OSError)
TRY_S = 4 * 3600
"""Maximum seconds of one attempt. After that, the store is assumed to hang."""


class Uploads:
    """Uploads a run's checkpoints; an empty `url` disables this. `metrics`: attempts by outcome, seconds of successful ones."""

    def __init__(self, url: str, run_dir: Path, run: str, metrics: tuple[Counter, Histogram]) -> None:
        self._root = f"{url.rstrip('/')}/{run}/{CHECKPOINTS}" if url else ""
        self._run_dir, self._aside, (self._tries, self._seconds) = run_dir, run_dir / "uploading", metrics
        self._waiting: tuple[int, Path] | None = None
        """Version and linked copy of the waiting checkpoint. The copy has the modification time of the checkpoint."""
        self._since_s = 0.0
        """Unix time at which the waiting checkpoint was written. If it replaced waiting checkpoints, the time of the first."""
        self._trying: Path | None = None
        self.last: dict[str, Any] = {}
        """Content of the file `UPLOADED`; empty before the first upload to this store."""
        self._changed = asyncio.Condition()
        """Notified of each change of `_waiting`. Its lock protects the linked folders."""

    @property
    def waiting_s(self) -> float | None:
        """Return for how many seconds a checkpoint has waited for its upload; 0 if none waits, None if uploads are disabled."""
        if not self._root:
            return None
        return max(0.0, time.time() - self._since_s) if self._waiting else 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context in which accepted checkpoints are uploaded."""
        if not self._root:
            yield
            return
        tidy(self._aside)
        last, found = read_json(self._run_dir / UPLOADED), resumable(self._run_dir)
        if str(last.get("url", "")).startswith(f"{self._root}/"):
            self.last = last
        if found:
            await self.take(found[max(found)].parent.parent, max(found))
        async with background(self._run()):
            yield

    async def take(self, checkpoint: Path, version: int) -> None:
        """Accept a checkpoint for upload. After this returns, its folder may be removed. Errors are only logged."""
        if not self._root or version == (self._waiting[0] if self._waiting else self.last.get("version")):
            return
        async with self._changed:
            try:
                folder = await asyncio.to_thread(link_export, checkpoint, self._aside / checkpoint.name)
            except OSError as error:
                log.error("the checkpoint of version %d will not be uploaded: %s", version, error)
                return
            if self._waiting is None:
                self._since_s = folder.stat().st_mtime
            self._waiting = version, folder
            await self._tidy()
            self._changed.notify_all()

    async def all_done(self) -> None:
        """Wait until every accepted checkpoint, or a later one, has been uploaded."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._waiting is None)

    async def _run(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting is not None)
            await retry_forever(self._try, "upload a checkpoint", retried=lambda e: isinstance(e, _RETRIED), backoff=BACKOFF)

    async def _try(self) -> None:
        assert self._waiting is not None, "a checkpoint waits"
        tried, began_s = self._waiting, time.monotonic()
        version, self._trying = tried
        url = f"{self._root}/{self._trying.name}"
        given_up = Event()
        try:
            await watched(url, partial(_put, self._trying, url, given_up), TRY_S)
            last = {"version": version, "url": url, "at_s": time.time()}
            await asyncio.to_thread(write_whole, self._run_dir / UPLOADED, json.dumps(last) + "\n", durably=True)
        except _RETRIED:
            self._tries.labels("failed").inc()
            raise
        finally:
            given_up.set()
            self._trying = None
        self.last, seconds = last, time.monotonic() - began_s
        self._tries.labels("uploaded").inc()
        self._seconds.observe(seconds)
        log.info("uploaded the checkpoint of version %d to %s in %.2f s", version, url, seconds)
        async with self._changed:
            if self._waiting is tried:
                self._waiting = None
            else:  # a newer one arrived
                self._since_s = self._waiting[1].stat().st_mtime
            await self._tidy()
            self._changed.notify_all()

    async def _tidy(self) -> None:
        kept = {self._waiting[1] if self._waiting else None, self._trying}
        for folder in self._aside.iterdir():
            if folder not in kept:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _put(folder: Path, url: str, given_up: Event, _: object) -> None:
    try:
        put_model(folder, url, given_up.is_set)
    except Exception as error:  # the thread ends here; no error of a store's library may end the run
        raise ServiceError(without_secrets(first_line(error), os.environ)) from error
