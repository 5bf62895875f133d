"""The weight log: versions of the weights as objects in a store, from which any reader restores them without the trainer.

Each version is written as a delta to the version before it in the log. From time to time an anchor, a whole version, begins a
new chain. The old chain still gets a delta to the anchor's version, so a reader that keeps up does not need the anchor. A
`Published` message, which travels over the control channel, names the objects of one version.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Callable, Iterable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from torch import Tensor

from pipelinerl.errors import first_line
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.delta import (
    Bytes,
    LogDamaged,
    decode_anchor,
    decode_delta,
    encode_anchor,
    encode_delta,
    largest_object,
)
from pipelinerl.transfer.group import HOST, Placement
from pipelinerl.transfer.manifest import Manifest
from pipelinerl.transfer.stores import LogStore, StoreError
from pipelinerl.v1.control_pb2 import LogObject, Published

_ANCHOR, _DELTA = "anchor.safetensors", "delta"
CHAINS_KEPT = 2
_SHA256_BYTES = 32
_KEY = re.compile(r"[\w=-][\w=.-]*(/[\w=-][\w=.-]*)*", re.ASCII)
"""Only keys that stay inside the store's folder match."""
_Result = TypeVar("_Result")


class WeightLog:
    """The writer of a log. `prefix`: folder of its keys. `anchor_every`: number of deltas from one anchor to the next. If the
    deltas together become larger than the last anchor, a new anchor follows sooner. `keep_all`: delete nothing. `placement`:
    memory that holds the streams given to `add`."""

    def __init__(
        self,
        store: LogStore,
        manifest: Manifest,
        prefix: str,
        *,
        anchor_every: int,
        keep_all: bool = False,
        placement: Placement = HOST,
    ) -> None:
        self._store, self._manifest, self._prefix, self._placement = store, manifest, prefix, placement
        self._anchor_every, self._keep_all = anchor_every, keep_all
        self._chains: list[list[LogObject]] = []
        self._newest: tuple[PolicyVersion, Tensor] | None = None
        self._has_old = True
        """True if the store may hold objects of chains that are no longer kept."""
        self._turn = asyncio.Lock()

    async def add(self, version: PolicyVersion, stream: Tensor, sha256: bytes) -> Published:
        """Write a version newer than the last one, and return its announcement. `stream`, uint8[manifest.total_bytes] with the
        digest `sha256`, must not change until another version has been added. Raises `StoreError`, after which this or a later
        version can be added."""
        async with self._turn:
            chains, announced = list(self._chains), list[LogObject]()
            if self._newest is not None and self._newest[0].incarnation == version.incarnation:
                before, old = self._newest
                assert before.number < version.number, f"{version} is not newer than {before}"
                parts = encode_delta(self._manifest, before, version, old, stream, self._placement)
                delta = await self._put(version, _DELTA, parts)
                announced = chains[-1] = [*chains[-1], delta]
            deltas = announced[1:]
            if not deltas or len(deltas) >= self._anchor_every or sum(one.bytes for one in deltas) > announced[0].bytes:
                parts = encode_anchor(self._manifest, version, stream, self._placement)
                chains.append([await self._put(version, _ANCHOR, parts)])
            self._has_old |= len(chains) > len(self._chains)
            self._chains, self._newest = chains[-CHAINS_KEPT:], (version, stream)
            return Published(
                incarnation=version.incarnation,
                version=version.number,
                manifest_id=self._manifest.manifest_id,
                place=self._store.place,
                objects=announced or chains[-1],
                sha256=sha256,
            )

    async def discard_old(self) -> None:
        """Delete all objects of this and earlier incarnations except the two newest chains of this writer. Call it when the
        newest version has been announced. Raises `StoreError`, after which the next call tries again."""
        async with self._turn:
            if self._keep_all or not self._has_old or self._newest is None:
                return
            kept = {one.key for chain in self._chains for one in chain}
            for key in await self._store.keys(self._prefix):
                incarnation, _, name = key.removeprefix(f"{self._prefix}/").partition("/")
                is_ours = name and incarnation.isdecimal() and int(incarnation) <= self._newest[0].incarnation
                if is_ours and key not in kept:
                    await self._store.delete(key)
            self._has_old = False

    async def _put(self, version: PolicyVersion, kind: str, parts: Iterable[bytes | memoryview]) -> LogObject:
        key = f"{self._prefix}/{version.incarnation}/{version.number}-{kind}"
        num_bytes, sha256 = await self._store.put(key, parts)
        return LogObject(version=version.number, key=key, bytes=num_bytes, sha256=sha256)


class Replica:
    """The reader of a log. `folder` holds the object that is being downloaded, and the stream: the bytes of `version` in the
    manifest's layout. `version` is None if the stream is incomplete. Make one call at a time."""

    def __init__(self, store: LogStore, manifest: Manifest, folder: Path) -> None:
        self._store, self._manifest, self._folder, self._path = store, manifest, folder, folder / "stream"
        self.version: PolicyVersion | None = None
        self.fetched_bytes = 0
        self._stream: Bytes | None = None

    async def bring_to(self, published: Published) -> Path:
        """Bring the stream to the announced version, and return its file of `manifest.total_bytes` bytes.

        The replica downloads and applies one object after another. After a failed download, the next call continues from
        `self.version`. Raises `StoreError` (try again), `ObjectMissing` (await a newer announcement) or `LogDamaged`.
        """
        version, objects = PolicyVersion(published.incarnation, published.version), list(published.objects)
        self._check(published, version)
        known = 0
        if self.version is not None and self.version.incarnation == version.incarnation:
            known = next((index for index, one in enumerate(objects, 1) if one.version == self.version.number), 0)
        for one in objects[known:]:
            await self._apply(one, PolicyVersion(version.incarnation, one.version))
        await self._compare(version, published.sha256)
        return self._path

    def _check(self, published: Published, version: PolicyVersion) -> None:
        name, objects = f"announcement of {version}", published.objects
        versions = [one.version for one in objects]
        if published.manifest_id != self._manifest.manifest_id:
            raise LogDamaged(name, "manifest_id", f"is {published.manifest_id!r}, expected {self._manifest.manifest_id!r}")
        if not versions or versions != sorted(set(versions)) or versions[-1] != version.number:
            raise LogDamaged(name, "objects", f"have the versions {versions}, which must ascend to {version.number}")
        for index, one in enumerate(objects):
            if not _KEY.fullmatch(one.key):
                fix = "must be names of letters, digits, dashes and dots, separated by slashes"
                raise LogDamaged(name, f"objects[{index}].key", f"is {one.key!r}, but {fix}")
            if one.key.endswith(_ANCHOR) != (index == 0) or len(one.sha256) != _SHA256_BYTES:
                wanted = f"the key of {'a delta' if index else 'an anchor'} and {_SHA256_BYTES} bytes of SHA-256"
                problem = f"has the key {one.key} and {len(one.sha256)} bytes of SHA-256, but needs {wanted}"
                raise LogDamaged(name, f"objects[{index}]", problem)
            if one.bytes > (most := largest_object(self._manifest)):
                raise LogDamaged(name, f"objects[{index}].bytes", f"is {one.bytes}, but an object has at most {most} bytes")

    async def _download(self, one: LogObject) -> Path:
        path, sha256 = self._folder / "object", hashlib.sha256()

        def take(file: BinaryIO, piece: bytes) -> None:
            file.write(piece)
            sha256.update(piece)

        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                async with aclosing(self._store.get(one.key)) as pieces:
                    async for piece in pieces:
                        await _on_thread(partial(take, file, piece))
                        self.fetched_bytes += len(piece)
                        if file.tell() > one.bytes:
                            break
                num_bytes = file.tell()
            for field, found, announced in (("bytes", num_bytes, one.bytes), ("sha256", sha256.digest(), one.sha256)):
                if found != announced:
                    raise LogDamaged(one.key, field, f"is {found!r}, announced as {announced!r}")
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise StoreError(f"cannot write {path}: {first_line(error)}") from error
            raise
        return path

    async def _apply(self, one: LogObject, after: PolicyVersion) -> None:
        """Download an object and apply it to the stream, during which `self.version` is None."""
        path = await self._download(one)
        try:
            data, stream = np.memmap(path, np.uint8, "r"), await _on_thread(self._mapped)
            before, self.version = self.version, None
            if one.key.endswith(_ANCHOR):
                steps = decode_anchor(self._manifest, after, data, stream, one.key)
            else:
                assert before is not None, "an anchor comes first"
                steps = decode_delta(self._manifest, before, after, data, stream, one.key)
            while await _on_thread(partial(next, steps, self)) is not self:  # `self` marks the end
                pass
            self.version = after
        finally:
            path.unlink(missing_ok=True)

    async def _compare(self, version: PolicyVersion, expected_sha256: bytes) -> None:
        """Raise `LogDamaged`, and leave `self.version` None, if the stream's SHA-256 is not the announced one."""
        sha256, stream, self.version = hashlib.sha256(), await _on_thread(self._mapped), None
        for chunk in self._manifest.chunks:
            await _on_thread(partial(sha256.update, stream[chunk.offset : chunk.offset + chunk.num_bytes].data))
        if sha256.digest() != expected_sha256:
            raise LogDamaged(f"version {version}", "sha256", f"is {sha256.hexdigest()}, announced {expected_sha256.hex()}")
        self.version = version

    def _mapped(self) -> Bytes:
        if self._stream is None:
            num_bytes = self._manifest.total_bytes
            try:
                with self._path.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk would otherwise end the process later
            except OSError as error:
                raise StoreError(f"cannot write {self._path}: {first_line(error)}") from error
            self._stream = np.memmap(self._path, np.uint8, "r+", shape=(num_bytes,))
        return self._stream


async def _on_thread(work: Callable[[], _Result]) -> _Result:
    """Run `work` on a thread. A cancellation waits for the thread, which uses the caller's files and memory."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
