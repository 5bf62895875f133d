from pipelinerl.v1 import sequence_pb2 as _sequence_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFY_STATUS_UNSPECIFIED: _ClassVar[VerifyStatus]
    VERIFY_STATUS_OK: _ClassVar[VerifyStatus]
    VERIFY_STATUS_TIMEOUT: _ClassVar[VerifyStatus]
    VERIFY_STATUS_CRASHED: _ClassVar[VerifyStatus]
    VERIFY_STATUS_OUT_OF_MEMORY: _ClassVar[VerifyStatus]
    VERIFY_STATUS_BAD_REWARD: _ClassVar[VerifyStatus]
    VERIFY_STATUS_UNKNOWN_TASK: _ClassVar[VerifyStatus]
    VERIFY_STATUS_BAD_REFERENCE: _ClassVar[VerifyStatus]
VERIFY_STATUS_UNSPECIFIED: VerifyStatus
VERIFY_STATUS_OK: VerifyStatus
VERIFY_STATUS_TIMEOUT: VerifyStatus
VERIFY_STATUS_CRASHED: VerifyStatus
VERIFY_STATUS_OUT_OF_MEMORY: VerifyStatus
VERIFY_STATUS_BAD_REWARD: VerifyStatus
VERIFY_STATUS_UNKNOWN_TASK: VerifyStatus
VERIFY_STATUS_BAD_REFERENCE: VerifyStatus

class VerifyItem(_message.Message):
    __slots__ = ("sequence_id", "task", "prompt_text", "completion_text", "reference_json", "completion_tokens", "max_tokens", "finish_reason", "traceparent", "judgement")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TEXT_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_JSON_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    JUDGEMENT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    task: str
    prompt_text: str
    completion_text: str
    reference_json: str
    completion_tokens: int
    max_tokens: int
    finish_reason: _sequence_pb2.FinishReason
    traceparent: str
    judgement: str
    def __init__(self, sequence_id: _Optional[str] = ..., task: _Optional[str] = ..., prompt_text: _Optional[str] = ..., completion_text: _Optional[str] = ..., reference_json: _Optional[str] = ..., completion_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., finish_reason: _Optional[_Union[_sequence_pb2.FinishReason, str]] = ..., traceparent: _Optional[str] = ..., judgement: _Optional[str] = ...) -> None: ...

class EpisodeRequest(_message.Message):
    __slots__ = ("sequence_id", "task", "prompt_text", "reference_json", "seed", "base_url", "max_tokens", "traceparent")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_JSON_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BASE_URL_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    task: str
    prompt_text: str
    reference_json: str
    seed: int
    base_url: str
    max_tokens: int
    traceparent: str
    def __init__(self, sequence_id: _Optional[str] = ..., task: _Optional[str] = ..., prompt_text: _Optional[str] = ..., reference_json: _Optional[str] = ..., seed: _Optional[int] = ..., base_url: _Optional[str] = ..., max_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[VerifyItem]
    def __init__(self, items: _Optional[_Iterable[_Union[VerifyItem, _Mapping]]] = ...) -> None: ...

class VerifyResult(_message.Message):
    __slots__ = ("sequence_id", "status", "reward", "components", "message", "seconds", "metrics", "answer")
    class ComponentsEntry(_message.Message):
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
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    sequence_id: str
    status: VerifyStatus
    reward: float
    components: _containers.ScalarMap[str, float]
    message: str
    seconds: float
    metrics: _containers.ScalarMap[str, float]
    answer: str
    def __init__(self, sequence_id: _Optional[str] = ..., status: _Optional[_Union[VerifyStatus, str]] = ..., reward: _Optional[float] = ..., components: _Optional[_Mapping[str, float]] = ..., message: _Optional[str] = ..., seconds: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., answer: _Optional[str] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[VerifyResult]
    def __init__(self, results: _Optional[_Iterable[_Union[VerifyResult, _Mapping]]] = ...) -> None: ...
