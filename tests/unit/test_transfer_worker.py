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
from pipelinerl.transfer.manifest import GroupFailed, GroupSpec, Kept, Manifest, TransferResult
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


async def test_closing_ends_a_join_under_way() -> None:
    store = GroupStore()
    async with engine(KeepingLoader()) as actor:
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


async def test_nccl_is_refused_by_an_engine_without_a_gpu() -> None:
    async with engine(KeepingLoader()) as actor:
        with pytest.raises(TransferError, match="weights\\.backend"):
            await actor.link.ask(Join(GroupSpec("127.0.0.1:1", "epoch-1", 1, 2, "nccl"), 1.0))


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


async def test_closing_ends_a_loader_that_waits_for_the_rest() -> None:
    store = GroupStore()
    async with engine(KeepingLoader()) as actor:
        await break_off(actor, store, 3)
        actor.workers[0].close()
        await until_no_thread("load-")
