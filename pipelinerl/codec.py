"""Protobuf ↔ dataclasses: wire types end here. Services decode at the door and encode on the way out.

Both directions check the message (`message_checks`), so that a mistake is found where it is made; whatever bytes come
in, decoding returns a valid object or raises `MessageError`. Control messages live in `control_codec` and are offered
here too. It sends and receives nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pipelinerl.arrays import array_to_bytes, logprobs_from_bytes, token_ids_from_bytes
from pipelinerl.control_codec import ManifestFields, decode_control, decode_manifest, encode_control, encode_manifest
from pipelinerl.errors import MessageError
from pipelinerl.message_checks import MAX_SAMPLES, check_dead_letter, check_group, check_sampling, check_sequence
from pipelinerl.types import (
    DeadLetter,
    FinishReason,
    PartialSequence,
    PromptGroup,
    SamplingParams,
    Sequence,
    VersionSpan,
)
from pipelinerl.v1 import sequence_pb2 as pb
from pipelinerl.wire import building, parse

__all__ = [
    "ManifestFields",
    "decode_control",
    "decode_dead_letter",
    "decode_group",
    "decode_manifest",
    "decode_sequence",
    "encode_control",
    "encode_dead_letter",
    "encode_group",
    "encode_manifest",
    "encode_sequence",
    "finish_reason_from_proto",
    "finish_reason_to_proto",
    "remains_of_group",
    "sampling_from_proto",
    "sampling_to_proto",
    "sequence_id_in",
    "spans_from_proto",
    "spans_to_proto",
]

_GROUP, _SEQUENCE, _DEAD = "PromptGroup", "Sequence", "DeadLetter"
_TO_PROTO = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}
_FROM_PROTO = {int(number): reason for reason, number in _TO_PROTO.items()}


def encode_sequence(sequence: Sequence) -> bytes:
    """Raises `MessageError` for what `decode_sequence` would refuse: the caller turns it into a failure."""
    check_sequence(sequence)
    with building(_SEQUENCE):
        message = pb.Sequence(
            run=sequence.run,
            sequence_id=sequence.sequence_id,
            group_id=sequence.group_id,
            sample_index=sequence.sample_index,
            group_size=sequence.group_size,
            task=sequence.task,
            prompt_token_ids=array_to_bytes(sequence.prompt_token_ids),
            completion_token_ids=array_to_bytes(sequence.completion_token_ids),
            behaviour_logprobs=array_to_bytes(sequence.behaviour_logprobs),
            reward=sequence.reward,
            finish_reason=finish_reason_to_proto(sequence.finish_reason),
            failure=sequence.failure,
            actor=sequence.actor,
            completion_text=sequence.completion_text,
            generation_s=sequence.generation_s,
            prompt_text=sequence.prompt_text,
            reference_json=sequence.reference_json,
        )
        for span in sequence.spans:  # added in place: half the cost of handing over a list
            message.spans.add(version=span.version, start=span.start, end=span.end, incarnation=span.incarnation)
        for name, value in sequence.reward_components.items():
            message.reward_components[name] = value
        return message.SerializeToString()


def decode_sequence(data: bytes, *, expected_run: str = "", max_bytes: int = 0) -> Sequence:
    """Arrays are read-only views of the message. Raises `MessageError`; `expected_run` "" and `max_bytes` 0 = any."""
    message = parse(pb.Sequence(), data, _SEQUENCE, max_bytes)
    sequence = Sequence(
        run=message.run,
        sequence_id=message.sequence_id,
        group_id=message.group_id,
        sample_index=message.sample_index,
        group_size=message.group_size,
        task=message.task,
        prompt_token_ids=token_ids_from_bytes(message.prompt_token_ids, _SEQUENCE, "prompt_token_ids"),
        completion_token_ids=token_ids_from_bytes(message.completion_token_ids, _SEQUENCE, "completion_token_ids"),
        behaviour_logprobs=logprobs_from_bytes(message.behaviour_logprobs, _SEQUENCE, "behaviour_logprobs"),
        spans=spans_from_proto(message.spans),
        reward=message.reward,
        reward_components=dict(message.reward_components),
        finish_reason=_finish_reason(message),
        failure=message.failure,
        actor=message.actor,
        completion_text=message.completion_text,
        prompt_text=message.prompt_text,
        reference_json=message.reference_json,
        generation_s=message.generation_s,
    )
    check_sequence(sequence, expected_run=expected_run)
    return sequence


def sequence_id_in(data: bytes, *, run: str) -> str:
    """The id that a sequence message of `run` names, although `decode_sequence` may refuse it; "" when it names none."""
    try:
        message = parse(pb.Sequence(), data, _SEQUENCE, 0)
    except MessageError:
        return ""
    return str(message.sequence_id) if message.run == run else ""


def encode_group(group: PromptGroup) -> bytes:
    """Raises `MessageError` for what `decode_group` would refuse."""
    check_group(group)
    with building(_GROUP):
        return pb.PromptGroup(
            run=group.run,
            group_id=group.group_id,
            problem_index=group.problem_index,
            task=group.task,
            prompt_token_ids=array_to_bytes(group.prompt_token_ids),
            prompt_text=group.prompt_text,
            reference_json=group.reference_json,
            num_samples=group.num_samples,
            sampling=sampling_to_proto(group.sampling),
            seed=group.seed,
            issued_version=group.issued_version,
            partials=[_partial_to_proto(partial) for partial in group.partials],
            done_samples=group.done_samples,
        ).SerializeToString()


def decode_group(data: bytes, *, expected_run: str = "", max_bytes: int = 0) -> PromptGroup:
    """Arrays are read-only views of the message. Raises `MessageError`; `expected_run` "" and `max_bytes` 0 = any."""
    message = parse(pb.PromptGroup(), data, _GROUP, max_bytes)
    group = PromptGroup(
        run=message.run,
        group_id=message.group_id,
        problem_index=message.problem_index,
        task=message.task,
        prompt_token_ids=token_ids_from_bytes(message.prompt_token_ids, _GROUP, "prompt_token_ids"),
        prompt_text=message.prompt_text,
        reference_json=message.reference_json,
        num_samples=message.num_samples,
        sampling=_sampling(message.sampling),
        seed=message.seed,
        issued_version=message.issued_version,
        partials=tuple(_partial_from_proto(partial) for partial in message.partials),
        done_samples=tuple(message.done_samples),
    )
    check_group(group, expected_run=expected_run)
    return group


def remains_of_group(data: bytes, *, run: str) -> PromptGroup | None:
    """What names the samples of a group that `decode_group` refuses: a group of `run` without a prompt. None when the
    message does not say that much. Not to be generated from: it accounts for samples that nobody can generate."""
    try:
        message = parse(pb.PromptGroup(), data, _GROUP, 0)
    except MessageError:
        return None
    if message.run != run or not (message.group_id and message.task and 1 <= message.num_samples <= MAX_SAMPLES):
        return None
    return PromptGroup(
        run=message.run,
        group_id=message.group_id,
        problem_index=message.problem_index,
        task=message.task,
        prompt_token_ids=np.empty(0, dtype=np.int32),
        prompt_text="",
        reference_json="",
        num_samples=message.num_samples,
        sampling=SamplingParams(),
        seed=0,
        issued_version=0,
        done_samples=tuple(sorted({index for index in message.done_samples if index < message.num_samples})),
    )


def encode_dead_letter(letter: DeadLetter) -> bytes:
    """Raises `MessageError`."""
    check_dead_letter(letter)
    with building(_DEAD):
        return pb.DeadLetter(
            run=letter.run,
            msg_id=letter.msg_id,
            prompt_group=letter.prompt_group,
            reason=letter.reason,
            deliveries=letter.deliveries,
            actor=letter.actor,
            at_s=letter.at_s,
        ).SerializeToString()


def decode_dead_letter(data: bytes, *, expected_run: str = "") -> DeadLetter:
    """Raises `MessageError`; `expected_run` "" = any."""
    message = parse(pb.DeadLetter(), data, _DEAD, 0)
    letter = DeadLetter(
        run=message.run,
        msg_id=message.msg_id,
        prompt_group=message.prompt_group,
        reason=message.reason,
        deliveries=message.deliveries,
        actor=message.actor,
        at_s=message.at_s,
    )
    check_dead_letter(letter, expected_run=expected_run)
    return letter


def sampling_to_proto(sampling: SamplingParams) -> pb.SamplingParams:
    check_sampling(sampling)
    return pb.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
    )


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Raises `MessageError` when a value is out of range."""
    sampling = _sampling(message)
    check_sampling(sampling)
    return sampling


def spans_to_proto(spans: Iterable[VersionSpan]) -> list[pb.VersionSpan]:
    return [
        pb.VersionSpan(version=span.version, start=span.start, end=span.end, incarnation=span.incarnation)
        for span in spans
    ]


def spans_from_proto(messages: Iterable[pb.VersionSpan]) -> tuple[VersionSpan, ...]:
    """Not checked: that needs the number of tokens (`message_checks.check_spans`)."""
    return tuple(VersionSpan(span.version, span.start, span.end, span.incarnation) for span in messages)


def finish_reason_to_proto(reason: FinishReason) -> pb.FinishReason:
    return _TO_PROTO[reason]


def finish_reason_from_proto(number: int, kind: str = _SEQUENCE) -> FinishReason:
    """Raises `MessageError` for a number that names no reason (0, or one of a newer version)."""
    reason = _FROM_PROTO.get(number)
    if reason is None:
        raise MessageError(kind, "finish_reason", f"{number} names no finish reason")
    return reason


def _finish_reason(message: pb.Sequence) -> FinishReason:
    if message.failure and message.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
        return FinishReason.STOP  # it did not finish, and nobody asks
    return finish_reason_from_proto(message.finish_reason)


def _sampling(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=_shortest(message.temperature),
        top_p=_shortest(message.top_p),
        top_k=message.top_k,
        max_tokens=message.max_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
    )


def _shortest(value: float) -> float:
    """The shortest decimal that a float32 stands for: 0.7 goes over the wire and comes back as 0.7."""
    return float(str(np.float32(value)))


def _partial_to_proto(partial: PartialSequence) -> pb.PartialSequence:
    return pb.PartialSequence(
        sample_index=partial.sample_index,
        completion_token_ids=array_to_bytes(partial.completion_token_ids),
        behaviour_logprobs=array_to_bytes(partial.behaviour_logprobs),
        spans=spans_to_proto(partial.spans),
        finish_reason=finish_reason_to_proto(partial.finish_reason) if partial.finish_reason else None,
        generation_s=partial.generation_s,
    )


def _partial_from_proto(message: pb.PartialSequence) -> PartialSequence:
    return PartialSequence(
        sample_index=message.sample_index,
        completion_token_ids=token_ids_from_bytes(
            message.completion_token_ids, _GROUP, "partials.completion_token_ids"
        ),
        behaviour_logprobs=logprobs_from_bytes(message.behaviour_logprobs, _GROUP, "partials.behaviour_logprobs"),
        spans=spans_from_proto(message.spans),
        finish_reason=_partial_finish_reason(message),
        generation_s=message.generation_s,
    )


def _partial_finish_reason(message: pb.PartialSequence) -> FinishReason | None:
    if message.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
        return None
    return finish_reason_from_proto(message.finish_reason, _GROUP)
