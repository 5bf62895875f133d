"""The transfer thread of a vLLM worker with a real socket, store and Gloo; only the model is absent."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore

from pipelinerl.errors import TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.chunks import describe
from pipelinerl.transfer.group import GroupStore, WeightGroup, open_store
from pipelinerl.transfer.manifest import GroupFailed, GroupSpec, Manifest, TransferResult
from services.actor.weight_sync.client import Discard, Join, Receive, StagedWeights, WeightLoading, WorkerLink
from services.actor.weight_sync.worker import TransferWorker
from services.trainer.weight_sync.sender import WeightSender

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

    async def join(self, store: GroupStore, name: str, world: int, timeout_s: float = FOREVER_S) -> list[StagedWeights]:
        group = GroupSpec(store.own_address, name, 1, world, "gloo", "127.0.0.1")
        return await self.link.ask(Join(group, timeout_s))

    async def receive(self, version: PolicyVersion = VERSION) -> list[StagedWeights]:
        return await self.link.ask(Receive(version, FOREVER_S))


@asynccontextmanager
async def engine(*loaders: KeepingLoader, staging_buffers: int = 2, stall_timeout_s: float = 20.0) -> AsyncIterator[Engine]:
    link = await WorkerLink.listen(len(loaders))
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


async def send(group: WeightGroup, version: PolicyVersion = VERSION) -> TransferResult:
    sender = WeightSender(MANIFEST)
    return await asyncio.wrap_future(sender.broadcast(sender.snapshot(version, WEIGHTS), group, SOON_S))


async def until_checked_in(store: GroupStore, name: str) -> None:
    """Rank 1 waits in the meeting."""
    meeting = PrefixStore(name, open_store(GroupSpec(store.own_address, name, 1, 2, "gloo", "127.0.0.1"), SOON_S))
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
        await until_checked_in(store, "epoch-1")
        await actor.link.ask(Discard())
        with pytest.raises(GroupFailed, match="TransferAborted"):
            await joining

        (await meet(actor, store, "epoch-2")).close()

        asks = (Discard(), Join(GroupSpec(store.own_address, "e", 1, 2), FOREVER_S), Discard())
        answers = await asyncio.gather(*(actor.link.ask(ask) for ask in asks), return_exceptions=True)
        assert [type(answer) for answer in answers] == [list, GroupFailed, list]


async def test_closing_ends_a_join_under_way() -> None:
    store = GroupStore()
    async with engine(KeepingLoader()) as actor:
        joining = asyncio.create_task(actor.join(store, "epoch-1", 2))
        await until_checked_in(store, "epoch-1")
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


async def test_nccl_is_refused_by_an_engine_without_a_gpu() -> None:
    async with engine(KeepingLoader()) as actor:
        with pytest.raises(TransferError, match="weights\\.backend"):
            await actor.link.ask(Join(GroupSpec("127.0.0.1:1", "epoch-1", 1, 2, "nccl"), 1.0))
