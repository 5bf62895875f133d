import asyncio
import errno
import socket
import subprocess
import sys
import threading

import pytest
import torch

from pipelinerl.errors import FieldError, TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.chunks import describe
from pipelinerl.transfer.group import GroupStore, WeightGroup, transfer_backend
from pipelinerl.transfer.manifest import GroupSpec
from services.actor.weight_sync.worker import Receiver
from services.trainer.weight_sync.sender import CollectiveGroup, WeightSender

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


END_IN_THE_MIDDLE = """
import asyncio, torch
from pipelinerl.service.lifecycle import leave
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.chunks import describe
from pipelinerl.transfer.group import GroupStore, WeightGroup
from pipelinerl.transfer.manifest import GroupSpec
from services.trainer.weight_sync.sender import WeightSender

async def main():
    weights = {"w": torch.zeros(8_000_000)}
    sender = WeightSender(describe(weights.items()), store=GroupStore())
    group = sender.open_group(1, 2, 120)
    spec = GroupSpec(group.store_address, "epoch-1", 1, 2, "gloo", "127.0.0.1")
    silent, _ = await asyncio.gather(asyncio.to_thread(WeightGroup.connect, spec, 120), group.built())
    sending = asyncio.create_task(group.broadcast(sender.snapshot(PolicyVersion(1, 1), weights), 600))
    await asyncio.sleep(0.2)
    await group.abandon()
    sending.cancel()
    return silent

silent = asyncio.run(main())
print("the last words")
leave(0)
"""


def test_a_process_that_ends_in_the_middle_of_a_transfer_ends_well() -> None:
    """Without `leave` the interpreter's end aborts it: exit code 134."""
    done = subprocess.run([sys.executable, "-c", END_IN_THE_MIDDLE], capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, done.stdout) == (0, "the last words\n"), done.stderr


@pytest.mark.parametrize(
    ("wanted", "on_gpu", "backend"),
    [("auto", False, "gloo"), ("auto", True, "nccl"), ("gloo", True, "gloo"), ("nccl", True, "nccl")],
)
def test_backend_follows_from_the_recipe_and_the_trainers_device(wanted, on_gpu, backend) -> None:
    assert transfer_backend(wanted, on_gpu) == backend
    with pytest.raises(FieldError, match=r"weights\.backend.*gloo"):
        transfer_backend("nccl", on_gpu=False)
