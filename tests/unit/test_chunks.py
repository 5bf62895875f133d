"""Manifests: the layout of what is sent, an id of all of it, and what is no manifest. Chunks: packed, checked and unpacked."""

import threading
from contextlib import closing
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.errors import FieldError, MessageError, TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.chunks import (
    ROW_BYTES,
    ReusedMemory,
    Unpacker,
    checksum,
    chunk_of,
    describe,
    device_checksum,
    pack,
    prefetch,
    version_checksum,
)
from pipelinerl.transfer.group import HOST
from pipelinerl.transfer.manifest import Chunk, LowRank, Manifest, ManifestDiffers, TransferAborted, build_manifest, chunk_size
from pipelinerl.v1 import control_pb2 as pb
from services.actor.weight_sync.worker import Receiver
from services.trainer.weight_sync.sender import WeightSender
from tests.unit.builders import changed

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


@pytest.mark.parametrize("checksum", [checksum, device_checksum])
def test_checksum_notices_every_changed_byte_and_what_sums_could_miss(checksum) -> None:
    chunk = random_bytes(3 * ROW_BYTES)
    words = chunk.view(torch.int64)
    sums = []
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
        sums.append(checksum(copy.view(torch.uint8)))

    for index in [*range(200), *range(ROW_BYTES - 4, ROW_BYTES + 4), 3 * ROW_BYTES - 1]:
        copy = chunk.clone()
        copy[index] ^= 1 << (index + 1) % 8
        sums.append(checksum(copy))

    assert len({checksum(chunk), *sums}) == 1 + len(sums)
    assert checksum(torch.zeros(64, dtype=torch.uint8)) != checksum(torch.zeros(128, dtype=torch.uint8))
    assert 0 <= checksum(chunk) < 2**56  # the header's field is a signed 64-bit one
    assert len({version_checksum("m", [1, 2]), version_checksum("m", [2, 1]), version_checksum("n", [1, 2])}) == 3


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda w: w.pop("p1"), "the manifest has this parameter, but the model here lacks it"),
        (lambda w: w.update(p1=torch.zeros(4)), "shape is "),
        (lambda w: w.update(p1=torch.zeros(3, dtype=torch.float16)), "dtype is "),
    ],
)
def test_packing_other_parameters_than_described_is_refused(change, problem) -> None:
    weights = small_weights()
    manifest = describe(weights.items())
    change(weights)

    with pytest.raises(ManifestDiffers, match=f"^p1: {problem}"):
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


# --- memory that is used again, never while somebody still looks at it; items made ahead, in bounded number


def test_memory_that_nobody_holds_is_used_again() -> None:
    memory = ReusedMemory(1)
    first = memory.take(64)
    address = first.data_ptr()
    del first
    second = memory.take(32)
    assert second.data_ptr() == address
    assert second.shape == (32,)


def test_memory_under_any_view_is_left_to_its_holder_and_apart_from_what_others_hold() -> None:
    memory = ReusedMemory(2)
    taken = memory.take(64)
    kept = taken.view(torch.float32)[3:5].fill_(7.0)
    del taken
    for _ in range(4):
        memory.take(64).fill_(255)
    assert kept.tolist() == [7.0, 7.0]
    memory = ReusedMemory(2)
    held = [memory.take(64).fill_(number) for number in range(5)]
    assert [tensor.unique().tolist() for tensor in held] == [[number] for number in range(5)]


def test_the_next_item_is_made_while_one_is_in_hand_and_closing_early_ends_the_thread() -> None:
    made = threading.Event()

    def make():
        yield 1
        made.set()
        yield from range(2, 1000)

    ahead = prefetch(make(), 2, "ends-early")
    assert next(ahead) == 1
    assert made.wait(60)
    assert next(ahead) == 2
    ahead.close()
    ahead.close()
    assert not any(thread.name.startswith("ends-early") for thread in threading.enumerate())


def test_an_error_comes_where_the_item_would_have_come() -> None:
    def make():
        yield 1
        raise ValueError("broken")

    with closing(prefetch(make(), 2, "test")) as ahead:
        assert next(ahead) == 1
        with pytest.raises(ValueError, match="broken"):
            next(ahead)


# --- manifests

TWO = [("a", (3, 5), "float32"), ("b", (4,), "bfloat16")]
FACTORS = [("q.a", (2, 5), "float32"), ("q.b", (3, 2), "float32")]
ADAPTED = {"name": "q.weight", "shape": (3, 5), "dtype": "bfloat16", "a": "q.a", "b": "q.b", "scaling": 0.1}
"""Rank 2, from 5 to 3."""


def adapted(**changes) -> list[LowRank]:
    return [LowRank(**ADAPTED | changes)]


def test_layout_by_hand_and_chunks_between_devices_are_larger_unless_the_recipe_says_a_size() -> None:
    manifest = build_manifest(TWO, chunk_bytes=64)

    assert manifest.sizes == (60, 8)  # 15 float32, 4 bfloat16
    assert manifest.offsets == (0, 64)
    assert manifest.chunks == (Chunk(0, 0, 64, range(1)), Chunk(1, 64, 64, range(1, 2)))
    assert manifest.total_bytes == 128
    assert build_manifest(TWO, wire_dtype="bfloat16").sizes == (30, 8)
    assert [chunk_size(mib, backend) for mib in (None, 0.0001) for backend in ("gloo", "nccl")] == [2**24, 2**27, 128, 128]


def test_chunks_hold_whole_parameters_or_a_part_of_one() -> None:
    """Padded to 64 bytes: 64, 64, 192, 64 and 128 in chunks of at most 128."""
    sizes = {"a": 1, "b": 16, "large": 40, "c": 3, "d": 32}
    manifest = build_manifest([(name, (size,), "float32") for name, size in sizes.items()], chunk_bytes=128)
    assert [(chunk.offset, chunk.num_bytes, [*chunk.parameters]) for chunk in manifest.chunks] == [
        (0, 128, [0, 1]),
        (128, 128, [2]),
        (256, 64, [2]),
        (320, 64, [3]),
        (384, 128, [4]),
    ]


def test_every_difference_changes_the_id() -> None:
    different = [
        build_manifest(TWO),
        build_manifest([("x", (3, 5), "float32"), TWO[1]]),
        build_manifest([("a", (5, 3), "float32"), TWO[1]]),
        build_manifest([("a", (3, 5), "float16"), TWO[1]]),
        build_manifest(TWO[:1]),
        build_manifest(TWO, chunk_bytes=128),
        build_manifest(TWO, wire_dtype="float16"),
        build_manifest(FACTORS),
        build_manifest(FACTORS, low_rank=adapted()),
        build_manifest(FACTORS, low_rank=adapted(scaling=0.2)),
    ]
    assert len({manifest.manifest_id for manifest in different}) == len(different)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"a": "q.c"}, "low_rank"),
        ({"a": "q.b"}, "low_rank"),
        ({"shape": (5, 3)}, r"low_rank\[q.weight\].shape"),
        ({"transposed": True}, r"low_rank\[q.weight\].shape"),
        ({"dtype": "int8"}, r"low_rank\[q.weight\].dtype"),
    ],
)
def test_adapters_that_do_not_fit_their_factors(changes, problem) -> None:
    with pytest.raises(FieldError, match=problem):
        build_manifest(FACTORS, low_rank=adapted(**changes))


def test_with_adapters_only_factors_are_sent() -> None:
    build_manifest(FACTORS, low_rank=adapted(shape=(5, 3), transposed=True))
    with pytest.raises(FieldError, match="low_rank"):
        build_manifest([*FACTORS, ("norm", (3,), "float32")], low_rank=adapted())


def test_a_manifest_of_adapters_comes_back_unchanged_and_its_id_is_checked() -> None:
    data = build_manifest(FACTORS, low_rank=adapted()).to_bytes()
    assert Manifest.from_bytes(data).to_bytes() == data
    with pytest.raises(MessageError, match="but the content's id is"):
        Manifest.from_bytes(changed(pb.WeightManifest.FromString(data), manifest_id="another").SerializeToString())


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("parameters", {"parameters": []}),
        ("parameters", {"parameters": [pb.ParameterSpec(name="w", shape=[1], dtype="float32")] * 2}),
        ("parameters.name", {"parameters": [pb.ParameterSpec(shape=[1], dtype="float32")]}),
        ("parameters[w].shape", {"parameters": [pb.ParameterSpec(name="w", shape=[0], dtype="float32")]}),
        ("parameters[w].dtype", {"parameters": [pb.ParameterSpec(name="w", shape=[1], dtype="int8")]}),
        ("chunk_bytes", {"chunk_bytes": 0}),
        ("chunk_bytes", {"chunk_bytes": 100}),
        ("wire_dtype", {"wire_dtype": "int8"}),
        ("low_rank[q.weight].scaling", {"low_rank": [pb.LowRank(**ADAPTED | {"scaling": inf})]}),
    ],
)
def test_a_wrong_manifest_names_its_field(field: str, changes: dict[str, Any]) -> None:
    right = {"parameters": [pb.ParameterSpec(name=n, shape=s, dtype=d) for n, s, d in FACTORS], "chunk_bytes": 64}
    with pytest.raises(MessageError) as caught:
        Manifest.from_bytes(pb.WeightManifest(**right | changes).SerializeToString())
    assert (caught.value.kind, caught.value.field) == ("WeightManifest", field)


def test_a_large_chunk_has_the_time_that_a_slow_network_needs() -> None:
    weights = {"w": torch.zeros(1000)}
    sender, wire = WeightSender(describe(weights.items(), chunk_bytes=2560), stall_timeout_s=0.0), Wire()
    sender.broadcast(sender.snapshot(VERSION, weights), wire, 60).result(timeout=60)  # type: ignore[arg-type]
    replay = wire.receiving()
    receiving = Receiver(replay, sender.manifest, VERSION, timeout_s=60, stall_timeout_s=0.0, aborted=threading.Event())  # type: ignore[arg-type]
    assert len(list(receiving.tensors())) == 1
    assert wire.given_s == replay.given_s == {2560 / 20e6}
