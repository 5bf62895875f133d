"""The nouns that travel between services, as immutable dataclasses.

Algorithms work on these, never on protobuf messages. Arrays are NumPy so that a sequence
of tens of thousands of tokens costs one copy. Nothing here talks to anything.

Token ids and log-probabilities: bytes on the wire (little-endian int32 / float32), NumPy arrays here, and checks.

Reading makes no copy: the array is a read-only view of the bytes. It checks what an array can be wrong about by itself
(length, dtype, range); what it must agree with is checked where messages are.

Bytes ↔ protobuf messages, with every failure as a `MessageError`. The codecs build on it; it knows no message.

What must hold of a prompt group and of a sequence, whoever made it. Used on both sides: by encoding and by decoding.

Pure. Every problem is a `MessageError` that names the message, the field and what is wrong with it. It knows nothing of
tokenizers, tasks or the state of a run: whether a version exists or a group was issued is the trainer's to judge.

Protobuf ↔ dataclasses: wire types end here. Services decode at the door and encode on the way out.

Both directions check the message (`message_checks`), so that a mistake is found where it is made; whatever bytes come
in, decoding returns a valid object or raises `MessageError`. Control messages live in `control_codec` and are offered
here too. It sends and receives nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from pipelinerl.errors import MessageError
from pipelinerl.messages.validation import building, check_finite, check_run, check_text, check_uint, parse
from pipelinerl.v1 import sequence_pb2 as pb

TokenIds = NDArray[np.int32]
"""int32[tokens]"""
Logprobs = NDArray[np.float32]
"""float32[tokens], nats"""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, order=True)
class PolicyVersion:
    """A version is known by the incarnation of the trainer that made it and its number (optimizer steps taken)."""

    incarnation: int
    number: int

    def __str__(self) -> str:
        return f"{self.incarnation}:{self.number}"


@dataclass(frozen=True)
class VersionSpan:
    """Completion tokens [start, end) were sampled by policy `version` of trainer `incarnation`."""

    version: int
    start: int
    end: int
    incarnation: int = 1


@dataclass(frozen=True)
class SamplingParams:
    """How completions are sampled; μ is the distribution after all of it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class PartialSequence:
    """What an actor that left had generated of one sample. `completion_token_ids`, `behaviour_logprobs`: [tokens].

    `finish_reason` None: to be continued. Otherwise it is complete and lacks only its reward and publication.
    """

    sample_index: int
    completion_token_ids: TokenIds
    behaviour_logprobs: Logprobs
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason | None = None
    generation_s: float = 0.0


@dataclass(frozen=True, eq=False)
class PromptGroup:
    """One prompt and how many samples of it are wanted.

    `done_samples` are not asked for here: they are published already, or another message of this group asks for them.
    `partials` are samples to go on with; all others start from the prompt.
    """

    run: str
    group_id: str
    problem_index: int
    task: str
    prompt_token_ids: TokenIds
    prompt_text: str
    reference_json: str
    num_samples: int
    sampling: SamplingParams
    seed: int
    issued_version: int
    partials: tuple[PartialSequence, ...] = ()
    done_samples: tuple[int, ...] = ()

    def sequence_id(self, sample_index: int) -> str:
        return f"{self.group_id}.{sample_index}"


@dataclass(frozen=True)
class DeadLetter:
    """A message of PROMPTS that was given up. `prompt_group`: its bytes, empty when they were too large to be kept."""

    run: str
    msg_id: str
    prompt_group: bytes
    reason: str
    deliveries: int
    actor: str
    at_s: float
    """Unix seconds."""


@dataclass(frozen=True, eq=False)
class Sequence:
    """One finished sequence. `spans` cover the completion without gap or overlap; `failure` is empty for a good one.

    prompt_token_ids int32[prompt], completion_token_ids int32[completion], behaviour_logprobs float32[completion]
    (log μ of each sampled token, nats).
    """

    run: str
    sequence_id: str
    group_id: str
    sample_index: int
    group_size: int
    task: str
    prompt_token_ids: TokenIds
    completion_token_ids: TokenIds
    behaviour_logprobs: Logprobs
    spans: tuple[VersionSpan, ...]
    reward: float
    reward_components: dict[str, float] = field(default_factory=dict)
    finish_reason: FinishReason = FinishReason.STOP
    failure: str = ""
    actor: str = ""
    completion_text: str = ""
    prompt_text: str = ""
    reference_json: str = ""
    generation_s: float = 0.0

    @property
    def num_completion_tokens(self) -> int:
        return len(self.completion_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.completion_token_ids)

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.spans)

    @property
    def num_versions(self) -> int:
        return len({(span.incarnation, span.version) for span in self.spans})

    def token_versions(self) -> NDArray[np.int64]:
        """int64[completion]: policy version of each completion token."""
        versions = np.empty(len(self.completion_token_ids), dtype=np.int64)
        for span in self.spans:
            versions[span.start : span.end] = span.version
        return versions


_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
LOGPROB_ROUNDING = 1e-3
"""A log-probability may exceed 0 by this much (nats): engines compute it in low precision."""


def token_ids_from_bytes(data: bytes, kind: str, field: str) -> TokenIds:
    """int32[tokens], read-only. Raises `MessageError` when the length is no multiple of 4 bytes."""
    return _from_bytes(data, _INT32, kind, field)


def logprobs_from_bytes(data: bytes, kind: str, field: str) -> Logprobs:
    """float32[tokens], read-only. Raises `MessageError` when the length is no multiple of 4 bytes."""
    return _from_bytes(data, _FLOAT32, kind, field)


def array_to_bytes(array: TokenIds | Logprobs) -> bytes:
    """The elements of an array that `check_token_ids` or `check_logprobs` has passed, little-endian."""
    return array.tobytes()


def check_token_ids(token_ids: TokenIds, kind: str, field: str) -> None:
    """Raises `MessageError` unless they are little-endian int32[tokens], none negative."""
    _check_shape(token_ids, _INT32, kind, field)
    if len(token_ids):
        lowest = token_ids.argmin()  # a quarter of the cost of `min`, which counts for short sequences
        if token_ids[lowest] < 0:
            raise MessageError(kind, field, f"token {lowest} is {token_ids[lowest]}: ids are not negative")


def check_logprobs(logprobs: Logprobs, kind: str, field: str) -> None:
    """Raises `MessageError` unless they are little-endian float32[tokens], finite and at most 0 (but for rounding)."""
    _check_shape(logprobs, _FLOAT32, kind, field)
    if not len(logprobs):
        return
    highest, lowest = logprobs.argmax(), logprobs.argmin()
    # Written so that NaN fails: argmax finds it, and no comparison with it is true.
    if not logprobs[highest] <= LOGPROB_ROUNDING:
        raise MessageError(kind, field, _bad_logprob(highest, logprobs))
    if not logprobs[lowest] > -np.inf:
        raise MessageError(kind, field, _bad_logprob(lowest, logprobs))


def _bad_logprob(index: np.intp, logprobs: Logprobs) -> str:
    return f"token {index} has {logprobs[index]}: a log-probability is finite and <= 0"


def _from_bytes(data: bytes, dtype: np.dtype, kind: str, field: str) -> NDArray:
    if len(data) % dtype.itemsize:
        raise MessageError(kind, field, f"{len(data)} bytes are no multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def _check_shape(array: NDArray, dtype: np.dtype, kind: str, field: str) -> None:
    if array.ndim != 1 or (array.dtype is not dtype and array.dtype != dtype):
        raise MessageError(kind, field, f"has dtype {array.dtype} and shape {array.shape}, not {dtype} and [tokens]")


MAX_SAMPLES = 65_536
"""Samples of one group at most: far above any use, and small enough that a broken count does no harm."""
_GROUP, _SEQUENCE, _SAMPLING, _DEAD = "PromptGroup", "Sequence", "SamplingParams", "DeadLetter"


def check_spans(spans: Items[VersionSpan], num_tokens: int, kind: str, field: str = "spans") -> None:
    """Raises `MessageError` unless the spans cover tokens [0, num_tokens) in order, without gap or overlap."""
    covered = 0
    for span in spans:
        if span.start != covered or span.end <= span.start:
            problem = f"[{span.start}, {span.end}) does not continue a cover of [0, {covered})"
            raise MessageError(kind, field, problem)
        if not 0 <= span.version < 1 << 64:
            raise MessageError(kind, f"{field}.version", f"{span.version} is not in [0, 2**64)")
        if not 1 <= span.incarnation < 1 << 32:
            raise MessageError(kind, f"{field}.incarnation", f"{span.incarnation} is not in [1, 2**32)")
        covered = span.end
    if covered != num_tokens:
        raise MessageError(kind, field, f"cover [0, {covered}) of {num_tokens} completion tokens")


def check_sampling(sampling: SamplingParams, kind: str = _SAMPLING, prefix: str = "") -> None:
    check_finite(sampling.temperature, kind, f"{prefix}temperature", at_least=0.0)
    if not 0 < sampling.top_p <= 1:
        raise MessageError(kind, f"{prefix}top_p", f"{sampling.top_p} is not in (0, 1]")
    check_uint(sampling.top_k, kind, f"{prefix}top_k", bits=31)
    check_uint(sampling.max_tokens, kind, f"{prefix}max_tokens", at_least=1)
    for token_id in sampling.stop_token_ids:
        check_uint(token_id, kind, f"{prefix}stop_token_ids", bits=31)


def check_group(group: PromptGroup, *, expected_run: str = "") -> None:
    """Raises `MessageError`. `expected_run` "" = any."""
    check_run(group.run, expected_run, _GROUP)
    check_text(group.group_id, _GROUP, "group_id")
    check_text(group.task, _GROUP, "task")
    check_token_ids(group.prompt_token_ids, _GROUP, "prompt_token_ids")
    if not len(group.prompt_token_ids):
        raise MessageError(_GROUP, "prompt_token_ids", "is empty")
    check_sampling(group.sampling, _GROUP, "sampling.")
    for name in ("problem_index", "seed", "issued_version"):
        check_uint(getattr(group, name), _GROUP, name, bits=64)
    if not 1 <= group.num_samples <= MAX_SAMPLES:
        raise MessageError(_GROUP, "num_samples", f"{group.num_samples} is not in [1, {MAX_SAMPLES}]")
    _check_samples(group)


def check_sequence(sequence: Sequence, *, expected_run: str = "") -> None:
    """Raises `MessageError`. A sequence with a `failure` may lack its tokens. `expected_run` "" = any."""
    check_run(sequence.run, expected_run, _SEQUENCE)
    check_text(sequence.group_id, _SEQUENCE, "group_id")
    check_text(sequence.task, _SEQUENCE, "task")
    _check_place_in_group(sequence)
    _check_tokens(sequence, _SEQUENCE, "")
    check_token_ids(sequence.prompt_token_ids, _SEQUENCE, "prompt_token_ids")
    if not sequence.failure and not (len(sequence.prompt_token_ids) and len(sequence.completion_token_ids)):
        field = "completion_token_ids" if len(sequence.prompt_token_ids) else "prompt_token_ids"
        raise MessageError(_SEQUENCE, field, "is empty, and the sequence names no failure")
    check_finite(sequence.reward, _SEQUENCE, "reward")
    for name, value in sequence.reward_components.items():
        check_finite(value, _SEQUENCE, f"reward_components[{name}]")
    check_finite(sequence.generation_s, _SEQUENCE, "generation_s", at_least=0.0)


def _check_place_in_group(sequence: Sequence) -> None:
    if not 1 <= sequence.group_size <= MAX_SAMPLES:
        raise MessageError(_SEQUENCE, "group_size", f"{sequence.group_size} is not in [1, {MAX_SAMPLES}]")
    if not 0 <= sequence.sample_index < sequence.group_size:
        problem = f"{sequence.sample_index} is not in [0, group_size = {sequence.group_size})"
        raise MessageError(_SEQUENCE, "sample_index", problem)
    expected_id = f"{sequence.group_id}.{sequence.sample_index}"
    if sequence.sequence_id != expected_id:
        raise MessageError(_SEQUENCE, "sequence_id", f"{sequence.sequence_id!r} should be {expected_id!r}")


def _check_tokens(tokens: Sequence | PartialSequence, kind: str, prefix: str) -> None:
    completion, logprobs = tokens.completion_token_ids, tokens.behaviour_logprobs
    check_token_ids(completion, kind, f"{prefix}completion_token_ids")
    check_logprobs(logprobs, kind, f"{prefix}behaviour_logprobs")
    if len(logprobs) != len(completion):
        problem = f"{len(logprobs)} values for {len(completion)} completion tokens"
        raise MessageError(kind, f"{prefix}behaviour_logprobs", problem)
    check_spans(tokens.spans, len(completion), kind, f"{prefix}spans")


def _check_samples(group: PromptGroup) -> None:
    """Samples done and samples to resume: inside the group, each once."""
    seen: set[int] = set()
    partial_indices = [partial.sample_index for partial in group.partials]
    for name, indices in (("done_samples", group.done_samples), ("partials", partial_indices)):
        for index in indices:
            if not 0 <= index < group.num_samples:
                raise MessageError(_GROUP, name, f"sample {index} is not in [0, num_samples = {group.num_samples})")
            if index in seen:
                raise MessageError(_GROUP, name, f"sample {index} is listed twice")
            seen.add(index)
    for partial in group.partials:
        _check_partial(partial, group.sampling.max_tokens)


def _check_partial(partial: PartialSequence, max_tokens: int) -> None:
    _check_tokens(partial, _GROUP, "partials.")
    check_finite(partial.generation_s, _GROUP, "partials.generation_s", at_least=0.0)
    num_tokens = len(partial.completion_token_ids)
    if num_tokens > max_tokens:
        problem = f"{num_tokens} tokens of sample {partial.sample_index}, sampling.max_tokens is {max_tokens}"
        raise MessageError(_GROUP, "partials.completion_token_ids", problem)
    if partial.finish_reason is not None and not num_tokens:
        problem = f"sample {partial.sample_index} is finished ({partial.finish_reason}) without a token"
        raise MessageError(_GROUP, "partials.finish_reason", problem)


def check_dead_letter(letter: DeadLetter, *, expected_run: str = "") -> None:
    """Raises `MessageError`. The message that was given up is not looked into. `expected_run` "" = any."""
    check_run(letter.run, expected_run, _DEAD)
    check_uint(letter.deliveries, _DEAD, "deliveries")
    check_finite(letter.at_s, _DEAD, "at_s", at_least=0.0)


_GROUP_codec, _SEQUENCE_codec, _DEAD_codec = "PromptGroup", "Sequence", "DeadLetter"
_TO_PROTO = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}
_FROM_PROTO = {int(number): reason for reason, number in _TO_PROTO.items()}


def encode_sequence(sequence: Sequence) -> bytes:
    """Raises `MessageError` for what `decode_sequence` would refuse: the caller turns it into a failure."""
    check_sequence(sequence)
    with building(_SEQUENCE_codec):
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


def decode_sequence(data: bytes, *, expected_run: str = "") -> Sequence:
    """Arrays are read-only views of the message. Raises `MessageError`; `expected_run` "" = any."""
    message = parse(pb.Sequence(), data, _SEQUENCE_codec)
    sequence = Sequence(
        run=message.run,
        sequence_id=message.sequence_id,
        group_id=message.group_id,
        sample_index=message.sample_index,
        group_size=message.group_size,
        task=message.task,
        prompt_token_ids=token_ids_from_bytes(message.prompt_token_ids, _SEQUENCE_codec, "prompt_token_ids"),
        completion_token_ids=token_ids_from_bytes(
            message.completion_token_ids, _SEQUENCE_codec, "completion_token_ids"
        ),
        behaviour_logprobs=logprobs_from_bytes(message.behaviour_logprobs, _SEQUENCE_codec, "behaviour_logprobs"),
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
        message = parse(pb.Sequence(), data, _SEQUENCE_codec)
    except MessageError:
        return ""
    return str(message.sequence_id) if message.run == run else ""


def encode_group(group: PromptGroup) -> bytes:
    """Raises `MessageError` for what `decode_group` would refuse."""
    check_group(group)
    with building(_GROUP_codec):
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


def decode_group(data: bytes, *, expected_run: str = "") -> PromptGroup:
    """Arrays are read-only views of the message. Raises `MessageError`; `expected_run` "" = any."""
    message = parse(pb.PromptGroup(), data, _GROUP_codec)
    group = PromptGroup(
        run=message.run,
        group_id=message.group_id,
        problem_index=message.problem_index,
        task=message.task,
        prompt_token_ids=token_ids_from_bytes(message.prompt_token_ids, _GROUP_codec, "prompt_token_ids"),
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
        message = parse(pb.PromptGroup(), data, _GROUP_codec)
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
    with building(_DEAD_codec):
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
    message = parse(pb.DeadLetter(), data, _DEAD_codec)
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


def finish_reason_from_proto(number: int, kind: str = _SEQUENCE_codec) -> FinishReason:
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
            message.completion_token_ids, _GROUP_codec, "partials.completion_token_ids"
        ),
        behaviour_logprobs=logprobs_from_bytes(message.behaviour_logprobs, _GROUP_codec, "partials.behaviour_logprobs"),
        spans=spans_from_proto(message.spans),
        finish_reason=_partial_finish_reason(message),
        generation_s=message.generation_s,
    )


def _partial_finish_reason(message: pb.PartialSequence) -> FinishReason | None:
    if message.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
        return None
    return finish_reason_from_proto(message.finish_reason, _GROUP_codec)
