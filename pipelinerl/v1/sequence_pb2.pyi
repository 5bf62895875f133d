from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class VersionSpan(_message.Message):
    __slots__ = ("version", "start", "end", "incarnation")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    end: int
    incarnation: int
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("start", "end", "finish_reason")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    finish_reason: FinishReason
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("prompt_token_ids", "completion_token_ids", "behaviour_logprobs", "spans", "turns")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOUR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: bytes
    completion_token_ids: bytes
    behaviour_logprobs: bytes
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    def __init__(self, prompt_token_ids: _Optional[bytes] = ..., completion_token_ids: _Optional[bytes] = ..., behaviour_logprobs: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "max_tokens", "stop_token_ids", "stop")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, temperature: _Optional[float] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ...) -> None: ...

class PartialSequence(_message.Message):
    __slots__ = ("sample_index", "completion_token_ids", "behaviour_logprobs", "spans", "finish_reason", "generation_s", "branches")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOUR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATION_S_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    completion_token_ids: bytes
    behaviour_logprobs: bytes
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    finish_reason: FinishReason
    generation_s: float
    branches: _containers.RepeatedCompositeFieldContainer[Branch]
    def __init__(self, sample_index: _Optional[int] = ..., completion_token_ids: _Optional[bytes] = ..., behaviour_logprobs: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., generation_s: _Optional[float] = ..., branches: _Optional[_Iterable[_Union[Branch, _Mapping]]] = ...) -> None: ...

class PromptGroup(_message.Message):
    __slots__ = ("run", "group_id", "problem_index", "task", "prompt_token_ids", "prompt_text", "reference_json", "num_samples", "sampling", "seed", "issued_version", "partials", "done_samples", "episodic", "token")
    RUN_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_INDEX_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_JSON_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ISSUED_VERSION_FIELD_NUMBER: _ClassVar[int]
    PARTIALS_FIELD_NUMBER: _ClassVar[int]
    DONE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    EPISODIC_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    run: str
    group_id: str
    problem_index: int
    task: str
    prompt_token_ids: bytes
    prompt_text: str
    reference_json: str
    num_samples: int
    sampling: SamplingParams
    seed: int
    issued_version: int
    partials: _containers.RepeatedCompositeFieldContainer[PartialSequence]
    done_samples: _containers.RepeatedScalarFieldContainer[int]
    episodic: bool
    token: bytes
    def __init__(self, run: _Optional[str] = ..., group_id: _Optional[str] = ..., problem_index: _Optional[int] = ..., task: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., prompt_text: _Optional[str] = ..., reference_json: _Optional[str] = ..., num_samples: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., seed: _Optional[int] = ..., issued_version: _Optional[int] = ..., partials: _Optional[_Iterable[_Union[PartialSequence, _Mapping]]] = ..., done_samples: _Optional[_Iterable[int]] = ..., episodic: _Optional[bool] = ..., token: _Optional[bytes] = ...) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("run", "sequence_id", "group_id", "sample_index", "group_size", "task", "prompt_token_ids", "completion_token_ids", "behaviour_logprobs", "spans", "reward", "reward_components", "finish_reason", "failure", "actor", "completion_text", "generation_s", "prompt_text", "reference_json", "turns", "branches", "metrics", "answer", "reason", "group_token")
    class RewardComponentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BEHAVIOUR_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TEXT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_JSON_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GROUP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    run: str
    sequence_id: str
    group_id: str
    sample_index: int
    group_size: int
    task: str
    prompt_token_ids: bytes
    completion_token_ids: bytes
    behaviour_logprobs: bytes
    spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    reward: float
    reward_components: _containers.ScalarMap[str, float]
    finish_reason: FinishReason
    failure: str
    actor: str
    completion_text: str
    generation_s: float
    prompt_text: str
    reference_json: str
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    branches: _containers.RepeatedCompositeFieldContainer[Branch]
    metrics: _containers.ScalarMap[str, float]
    answer: str
    reason: str
    group_token: bytes
    def __init__(self, run: _Optional[str] = ..., sequence_id: _Optional[str] = ..., group_id: _Optional[str] = ..., sample_index: _Optional[int] = ..., group_size: _Optional[int] = ..., task: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., completion_token_ids: _Optional[bytes] = ..., behaviour_logprobs: _Optional[bytes] = ..., spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., reward: _Optional[float] = ..., reward_components: _Optional[_Mapping[str, float]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., failure: _Optional[str] = ..., actor: _Optional[str] = ..., completion_text: _Optional[str] = ..., generation_s: _Optional[float] = ..., prompt_text: _Optional[str] = ..., reference_json: _Optional[str] = ..., turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ..., branches: _Optional[_Iterable[_Union[Branch, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., answer: _Optional[str] = ..., reason: _Optional[str] = ..., group_token: _Optional[bytes] = ...) -> None: ...

class DeadLetter(_message.Message):
    __slots__ = ("run", "msg_id", "prompt_group", "reason", "deliveries", "actor", "at_s")
    RUN_FIELD_NUMBER: _ClassVar[int]
    MSG_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_GROUP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    run: str
    msg_id: str
    prompt_group: bytes
    reason: str
    deliveries: int
    actor: str
    at_s: float
    def __init__(self, run: _Optional[str] = ..., msg_id: _Optional[str] = ..., prompt_group: _Optional[bytes] = ..., reason: _Optional[str] = ..., deliveries: _Optional[int] = ..., actor: _Optional[str] = ..., at_s: _Optional[float] = ...) -> None: ...
