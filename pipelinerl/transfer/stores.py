"""Stores of the weight log: JetStream's object store ("nats"), or any store that pyarrow opens by a URL.

An object appears under its key, such as `RUN/1/20-delta`, when all its bytes are stored. A run's next writer removes a killed
writer's remains. Unfinished S3 uploads need a lifecycle rule of the bucket instead. No call to an open store blocks for ever:
`StoreError` is raised after `STALL_S` without progress, or if NATS does not answer within its request timeout.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import nats.js.errors
from nats.js.api import ObjectInfo, ObjectMeta, ObjectMetaOptions, StorageType
from nats.js.object_store import OBJ_CHUNKS_PRE_TEMPLATE, OBJ_META_PRE_TEMPLATE, ObjectStore

from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.link import bus_errors, is_stream_full
from pipelinerl.bus.protocol import Subjects
from pipelinerl.bus.reader import OrderedReader, stored_messages
from pipelinerl.errors import BusError, FieldError, TransferError, first_line
from pipelinerl.run_dir import sync_path
from pipelinerl.service.lifecycle import on_thread
from pipelinerl.service.logs import without_secrets
from pipelinerl.service.retry import retry_forever

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

NATS = "nats"
STALL_S = 60.0
PIECE_BYTES = 8 * 2**20
_MESSAGE_BYTES, _MESSAGES_AHEAD = 128 * 1024, 32
"""Bytes per message, and messages read ahead: 4 MiB in all. More would delay pings and control messages on slow links."""
_Result = TypeVar("_Result")
_Parts = Iterable[bytes | memoryview]


class StoreError(TransferError):
    """The store is unreachable, slow or full, or refuses a request. Trying again later may help."""


class ObjectMissing(TransferError):
    """The store has no object `key`. The log's retention removed it, or it is in another store."""

    def __init__(self, key: str, place: str) -> None:
        self.key = key
        super().__init__(f"{place}: there is no object {key}")


class LogStore(Protocol):
    """A store of objects. `place`: its URL, or "nats". Every call may raise `StoreError`."""

    place: str

    async def put(self, key: str, parts: _Parts) -> tuple[int, bytes]:
        """Store an object durably. Replace an earlier object of this key. Return the size in bytes and the SHA-256. A thread
        consumes the parts one by one. After a cancellation, the thread may still finish the object."""

    def get(self, key: str) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of an object, of any size. Raises `ObjectMissing`."""

    async def keys(self, prefix: str) -> list[str]:
        """Return the keys below the folder `prefix`."""

    async def delete(self, key: str) -> None:
        """Delete an object if it exists."""


@asynccontextmanager
async def open_store(url: str, bus: Bus) -> AsyncIterator[LogStore]:
    """Open the store at `url`: "nats", or a URL that a valid recipe may have as `weights.log`. Wait until the store answers:
    to open an S3 bucket, pyarrow asks S3 for the bucket's region. Raises `FieldError` if pyarrow cannot open the URL."""
    if url == NATS:
        yield BucketStore(bus)
    else:
        opening = partial(watched, url, lambda _: open_files("weights.log", url))
        opened = await retry_forever(opening, "open weights.log", retried=lambda error: isinstance(error, StoreError))
        yield FileStore(*opened, url.rstrip("/"))


def open_files(field: str, url: str) -> tuple[FileSystem, str]:
    """Open a URL with pyarrow. Return the file system and the path in it. Raises `FieldError` about `field` for a wrong URL."""
    from pyarrow.fs import FileSystem

    try:
        files, root = FileSystem.from_uri(url)
    except (ValueError, ImportError) as error:
        raise FieldError(field, url, without_secrets(first_line(error), os.environ)) from None
    return files, root.rstrip("/")


async def watched(place: str, work: Callable[[Callable[[], None]], _Result], stall_s: float | None = None) -> _Result:
    """Run `work(step)` on a thread; `work` calls `step` after progress. Raises `StoreError` if `work` raises OSError, or has no
    progress for `stall_s` seconds (None = `STALL_S`). The thread of a stalled or cancelled call ends once the store answers."""
    stepped_s, limit_s = time.monotonic(), STALL_S if stall_s is None else stall_s

    def step() -> None:
        nonlocal stepped_s
        stepped_s = time.monotonic()

    def run() -> _Result:
        try:
            return work(step)
        except OSError as error:
            raise StoreError(f"{place}: {without_secrets(first_line(error), os.environ)}") from None

    future = asyncio.wrap_future(on_thread("weight-log", run))
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # asyncio would log an unread error
    while not future.done():
        if (left_s := stepped_s + limit_s - time.monotonic()) <= 0:
            raise StoreError(f"{place}: no progress for {limit_s:g} s")
        await asyncio.wait({future}, timeout=left_s)
    return future.result()


def write_object(files: FileSystem, path: str, parts: _Parts, step: Callable[[], None] = lambda: None) -> tuple[int, bytes]:
    """Write an object durably and as a whole, in pieces. Call `step` after each piece. Return the object's size and SHA-256."""
    num_bytes, sha256, is_local = 0, hashlib.sha256(), files.type_name == "local"
    folder, _, name = path.rpartition("/")
    target = f"{folder}/.{name}.{os.getpid()}" if is_local else path  # object stores write atomically
    if is_local:
        files.create_dir(folder)
    stream = files.open_output_stream(target)
    try:
        for part in parts:
            for start in range(0, len(part), PIECE_BYTES):
                piece = memoryview(part)[start : start + PIECE_BYTES]
                stream.write(piece)
                sha256.update(piece)
                num_bytes += len(piece)
                if len(piece) == PIECE_BYTES:
                    stream.flush()  # pyarrow would otherwise queue any number of bytes for S3
                step()
        stream.close()
    except BaseException:
        with suppress(OSError):
            stream.close()  # completes the object unless its upload failed; pyarrow cannot abort
            files.delete_file(target)
        raise
    if is_local:
        sync_path(Path(target))
        files.move(target, path)
        sync_path(Path(folder))
    return num_bytes, sha256.digest()


class FileStore:
    """A store that pyarrow opened. Keys are relative to its folder `root`."""

    def __init__(self, files: FileSystem, root: str, place: str) -> None:
        self._files, self._root, self.place = files, root, place

    async def put(self, key: str, parts: _Parts) -> tuple[int, bytes]:
        return await watched(self.place, partial(write_object, self._files, f"{self._root}/{key}", parts))

    async def get(self, key: str) -> AsyncGenerator[bytes, None]:
        def read(make: Callable[[], _Result], _: object) -> _Result:
            try:
                return make()
            except FileNotFoundError:
                raise ObjectMissing(key, self.place) from None

        stream = await watched(self.place, partial(read, lambda: self._files.open_input_stream(f"{self._root}/{key}")))
        while piece := await watched(self.place, partial(read, lambda: stream.read(PIECE_BYTES))):
            yield piece

    async def keys(self, prefix: str) -> list[str]:
        from pyarrow.fs import FileSelector

        selector = FileSelector(f"{self._root}/{prefix}", recursive=True, allow_not_found=True)
        found = await watched(self.place, lambda _: self._files.get_file_info(selector))
        return [info.path.removeprefix(f"{self._root}/") for info in found if info.is_file]

    async def delete(self, key: str) -> None:
        def delete(_: object) -> None:
            with suppress(FileNotFoundError):
                self._files.delete_file(f"{self._root}/{key}")  # `key` may also be a partial file of a killed writer

        await watched(self.place, delete)


class BucketStore:
    """The run's object store in JetStream. The first `put` makes the bucket."""

    place = NATS

    def __init__(self, bus: Bus) -> None:
        subjects = Subjects(bus.run)
        self._bus, self._bucket, self._stream = bus, subjects.weights_bucket, subjects.weights_stream
        self._connection, self._js = bus.connection, bus.connection.js
        self._objects = ObjectStore(self._bucket, self._stream, self._js)
        self._is_clean = False
        """True if the bucket exists and holds no remains of unfinished calls."""

    async def put(self, key: str, parts: _Parts) -> tuple[int, bytes]:
        try:
            with _store_errors(f"writing {key} into {self._stream}"):
                await self._connection.wait_connected()
                if not self._is_clean:
                    await self._make()
                self._is_clean = False
                options = ObjectMetaOptions(max_chunk_size=min(_MESSAGE_BYTES, self._bus.max_payload_bytes))
                data = io.BufferedReader(_Reading(iter(parts)), _MESSAGE_BYTES)
                info = await self._objects.put(key, data, ObjectMeta(options=options))
                self._is_clean = True
        except StoreError as error:
            if isinstance(error.__cause__, BusError) and is_stream_full(error.__cause__):
                with _store_errors(""):
                    raise StoreError(f"{self._stream} is full: {await self._bus.limits_of(self._stream)}") from error
            raise
        return info.size or 0, base64.urlsafe_b64decode((info.digest or "").removeprefix("SHA-256="))

    async def get(self, key: str) -> AsyncGenerator[bytes, None]:
        info, num_bytes = await self._info(key), 0
        with _store_errors(f"reading {key} from {self._stream}"):
            async with OrderedReader(
                self._connection,
                self._stream,
                lambda message: message.data,
                subjects=(self._chunks(info.nuid),),
                from_position=1,
                read_ahead=_MESSAGES_AHEAD,
            ) as reader:
                while num_bytes < (info.size or 0):
                    try:
                        async with asyncio.timeout(self._connection.request_timeout_s):
                            piece = await anext(reader)
                    except TimeoutError:
                        await self._info(key)  # it may have been deleted meanwhile
                        raise
                    num_bytes += len(piece)
                    yield piece

    async def keys(self, prefix: str) -> list[str]:
        with _store_errors(f"looking into {self._stream}"):
            return [info.name for info in await self._stored() if info.name.startswith(f"{prefix}/")]

    async def delete(self, key: str) -> None:
        """Delete the object and leave no marker, unlike nats-py's own method, because a full bucket would refuse a marker."""
        name = base64.urlsafe_b64encode(key.encode()).decode()
        with suppress(ObjectMissing), _store_errors(f"deleting {key} from {self._stream}"):
            info, was_clean, self._is_clean = await self._info(key), self._is_clean, False
            await self._js.purge_stream(self._stream, subject=OBJ_META_PRE_TEMPLATE.format(bucket=self._bucket, obj=name))
            await self._js.purge_stream(self._stream, subject=self._chunks(info.nuid))
            self._is_clean = was_clean

    async def _info(self, key: str) -> ObjectInfo:
        with _store_errors(f"looking for {key} in {self._stream}"):
            await self._connection.wait_connected()
            try:
                return await self._objects.get_info(key)
            except nats.js.errors.ObjectNotFoundError:
                raise ObjectMissing(key, self.place) from None

    async def _make(self) -> None:
        """Make the bucket or, if it exists, remove the messages of unfinished uploads from it."""
        try:
            info = await self._js.stream_info(self._stream, subjects_filter=self._chunks("*"))
        except nats.js.errors.NotFoundError:
            size, replicas = self._bus.limits.weights_max_bytes, self._bus.limits.replicas
            await self._js.create_object_store(self._bucket, max_bytes=size, storage=StorageType.FILE, replicas=replicas)
            return
        whole = {self._chunks(one.nuid) for one in await self._stored()}
        for subject in set(info.state.subjects or ()) - whole:
            await self._js.purge_stream(self._stream, subject=subject)

    async def _stored(self) -> list[ObjectInfo]:
        subject = OBJ_META_PRE_TEMPLATE.format(bucket=self._bucket, obj="*")
        found = await stored_messages(self._connection, self._stream, subject)
        return [ObjectInfo.from_response(json.loads(message.data or b"{}")) for message in found]

    def _chunks(self, nuid: str) -> str:
        return OBJ_CHUNKS_PRE_TEMPLATE.format(bucket=self._bucket, obj=nuid)


@contextmanager
def _store_errors(action: str) -> Iterator[None]:
    try:
        with bus_errors(action):
            yield
    except BusError as error:
        raise StoreError(f"weight log: {error}") from error


class _Reading(io.RawIOBase):
    """Presents the parts of an object as a file to nats-py, which reads it on threads."""

    def __init__(self, parts: Iterator[bytes | memoryview]) -> None:
        self._parts, self._rest = parts, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest and (part := next(self._parts, None)) is not None:
            self._rest = memoryview(part)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count
