"""Control messages on the wire: what decoding accepts and how it names what it refuses."""

from math import inf, nan
from typing import Any

import pytest

from pipelinerl.errors import MessageError
from pipelinerl.messages.control import decode_control
from pipelinerl.transfer.manifest import LowRank, Manifest, build_manifest
from pipelinerl.v1 import control_pb2 as pb
from tests.unit.builders import changed

FACTORS = [("q.a", (2, 6), "float32"), ("q.b", (8, 2), "float32")]
INFINITE = pb.LowRank(name="q", shape=[8, 6], dtype="float32", a="q.a", b="q.b", scaling=inf)
START = pb.EpochStart(
    incarnation=1,
    epoch=4,
    store_address="trainer:7000",
    backend="nccl",
    world_size=4,
    members=(
        pb.EpochMember(actor="actor-0", process="p0", first_rank=1, ranks=2),
        pb.EpochMember(actor="actor-1", process="p1", first_rank=3, ranks=1),
    ),
    manifest_id="m",
    deadline_s=60.0,
)
REGISTRATION = pb.Registration(actor="actor-0", process="p0", grpc_address="10.0.0.1:50051", ranks=1, phase="joining")
ANNOUNCE = pb.Announce(incarnation=1, epoch=4, version=8, manifest_id="m", deadline_s=30.0)
SERVING = pb.Serving(actor="actor-0", incarnation=1, epoch=4, version=8, stall_s=0.05)
STAGED = pb.Staged(actor="actor-0", incarnation=1, epoch=4, version=8, checksum=2**64 - 1, bytes=10**12, receive_s=1.5)


def test_an_epoch_may_have_no_members() -> None:
    alone = pb.EpochStart(incarnation=1, store_address="t:1", backend="gloo", world_size=1, manifest_id="m", deadline_s=1.0)
    assert decode_control(alone.SerializeToString(), pb.EpochStart) == alone


@pytest.mark.parametrize(
    ("message", "field", "changes"),
    [
        (REGISTRATION, "actor", {"actor": ""}),
        (REGISTRATION, "ranks", {"ranks": 0}),
        (REGISTRATION, "ranks", {"ranks": 5000}),
        (REGISTRATION, "phase", {"phase": "sleeping"}),
        (START, "backend", {"backend": "mpi"}),
        (START, "incarnation", {"incarnation": 0}),
        (START, "deadline_s", {"deadline_s": 0.0}),
        (START, "deadline_s", {"deadline_s": inf}),
        (START, "members", {"world_size": 5}),
        (START, "members", {"members_1__first_rank": 2}),
        (START, "members", {"members_1__actor": "actor-0"}),
        (START, "members.first_rank", {"members_0__first_rank": 0}),
        (ANNOUNCE, "manifest_id", {"manifest_id": ""}),
        (SERVING, "stall_s", {"stall_s": nan}),
        (STAGED, "receive_s", {"receive_s": -1.0}),
    ],
)
def test_a_wrong_control_message_names_its_field(message: Any, field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(MessageError) as caught:
        decode_control(changed(message, **changes).SerializeToString(), type(message))
    assert (caught.value.kind, caught.value.field) == (type(message).__name__, field)


def test_a_manifest_comes_back_unchanged_and_its_id_is_checked() -> None:
    low_rank = LowRank(name="q", shape=(8, 6), dtype="bfloat16", a="q.a", b="q.b", scaling=0.1)
    data = build_manifest(FACTORS, low_rank=[low_rank]).to_bytes()
    assert Manifest.from_bytes(data).to_bytes() == data
    with pytest.raises(MessageError, match="is not the id of its content"):
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
        ("low_rank[q].scaling", {"low_rank": [INFINITE]}),
    ],
)
def test_a_wrong_manifest_names_its_field(field: str, changes: dict[str, Any]) -> None:
    right = {"parameters": [pb.ParameterSpec(name=n, shape=s, dtype=d) for n, s, d in FACTORS], "chunk_bytes": 64}
    with pytest.raises(MessageError) as caught:
        Manifest.from_bytes(pb.WeightManifest(**right | changes).SerializeToString())
    assert (caught.value.kind, caught.value.field) == ("WeightManifest", field)
