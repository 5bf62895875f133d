"""The weight log on a folder: what is read is the trainer's stream bit for bit, or an error that names object and field."""

import asyncio
import contextlib
import hashlib
import os
import struct
from collections.abc import AsyncGenerator, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from safetensors.torch import load_file

from pipelinerl.errors import FieldError, TransferError, UserError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.transfer import stores
from pipelinerl.transfer.chunks import pack
from pipelinerl.transfer.delta import (
    Bytes,
    LogDamaged,
    anchor_header,
    decode_anchor,
    decode_delta,
    encode_anchor,
    encode_delta,
    largest_object,
)
from pipelinerl.transfer.manifest import Manifest, build_manifest
from pipelinerl.transfer.stores import LogStore, ObjectMissing, StoreError, open_store
from pipelinerl.transfer.weight_log import Replica, WeightLog
from pipelinerl.v1.control_pb2 import LogObject, Published

MIXED = build_manifest([("a", (7, 33), "bfloat16"), ("b", (9000,), "float16"), ("c", (3,), "float32")], chunk_bytes=4096)
MANIFESTS = {
    "mixed": MIXED,
    "one": build_manifest([("w", (1,), "bfloat16")]),
    "float32": build_manifest([("w", (1000, 5), "float32"), ("v", (), "float32")], chunk_bytes=8192),
    "float64": build_manifest([("w", (77,), "float64")]),
    "sent as bfloat16": build_manifest([("w", (129, 65), "float32")], wire_dtype="bfloat16", chunk_bytes=64),
}
FIRST, SECOND = PolicyVersion(1, 4), PolicyVersion(1, 9)


def random_stream(manifest: Manifest, rng: np.random.Generator) -> Bytes:
    """Any bits: NaNs, infinities, subnormals and both zeros among them. The padding is zero."""
    stream = np.zeros(manifest.total_bytes, np.uint8)
    for offset, size in zip(manifest.offsets, manifest.sizes, strict=True):
        stream[offset : offset + size] = rng.integers(0, 256, size, np.uint8)
    return stream


def changed_stream(manifest: Manifest, stream: Bytes, share: float, rng: np.random.Generator) -> Bytes:
    other = random_stream(manifest, rng)
    return np.where(rng.random(len(stream)) < share, other, stream)


def on_host(stream: Bytes) -> tuple[torch.Tensor, bytes]:
    """As a snapshot gives it."""
    return torch.from_numpy(stream), hashlib.sha256(stream.data).digest()


def joined(parts: Iterable[bytes | memoryview]) -> Bytes:
    return np.frombuffer(b"".join(parts), np.uint8)


def delta(manifest: Manifest, old: Bytes, new: Bytes) -> Bytes:
    return joined(encode_delta(manifest, FIRST, SECOND, torch.from_numpy(old), torch.from_numpy(new)))


def applied(manifest: Manifest, old: Bytes, data: Bytes) -> Bytes:
    into = old.copy()
    for _ in decode_delta(manifest, FIRST, SECOND, data, into, "o"):
        pass
    return into


@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.12, 0.5, 1.0])
@pytest.mark.parametrize("name", MANIFESTS)
def test_a_delta_restores_every_bit(name: str, share: float) -> None:
    manifest, rng = MANIFESTS[name], np.random.default_rng(int(share * 1e4))
    for _ in range(5):
        old = random_stream(manifest, rng)
        new = changed_stream(manifest, old, share, rng)
        data = delta(manifest, old, new)
        assert np.array_equal(applied(manifest, old, data), new)
        assert len(data) <= 44 + 48 * len(manifest.chunks) + manifest.total_bytes * 1.01
        assert len(data) < largest_object(manifest)
        if not share:
            assert len(data) == 44 + 8 * len(manifest.chunks)


def test_signs_of_zero_and_single_far_words_are_changes() -> None:
    manifest = build_manifest([("w", (300_000,), "bfloat16")])
    old = pack(manifest, {"w": torch.zeros(300_000, dtype=torch.bfloat16)}).numpy()
    for places in ([0], [299_999], [0, 255, 256, 511, 766, 299_999], [254], list(range(250, 262))):
        new = old.copy()
        new.view(np.uint16)[places] ^= 0x8000
        data = delta(manifest, old, new)
        assert np.array_equal(applied(manifest, old, data), new)
        assert len(data) < 200


def test_any_tool_reads_an_anchor(tmp_path: Path) -> None:
    halves, singles = torch.full((9000,), float("nan")).half(), torch.tensor([-0.0, 1, 2])
    tensors = {"a": torch.randn(7, 33).bfloat16(), "b": halves, "c": singles}
    stream = pack(MIXED, tensors).numpy()
    data = joined(encode_anchor(MIXED, FIRST, torch.from_numpy(stream)))
    (tmp_path / "anchor").write_bytes(data.tobytes())
    found = load_file(tmp_path / "anchor")
    assert list(found) == ["a", "b", "c"]
    assert all(torch.equal(found[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in tensors)
    into = np.full(MIXED.total_bytes, 255, np.uint8)
    for _ in decode_anchor(MIXED, FIRST, data, into, "o"):
        pass
    assert np.array_equal(into, stream)


def test_damage_is_an_error_that_names_object_and_field_or_is_left_to_the_digest() -> None:
    rng = np.random.default_rng(0)
    old = random_stream(MIXED, rng)
    outcomes = set[int | tuple[str, str]]()
    for share in (0.01, 0.5, 1.0):
        data = delta(MIXED, old, changed_stream(MIXED, old, share, rng))
        for length in {*range(200), *range(200, len(data), 97)}:
            with pytest.raises(LogDamaged, match=r"^weight log, o: (header|chunks\[\d+\]) "):
                applied(MIXED, old, data[:length])
        for position in {*range(200), *rng.integers(0, len(data), 400).tolist()}:
            for flipped in (1, 0x80, 0xFF):
                damaged = data.copy()
                damaged[position] ^= flipped
                try:
                    outcomes.add(len(applied(MIXED, old, damaged)))
                except LogDamaged as error:
                    outcomes.add((error.object, error.field.partition("[")[0]))
    fields = ("magic", "manifest_id", "incarnation", "from_version", "to_version", "chunks")
    assert outcomes == {MIXED.total_bytes, *(("o", field) for field in fields)}
    with pytest.raises(LogDamaged, match="bytes are"):
        applied(MIXED, old, np.append(data, np.uint8(0)))


ONE = build_manifest([("w", (64,), "bfloat16")])
ZSTD = pyarrow.Codec("zstd", compression_level=1)


def record(body: bytes, length: int | None = None) -> Bytes:
    head = struct.pack("<8s16sIQQ", b"PRLDELT2", ONE.manifest_id.encode(), 1, 4, 9)
    return joined([head, struct.pack("<Q", len(body) if length is None else length), body])


def changed(changes: int, gaps: bytes, values: bytes, num_gaps: int | None = None) -> bytes:
    packed = ZSTD.compress(gaps + values, asbytes=True)
    return struct.pack("<QQ", changes, len(gaps) if num_gaps is None else num_gaps) + packed


@pytest.mark.parametrize(
    ("body", "length"),
    [
        *((b"x", None), (b"x" * 127, None), (b"x", 2**63), (changed(64, b"", b"x" * 127), None)),
        *((changed(64, b"", b"x" * 2**20), None), (changed(63, b"", b"x" * 126), None), (changed(65, b"", b"x" * 130), None)),
        (changed(2**63, b"\0", b"xx"), None),
        (changed(1, b"\0", b"xx", 2**63), None),
        (changed(0, b"", b""), None),
        (changed(1, b"\x40", b"xx"), None),  # word 64 of 64
        (changed(2, b"\x3f\0", b"xxxx"), None),
        (changed(1, b"\xff", b"xx"), None),
        (changed(2, b"\0", b"xxxx", 1), None),
    ],
)
def test_a_forged_record_changes_nothing(body: bytes, length: int | None) -> None:
    old = random_stream(ONE, np.random.default_rng(0))
    into = old.copy()
    with pytest.raises(LogDamaged, match=r"weight log, o: chunks\[0\] "):
        list(decode_delta(ONE, FIRST, SECOND, record(body, length), into, "o"))
    assert np.array_equal(into, old)


def test_damage_of_an_anchor_is_found() -> None:
    data = joined(encode_anchor(ONE, FIRST, torch.from_numpy(random_stream(ONE, np.random.default_rng(0)))))
    header = len(anchor_header(ONE, FIRST))
    for wrong, field in ((data[:-1], "bytes"), (np.append(data, np.uint8(0)), "bytes"), (data[:5], "bytes")):
        with pytest.raises(LogDamaged, match=f"o: {field} "):
            list(decode_anchor(ONE, FIRST, wrong, np.zeros(ONE.total_bytes, np.uint8), "o"))
    for position in range(header):
        damaged = data.copy()
        damaged[position] ^= 1
        with pytest.raises(LogDamaged, match="o: header "):
            list(decode_anchor(ONE, FIRST, damaged, np.zeros(ONE.total_bytes, np.uint8), "o"))


# --- Writer and reader -------------------------------------------------------------------------------------------------


class Faulty:
    """A store that fails or waits on demand, around a real one."""

    def __init__(self, store: LogStore) -> None:
        self._store, self.place = store, store.place
        self.error: TransferError | None = None
        self.may_go, self.waiting, self.read = asyncio.Event(), asyncio.Event(), list[str]()
        self.may_go.set()
        self.put_fails, self.delete_fails, self.fails_after = "", False, -1
        self.waits_at = ""

    async def _checked(self) -> None:
        await self.may_go.wait()
        if self.error is not None:
            raise self.error

    async def put(self, key: str, parts: Iterable[bytes | memoryview]) -> tuple[int, bytes]:
        await self._checked()
        if self.put_fails and self.put_fails in key:
            raise StoreError(f"no room for {key}")
        return await self._store.put(key, parts)

    async def get(self, key: str) -> AsyncGenerator[bytes, None]:
        await self._checked()
        self.read.append(key)
        async with contextlib.aclosing(self._store.get(key)) as pieces:
            async for piece in pieces:
                if self.fails_after == 0:
                    raise StoreError(f"{key} broke off")
                self.fails_after -= 1
                if self.waits_at and self.waits_at in key:
                    yield piece[:100]
                    self.waiting.set()
                    await asyncio.Event().wait()
                yield piece

    async def keys(self, prefix: str) -> list[str]:
        return await self._store.keys(prefix)

    async def delete(self, key: str) -> None:
        await self._checked()
        if self.delete_fails:
            raise StoreError("not now")
        await self._store.delete(key)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[Faulty, None]:
    async with open_store(f"file://{tmp_path}/log", None) as opened:  # type: ignore[arg-type]
        yield Faulty(opened)


class History:
    """A run's versions: they follow one another, are skipped, and branch off earlier ones after restarts."""

    def __init__(self, manifest: Manifest, seed: int) -> None:
        self.manifest, self.rng = manifest, np.random.default_rng(seed)
        self.streams = {PolicyVersion(1, 0): random_stream(manifest, self.rng)}
        self.version = PolicyVersion(1, 0)

    def step(self, share: float = 0.01) -> PolicyVersion:
        stream = changed_stream(self.manifest, self.streams[self.version], share, self.rng)
        self.version = PolicyVersion(self.version.incarnation, self.version.number + int(self.rng.integers(1, 4)))
        self.streams[self.version] = stream
        return self.version

    def branch(self) -> PolicyVersion:
        """Go on from an earlier version in the next incarnation."""
        numbers = [version.number for version in self.streams if version.incarnation == self.version.incarnation]
        earlier = PolicyVersion(self.version.incarnation, int(self.rng.choice(numbers)))
        self.version = PolicyVersion(earlier.incarnation + 1, earlier.number)
        self.streams[self.version] = self.streams[earlier]
        return self.version

    def sent(self) -> tuple[torch.Tensor, bytes]:
        return on_host(self.streams[self.version])


async def run_history(writing: LogStore, reading: LogStore, folder: Path, *, versions: int, seed: int) -> None:
    """Write `versions` versions, with restarts and branches, while readers follow, fall behind, restart and join."""
    history = History(MIXED, seed)
    log = WeightLog(writing, MIXED, "weights/run", anchor_every=7)
    readers: list[Replica] = []
    for index in range(versions):
        published = await log.add(history.version, *history.sent())
        assert Published.FromString(published.SerializeToString()) == published
        expected = history.streams[history.version]
        assert published.sha256 == hashlib.sha256(expected.data).digest()
        if index % 20 == 0:
            readers = [*readers[-2:], Replica(reading, MIXED, folder / f"reader-{index}")]
        for number, reader in enumerate(readers):
            if number == len(readers) - 1 or history.rng.random() < 0.3:
                assert (await reader.bring_to(published)).read_bytes() == expected.tobytes()
                assert reader.version == history.version
        await log.discard_old()
        if index % 37 == 36:
            if history.branch().incarnation % 2:  # else the same writer goes on
                log = WeightLog(writing, MIXED, "weights/run", anchor_every=7)
        else:
            history.step(float(history.rng.choice([0.0, 1e-3, 0.02, 0.5])))
    late = Replica(reading, MIXED, folder / "late")
    assert (await late.bring_to(published)).read_bytes() == expected.tobytes()
    chains = {key.rpartition("/")[2] for key in await writing.keys("weights/run") if "anchor" in key}
    assert 1 <= len(chains) <= 2


async def test_two_hundred_versions_are_read_bit_for_bit(store: Faulty, tmp_path: Path) -> None:
    await run_history(store, store, tmp_path, versions=200, seed=1)


async def test_anchors_come_when_deltas_outweigh_one_and_old_chains_go(store: Faulty) -> None:
    history, log = History(MIXED, 3), WeightLog(store, MIXED, "w", anchor_every=1000)
    every = WeightLog(store, MIXED, "all", anchor_every=2, keep_all=True)
    for count in range(1, 12):
        published = await log.add(history.version, *history.sent())
        await every.add(history.version, *history.sent())
        for one in (log, every):
            await one.discard_old()
        keys = await store.keys("w")
        assert {one.key for one in published.objects} <= set(keys)
        assert sum("anchor" in key for key in keys) <= 2
        assert len(await store.keys("all")) == count + (count - 1) // 2
        history.step(0.7)
    assert len(keys) < 10


def test_the_longest_announcement_fits_the_smallest_message_that_nats_is_set_up_for() -> None:
    """1 MiB is nats-server's own limit. A chain has an anchor, and as many deltas as `weights.anchor_every` allows."""
    for wrong, said in (("weights.anchor_every=4097", r"= 4097: .* 4096"), ("weights.log=hf://owner/name", r".*use 'nats'")):
        with pytest.raises(UserError, match=said):
            load_recipe("arithmetic", [wrong])
    most = load_recipe("arithmetic", ["weights.anchor_every=4096"]).weights.anchor_every
    key = f"{'r' * 40}/{2**32 - 1}/{2**64 - 1}-anchor.safetensors"
    longest = LogObject(version=2**64 - 1, key=key, bytes=2**64 - 1, sha256=bytes(32))
    assert Published(place="s3://" + "p" * 4096, objects=[longest] * (most + 1)).ByteSize() < 2**20


async def test_a_failed_add_is_followed_by_the_same_or_a_later_version(store: Faulty, tmp_path: Path) -> None:
    history, log = History(MIXED, 4), WeightLog(store, MIXED, "w", anchor_every=3)
    reader, seen = Replica(store, MIXED, tmp_path / "reader"), 0
    remains = tmp_path / "log" / "w" / "1" / ".7-delta.77"
    remains.parent.mkdir(parents=True)
    remains.touch()  # of a killed writer
    for fails in ("anchor", "", "delta", "", "", "anchor", "", "delta", "delta", "", ""):
        store.put_fails = fails
        try:
            published = await log.add(history.version, *history.sent())
        except StoreError:
            if history.rng.random() < 0.5:
                history.step()
            continue
        path = await reader.bring_to(published)
        assert path.read_bytes() == history.streams[history.version].tobytes()
        seen += 1
        store.delete_fails = True
        with contextlib.suppress(StoreError):
            await log.discard_old()
        store.delete_fails = False
        await log.discard_old()
        history.step()
    assert seen >= 5
    kept = set(await store.keys("w"))
    assert {one.key for one in published.objects} <= kept
    assert len(kept) <= 9
    assert not remains.exists()


async def test_a_reader_keeps_the_version_that_it_has_reached_until_the_rest_arrives(store: Faulty, tmp_path: Path) -> None:
    history, log = History(MIXED, 5), WeightLog(store, MIXED, "w", anchor_every=100)
    reader = Replica(store, MIXED, tmp_path / "reader")
    path = await reader.bring_to(await log.add(history.version, *history.sent()))
    for _ in range(3):
        reached = history.version
        published = await log.add(history.step(), *history.sent())
    store.read.clear()
    store.fails_after = 2
    with pytest.raises(StoreError, match="broke off"):
        await reader.bring_to(published)
    assert reader.version == reached
    assert path.read_bytes() == history.streams[reached].tobytes()
    store.fails_after, store.waits_at = -1, f"{history.version.number}-delta"
    reading = asyncio.create_task(reader.bring_to(published))
    await store.waiting.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert reader.version == reached
    assert path.read_bytes() == history.streams[reached].tobytes()
    assert list((tmp_path / "reader").iterdir()) == [path]
    store.waits_at = ""
    assert (await reader.bring_to(published)).read_bytes() == history.streams[history.version].tobytes()
    deltas = [one.key for one in published.objects[1:]]
    assert store.read == [*deltas, deltas[2], deltas[2]]  # the first two were applied


async def test_a_reader_cancelled_while_it_applies_starts_from_the_anchor(store: Faulty, tmp_path: Path) -> None:
    history, log = History(MIXED, 6), WeightLog(store, MIXED, "w", anchor_every=100)
    reader = Replica(store, MIXED, tmp_path / "reader")
    await reader.bring_to(await log.add(history.version, *history.sent()))
    published = await log.add(history.step(), *history.sent())
    reading = asyncio.create_task(reader.bring_to(published))
    while reader.version is not None and not reading.done():  # until it changes the stream
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert reader.version is None
    assert (await reader.bring_to(published)).read_bytes() == history.streams[history.version].tobytes()
    assert "anchor" in store.read[-2]


async def test_a_damaged_object_or_announcement_is_named_and_the_next_version_is_read(store: Faulty, tmp_path: Path) -> None:
    history, log = History(MIXED, 7), WeightLog(store, MIXED, "w", anchor_every=100)
    reader = Replica(store, MIXED, tmp_path / "reader")
    await reader.bring_to(await log.add(history.version, *history.sent()))
    first = history.version
    published = await log.add(history.step(), *history.sent())
    file = tmp_path / "log" / published.objects[1].key
    whole = file.read_bytes()
    for damaged, field in (
        (whole[:-1], "bytes"),
        (whole + b"x", "bytes"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), "sha256"),
        (bytes(3 * stores.PIECE_BYTES), f"bytes is {stores.PIECE_BYTES},"),  # the rest is not even read
    ):
        file.write_bytes(damaged)
        with pytest.raises(LogDamaged, match=f"{published.objects[1].key}: {field} "):
            await reader.bring_to(published)
        assert reader.version == first
    file.unlink()
    with pytest.raises(ObjectMissing, match=published.objects[1].key):
        await reader.bring_to(published)
    file.write_bytes(whole)

    def forged(**changes: object) -> Published:
        message = Published.FromString(published.SerializeToString())
        for name, value in changes.items():
            setattr(message, name, value)
        return message

    short, without, large = forged(), forged(), forged()
    short.objects[0].sha256 = b"x"
    del without.objects[0]
    large.objects[1].bytes = 2**60
    escaping = [forged() for _ in range(4)]
    for message, key in zip(escaping, ("w/../../secret", "w//x", "/x", "w/.x"), strict=True):
        message.objects[1].key = key
    for wrong, field in (
        (forged(manifest_id="0" * 16), "manifest_id"),
        (forged(version=99), "objects"),
        (without, r"objects\[0\]"),
        (short, r"objects\[0\]"),
        (large, r"objects\[1\].bytes"),
        *((message, r"objects\[1\].key") for message in escaping),
    ):
        with pytest.raises(LogDamaged, match=f": {field} "):
            await reader.bring_to(wrong)
        assert reader.version == first
    with pytest.raises(LogDamaged, match="sha256 is"):
        await reader.bring_to(forged(sha256=b"x" * 32))
    assert reader.version is None
    published = await log.add(history.step(), *history.sent())
    assert (await reader.bring_to(published)).read_bytes() == history.streams[history.version].tobytes()


async def test_the_same_number_in_a_later_incarnation_is_another_version(store: Faulty, tmp_path: Path) -> None:
    history, log = History(MIXED, 9), WeightLog(store, MIXED, "w", anchor_every=100)
    first, reader = history.streams[history.version], Replica(store, MIXED, tmp_path / "reader")
    await log.add(history.version, *history.sent())
    await reader.bring_to(await log.add(history.step(), *history.sent()))
    other, second = PolicyVersion(2, history.version.number), changed_stream(MIXED, first, 0.01, history.rng)
    await log.add(PolicyVersion(2, 0), *on_host(first))
    assert (await reader.bring_to(await log.add(other, *on_host(second)))).read_bytes() == second.tobytes()
    assert reader.version == other


# --- The store ---------------------------------------------------------------------------------------------------------


async def content(store: LogStore, key: str) -> bytes:
    return b"".join([piece async for piece in store.get(key)])


def torn(parts: Iterable[bytes]) -> Iterator[bytes]:
    yield from parts
    raise RuntimeError("torn")


async def test_a_torn_upload_is_never_visible(store: Faulty, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="torn"):
        await store.put("w/1", torn([b"x" * 100_000]))
    assert await store.keys("w") == []
    assert not any((tmp_path / "log" / "w").iterdir())
    assert await store.put("w/1", [b"whole", b"", memoryview(b"!")]) == (6, hashlib.sha256(b"whole!").digest())
    with pytest.raises(RuntimeError, match="torn"):
        await store.put("w/1", torn([b"x"]))
    assert await content(store, "w/1") == b"whole!"
    await store.delete("w/1")
    await store.delete("w/1")


async def test_a_store_that_hangs_fails_after_a_while(store: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "STALL_S", 0.2)
    (tmp_path / "log").mkdir()
    os.mkfifo(tmp_path / "log" / "pipe")  # opening it waits for a writer that never comes
    with pytest.raises(StoreError, match=r"no progress for 0\.2 s"):
        _ = [piece async for piece in store.get("pipe")]
    os.close(os.open(tmp_path / "log" / "pipe", os.O_RDWR))


async def test_a_folder_that_cannot_be_written_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    async with open_store(f"file://{tmp_path}/file", None) as opened:  # type: ignore[arg-type]
        with pytest.raises(StoreError, match=f"^file://{tmp_path}/file: "):
            await opened.put("w", [b"x"])


@pytest.mark.parametrize("url", ["nowhere", "s3:/x", "http://x/y"])
async def test_a_url_that_cannot_be_opened_is_an_error_of_the_field(url: str) -> None:
    with pytest.raises(FieldError, match=r"^weights.log = "):
        async with open_store(url, None):  # type: ignore[arg-type]
            pass
