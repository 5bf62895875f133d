from pipelinerl.v1 import sequence_pb2 as _sequence_pb2
from pipelinerl.v1 import verifier_pb2 as _verifier_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ActorPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACTOR_PHASE_UNSPECIFIED: _ClassVar[ActorPhase]
    ACTOR_PHASE_STARTING: _ClassVar[ActorPhase]
    ACTOR_PHASE_JOINING: _ClassVar[ActorPhase]
    ACTOR_PHASE_SERVING: _ClassVar[ActorPhase]
    ACTOR_PHASE_DRAINING: _ClassVar[ActorPhase]
ACTOR_PHASE_UNSPECIFIED: ActorPhase
ACTOR_PHASE_STARTING: ActorPhase
ACTOR_PHASE_JOINING: ActorPhase
ACTOR_PHASE_SERVING: ActorPhase
ACTOR_PHASE_DRAINING: ActorPhase

class GetStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ActorState(_message.Message):
    __slots__ = ("instance", "phase", "policy_version", "incarnation", "epoch", "sequences_in_progress", "generated_tokens", "busy_s", "uptime_s", "sequences_finished")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_IN_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FINISHED_FIELD_NUMBER: _ClassVar[int]
    instance: str
    phase: ActorPhase
    policy_version: int
    incarnation: int
    epoch: int
    sequences_in_progress: int
    generated_tokens: int
    busy_s: float
    uptime_s: float
    sequences_finished: int
    def __init__(self, instance: _Optional[str] = ..., phase: _Optional[_Union[ActorPhase, str]] = ..., policy_version: _Optional[int] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., sequences_in_progress: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., busy_s: _Optional[float] = ..., uptime_s: _Optional[float] = ..., sequences_finished: _Optional[int] = ...) -> None: ...

class GeneratePrompt(_message.Message):
    __slots__ = ("id", "prompt_token_ids", "task", "reference_json", "problem_index", "prompt_text")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_JSON_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    id: str
    prompt_token_ids: bytes
    task: str
    reference_json: str
    problem_index: int
    prompt_text: str
    def __init__(self, id: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., task: _Optional[str] = ..., reference_json: _Optional[str] = ..., problem_index: _Optional[int] = ..., prompt_text: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("prompts", "sampling", "seed")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[GeneratePrompt]
    sampling: _sequence_pb2.SamplingParams
    seed: int
    def __init__(self, prompts: _Optional[_Iterable[_Union[GeneratePrompt, _Mapping]]] = ..., sampling: _Optional[_Union[_sequence_pb2.SamplingParams, _Mapping]] = ..., seed: _Optional[int] = ...) -> None: ...

class GenerateResult(_message.Message):
    __slots__ = ("id", "completion_token_ids", "behaviour_logprobs", "spans", "finish_reason", "completion_text", "failure", "verdict", "branches")
    ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOUR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TEXT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    id: str
    completion_token_ids: bytes
    behaviour_logprobs: bytes
    spans: _containers.RepeatedCompositeFieldContainer[_sequence_pb2.VersionSpan]
    finish_reason: _sequence_pb2.FinishReason
    completion_text: str
    failure: str
    verdict: _verifier_pb2.VerifyResult
    branches: _containers.RepeatedCompositeFieldContainer[_sequence_pb2.Branch]
    def __init__(self, id: _Optional[str] = ..., completion_token_ids: _Optional[bytes] = ..., behaviour_logprobs: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[_sequence_pb2.VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[_Union[_sequence_pb2.FinishReason, str]] = ..., completion_text: _Optional[str] = ..., failure: _Optional[str] = ..., verdict: _Optional[_Union[_verifier_pb2.VerifyResult, _Mapping]] = ..., branches: _Optional[_Iterable[_Union[_sequence_pb2.Branch, _Mapping]]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    def __init__(self, token_ids: _Optional[bytes] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("logprobs", "policy_version", "incarnation", "loader")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOADER_FIELD_NUMBER: _ClassVar[int]
    logprobs: bytes
    policy_version: int
    incarnation: int
    loader: str
    def __init__(self, logprobs: _Optional[bytes] = ..., policy_version: _Optional[int] = ..., incarnation: _Optional[int] = ..., loader: _Optional[str] = ...) -> None: ...
