"""Prompt groups, sequences and dead letters: the messages on a run's streams, apart from control messages.

Messages are checked when they are encoded and when they are decoded. A `MessageError` names the message, the field and the
problem. If the check at encoding fails, an actor publishes the sequence as a failure with this error. The trainer, not this
module, checks whether a version exists or a group was issued. Arrays of a decoded message are read-only views of its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from pipelinerl.errors import MessageError
from pipelinerl.recipe.fields import MOST_REWARD
from pipelinerl.v1 import sequence_pb2 as pb
from pipelinerl.v1.sequence_pb2 import DeadLetter

TokenIds = NDArray[np.int32]
"""Token ids, int32[tokens]."""
Logprobs = NDArray[np.float32]
"""Log-probabilities in nats, float32[tokens]."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, order=True)
class PolicyVersion:
    """A policy version: the incarnation of the trainer that made it, and its number (optimizer steps taken)."""

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
    """Settings for sampling. A completion ends with the end-of-sequence token, one of `stop_token_ids`, or the token that
    completes a text in `stop`. Otherwise it is cut at `max_tokens`. μ is the policy's distribution at `temperature`."""

    temperature: float = 1.0
    max_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Turn:
    """Completion tokens [start, end) that the policy sampled in one turn. `finish_reason`: None = interrupted."""

    start: int
    end: int
    finish_reason: FinishReason | None = FinishReason.STOP


@dataclass(frozen=True, eq=False)
class Completion:
    """Tokens that the policy sampled, including the end-of-sequence token. behaviour_logprobs float32[tokens]: log μ of each
    token, nats. `spans` cover the tokens without gap or overlap. `finish_reason` is None if the completion was interrupted."""

    completion_token_ids: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))
    behaviour_logprobs: Logprobs = field(default_factory=lambda: np.empty(0, np.float32))
    spans: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Branch(Completion):
    """One row of tokens: a prompt, then turns with an environment's observations between them. The completion is everything
    from the first turn to the last one; without `turns`, it is one turn. behaviour_logprobs and `spans` leave out the
    observations."""

    prompt_token_ids: TokenIds
    turns: tuple[Turn, ...] = ()

    @property
    def num_completion_tokens(self) -> int:
        """Number of tokens after the prompt, observations included."""
        return len(self.completion_token_ids)

    @property
    def num_sampled_tokens(self) -> int:
        return len(self.behaviour_logprobs)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.completion_token_ids)


@dataclass(frozen=True, eq=False, kw_only=True)
class PartialSequence(Completion):
    """Tokens of one sample that its actor hands over. For an episode, `branches` hold all tokens. When the next actor continues
    it, the environment starts anew. If the environment repeats a request, the actor answers with the recorded turn."""

    sample_index: int
    generation_s: float = 0.0
    branches: tuple[Branch, ...] = ()

    @property
    def num_sampled_tokens(self) -> int:
        return len(self.behaviour_logprobs) + sum(branch.num_sampled_tokens for branch in self.branches)


@dataclass(frozen=True, eq=False)
class PromptGroup:
    """One prompt, with the number of samples wanted. `partials` are samples to continue. `done_samples` are not requested,
    because they are published already or requested by another message. All other samples start from the prompt. `episodic`:
    each sample is an episode, whose environment makes the prompt."""

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
    episodic: bool = False
    token: bytes = b""
    """Secret that an actor copies into the group's sequences (`group_token`), as proof that it received this group."""

    def sequence_id(self, sample_index: int) -> str:
        return f"{self.group_id}.{sample_index}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Sequence(Branch):
    """One finished sequence. The fields of `Branch` hold its first branch; only an episode has more, in `branches`. `failure`
    is empty if the sequence succeeded. `finish_reason` is that of the latest turn."""

    run: str
    sequence_id: str
    group_id: str
    sample_index: int
    group_size: int
    task: str
    reward: float
    reward_components: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """Other numbers that an environment or a reward reports."""
    answer: str = ""
    """Part of the completion that the reward took as the answer, shown to people."""
    reason: str = ""
    """The reward's explanation of its value, shown to people."""
    finish_reason: FinishReason = FinishReason.STOP
    failure: str = ""
    group_token: bytes = b""
    actor: str = ""
    completion_text: str = ""
    prompt_text: str = ""
    reference_json: str = ""
    generation_s: float = 0.0
    branches: tuple[Branch, ...] = ()

    @property
    def all_branches(self) -> tuple[Branch, ...]:
        return (self, *self.branches)

    @property
    def num_episode_tokens(self) -> int:
        """Number of sampled tokens in all branches."""
        return sum(branch.num_sampled_tokens for branch in self.all_branches)

    @property
    def num_turns(self) -> int:
        return sum(len(branch.turns) or 1 for branch in self.all_branches)

    @property
    def reported(self) -> dict[str, float]:
        """Numbers that environment and reward report, by name. An episode also has its number of `turns`."""
        turns = {"turns": float(self.num_turns)} if self.turns else {}
        return {**turns, **self.metrics, **self.reward_components}

    @property
    def num_versions(self) -> int:
        return len({(span.incarnation, span.version) for branch in self.all_branches for span in branch.spans})


EMPTY_COMPLETION = "empty_completion"
"""Failure of a sequence whose policy sampled no token. A held-out answer that fails in this way counts as wrong."""
MAX_SAMPLES = 65_536
"""Maximum number of samples of one group. The limit keeps a corrupt number from creating billions of samples."""
_GROUP, _SEQUENCE = "PromptGroup", "Sequence"
FINISH_REASON_TO_PROTO = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
INT32, FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
"""Dtypes of token ids and log-probabilities in messages."""


def encode_sequence(sequence: Sequence) -> bytes:
    """Encode a sequence. Raises `MessageError` if `decode_sequence` would refuse it."""
    _check_sequence(sequence)
    with building(_SEQUENCE):
        return pb.Sequence(**_to_proto(sequence)).SerializeToString()


def decode_sequence(data: bytes, *, expected_run: str = "") -> Sequence:
    """Decode a sequence. Raises `MessageError` if it is invalid or from another run than `expected_run` (empty = any)."""
    message = parse(pb.Sequence(), data, _SEQUENCE)
    if message.failure and message.finish_reason == pb.FINISH_REASON_UNSPECIFIED:
        message.finish_reason = pb.FINISH_REASON_STOP
    sequence = Sequence(**_from_proto(message, _SEQUENCE))
    _check_sequence(sequence, expected_run)
    return sequence


def remains_of_sequence(data: bytes, *, run: str) -> tuple[str, bytes]:
    """Return id and `group_token` of a sequence that `decode_sequence` refuses; empty if unreadable or of another run."""
    try:
        message = parse(pb.Sequence(), data, _SEQUENCE)
    except MessageError:
        return "", b""
    return (message.sequence_id, message.group_token) if message.run == run else ("", b"")


def encode_group(group: PromptGroup) -> bytes:
    """Encode a group. Raises `MessageError` if `decode_group` would refuse it."""
    check_group(group)
    with building(_GROUP):
        return pb.PromptGroup(**_to_proto(group)).SerializeToString()


def decode_group(data: bytes, *, expected_run: str = "") -> PromptGroup:
    """Decode a group. Raises `MessageError` if it is invalid or from another run than `expected_run` (empty = any)."""
    group = PromptGroup(**_from_proto(parse(pb.PromptGroup(), data, _GROUP), _GROUP))
    check_group(group, expected_run=expected_run)
    return group


def remains_of_group(data: bytes, *, run: str) -> PromptGroup | None:
    """Return a group that `decode_group` refuses, reduced to the fields with which its samples can be published as failed.
    Return None if the message does not identify a group of `run`."""
    try:
        message = parse(pb.PromptGroup(), data, _GROUP)
    except MessageError:
        return None
    if message.run != run or not (message.group_id and message.task and 1 <= message.num_samples <= MAX_SAMPLES):
        return None
    for name in ("prompt_token_ids", "prompt_text", "reference_json", "seed", "issued_version", "sampling", "partials"):
        message.ClearField(name)
    group = PromptGroup(**_from_proto(message, _GROUP))
    return replace(group, done_samples=tuple(sorted({index for index in group.done_samples if index < group.num_samples})))


def decode_dead_letter(data: bytes, *, expected_run: str = "") -> DeadLetter:
    """Decode a dead letter, but not the message inside it. Raises `MessageError` if the dead letter is invalid."""
    letter = parse(DeadLetter(), data, "DeadLetter")
    check_run(letter.run, expected_run, "DeadLetter")
    check_finite(letter.at_s, "DeadLetter", "at_s", at_least=0.0)
    return letter


# Protobuf messages have the fields of their dataclasses. Only `Branch.finish_reason` is derived, from the last turn.


def _to_proto(value: Any) -> dict[str, Any]:
    """Return a dataclass's fields as keyword arguments for its protobuf message."""
    fields = {name: _ENCODERS[name](given) if name in _ENCODERS else given for name, given in vars(value).items()}
    if type(value) is Branch:
        del fields["finish_reason"]
    return fields


def _from_proto(message: Message, kind: str, prefix: str = "") -> dict[str, Any]:
    """Return a message's fields as keyword arguments for its dataclass. Only array lengths and finish reasons are checked."""
    fields = {name: getattr(message, name) for name in message.DESCRIPTOR.fields_by_name}
    for name in fields:
        if name in _DECODERS:
            fields[name] = _DECODERS[name](fields[name], kind, prefix + name)
    if isinstance(message, pb.Branch) and fields["turns"]:
        fields["finish_reason"] = fields["turns"][-1].finish_reason
    return fields


def _several(part: type[Any]) -> Callable[..., Any]:
    return lambda given, kind, field: tuple(part(**_from_proto(one, kind, f"{field.rpartition('.')[2]}.")) for one in given)


def _array_of(dtype: np.dtype) -> Callable[..., Any]:
    return lambda given, kind, field: array_from_bytes(given, dtype, kind, field)


def _finish_reason(number: int, kind: str, field: str) -> FinishReason | None:
    for reason, its_number in FINISH_REASON_TO_PROTO.items():
        if its_number == number:
            return reason
    raise MessageError(kind, field, f"{number} is not a known finish reason")


_ENCODERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("prompt_token_ids", "completion_token_ids", "behaviour_logprobs"), np.ndarray.tobytes),
    **dict.fromkeys(("turns", "branches", "partials"), lambda given: [*map(_to_proto, given)]),
    "spans": lambda given: [*map(vars, given)],
    "sampling": vars,
    "finish_reason": FINISH_REASON_TO_PROTO.__getitem__,
}
_DECODERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("prompt_token_ids", "completion_token_ids"), _array_of(INT32)),
    "behaviour_logprobs": _array_of(FLOAT32),
    "turns": _several(Turn),
    "branches": _several(Branch),
    "partials": _several(PartialSequence),
    "spans": lambda given, *_: tuple(VersionSpan(one.version, one.start, one.end, one.incarnation) for one in given),
    "sampling": lambda given, kind, _: SamplingParams(**_from_proto(given, kind)),
    "temperature": lambda given, *_: float(str(np.float32(given))),  # the shortest number that rounds to this float32
    "finish_reason": _finish_reason,
    **dict.fromkeys(("done_samples", "stop_token_ids", "stop"), lambda given, *_: tuple(given)),
    **dict.fromkeys(("reward_components", "metrics"), lambda given, *_: dict(given)),
}
"""Conversions of a message's values for its dataclass, by name of the field. Other fields have the same value in both."""


def _check_sequence(sequence: Sequence, expected_run: str = "") -> None:
    """Raise `MessageError` for an invalid sequence. Only one with a `failure` may lack tokens or a finish reason."""
    _check_names(sequence, expected_run, _SEQUENCE)
    _check_num_samples(sequence.group_size, _SEQUENCE, "group_size")
    if sequence.finish_reason is None and not sequence.failure:
        raise MessageError(_SEQUENCE, "finish_reason", "is not set, although the sequence names no failure")
    if not 0 <= sequence.sample_index < sequence.group_size:
        problem = f"{sequence.sample_index} is not in [0, {sequence.group_size}) (group_size)"
        raise MessageError(_SEQUENCE, "sample_index", problem)
    expected_id = f"{sequence.group_id}.{sequence.sample_index}"
    if sequence.sequence_id != expected_id:
        raise MessageError(_SEQUENCE, "sequence_id", f"{sequence.sequence_id!r} should be {expected_id!r}")
    for branch in sequence.all_branches:
        prefix = "" if branch is sequence else "branches."
        _check_tokens(branch, _SEQUENCE, prefix, branch.turns)
        check_token_ids(branch.prompt_token_ids, _SEQUENCE, f"{prefix}prompt_token_ids")
        if not sequence.failure and not (len(branch.prompt_token_ids) and len(branch.completion_token_ids)):
            field = "completion_token_ids" if len(branch.prompt_token_ids) else "prompt_token_ids"
            raise MessageError(_SEQUENCE, f"{prefix}{field}", "is empty, although the sequence names no failure")
        if any(turn.finish_reason is None for turn in branch.turns):
            raise MessageError(_SEQUENCE, f"{prefix}turns", "a turn is unfinished, which only a partial sequence allows")
    terms = {f"reward_components[{name}]": value for name, value in sequence.reward_components.items()}
    for name, value in {"reward": sequence.reward, **terms}.items():
        check_finite(value, _SEQUENCE, name)
        if abs(value) > MOST_REWARD:  # the scorer has already applied the recipe's limit
            raise MessageError(_SEQUENCE, name, f"{value} is beyond ±{MOST_REWARD:g}")
    for name, value in sequence.metrics.items():
        check_finite(value, _SEQUENCE, f"metrics[{name}]")
    check_finite(sequence.generation_s, _SEQUENCE, "generation_s", at_least=0.0)


def check_group(group: PromptGroup, *, expected_run: str = "") -> None:
    """Raise `MessageError` unless the group belongs to `expected_run` (empty = any) and its fields are valid."""
    _check_names(group, expected_run, _GROUP)
    check_token_ids(group.prompt_token_ids, _GROUP, "prompt_token_ids")
    if not len(group.prompt_token_ids) and not group.episodic:
        raise MessageError(_GROUP, "prompt_token_ids", "is empty")
    check_finite(group.sampling.temperature, _GROUP, "sampling.temperature", at_least=0.0)
    check_uint(group.sampling.max_tokens, _GROUP, "sampling.max_tokens", at_least=1)
    for token_id in group.sampling.stop_token_ids:
        check_uint(token_id, _GROUP, "sampling.stop_token_ids", bits=31)
    if "" in group.sampling.stop:
        raise MessageError(_GROUP, "sampling.stop", "contains an empty text, which would end every completion")
    for name in ("problem_index", "seed", "issued_version"):
        check_uint(getattr(group, name), _GROUP, name, bits=64)
    _check_num_samples(group.num_samples, _GROUP, "num_samples")
    seen: set[int] = set()
    listed = {"done_samples": group.done_samples, "partials": [partial.sample_index for partial in group.partials]}
    for name, indices in listed.items():
        for index in indices:
            if not 0 <= index < group.num_samples:
                raise MessageError(_GROUP, name, f"sample {index} is not in [0, {group.num_samples}) (num_samples)")
            if index in seen:
                raise MessageError(_GROUP, name, f"sample {index} is listed twice")
            seen.add(index)
    for partial in group.partials:
        _check_partial(partial, group.sampling.max_tokens)


def _check_partial(partial: PartialSequence, max_tokens: int) -> None:
    _check_tokens(partial, _GROUP, "partials.")
    for branch in partial.branches:
        _check_tokens(branch, _GROUP, "partials.branches.", branch.turns)
        check_token_ids(branch.prompt_token_ids, _GROUP, "partials.branches.prompt_token_ids")
    check_finite(partial.generation_s, _GROUP, "partials.generation_s", at_least=0.0)
    num_tokens = len(partial.completion_token_ids)
    if num_tokens > max_tokens:
        problem = f"sample {partial.sample_index} has {num_tokens} tokens, but sampling.max_tokens is {max_tokens}"
        raise MessageError(_GROUP, "partials.completion_token_ids", problem)
    if partial.finish_reason is not None and not num_tokens:
        problem = f"sample {partial.sample_index} is finished ({partial.finish_reason}) without a token"
        raise MessageError(_GROUP, "partials.finish_reason", problem)


def _check_num_samples(number: int, kind: str, field: str) -> None:
    if not 1 <= number <= MAX_SAMPLES:
        raise MessageError(kind, field, f"{number} is not in [1, {MAX_SAMPLES}]")


def _check_tokens(tokens: Completion, kind: str, prefix: str, turns: tuple[Turn, ...] = ()) -> None:
    completion, logprobs, num_sampled = tokens.completion_token_ids, tokens.behaviour_logprobs, 0
    check_token_ids(completion, kind, f"{prefix}completion_token_ids")
    check_logprobs(logprobs, kind, f"{prefix}behaviour_logprobs")
    end = 0
    for turn in turns:
        if not (end <= turn.start < turn.end and (num_sampled or turn.start == 0)):
            problem = f"[{turn.start}, {turn.end}) is empty, begins before {end}, or is the first turn and does not begin at 0"
            raise MessageError(kind, f"{prefix}turns", problem)
        num_sampled, end = num_sampled + turn.end - turn.start, turn.end
    if turns and end != len(completion):
        problem = f"end at {end} of {len(completion)} completion tokens, but the last turn must end the completion"
        raise MessageError(kind, f"{prefix}turns", problem)
    if len(logprobs) != (num_sampled if turns else len(completion)):
        sampled = f"{num_sampled} sampled" if turns else f"{len(completion)} completion"
        raise MessageError(kind, f"{prefix}behaviour_logprobs", f"{len(logprobs)} values for {sampled} tokens")
    _check_spans(tokens.spans, turns or (Turn(0, len(completion)),), kind, f"{prefix}spans")


def _check_spans(spans: Iterable[VersionSpan], turns: tuple[Turn, ...], kind: str, field: str) -> None:
    number, covered = 0, 0
    for span in spans:
        if covered == turns[number].end and number + 1 < len(turns):
            number += 1
            covered = turns[number].start
        if span.start != covered or not span.start < span.end <= turns[number].end:
            problem = f"[{span.start}, {span.end}) is empty, does not begin at {covered}, or ends after {turns[number].end}"
            raise MessageError(kind, field, problem)
        if not (0 <= span.version < 1 << 64 and 1 <= span.incarnation < 1 << 32):  # inlined, since this runs for every span
            check_uint(span.version, kind, f"{field}.version", bits=64)
            check_uint(span.incarnation, kind, f"{field}.incarnation", at_least=1)
        covered = span.end
    if covered != turns[-1].end:
        raise MessageError(kind, field, f"cover only [0, {covered}) of {turns[-1].end} completion tokens")


# --- parts of all decoders

_Proto = TypeVar("_Proto", bound=Message)
LOGPROB_ROUNDING = 1e-3
"""A log-probability may exceed 0 by this many nats, because engines compute it in low precision."""


def parse(message: _Proto, data: bytes, kind: str) -> _Proto:
    """Fill `message` from `data` and return it. Raises `MessageError` if `data` cannot be parsed."""
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise MessageError(kind, "", f"{len(data)} bytes do not parse: {error}") from error
    return message


@contextmanager
def building(kind: str) -> Iterator[None]:
    """Raise `MessageError` instead of the error that protobuf raises for a value out of range or for invalid Unicode."""
    try:
        yield
    except ValueError as error:
        raise MessageError(kind, "", str(error)) from error


def check_uint(value: int, kind: str, field: str, *, at_least: int = 0, bits: int = 32) -> None:
    """Raise `MessageError` unless `value` is in [at_least, 2**bits)."""
    if not at_least <= value < 1 << bits:
        raise MessageError(kind, field, f"{value} is not in [{at_least}, 2**{bits})")


def check_finite(value: float, kind: str, field: str, *, at_least: float = -math.inf) -> None:
    if not (math.isfinite(value) and value >= at_least):
        wanted = "a finite number" if at_least == -math.inf else f"a finite number >= {at_least:g}"
        raise MessageError(kind, field, f"{value} is not {wanted}")


def check_run(run: str, expected_run: str, kind: str) -> None:
    """Raise `MessageError` if `run` is empty or not `expected_run` (empty = any)."""
    if not run or run != (expected_run or run):
        raise MessageError(kind, "run", f"{run!r} is not this run, {expected_run!r}" if run else "is empty")


def _check_names(message: Sequence | PromptGroup, expected_run: str, kind: str) -> None:
    check_run(message.run, expected_run, kind)
    for name in ("group_id", "task"):
        if not getattr(message, name):
            raise MessageError(kind, name, "is empty")


def array_from_bytes(data: bytes, dtype: np.dtype, kind: str, field: str) -> NDArray:
    """Return a read-only array [tokens]. Raises `MessageError` if the number of bytes is not a multiple of the dtype's size."""
    if len(data) % dtype.itemsize:
        raise MessageError(kind, field, f"{len(data)} bytes are not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def check_token_ids(token_ids: TokenIds, kind: str, field: str) -> None:
    _check_array(token_ids, INT32, kind, field)
    if len(token_ids):
        lowest = token_ids.argmin()  # takes a quarter of the time of `min`, which matters for short sequences
        if token_ids[lowest] < 0:
            raise MessageError(kind, field, f"token {lowest} is {token_ids[lowest]}: ids must not be negative")


def check_logprobs(logprobs: Logprobs, kind: str, field: str) -> None:
    _check_array(logprobs, FLOAT32, kind, field)
    if not len(logprobs):
        return
    # NaN fails this check, because argmax finds it, and no comparison with it is true.
    highest, lowest = logprobs.argmax(), logprobs.argmin()
    if logprobs[highest] <= LOGPROB_ROUNDING and logprobs[lowest] > -np.inf:
        return
    bad = lowest if logprobs[highest] <= LOGPROB_ROUNDING else highest
    raise MessageError(kind, field, f"token {bad} has {logprobs[bad]}: a log-probability must be finite and <= 0")


def _check_array(array: NDArray, dtype: np.dtype, kind: str, field: str) -> None:
    """Check that the array has one dimension and the dtype `dtype`."""
    if array.ndim != 1 or (array.dtype is not dtype and array.dtype != dtype):
        raise MessageError(kind, field, f"has dtype {array.dtype} and shape {array.shape}; give a 1-D array of {dtype}")
