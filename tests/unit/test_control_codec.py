"""Control messages on the wire."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.errors import MessageError
from pipelinerl.messages import control
from pipelinerl.messages.control import LowRankFields, decode_control, decode_manifest, encode_control, encode_manifest
from pipelinerl.v1 import control_pb2

START = control.EpochStart(
    incarnation=1,
    epoch=4,
    store_address="trainer:7000",
    backend="nccl",
    world_size=4,
    members=(control.EpochMember("actor-0", "p0", 1, 2), control.EpochMember("actor-1", "p1", 3, 1)),
    manifest_id="m",
    deadline_s=60.0,
)
MESSAGES: list[control.Control] = [
    control.Registration("actor-0", "p0", "10.0.0.1:50051", 2, "m", 7, 1, "serving", "uid-0"),
    control.Registration("actor-0", "p0", "10.0.0.1:50051", 1),
    START,
    control.EpochJoined("actor-0", 1, 4),
    control.Announce(1, 4, 8, "m", 30.0),
    control.Staged("actor-0", 1, 4, 8, 2**64 - 1, 10**12, 1.5, 0.25),
    control.Commit(1, 4, 8),
    control.Serving("actor-0", 1, 4, 8, 0.05),
    control.Abort(1, 4, 8, "deadline"),
    control.Abort(1, 4, 8, "checksum", "actor-0"),
    control.Abort(1, 4, 8, "connection reset", "actor-0", group_broke=True),
    control.RunEnd(2, 100, True),
    control.RunEnd(2, 41, False, "out of memory"),
]
SHAPES = [("embed.weight", (100, 64), "float32"), ("norm.bias", (), "bfloat16")]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_control_message_comes_back_unchanged(message: control.Control) -> None:
    assert decode_control(encode_control(message), type(message)) == message


def test_every_message_of_the_channel_has_a_dataclass_with_the_same_fields() -> None:
    elsewhere = {"WeightManifest", "ParameterSpec", "LowRank"}  # pipelinerl.transfer.manifest
    for name, message in control_pb2.DESCRIPTOR.message_types_by_name.items():
        if name not in elsewhere:
            fields = {field.name for field in dataclasses.fields(getattr(control, name))}
            assert fields == set(message.fields_by_name), name


@pytest.mark.parametrize(
    ("message", "field", "changes"),
    [
        (MESSAGES[0], "actor", {"actor": ""}),
        (MESSAGES[0], "ranks", {"ranks": 0}),
        (MESSAGES[0], "ranks", {"ranks": 5000}),
        (MESSAGES[0], "phase", {"phase": "sleeping"}),
        (START, "backend", {"backend": "mpi"}),
        (START, "incarnation", {"incarnation": 0}),
        (START, "deadline_s", {"deadline_s": 0.0}),
        (START, "deadline_s", {"deadline_s": float("inf")}),
        (START, "members", {"world_size": 5}),
        (START, "members", {"members": START.members[:1]}),
        (START, "members", {"members": (START.members[0], replace(START.members[1], first_rank=2))}),
        (START, "members", {"members": (START.members[0], replace(START.members[1], actor="actor-0"))}),
        (START, "members.first_rank", {"members": (replace(START.members[0], first_rank=0),)}),
        (control.Announce(1, 4, 8, "m", 30.0), "manifest_id", {"manifest_id": ""}),
        (control.Serving("a", 1, 4, 8, 0.1), "stall_s", {"stall_s": float("nan")}),
        (control.Staged("a", 1, 4, 8, 1, 1, 1.0, 1.0), "checksum", {"checksum": 2**64}),
        (control.Commit(1, 4, 8), "version", {"version": -1}),
    ],
)
def test_a_wrong_control_message_names_its_field(message: Any, field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(MessageError) as caught:
        encode_control(replace(message, **changes))
    assert (caught.value.kind, caught.value.field) == (type(message).__name__, field)


def test_an_epoch_of_the_trainer_alone_is_valid() -> None:
    alone = replace(START, world_size=1, members=())
    assert decode_control(encode_control(alone), control.EpochStart) == alone


@given(st.binary(max_size=200))
def test_random_bytes_are_an_error_or_a_valid_control_message(data: bytes) -> None:
    for message in MESSAGES:
        try:
            survivor = decode_control(data, type(message))
        except MessageError:
            continue
        assert decode_control(encode_control(survivor), type(message)) == survivor


def test_an_oversized_control_message_is_refused() -> None:
    data = encode_control(START)
    with pytest.raises(MessageError, match="exceed the limit"):
        decode_control(data, control.EpochStart, max_bytes=len(data) - 1)


def test_a_manifest_comes_back_unchanged() -> None:
    manifest = decode_manifest(encode_manifest("id-1", SHAPES, 64 * 1024**2, "bfloat16"))
    assert manifest == ("id-1", tuple(SHAPES), 64 * 1024**2, "bfloat16", ())
    low_rank = (LowRankFields("q.weight", (8, 6), "bfloat16", "q.a", "q.b", 0.1, True),)
    assert decode_manifest(encode_manifest("id-1", SHAPES, 64, low_rank=low_rank)).low_rank == low_rank


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("manifest_id", ("", SHAPES, 1, "")),
        ("parameters", ("m", [], 1, "")),
        ("parameters", ("m", [SHAPES[0], SHAPES[0]], 1, "")),
        ("parameters.name", ("m", [("", (1,), "float32")], 1, "")),
        ("parameters[w].shape", ("m", [("w", (-1,), "float32")], 1, "")),
        ("low_rank.a", ("m", SHAPES, 1, "", [LowRankFields("q", (1, 1), "float32", "", "b", 1.0, False)])),
        ("low_rank[q].scaling", ("m", SHAPES, 1, "", [LowRankFields("q", (1, 1), "float32", "a", "b", inf, False)])),
        ("chunk_bytes", ("m", SHAPES, 0, "")),
        ("wire_dtype", ("m", SHAPES, 1, "int8")),
    ],
)
def test_a_wrong_manifest_names_its_field(field: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(MessageError) as caught:
        encode_manifest(*arguments)
    assert (caught.value.kind, caught.value.field) == ("WeightManifest", field)


@given(st.binary(max_size=200))
def test_random_bytes_are_an_error_or_a_valid_manifest(data: bytes) -> None:
    try:
        survivor = decode_manifest(data)
    except MessageError:
        return
    assert decode_manifest(encode_manifest(*survivor)) == survivor
