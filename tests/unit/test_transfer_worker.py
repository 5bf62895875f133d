"""The transfer thread of a vLLM worker with a real socket, store and Gloo; only the model is absent. In which order streams
copy, send and load: checked without a device, by the clocks of `tests.support.streams`."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore

from pipelinerl.errors import ManifestMismatch, TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.chunks import describe, device_checksum
from pipelinerl.transfer.group import HOST, GroupStore, NcclTransport, WeightGroup, open_store
from pipelinerl.transfer.manifest import GroupFailed, GroupSpec, Kept, Manifest, TransferResult
from services.actor.weight_sync import worker
from services.actor.weight_sync.client import Discard, Join, Receive, StagedWeights, WeightLoading, WorkerLink
from services.actor.weight_sync.worker import Receiver, TransferWorker
from services.trainer.weight_sync import sender as sending
from services.trainer.weight_sync.sender import WeightSender
from tests.support.streams import Device, Stream, device_without_hardware
from tests.unit.test_transfer_groups import FakeNccl, nccl

__all__ = ["nccl"]

WEIGHTS = {f"w{i}": torch.arange(i, i + 3000.0) for i in range(5)}
MANIFEST = describe(WEIGHTS.items(), chunk_bytes=8192)
VERSION = PolicyVersion(1, 4)
FOREVER_S = 600.0
SOON_S = 120.0
"""Far below FOREVER_S and above anything that ends by itself."""


@dataclass
class KeepingLoader:
    """Keeps what it is given. `on_tensor` may fail."""

    mode: str = "test"
    loaded: dict[str, Tensor] = field(default_factory=dict)
    live: dict[str, Tensor] = field(default_factory=dict)
    on_tensor: Callable[[str], None] = lambda name: None

    def check(self, manifest: Manifest) -> None:
        return

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.drop()
        for name, tensor in tensors:
            self.on_tensor(name)
            self.loaded[name] = tensor.clone()

    def swap(self) -> None:
        self.live, self.loaded = self.loaded, {}

    def drop(self) -> None:
        self.loaded = {}


@dataclass
class Engine:
    """An actor's workers, as vLLM would have them, and the actor's end of their socket."""

    link: WorkerLink
    workers: list[TransferWorker]
    loaders: list[KeepingLoader]

    async def join(self, store: GroupStore, name: str, world: int) -> list[StagedWeights]:
        group = GroupSpec(store.own_address, name, 1, world, "gloo", "127.0.0.1")
        return await self.link.ask(Join(group, FOREVER_S))

    async def receive(self, version: PolicyVersion = VERSION) -> list[StagedWeights]:
        return await self.link.ask(Receive(version, FOREVER_S))


@asynccontextmanager
async def engine(*loaders: KeepingLoader, staging_buffers: int = 2, stall_timeout_s: float = 20.0) -> AsyncIterator[Engine]:
    link = WorkerLink(len(loaders))
    await link.listen()
    workers = list[TransferWorker]()
    given = {"stall_timeout_s": stall_timeout_s, "staging_buffers": staging_buffers}
    try:
        for rank, loader in enumerate(loaders):
            about = rank, WeightLoading(loader.mode), loader, MANIFEST, link.path
            workers.append(await asyncio.to_thread(TransferWorker, *about, **given))
        await link.hellos(SOON_S)
        async with asyncio.timeout(SOON_S):
            yield Engine(link, workers, list(loaders))
    finally:
        for worker in workers:
            worker.close()
        await link.close()


async def meet(actor: Engine, store: GroupStore, name: str = "epoch-1", world: int = 2) -> WeightGroup:
    spec = GroupSpec(store.own_address, name, 0, world, "gloo", "127.0.0.1")
    meeting = asyncio.to_thread(WeightGroup.connect, spec, SOON_S)
    joined, group = await asyncio.gather(actor.join(store, name, world), meeting)
    assert joined == []
    return group


async def send(group: WeightGroup, version: PolicyVersion = VERSION, weights: dict[str, Tensor] = WEIGHTS) -> TransferResult:
    sender = WeightSender(MANIFEST)
    return await asyncio.wrap_future(sender.broadcast(sender.snapshot(version, weights), group, SOON_S))


async def until_checked_in(store: GroupStore) -> None:
    """Rank 1 waits in the meeting of epoch 1."""
    spec = GroupSpec(store.own_address, "epoch-1", 1, 2, "gloo", "127.0.0.1")
    meeting = PrefixStore(spec.name, open_store(spec, SOON_S))
    while not await asyncio.to_thread(meeting.check, ["here/1"]):
        await asyncio.sleep(0.01)


async def until_no_thread(prefix: str) -> None:
    while any(thread.name.startswith(prefix) for thread in threading.enumerate()):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("staging_buffers", [1, 2, 5])
async def test_both_ranks_of_one_actor_stage_the_senders_bytes(staging_buffers: int) -> None:
    """Real Gloo between three ranks; what a rank keeps of a tensor is its model's own business."""
    store = GroupStore()
    async with engine(KeepingLoader(), KeepingLoader(), staging_buffers=staging_buffers) as actor:
        group = await meet(actor, store, world=3)
        staged, sent = await asyncio.gather(actor.receive(), send(group))

        assert [one.checksum for one in staged] == [sent.checksum] * 2
        for loader in actor.loaders:
            assert loader.loaded.keys() == WEIGHTS.keys()
            assert all(torch.equal(loader.loaded[name], tensor) for name, tensor in WEIGHTS.items())
        for worker in actor.workers:
            worker.check_staged(VERSION)
        await actor.link.ask(Discard())
        with pytest.raises(TransferError):
            actor.workers[0].swap()  # what was discarded since the check
        group.close()


async def test_discard_ends_a_join_at_once_the_next_join_works_and_a_second_discard_is_not_forgotten() -> None:
    store = GroupStore()
    async with engine(KeepingLoader()) as actor:
        joining = asyncio.create_task(actor.join(store, "epoch-1", 3))  # neither the trainer nor rank 2 ever comes
        await until_checked_in(store)
        await actor.link.ask(Discard())
        with pytest.raises(GroupFailed, match="TransferAborted"):
            await joining

        (await meet(actor, store, "epoch-2")).close()

        asks = (Discard(), Join(GroupSpec(store.own_address, "e", 1, 2), FOREVER_S), Discard())
        answers = await asyncio.gather(*(actor.link.ask(ask) for ask in asks), return_exceptions=True)
        assert [type(answer) for answer in answers] == [list, GroupFailed, list]


async def test_closing_ends_a_join_under_way_and_nccl_is_refused_without_a_gpu() -> None:
    store = GroupStore()
    async with engine(KeepingLoader()) as actor:
        with pytest.raises(TransferError, match=r"weights\.backend"):
            await actor.link.ask(Join(GroupSpec("127.0.0.1:1", "epoch-1", 1, 2, "nccl"), 1.0))
        joining = asyncio.create_task(actor.join(store, "epoch-1", 2))
        await until_checked_in(store)
        actor.workers[0].close()
        await asyncio.gather(joining, return_exceptions=True)  # an answer, if it was faster than the socket's end
        await until_no_thread("weights-_work")


@pytest.mark.parametrize("staging_buffers", [1, 2])
async def test_a_loader_that_fails_ends_the_receive_and_leaves_the_group(staging_buffers: int) -> None:
    def fail(name: str) -> None:
        if name == "w2":
            raise ValueError("does not fit")

    store = GroupStore()
    async with engine(KeepingLoader(on_tensor=fail), staging_buffers=staging_buffers) as actor:
        group = await meet(actor, store)
        sending = asyncio.create_task(send(group))
        with pytest.raises(TransferError, match="ValueError: does not fit"):
            await actor.receive()
        await asyncio.gather(sending, return_exceptions=True)  # small enough to be in the kernel's buffers already
        await until_no_thread("receive-")
        with pytest.raises(TransferError):  # it has left
            await actor.receive()


@pytest.mark.parametrize("staging_buffers", [1, 2])
async def test_discard_ends_a_receive_whose_sender_is_silent(staging_buffers: int) -> None:
    store = GroupStore()
    async with engine(KeepingLoader(), staging_buffers=staging_buffers, stall_timeout_s=0.5) as actor:
        group = await meet(actor, store)
        receiving = asyncio.create_task(actor.receive())
        await actor.link.ask(Discard())
        with pytest.raises(TransferError):
            await receiving
        await until_no_thread("receive-")
        group.close()


CONTENT = MANIFEST.content(VERSION)
TOTAL_BYTES, THREE_CHUNKS = 5 * 12_032, 12_032 + 8_192
"""A tensor takes 12,032 bytes with padding, in chunks of 8,192 and 3,840 bytes."""


async def break_off(actor: Engine, store: GroupStore, at: int, name: str = "broken", kept: Kept = Kept()) -> None:  # noqa: B008
    """Send VERSION to the actor and to another rank, which has `kept` and leaves when it has the first `at` chunks."""
    spec = GroupSpec(store.own_address, name, 2, 3, "gloo", "127.0.0.1", kept)
    group, other = await asyncio.gather(meet(actor, store, name, world=3), asyncio.to_thread(WeightGroup.connect, spec, SOON_S))

    def take() -> None:
        for chunk in MANIFEST.chunks[other.first_chunk(CONTENT) : at]:
            other.broadcast(torch.zeros(6, dtype=torch.int64), SOON_S)
            other.broadcast(torch.zeros(chunk.num_bytes, dtype=torch.uint8), SOON_S)
        other.close()

    told = await asyncio.gather(actor.receive(), send(group), asyncio.to_thread(take), return_exceptions=True)
    assert [type(one) for one in told] == [GroupFailed, GroupFailed, type(None)]


def loads(actor: Engine, weights: dict[str, Tensor] = WEIGHTS) -> bool:
    def holds(loaded: dict[str, Tensor]) -> bool:
        return loaded.keys() == weights.keys() and all(torch.equal(loaded[name], weights[name]) for name in weights)

    return all(holds(loader.loaded) for loader in actor.loaders)


@pytest.mark.parametrize("staging_buffers", [1, 2, 5])
@pytest.mark.parametrize("of_other", [Kept(), Kept(CONTENT, 1), Kept(CONTENT, 3), Kept(CONTENT, 9)])
async def test_a_broken_transfer_goes_on_at_the_first_missing_chunk(staging_buffers: int, of_other: Kept) -> None:
    """The actor has three chunks. The transfer breaks again at the fifth, with another rank that has fewer or more, and then
    goes on with the actor alone."""
    store, names = GroupStore(), list[str]()
    async with engine(KeepingLoader(on_tensor=names.append), staging_buffers=staging_buffers) as actor:
        await break_off(actor, store, 3)
        with pytest.raises(TransferError):
            actor.workers[0].check_staged(VERSION)
        await break_off(actor, store, 5, "again", of_other)
        assert names == ["w0", "w1"]

        group = await meet(actor, store, "epoch-2")
        staged, sent = await asyncio.gather(actor.receive(), send(group))
        assert sent.num_bytes == TOTAL_BYTES - THREE_CHUNKS - 3_840 - 8_192
        assert [one.checksum for one in staged] == [sent.checksum]
        assert (names, loads(actor)) == (list(WEIGHTS), True)
        actor.workers[0].check_staged(VERSION)
        await asyncio.to_thread(actor.workers[0].swap)
        assert actor.loaders[0].live.keys() == WEIGHTS.keys()


@pytest.mark.parametrize("version", [PolicyVersion(1, 5), PolicyVersion(2, 4)])
async def test_chunks_of_a_broken_transfer_are_thrown_away_if_another_version_comes(version: PolicyVersion) -> None:
    store, names, others = GroupStore(), list[str](), {name: -tensor for name, tensor in WEIGHTS.items()}
    async with engine(KeepingLoader(on_tensor=names.append)) as actor:
        await break_off(actor, store, 3)
        group = await meet(actor, store, "epoch-2")
        staged, sent = await asyncio.gather(actor.receive(version), send(group, version, others))
        assert (sent.num_bytes, [one.checksum for one in staged]) == (TOTAL_BYTES, [sent.checksum])
        assert (names, loads(actor, others)) == (["w0", *WEIGHTS], True)

        group = await meet(actor, store, "epoch-3")
        _, sent = await asyncio.gather(actor.receive(), send(group))
        assert (sent.num_bytes, loads(actor)) == (TOTAL_BYTES, True)


@pytest.mark.parametrize("complete", [False, True])
async def test_a_new_process_gets_everything_and_the_others_load_nothing_twice(complete: bool) -> None:
    store, names = GroupStore(), list[str]()
    async with engine(KeepingLoader(on_tensor=names.append)) as actor, engine(KeepingLoader()) as fresh:
        if complete:
            group = await meet(actor, store)
            await asyncio.gather(actor.receive(), send(group))
            await actor.link.ask(Discard())
            with pytest.raises(TransferError):
                actor.workers[0].check_staged(VERSION)
        else:
            await break_off(actor, store, 3)
        order = Join(GroupSpec(store.own_address, "epoch-2", 2, 3, "gloo", "127.0.0.1"), FOREVER_S)
        group, _ = await asyncio.gather(meet(actor, store, "epoch-2", world=3), fresh.link.ask(order))
        mine, of_fresh, sent = await asyncio.gather(actor.receive(), fresh.receive(), send(group))
        assert sent.num_bytes == TOTAL_BYTES
        assert [one.checksum for one in mine + of_fresh] == [sent.checksum] * 2
        assert (names, loads(actor), loads(fresh)) == (list(WEIGHTS), True, True)


async def test_a_complete_version_is_not_sent_again_and_can_be_served_after_the_next_meeting() -> None:
    store = GroupStore()
    async with engine(KeepingLoader(), KeepingLoader()) as actor:
        group = await meet(actor, store, world=3)
        first, _ = await asyncio.gather(actor.receive(), send(group))
        await actor.link.ask(Discard())
        group = await meet(actor, store, "epoch-2", world=3)
        staged, sent = await asyncio.gather(actor.receive(), send(group))
        assert (sent.num_bytes, staged) == (0, first)
        for worker, loader in zip(actor.workers, actor.loaders, strict=True):
            worker.check_staged(VERSION)
            await asyncio.to_thread(worker.swap)
            assert torch.equal(loader.live["w4"], WEIGHTS["w4"])

        group = await meet(actor, store, "epoch-3", world=3)  # the old weights are in the loader now
        staged, sent = await asyncio.gather(actor.receive(), send(group))
        assert (sent.num_bytes, loads(actor)) == (TOTAL_BYTES, True)


async def test_other_bytes_under_the_same_version_are_noticed() -> None:
    store, others = GroupStore(), {name: -tensor for name, tensor in WEIGHTS.items()}
    async with engine(KeepingLoader()) as actor:
        await break_off(actor, store, 3)
        group = await meet(actor, store, "epoch-2")
        staged, sent = await asyncio.gather(actor.receive(), send(group, weights=others))
        assert staged[0].checksum != sent.checksum


# --- streams: most tests also run without some of the waits that they rest on, and then there must be a race

NO_WAIT: Callable[..., None] = lambda *_: None  # noqa: E731


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return device_without_hardware(monkeypatch)


@pytest.mark.parametrize("unfit", [False, True], ids=["", "a parameter does not fit"])
@pytest.mark.parametrize("waits", [True, False])
def test_a_snapshot_comes_between_steps(device: Device, waits: bool, unfit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"a": torch.ones(8), "b": torch.ones(8)}
    sender = WeightSender(describe(weights.items()), placement=device.placement("snapshots"))
    if not waits:
        monkeypatch.setattr(Stream, "wait_stream", NO_WAIT)
    with device.on(device.default):
        weights["a"].mul_(2)
        try:
            sender.snapshot(VERSION, weights | {"b": torch.ones(9)} if unfit else weights)
        except ManifestMismatch:
            assert unfit
        weights["a"].mul_(3)
    found = {race.rpartition(" on ")[2] for race in device.races}
    assert found == (set() if waits else {"snapshots does not wait for default", "default does not wait for snapshots"})


class DeviceNccl(FakeNccl):
    """Works on a stream of its own, after the stream of its caller, as torch's does. `wire`: what rank 0 sends."""

    device: Device
    wire: list[Tensor]

    def __init__(self, store: Any, rank: int, world: int, options: Any) -> None:
        super().__init__(store, rank, world, options)
        self.stream, self.rank = Stream(self.device, "nccl"), rank

    def broadcast(self, tensors: list[Tensor], options: Any) -> FakeNccl:
        [tensor] = tensors
        self.stream.wait_stream(self.device.current())
        with self.device.on(self.stream):
            if self.rank == 0:
                self.wire.append(tensor.clone())
            elif self.wire:
                tensor.copy_(self.wire.pop(0))
        return self

    def is_completed(self) -> bool:
        self.stream.synchronize()  # the host sees what the device has done
        return super().is_completed()


def group_of(monkeypatch: pytest.MonkeyPatch, device: Device, rank: int, wire: list[Tensor]) -> WeightGroup:
    class Nccl(DeviceNccl):
        made: list[FakeNccl] = []  # noqa: RUF012 - of one group

    Nccl.device, Nccl.wire = device, wire if rank == 0 else []
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    placement = device.placement(f"group of rank {rank}")
    with device.on(device.default):
        transport = NcclTransport(None, rank, 2, 30.0, placement, threading.Event())  # type: ignore[arg-type]
    Nccl.wire = wire
    return WeightGroup(GroupSpec("", "epoch-1", rank, 2, "nccl"), transport, placement)  # type: ignore[arg-type]


@pytest.mark.parametrize("without", ["", "checksums that wait for the copy", "waits for NCCL"])
@pytest.mark.usefixtures("nccl")
def test_a_snapshot_is_sent_twice_and_received_in_order(device: Device, without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {f"w{i}": torch.arange(i, i + 3000.0) for i in range(5)}
    sender = WeightSender(describe(weights.items(), chunk_bytes=8192), placement=device.placement("snapshots"))
    with device.on(device.default):
        snapshot = sender.snapshot(VERSION, weights)

    def checksum(chunk: Tensor) -> int:
        value = device_checksum(chunk)
        device.current().synchronize()  # as `.cpu()` does of a device's tensor
        return value

    for module in (sending, worker):
        monkeypatch.setattr(module, "checksum", checksum)
    if without.startswith("checksums"):
        monkeypatch.setattr(snapshot, "_placement", HOST)
    wires: list[list[Tensor]] = [[], []]
    for wire in wires:
        group = group_of(monkeypatch, device, 0, wire)
        del wire[:]  # its greeting
        sender.broadcast(snapshot, group, 30.0).result()
    if without.startswith("waits"):
        monkeypatch.setattr(Stream, "synchronize", NO_WAIT)
    receiving = group_of(monkeypatch, device, 1, wires[1])
    aborted = threading.Event()
    receiver = Receiver(receiving, sender.manifest, VERSION, timeout_s=30.0, stall_timeout_s=5.0, aborted=aborted)
    with device.on(device.default):
        received = {name: tensor.clone() for name, tensor in receiver.tensors()}
    assert all(torch.equal(received[name], weights[name]) for name in weights)
    assert bool(device.races) == bool(without)


class CopyingLoader(KeepingLoader):
    """Has one set of tensors beside the live ones, and copies them there, as a loader in place does."""

    def load(self, tensors: Any) -> None:
        for name, tensor in tensors:
            if name in self.loaded:
                self.loaded[name].copy_(tensor)
            else:
                self.loaded[name] = tensor.clone()

    def swap(self) -> None:
        for name, tensor in self.loaded.items():
            self.live.setdefault(name, torch.zeros_like(tensor)).copy_(tensor)

    def drop(self) -> None:
        return


@pytest.mark.parametrize("waits", [True, False])
async def test_decoding_and_loading_meet_when_both_waited(device: Device, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "on_device", lambda _: device.placement("loading"))
    if not waits:
        monkeypatch.setattr(Stream, "synchronize", NO_WAIT)
    store = GroupStore()
    async with engine(CopyingLoader()) as actor:
        group, [serving] = await meet(actor, store), actor.workers
        for number in (4, 5):
            version = PolicyVersion(1, number)
            await asyncio.gather(actor.receive(version), send(group, version))
            serving.check_staged(version)
            with device.on(device.default):  # vLLM's main thread
                serving.swap()
                for tensor in actor.loaders[0].live.values():
                    tensor.sum()
        group.close()
    found = {race.rpartition(" on ")[2] for race in device.races}
    assert found == (set() if waits else {"default does not wait for loading", "loading does not wait for default"})
