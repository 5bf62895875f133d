import os
import queue
import signal
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import PrefixStore, TCPStore

from pipelinerl.errors import TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.service.lifecycle import on_thread
from pipelinerl.transfer.chunks import (
    ROW_BYTES,
    Unpacker,
    checksum,
    chunk_of,
    describe,
    device_checksum,
    pack,
    tensor_sums,
    version_checksum,
)
from pipelinerl.transfer.group import HOST, GroupStore, WeightGroup, open_store
from pipelinerl.transfer.manifest import DeadlineExceeded, GroupFailed, GroupSpec, Manifest, ManifestDiffers, TransferAborted
from services.actor.weight_sync.worker import Receiver
from services.trainer.weight_sync.sender import WeightSender
from tests.unit.test_gloo_chain import at_once, connected, spec

VERSION = PolicyVersion(1, 8)
shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)


def tensors_of(listed: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(listed))
    return {f"p{i}": torch.randn(shape, generator=generator).to(dtype) for i, shape in enumerate(listed)}


def small_weights() -> dict[str, torch.Tensor]:
    return tensors_of([(20, 10), (3,), (50,)])


class Wire:
    """Stands in for a group: the sender's tensors are kept and handed to a receiver, who may be lied to."""

    placement = HOST

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.closed = False
        self.given_s: set[float] = set()

    def first_chunk(self, content: str) -> int:
        return 0

    def broadcast(self, tensor: torch.Tensor, timeout_s: float) -> None:
        self.sent.append(tensor.clone())
        self.given_s.add(timeout_s)

    def close(self) -> None:
        self.closed = True

    def receiving(self) -> "Replay":
        replay = Replay()
        replay.sent = list(self.sent)
        return replay


class Replay(Wire):
    def broadcast(self, tensor: torch.Tensor, timeout_s: float) -> None:
        tensor.copy_(self.sent.pop(0))
        self.given_s.add(timeout_s)


def receiver(group, manifest, version=VERSION, aborted=None) -> Receiver:
    return Receiver(group, manifest, version, timeout_s=120, stall_timeout_s=120, aborted=aborted or threading.Event())


def transmitted() -> tuple[Wire, WeightSender]:
    weights = small_weights()
    sender, wire = WeightSender(describe(weights.items(), chunk_bytes=256)), Wire()
    sender.broadcast(sender.snapshot(VERSION, weights), wire, 5).result(timeout=60)  # type: ignore[arg-type]
    return wire, sender


def test_a_large_chunk_has_the_time_that_a_slow_network_needs() -> None:
    weights = {"w": torch.zeros(1000)}
    sender, wire = WeightSender(describe(weights.items(), chunk_bytes=2560), stall_timeout_s=0.0), Wire()
    sender.broadcast(sender.snapshot(VERSION, weights), wire, 60).result(timeout=60)  # type: ignore[arg-type]
    replay = wire.receiving()
    receiving = Receiver(replay, sender.manifest, VERSION, timeout_s=60, stall_timeout_s=0.0, aborted=threading.Event())  # type: ignore[arg-type]
    assert len(list(receiving.tensors())) == 1
    assert wire.given_s == replay.given_s == {2560 / 20e6}


@pytest.mark.parametrize("pinned", [False, True])
def test_an_engine_on_a_gpu_receives_into_pinned_host_memory(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wire, sender = transmitted()
    receiving, asked, empty = receiver(wire.receiving(), sender.manifest), set[bool](), torch.empty
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pinned)
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: asked.add(pin_memory) or empty(*a, **k))
    assert len(list(receiving.tensors())) == 3
    assert asked == {pinned}


def unpacked(manifest: Manifest, stream: torch.Tensor, ahead: int = 1) -> list[tuple[str, torch.Tensor]]:
    """With room taken for up to `ahead` chunks beyond the one that is added."""
    unpacker, received = Unpacker(manifest, lambda num_bytes: torch.full((num_bytes,), 99, dtype=torch.uint8)), []
    coming = list(manifest.chunks)
    for chunk in manifest.chunks:
        while coming and coming[0].index <= chunk.index + ahead:
            arrived = coming.pop(0)
            unpacker.memory_for(arrived).copy_(chunk_of(stream, arrived))
        received += unpacker.add(chunk)
    return received


@settings(deadline=None)
@given(
    st.lists(shapes, min_size=1, max_size=6),
    st.integers(1, 6).map(lambda n: 64 * n),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 3),
)
def test_unpacked_tensors_equal_packed_ones_bit_for_bit(listed, chunk_bytes, dtype, ahead) -> None:
    weights = tensors_of(listed, dtype)
    manifest = describe(weights.items(), chunk_bytes=chunk_bytes)
    stream = pack(manifest, weights)
    received = unpacked(manifest, stream, ahead)

    assert torch.equal(stream, pack(manifest, weights, into=torch.full_like(stream, 255))), "padding is zeroed"
    assert [name for name, _ in received] == list(weights)
    assert all(torch.equal(tensor, weights[name]) and tensor.dtype == dtype for name, tensor in received)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_an_unpacker_goes_on_after_chunks_that_were_received_in_part(ahead: int) -> None:
    weights = tensors_of([(20, 10), (3,), (50,), (2,), (60,)])
    manifest = describe(weights.items(), chunk_bytes=128)
    stream = pack(manifest, weights)
    for cut in range(len(manifest.chunks)):
        unpacker, received = Unpacker(manifest, lambda num_bytes: torch.full((num_bytes,), 99, dtype=torch.uint8)), []
        for chunk in manifest.chunks[:cut]:
            unpacker.memory_for(chunk).copy_(chunk_of(stream, chunk))
            received += unpacker.add(chunk)
        for chunk in manifest.chunks[cut : cut + ahead]:
            unpacker.memory_for(chunk).fill_(77)
        unpacker.rewind(manifest.chunks[cut])
        for chunk in manifest.chunks[cut:]:
            unpacker.memory_for(chunk).copy_(chunk_of(stream, chunk))
            received += unpacker.add(chunk)
        assert [name for name, _ in received] == list(weights)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in received)


def test_wire_dtype_rounds_once() -> None:
    weights = {"w": torch.tensor([1.0, 1.0 + 2**-12, -3.0])}
    manifest = describe(weights.items(), wire_dtype="bfloat16")
    [(_, tensor)] = unpacked(manifest, pack(manifest, weights))

    assert tensor.dtype == torch.bfloat16
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    assert torch.equal(pack(manifest, rounded), pack(manifest, weights)), "a parameter may already have the wire's dtype"
    with pytest.raises(ManifestDiffers, match="dtype"):
        pack(manifest, {name: weight.half() for name, weight in weights.items()})
    assert tensor.tolist() == [1.0, 1.0, -3.0]


def random_bytes(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))


@pytest.mark.parametrize("num_bytes", [1, 64, ROW_BYTES - 8, ROW_BYTES, 5 * ROW_BYTES, 5 * ROW_BYTES + 72])
def test_sums_of_a_chunk_are_those_of_its_words(num_bytes) -> None:
    chunk = random_bytes(num_bytes)
    padded = bytes(chunk.numpy()) + bytes(-num_bytes % ROW_BYTES or ROW_BYTES)
    words = [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]
    rows = [sum(words[at : at + 1024]) % 2**64 for at in range(0, len(words), 1024)]
    columns = [sum(words[at::1024]) % 2**64 for at in range(1024)]

    assert tensor_sums(chunk).numpy().view("u8").tolist() == rows + columns


@pytest.mark.parametrize("checksum", [checksum, device_checksum])
def test_checksum_notices_every_changed_byte_and_what_sums_could_miss(checksum) -> None:
    chunk = random_bytes(3 * ROW_BYTES)
    words = chunk.view(torch.int64)
    changed = []
    for change in (
        lambda w: w[5].bitwise_xor_(1),
        lambda w: w[5].bitwise_xor_(-(2**63)),
        lambda w: w.__setitem__([5, 6], w[[6, 5]].clone()),  # two of one row
        lambda w: w.__setitem__([5, 1029], w[[1029, 5]].clone()),  # two of one column
        lambda w: w.copy_(w.view(3, 1024)[[1, 0, 2]].flatten()),  # two rows
        lambda w: (w[5].add_(7), w[6].sub_(7)),
    ):
        copy = words.clone()
        change(copy)
        changed.append(checksum(copy.view(torch.uint8)))

    for index in [*range(200), *range(ROW_BYTES - 4, ROW_BYTES + 4), 3 * ROW_BYTES - 1]:
        copy = chunk.clone()
        copy[index] ^= 1 << (index + 1) % 8
        changed.append(checksum(copy))

    assert len({checksum(chunk), *changed}) == 1 + len(changed)
    assert checksum(torch.zeros(64, dtype=torch.uint8)) != checksum(torch.zeros(128, dtype=torch.uint8))
    assert 0 <= checksum(chunk) < 2**56  # the header's field is a signed 64-bit one
    assert len({version_checksum("m", [1, 2]), version_checksum("m", [2, 1]), version_checksum("n", [1, 2])}) == 3


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda w: w.pop("p1"), "presence"),
        (lambda w: w.update(p1=torch.zeros(4)), "shape"),
        (lambda w: w.update(p1=torch.zeros(3, dtype=torch.float16)), "dtype"),
    ],
)
def test_packing_other_parameters_than_described_is_refused(change, field) -> None:
    weights = small_weights()
    manifest = describe(weights.items())
    change(weights)

    with pytest.raises(ManifestDiffers, match=f"^p1: {field} is "):
        pack(manifest, weights)


@pytest.mark.parametrize(
    "change",
    [
        lambda sent: sent[3].__setitem__(17, sent[3][17] ^ 1),  # header, chunk 0, header, chunk 1
        lambda sent: sent.__setitem__(slice(3, 6, 2), sent[5:2:-2]),  # chunk 1 and 2, of one size, under their headers
    ],
)
def test_changed_bit_and_exchanged_chunks_are_noticed_before_the_tensors_are_handed_out(change) -> None:
    wire, sender = transmitted()
    change(wire.sent)
    received = []

    with pytest.raises(TransferError, match=r"version 1:8, chunk 1: checksum \w+, expected \w+"):
        received.extend(receiver(wire.receiving(), sender.manifest).tensors())
    assert received == []  # the first tensor ends in chunk 3


@pytest.mark.parametrize(
    ("drop", "version", "field"),
    [
        (0, PolicyVersion(1, 9), "version"),
        (0, PolicyVersion(2, 8), "version"),
        (2, VERSION, "chunk"),
        (1, VERSION, "magic"),  # a chunk where its header should be
    ],
)
def test_chunks_of_another_place_are_refused(drop, version, field) -> None:
    wire, sender = transmitted()
    group = wire.receiving()
    del group.sent[:drop]
    if field == "magic":
        group.sent[0] = group.sent[0].view(torch.int64)[:6]

    with pytest.raises(TransferError, match=f"{field} is "):
        list(receiver(group, sender.manifest, version).tensors())


def test_abort_ends_a_receive_between_chunks() -> None:
    wire, sender = transmitted()
    aborted = threading.Event()
    receiving = receiver(wire.receiving(), sender.manifest, aborted=aborted)
    tensors = receiving.tensors()
    next(tensors)
    aborted.set()

    with pytest.raises(TransferAborted):
        list(tensors)


def test_a_broadcast_that_is_given_up_fails_and_closes_the_group() -> None:
    weights, group, given_up = small_weights(), Wire(), threading.Event()
    given_up.set()
    sender = WeightSender(describe(weights.items()))
    broadcast = sender.broadcast(sender.snapshot(VERSION, weights), group, 5, given_up)  # type: ignore[arg-type]
    with pytest.raises(TransferAborted):
        broadcast.result(timeout=60)
    assert (group.sent, group.closed) == ([], True)


# --- real groups of host memory ---------------------------------------------------------------------------------------


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


def test_silent_peer_and_missing_peer_end_at_the_deadline(store) -> None:
    _trainer, actor = connected(store, 2)
    with pytest.raises(DeadlineExceeded):
        actor.broadcast(torch.zeros(4), 0.2)
    with pytest.raises(DeadlineExceeded):
        WeightGroup.connect(spec(store, 1, 2, "epoch-2"), 2)


@pytest.mark.parametrize(
    ("world", "timeout_s", "patience_s", "comes_after_s", "missing"),
    [(4, 2, None, 0.0, (1, 3)), (3, 60, 0.2, 0.5, (1,))],
    ids=["to the deadline", "patience begins when the first has come"],
)
def test_rank_0_names_the_missing_ranks_and_ends_the_wait_of_the_others(
    store, world, timeout_s, patience_s, comes_after_s, missing
) -> None:
    told = list[BaseException]()

    def come() -> None:
        try:
            WeightGroup.connect(spec(store, 2, world), 60)
        except TransferAborted as error:
            told.append(error)

    coming = threading.Timer(comes_after_s, come)
    coming.start()
    meeting = PrefixStore("epoch-1", open_store(spec(store, 2, world), 120))
    while not comes_after_s and not meeting.check(["here/2"]):
        threading.Event().wait(0.01)
    with pytest.raises(DeadlineExceeded) as caught:
        WeightGroup.connect(spec(store, 0, world), timeout_s, patience_s=patience_s)
    assert caught.value.missing == missing
    coming.join(60)
    assert len(told) == 1


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
        given_up, errors = threading.Event(), queue.Queue[Exception]()

        def meet(name: str, timeout_s: float, given_up: threading.Event | None) -> None:
            try:
                WeightGroup.connect(GroupSpec(f"127.0.0.1:{port}", name, 1, 2), timeout_s, given_up)
            except TransferError as error:
                errors.put(error)

        threads = [
            threading.Thread(target=meet, args=arguments, daemon=True)
            for arguments in (("epoch-1", 6.0, None), ("epoch-2", 600.0, given_up), ("epoch-3", 600.0, None))
        ]
        for thread in threads:
            thread.start()
        while not store.check(["epoch-1/here/1", "epoch-2/here/1", "epoch-3/here/1"]):
            threading.Event().wait(0.01)
        os.kill(host.pid, signal.SIGSTOP)
        assert isinstance(errors.get(timeout=60), DeadlineExceeded)
        given_up.set()
        assert isinstance(errors.get(timeout=60), TransferAborted)
        host.kill()
        assert type(errors.get(timeout=60)) is GroupFailed
    finally:
        host.kill()
        host.communicate()
