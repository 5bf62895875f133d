"""Sequences, prompt groups and control messages on the wire: what goes in comes out, and nothing that is wrong passes."""

from dataclasses import fields, replace
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.errors import MessageError
from pipelinerl.messages.control import decode_control
from pipelinerl.messages.sequences import (
    Branch,
    DeadLetter,
    FinishReason,
    PartialSequence,
    PromptGroup,
    SamplingParams,
    Sequence,
    Turn,
    VersionSpan,
    decode_dead_letter,
    decode_group,
    decode_sequence,
    encode_group,
    encode_sequence,
    remains_of_group,
)
from pipelinerl.v1 import control_pb2 as control
from pipelinerl.v1 import sequence_pb2 as pb
from tests.unit.builders import changed, damaged


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def logs(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


SEQUENCE = Sequence(
    run="demo",
    sequence_id="g7.1",
    group_id="g7",
    sample_index=1,
    group_size=4,
    task="chain_sum",
    prompt_token_ids=ids(5, 6),
    completion_token_ids=ids(7, 8, 2),
    behaviour_logprobs=logs(-0.5, -1.25, 0.0),
    spans=(VersionSpan(3, 0, 1), VersionSpan(4, 1, 3, incarnation=2)),
    reward=1.0,
    reward_components={"answer": 0.75, "format": 0.25},
    metrics={"said": 3.0},
    answer="7",
    reason="right",
    actor="actor-0",
    completion_text="3+4=7 ✓",
    prompt_text="3+4=",
    reference_json='{"answer": 7}',
    generation_s=0.125,
)
"""Three completion tokens, the last two of a newer version."""
PARTIAL = PartialSequence(ids(9, 10), logs(-0.25, -2.0), (VersionSpan(1, 0, 2),), sample_index=2)
WITHOUT_A_TOKEN = PartialSequence(finish_reason=FinishReason.STOP, sample_index=2)
GROUP = PromptGroup(
    run="demo",
    group_id="g7",
    problem_index=7,
    task="chain_sum",
    prompt_token_ids=ids(5, 6),
    prompt_text="3+4=",
    reference_json="{}",
    num_samples=4,
    sampling=SamplingParams(temperature=0.7, max_tokens=32, stop_token_ids=(2, 0), stop=("\n", "ø")),
    seed=2**64 - 1,
    issued_version=12,
    partials=(PARTIAL,),
    done_samples=(0, 3),
)


def assert_same(left: object, right: object) -> None:
    """Field by field; arrays by dtype and value."""
    for field in fields(left):  # type: ignore[arg-type]
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, field.name
            np.testing.assert_array_equal(a, b)
        elif field.name in ("partials", "branches"):
            assert len(a) == len(b)
            for one, other in zip(a, b, strict=True):
                assert_same(one, other)
        else:
            assert a == b, field.name


def raw_sequence(**changes: Any) -> bytes:
    """Bytes of a good sequence with fields of the wire message replaced: what a broken producer would send."""
    message = pb.Sequence.FromString(encode_sequence(SEQUENCE))
    for name, value in changes.items():
        message.ClearField(name)
        if isinstance(value, list):
            getattr(message, name).extend(value)
        elif isinstance(value, dict):
            getattr(message, name).update(value)
        else:
            setattr(message, name, value)
    return message.SerializeToString()


# --- there and back


def test_the_layout_on_the_wire_is_little_endian_and_packed_and_decoded_arrays_are_views_of_it() -> None:
    message = pb.Sequence.FromString(encode_sequence(SEQUENCE))
    assert message.completion_token_ids == bytes([7, 0, 0, 0, 8, 0, 0, 0, 2, 0, 0, 0])
    assert message.behaviour_logprobs == bytes([0, 0, 0, 0xBF, 0, 0, 0xA0, 0xBF, 0, 0, 0, 0])  # -0.5, -1.25, 0.0
    decoded = decode_sequence(encode_sequence(SEQUENCE))
    assert not decoded.completion_token_ids.flags.writeable
    assert not decoded.completion_token_ids.flags.owndata


def test_a_failed_sequence_needs_no_finish_reason() -> None:
    data = raw_sequence(failure="aborted", finish_reason=pb.FINISH_REASON_UNSPECIFIED)
    assert decode_sequence(data).failure == "aborted"


INTERRUPTED = Branch(
    prompt_token_ids=ids(1),
    completion_token_ids=ids(2**31 - 1, 0, 5),
    behaviour_logprobs=logs(-100.0, -1e-30),
    spans=(VersionSpan(2**64 - 1, 0, 1, incarnation=2**32 - 1), VersionSpan(0, 2, 3)),
    turns=(Turn(0, 1, FinishReason.LENGTH), Turn(2, 3, None)),
)
FINISHED = replace(INTERRUPTED, turns=(Turn(0, 1, FinishReason.LENGTH), Turn(2, 3)), finish_reason=FinishReason.STOP)
ONE_TURN = Branch(ids(4), logs(-1.0), (VersionSpan(3, 0, 1),), None, prompt_token_ids=ids(1))
EPISODE = replace(SEQUENCE, **{name: getattr(FINISHED, name) for name in vars(FINISHED)}, branches=(ONE_TURN, FINISHED))
FAILED = replace(
    SEQUENCE,
    failure="aborted",
    prompt_token_ids=ids(),
    completion_token_ids=ids(),
    behaviour_logprobs=logs(),
    spans=(),
    metrics={},
    reward_components={"": -1e6},
    actor="",
    generation_s=1e9,
)
EPISODIC = replace(
    GROUP,
    episodic=True,
    prompt_token_ids=ids(),
    sampling=SamplingParams(temperature=0.0, max_tokens=2**32 - 1),
    partials=(replace(PARTIAL, finish_reason=FinishReason.LENGTH), PartialSequence(sample_index=1, branches=(INTERRUPTED,))),
    done_samples=(),
)
SEQUENCES, GROUPS = [SEQUENCE, EPISODE, FAILED], [GROUP, EPISODIC]


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_a_valid_sequence_comes_back_unchanged(sequence: Sequence) -> None:
    assert_same(decode_sequence(encode_sequence(sequence)), sequence)


@pytest.mark.parametrize("group", GROUPS)
def test_a_valid_group_comes_back_unchanged(group: PromptGroup) -> None:
    """Sampling too: 0.7 is not a float32, and must not become 0.699999988."""
    assert_same(decode_group(encode_group(group)), group)


# --- bytes from anywhere


@given(damaged(st.sampled_from([*map(encode_sequence, SEQUENCES), *map(encode_group, GROUPS)])))
def test_damaged_bytes_are_an_error_or_a_valid_message(data: bytes) -> None:
    """A cut between two fields still parses; what is left must then pass every check by itself."""
    for decode, encode in ((decode_sequence, encode_sequence), (decode_group, encode_group)):
        try:
            survivor = decode(data)
        except MessageError:
            continue
        encode(survivor)  # type: ignore[operator]


def test_a_dead_letter_is_of_this_run_and_has_a_time() -> None:
    letter = DeadLetter(run="demo", msg_id="g7", prompt_group=b"\xff", reason="unreadable", deliveries=6, at_s=1.7e9)
    assert decode_dead_letter(letter.SerializeToString(), expected_run="demo") == letter
    for wrong, run in ((letter.SerializeToString(), "other"), (b"\xff", "demo")):
        with pytest.raises(MessageError):
            decode_dead_letter(wrong, expected_run=run)
    letter.at_s = float("nan")
    with pytest.raises(MessageError, match="at_s"):
        decode_dead_letter(letter.SerializeToString())


def test_what_remains_of_an_unreadable_group_knows_its_done_samples() -> None:
    message = pb.PromptGroup.FromString(encode_group(GROUP))
    message.prompt_token_ids = b"\x01"
    message.done_samples.append(9)  # there are four
    group = remains_of_group(message.SerializeToString(), run="demo")
    assert group.done_samples == (0, 3)


# --- one mistake at a time

BAD_SEQUENCES = [
    ("run", {"run": ""}),
    ("group_id", {"group_id": ""}),
    ("task", {"task": ""}),
    ("sequence_id", {"sequence_id": "g7.2"}),
    ("group_size", {"group_size": 0}),
    ("group_size", {"group_size": 2**20}),
    ("sample_index", {"sample_index": 4, "sequence_id": "g7.4"}),
    ("prompt_token_ids", {"prompt_token_ids": b""}),
    ("prompt_token_ids", {"prompt_token_ids": b"\x01\x00\x00"}),
    ("prompt_token_ids", {"prompt_token_ids": ids(5, -1).tobytes()}),
    ("completion_token_ids", {"completion_token_ids": b"", "behaviour_logprobs": b"", "spans": []}),
    ("behaviour_logprobs", {"behaviour_logprobs": logs(-0.5, -1.0).tobytes()}),
    ("behaviour_logprobs", {"behaviour_logprobs": logs(-0.5, np.nan, 0.0).tobytes()}),
    ("behaviour_logprobs", {"behaviour_logprobs": logs(-0.5, -np.inf, 0.0).tobytes()}),
    ("behaviour_logprobs", {"behaviour_logprobs": logs(-0.5, 0.002, 0.0).tobytes()}),
    ("reward", {"reward": float("nan")}),
    ("reward", {"reward": 1e30}),
    ("reward_components[answer]", {"reward_components": {"answer": -2e6}}),
    ("metrics[said]", {"metrics": {"said": float("nan")}}),
    ("generation_s", {"generation_s": -1.0}),
    ("finish_reason", {"finish_reason": 0}),
    ("finish_reason", {"finish_reason": 3}),
    ("spans.incarnation", {"spans": [pb.VersionSpan(version=1, start=0, end=3)]}),
    ("turns", {"turns": [pb.Turn(start=1, end=3, finish_reason=1)]}),  # begins with an observation
    ("turns", {"turns": [pb.Turn(start=0, end=2, finish_reason=1)]}),  # ends with one
    ("turns", {"turns": [pb.Turn(start=0, end=2, finish_reason=1), pb.Turn(start=1, end=3, finish_reason=1)]}),
    ("turns", {"turns": [pb.Turn(start=0, end=3)]}),  # unfinished
    ("turns.finish_reason", {"turns": [pb.Turn(start=0, end=3, finish_reason=9)]}),
    ("behaviour_logprobs", {"turns": [pb.Turn(start=0, end=1, finish_reason=1), pb.Turn(start=2, end=3, finish_reason=1)]}),
    (
        "spans",  # 0 to 3, over an observation
        {
            "turns": [pb.Turn(start=0, end=1, finish_reason=1), pb.Turn(start=2, end=3, finish_reason=1)],
            "behaviour_logprobs": logs(-0.5, 0.0).tobytes(),
        },
    ),
    ("branches.prompt_token_ids", {"branches": [pb.Branch()]}),
    *(
        ("spans", {"spans": [pb.VersionSpan(version=1, start=start, end=end, incarnation=1) for start, end in spans]})
        for spans in (
            [],
            [(0, 2)],  # stops early
            [(0, 4)],  # beyond the end
            [(1, 3)],  # starts late
            [(0, 1), (2, 3)],  # gap
            [(0, 2), (1, 3)],  # overlap
            [(0, 0), (0, 3)],  # empty
        )
    ),
]


@pytest.mark.parametrize(("field", "changes"), BAD_SEQUENCES)
def test_a_wrong_sequence_names_its_field(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(MessageError) as caught:
        decode_sequence(raw_sequence(**changes))
    assert (caught.value.kind, caught.value.field) == ("Sequence", field)


def test_a_logprob_may_exceed_zero_by_rounding() -> None:
    data = raw_sequence(behaviour_logprobs=logs(-0.5, 0.0009, 0.0).tobytes())
    assert decode_sequence(data).behaviour_logprobs[1] == np.float32(0.0009)


def test_another_runs_message_is_refused() -> None:
    with pytest.raises(MessageError, match=r"Sequence\.run: 'demo' is not this run, 'other'"):
        decode_sequence(encode_sequence(SEQUENCE), expected_run="other")
    with pytest.raises(MessageError, match=r"PromptGroup\.run"):
        decode_group(encode_group(GROUP), expected_run="other")
    assert decode_sequence(encode_sequence(SEQUENCE), expected_run="demo").run == "demo"


@pytest.mark.parametrize(
    ("good", "field", "changes"),
    [
        (SEQUENCE, "behaviour_logprobs", {"behaviour_logprobs": logs(-1.0, np.nan, 0.0)}),
        (SEQUENCE, "behaviour_logprobs", {"behaviour_logprobs": np.array([-1.0, -1.0, -1.0])}),  # float64
        (SEQUENCE, "completion_token_ids", {"completion_token_ids": np.array([1, 2, 3])}),  # int64
        (SEQUENCE, "completion_token_ids", {"completion_token_ids": ids(1, 2, 3).reshape(1, 3)}),
        (SEQUENCE, "", {"completion_text": "\ud800"}),  # half a surrogate pair is no text
        (SEQUENCE, "spans.version", {"spans": (VersionSpan(2**64, 0, 3),)}),
        (GROUP, "run", {"run": ""}),
        (GROUP, "prompt_token_ids", {"prompt_token_ids": ids()}),
        (GROUP, "num_samples", {"num_samples": 0, "partials": (), "done_samples": ()}),
        (GROUP, "sampling.temperature", {"sampling": SamplingParams(temperature=float("nan"))}),
        (GROUP, "sampling.max_tokens", {"sampling": SamplingParams(max_tokens=0)}),
        (GROUP, "sampling.stop_token_ids", {"sampling": SamplingParams(stop_token_ids=(-1,))}),
        (GROUP, "sampling.stop", {"sampling": SamplingParams(stop=("a", ""))}),
        (GROUP, "seed", {"seed": -1}),
        (GROUP, "done_samples", {"done_samples": (4,)}),
        (GROUP, "done_samples", {"done_samples": (1, 1)}),
        (GROUP, "partials", {"done_samples": (2,)}),
        (GROUP, "partials", {"partials": (replace(PARTIAL, sample_index=4),)}),
        (GROUP, "partials.behaviour_logprobs", {"partials": (replace(PARTIAL, behaviour_logprobs=logs(-1.0)),)}),
        (GROUP, "partials.spans", {"partials": (replace(PARTIAL, spans=(VersionSpan(1, 0, 1),)),)}),
        (GROUP, "partials.generation_s", {"partials": (replace(PARTIAL, generation_s=-1.0),)}),
        (GROUP, "partials.completion_token_ids", {"sampling": SamplingParams(max_tokens=1)}),
        (GROUP, "partials.finish_reason", {"partials": (WITHOUT_A_TOKEN,)}),
    ],
)
def test_encoding_names_the_field_that_decoding_would_refuse(good: Any, field: str, changes: dict[str, Any]) -> None:
    encode: Any = encode_sequence if good is SEQUENCE else encode_group
    with pytest.raises(MessageError) as caught:
        encode(replace(good, **changes))
    assert (caught.value.kind, caught.value.field) == (type(good).__name__, field)


# --- control messages

START = control.EpochStart(
    incarnation=1,
    epoch=4,
    store_address="trainer:7000",
    backend="nccl",
    world_size=4,
    members=(
        control.EpochMember(actor="actor-0", process="p0", first_rank=1, ranks=2),
        control.EpochMember(actor="actor-1", process="p1", first_rank=3, ranks=1),
    ),
    manifest_id="m",
    deadline_s=60.0,
)
REGISTRATION = control.Registration(actor="actor-0", process="p0", grpc_address="10.0.0.1:50051", ranks=1, phase="joining")
ANNOUNCE = control.Announce(incarnation=1, epoch=4, version=8, manifest_id="m", deadline_s=30.0)
SERVING = control.Serving(actor="actor-0", incarnation=1, epoch=4, version=8, stall_s=0.05)
STAGED = control.Staged(actor="actor-0", incarnation=1, epoch=4, version=8, checksum=2**64 - 1, bytes=10**12, receive_s=1.5)


@pytest.mark.parametrize(
    ("message", "field", "changes"),
    [
        (REGISTRATION, "actor", {"actor": ""}),
        (REGISTRATION, "ranks", {"ranks": 0}),
        (REGISTRATION, "ranks", {"ranks": 5000}),
        (REGISTRATION, "phase", {"phase": "sleeping"}),
        (START, "backend", {"backend": "mpi"}),
        (START, "incarnation", {"incarnation": 0}),
        (START, "deadline_s", {"deadline_s": inf}),
        (START, "members", {"world_size": 5}),
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
