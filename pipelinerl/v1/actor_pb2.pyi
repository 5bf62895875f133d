from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
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

class GenerateRequest(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, groups: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GenerateResult(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: bytes
    def __init__(self, sequence: _Optional[bytes] = ...) -> None: ...

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
