from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TrainerPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRAINER_PHASE_UNSPECIFIED: _ClassVar[TrainerPhase]
    TRAINER_PHASE_LOADING: _ClassVar[TrainerPhase]
    TRAINER_PHASE_WAITING_FOR_ACTORS: _ClassVar[TrainerPhase]
    TRAINER_PHASE_WAITING_FOR_SEQUENCES: _ClassVar[TrainerPhase]
    TRAINER_PHASE_TRAINING: _ClassVar[TrainerPhase]
    TRAINER_PHASE_FINISHED: _ClassVar[TrainerPhase]
TRAINER_PHASE_UNSPECIFIED: TrainerPhase
TRAINER_PHASE_LOADING: TrainerPhase
TRAINER_PHASE_WAITING_FOR_ACTORS: TrainerPhase
TRAINER_PHASE_WAITING_FOR_SEQUENCES: TrainerPhase
TRAINER_PHASE_TRAINING: TrainerPhase
TRAINER_PHASE_FINISHED: TrainerPhase

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SequenceCounts(_message.Message):
    __slots__ = ("issued", "trained", "dropped_stale", "dropped_filtered", "failed", "in_flight")
    ISSUED_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_STALE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FILTERED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    issued: int
    trained: int
    dropped_stale: int
    dropped_filtered: int
    failed: int
    in_flight: int
    def __init__(self, issued: _Optional[int] = ..., trained: _Optional[int] = ..., dropped_stale: _Optional[int] = ..., dropped_filtered: _Optional[int] = ..., failed: _Optional[int] = ..., in_flight: _Optional[int] = ...) -> None: ...

class TrainerStatus(_message.Message):
    __slots__ = ("run", "phase", "policy_version", "incarnation", "total_steps", "sequences", "members", "epoch", "message", "failures")
    class FailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    run: str
    phase: TrainerPhase
    policy_version: int
    incarnation: int
    total_steps: int
    sequences: SequenceCounts
    members: int
    epoch: int
    message: str
    failures: _containers.ScalarMap[str, str]
    def __init__(self, run: _Optional[str] = ..., phase: _Optional[_Union[TrainerPhase, str]] = ..., policy_version: _Optional[int] = ..., incarnation: _Optional[int] = ..., total_steps: _Optional[int] = ..., sequences: _Optional[_Union[SequenceCounts, _Mapping]] = ..., members: _Optional[int] = ..., epoch: _Optional[int] = ..., message: _Optional[str] = ..., failures: _Optional[_Mapping[str, str]] = ...) -> None: ...

class StreamMetricsRequest(_message.Message):
    __slots__ = ("from_step",)
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    from_step: int
    def __init__(self, from_step: _Optional[int] = ...) -> None: ...

class StepMetrics(_message.Message):
    __slots__ = ("step", "json")
    STEP_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    step: int
    json: str
    def __init__(self, step: _Optional[int] = ..., json: _Optional[str] = ...) -> None: ...

class CheckpointNowRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointNowResponse(_message.Message):
    __slots__ = ("path", "policy_version")
    PATH_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    path: str
    policy_version: int
    def __init__(self, path: _Optional[str] = ..., policy_version: _Optional[int] = ...) -> None: ...

class GetInitialModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class InitialModelChunk(_message.Message):
    __slots__ = ("file", "data")
    FILE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    file: str
    data: bytes
    def __init__(self, file: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...
