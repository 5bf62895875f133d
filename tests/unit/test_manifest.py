"""Manifests: the layout of what is sent, an id of all of it, and what is no manifest."""

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.errors import FieldError, MessageError
from pipelinerl.transfer.manifest import Chunk, LowRank, Manifest, build_manifest, chunk_size
from pipelinerl.v1 import control_pb2 as pb
from tests.unit.builders import changed

TWO = [("a", (3, 5), "float32"), ("b", (4,), "bfloat16")]
FACTORS = [("q.a", (2, 5), "float32"), ("q.b", (3, 2), "float32")]
ADAPTED = {"name": "q.weight", "shape": (3, 5), "dtype": "bfloat16", "a": "q.a", "b": "q.b", "scaling": 0.1}
"""Rank 2, from 5 to 3."""


def adapted(**changes) -> list[LowRank]:
    return [LowRank(**ADAPTED | changes)]


shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
parameters = st.lists(st.tuples(shapes, st.sampled_from(["float32", "bfloat16"])), min_size=1, max_size=8).map(
    lambda listed: [(f"p{i}", shape, dtype) for i, (shape, dtype) in enumerate(listed)]
)
chunk_sizes = st.integers(1, 8).map(lambda n: 64 * n)


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


@given(parameters, chunk_sizes, st.sampled_from(["", "float16"]))
def test_a_round_trip_keeps_the_id(listed, chunk_bytes, wire_dtype) -> None:
    manifest = build_manifest(listed, chunk_bytes=chunk_bytes, wire_dtype=wire_dtype)
    again = Manifest.from_bytes(manifest.to_bytes())

    assert again.manifest_id == manifest.manifest_id
    assert sum(chunk.num_bytes for chunk in again.chunks) == again.total_bytes


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
        ("low_rank[q.weight].scaling", {"low_rank": [pb.LowRank(**ADAPTED | {"scaling": inf})]}),
    ],
)
def test_a_wrong_manifest_names_its_field(field: str, changes: dict[str, Any]) -> None:
    right = {"parameters": [pb.ParameterSpec(name=n, shape=s, dtype=d) for n, s, d in FACTORS], "chunk_bytes": 64}
    with pytest.raises(MessageError) as caught:
        Manifest.from_bytes(pb.WeightManifest(**right | changes).SerializeToString())
    assert (caught.value.kind, caught.value.field) == ("WeightManifest", field)
