"""Groups of ranks that pass weights: real ones of host memory, the trainer's end of them, and how a group drives torch's NCCL
group. NCCL itself needs a GPU (tests/gpu): here a stand-in answers."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed import PrefixStore, TCPStore

from pipelinerl.errors import FieldError, TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.service.lifecycle import on_thread
from pipelinerl.transfer.chunks import describe
from pipelinerl.transfer.group import GroupStore, WeightGroup, open_store, transfer_backend
from pipelinerl.transfer.manifest import DeadlineExceeded, GroupFailed, GroupSpec, TransferAborted
from services.actor.weight_sync.worker import Receiver
from services.trainer.weight_sync.sender import CollectiveGroup, WeightSender
from tests.unit.test_gloo_chain import at_once, connected, spec


@pytest.fixture
def store() -> GroupStore:
    return GroupStore()


def test_member_that_left_fails_the_broadcast_at_once_and_the_next_epoch_works(store) -> None:
    trainer, actor = connected(store, 2)
    actor.close()
    with pytest.raises(GroupFailed) as caught:
        trainer.broadcast(torch.zeros(1 << 24), 120)  # more than the kernel buffers
    assert not isinstance(caught.value, DeadlineExceeded)
    trainer.close()
    trainer.close()
    with pytest.raises(GroupFailed, match="is closed"):
        trainer.broadcast(torch.zeros(1), 1)

    trainer, actor = connected(store, 2, "epoch-2")
    tensors = [torch.arange(4.0), torch.zeros(4)]
    at_once(lambda rank: (trainer, actor)[rank].broadcast(tensors[rank], 120), 0, 1)
    assert tensors[1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("world", "timeout_s", "patience_s", "comes_after_s", "missing"),
    [(4, 2, None, 0.0, (1, 3)), (3, 60, 0.2, 0.5, (1,))],
    ids=["to the deadline", "patience begins when the first has come"],
)
def test_rank_0_names_the_missing_ranks_and_ends_the_wait_of_the_others(
    store, world, timeout_s, patience_s, comes_after_s, missing
) -> None:
    meeting = PrefixStore("epoch-1", open_store(spec(store, 2, world), 120))
    coming = on_thread("rank 2", lambda: (sleep(comes_after_s), WeightGroup.connect(spec(store, 2, world), 60)))
    while not comes_after_s and not meeting.check(["here/2"]):
        threading.Event().wait(0.01)
    with pytest.raises(DeadlineExceeded) as caught:
        WeightGroup.connect(spec(store, 0, world), timeout_s, patience_s=patience_s)
    assert caught.value.missing == missing
    assert isinstance(coming.exception(60), TransferAborted)


@pytest.mark.parametrize(("gives_up", "timeout_s"), [(True, 30), (False, 3)], ids=["given up", "in time"])
def test_a_trainer_to_whom_nobody_connects_does_not_wait_for_ever(store, gives_up: bool, timeout_s: float) -> None:
    given_up = threading.Event()
    meeting = PrefixStore("epoch-1", open_store(spec(store, 1, 2), 120))
    meeting.set("here/1", '["", 0]')  # and comes no further
    coming = on_thread("trainer", lambda: WeightGroup.connect(spec(store, 0, 2), timeout_s, given_up))
    while not meeting.check(["outcome"]):
        threading.Event().wait(0.01)
    if gives_up:
        given_up.set()
    with pytest.raises(TransferAborted if gives_up else DeadlineExceeded):
        coming.result(60)


HOST_OF_A_STORE = """
import signal
from pipelinerl.transfer.group import GroupStore

store = GroupStore()
print(store.port, flush=True)
signal.pause()
"""


def test_store_whose_host_is_gone_ends_a_meeting_at_the_deadline_and_when_given_up_or_at_once_if_it_was_killed() -> None:
    """A stopped process keeps its connections and answers nothing, as an unreachable machine does."""
    host = subprocess.Popen([sys.executable, "-c", HOST_OF_A_STORE], stdout=subprocess.PIPE, text=True)
    try:
        port = int(host.stdout.readline())
        store = TCPStore("127.0.0.1", port, is_master=False)
        given_up = threading.Event()

        def meeting(name: str, timeout_s: float, given_up: threading.Event | None = None) -> Future[WeightGroup]:
            spec = GroupSpec(f"127.0.0.1:{port}", name, 1, 2)
            return on_thread(name, lambda: WeightGroup.connect(spec, timeout_s, given_up))

        late, giving_up, cut_off = meeting("epoch-1", 6.0), meeting("epoch-2", 600.0, given_up), meeting("epoch-3", 600.0)
        while not store.check(["epoch-1/here/1", "epoch-2/here/1", "epoch-3/here/1"]):
            threading.Event().wait(0.01)
        os.kill(host.pid, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            late.result(60)
        given_up.set()
        with pytest.raises(TransferAborted):
            giving_up.result(60)
        host.kill()
        assert type(cut_off.exception(60)) is GroupFailed
    finally:
        host.kill()
        host.communicate()


# --- the trainer's end

WEIGHTS = {"w": torch.arange(5000.0)}
VERSION = PolicyVersion(1, 3)


def sender_and_snapshot(stall_timeout_s: float = 120.0, host: str = "127.0.0.1"):
    manifest = describe(WEIGHTS.items(), chunk_bytes=4096)
    sender = WeightSender(manifest, stall_timeout_s=stall_timeout_s, store=GroupStore(host), host=host)
    return sender, sender.snapshot(VERSION, WEIGHTS)


async def meeting(sender: WeightSender, epoch: int, host: str = "127.0.0.1") -> tuple[CollectiveGroup, WeightGroup]:
    group = sender.open_group(epoch, 2, 120)
    spec = GroupSpec(group.store_address, f"epoch-{epoch}", 1, 2, "gloo", host)
    actor, _ = await asyncio.gather(asyncio.to_thread(WeightGroup.connect, spec, 120), group.built())
    return group, actor


def receive(group: WeightGroup, sender: WeightSender) -> Receiver:
    receiver = Receiver(group, sender.manifest, VERSION, timeout_s=120, stall_timeout_s=120, aborted=threading.Event())
    received = dict(receiver.tensors())
    assert torch.equal(received["w"], WEIGHTS["w"])
    return receiver


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"], ids=["IPv4", "IPv6"])
async def test_a_version_arrives_with_the_checksum_that_the_trainer_reports(host: str) -> None:
    try:
        sender, snapshot = sender_and_snapshot(host=host)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    group, actor = await meeting(sender, 1, host)
    assert group.store_address.startswith(f"[{host}]:" if ":" in host else f"{host}:")
    sent, receiver = await asyncio.gather(group.broadcast(snapshot, 120), asyncio.to_thread(receive, actor, sender))

    assert sent.checksum == receiver.staged().checksum
    assert sent.num_bytes == sender.manifest.total_bytes
    await group.abandon()


async def test_other_groups_move_bytes_while_one_is_stuck_and_abandoning_it_waits_for_nobody() -> None:
    sender, snapshot = sender_and_snapshot(stall_timeout_s=600)
    stuck, silent = await meeting(sender, 1)
    sending = asyncio.create_task(stuck.broadcast(snapshot, 600))
    side, joiner = await meeting(sender, 2)
    async with asyncio.timeout(120):
        await asyncio.gather(side.broadcast(snapshot, 120), asyncio.to_thread(receive, joiner, sender))
    assert not sending.done()
    async with asyncio.timeout(120):
        await stuck.abandon()

    group, actor = await meeting(sender, 3)
    await asyncio.gather(group.broadcast(snapshot, 120), asyncio.to_thread(receive, actor, sender))
    silent.close()
    with pytest.raises(TransferError):
        await sending
    await side.abandon()
    await group.abandon()


def test_the_store_listens_on_the_one_interface_it_was_given() -> None:
    """It has no authentication, and torch's own listens on all interfaces whatever host it is given."""
    stores, answers = [GroupStore("127.0.0.2") for _ in range(3)], []
    for store in stores:
        socket.create_connection(("127.0.0.2", store.port), timeout=60).close()
        with socket.socket() as other:
            answers.append(other.connect_ex(("127.0.0.1", store.port)))
    assert errno.ECONNREFUSED in answers, "another program may have the same port of that interface, but not all three"


def test_backend_follows_from_the_recipe_and_the_trainers_device() -> None:
    wanted = ("auto", False), ("auto", True), ("gloo", True)
    assert [transfer_backend(*one) for one in wanted] == ["gloo", "nccl", "gloo"]
    with pytest.raises(FieldError, match=r"weights\.backend.*gloo"):
        transfer_backend("nccl", on_gpu=False)


# --- NCCL

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class FakeNccl:
    """Completes what it is told to, as torch does: an aborted broadcast looks complete, too."""

    made: list[FakeNccl]
    completes = True
    fails = ""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=None)

    def __init__(self, store: PrefixStore, rank: int, world: int, options: Any) -> None:
        self.options, self.environment = options, os.environ.get(BLOCKING_WAIT)
        self.aborted, self.asked, self.looks = threading.Event(), threading.Event(), 0
        self.made.append(self)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> FakeNccl:
        return self

    def is_completed(self) -> bool:
        self.asked.set()
        self.looks += 1
        return self.completes or self.aborted.is_set()

    def wait(self, timeout: Any) -> None:
        if self.fails:
            raise RuntimeError(self.fails)

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[FakeNccl]:
    class Fake(FakeNccl):
        made: list[FakeNccl] = []  # noqa: RUF012 - of one test

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Fake, raising=False)
    monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "60")
    return Fake


def alone(store: GroupStore, given_up: threading.Event | None = None, timeout_s: float = 30.0) -> WeightGroup:
    return WeightGroup.connect(GroupSpec(store.own_address, "epoch-1", 0, 1, "nccl"), timeout_s, given_up)


def test_group_has_no_watchdog_and_the_environment_is_as_before(nccl) -> None:
    alone(GroupStore()).close()
    [group] = nccl.made
    assert (group.environment, os.environ.get(BLOCKING_WAIT)) == ("1", None)
    assert group.options.config.blocking == 0
    assert group.aborted.is_set()


def test_silent_peer_ends_at_the_deadline_and_is_looked_at_rarely(nccl) -> None:
    group = alone(GroupStore())
    nccl.completes, nccl.made[0].looks = False, 0
    with pytest.raises(DeadlineExceeded):
        group.broadcast(torch.zeros(1), 0.2)
    assert nccl.made[0].aborted.is_set(), "its kernel ended before the memory can go to somebody else"
    # 9 in the first 0.8 ms, then each an eighth later than the one before up to 40 ms, then one in 5 ms
    assert nccl.made[0].looks <= 9 + 34 + 32
    group.close()


def test_peer_that_never_connects_ends_the_meeting_and_nothing_is_left(nccl) -> None:
    nccl.completes = False
    with pytest.raises(DeadlineExceeded):
        alone(GroupStore(), timeout_s=3.0)  # a third of it is for the store
    assert nccl.made[0].aborted.wait(60)


def test_error_of_nccl_fails_the_group(nccl) -> None:
    group = alone(GroupStore())
    nccl.fails = "NCCL error: remote process exited\nmore"
    with pytest.raises(GroupFailed, match=r"remote process exited$"):
        group.broadcast(torch.zeros(1), 30)


@pytest.mark.parametrize("how", ["close", "give up"])
def test_broadcast_under_way_is_given_up_at_once_and_never_counts_as_done(nccl, how) -> None:
    given_up = threading.Event()
    group = alone(GroupStore(), given_up)
    nccl.completes = False
    nccl.made[0].asked.clear()
    broadcast = on_thread("broadcast", lambda: group.broadcast(torch.zeros(1), 600))
    assert nccl.made[0].asked.wait(60)
    group.close() if how == "close" else given_up.set()
    assert type(broadcast.exception(60)) is TransferAborted
    group.close()
