from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WeightManifest(_message.Message):
    __slots__ = ("manifest_id", "parameters", "chunk_bytes", "wire_dtype", "low_rank")
    MANIFEST_ID_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LOW_RANK_FIELD_NUMBER: _ClassVar[int]
    manifest_id: str
    parameters: _containers.RepeatedCompositeFieldContainer[ParameterSpec]
    chunk_bytes: int
    wire_dtype: str
    low_rank: _containers.RepeatedCompositeFieldContainer[LowRank]
    def __init__(self, manifest_id: _Optional[str] = ..., parameters: _Optional[_Iterable[_Union[ParameterSpec, _Mapping]]] = ..., chunk_bytes: _Optional[int] = ..., wire_dtype: _Optional[str] = ..., low_rank: _Optional[_Iterable[_Union[LowRank, _Mapping]]] = ...) -> None: ...

class ParameterSpec(_message.Message):
    __slots__ = ("name", "shape", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class LowRank(_message.Message):
    __slots__ = ("name", "shape", "dtype", "a", "b", "scaling", "transposed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    A_FIELD_NUMBER: _ClassVar[int]
    B_FIELD_NUMBER: _ClassVar[int]
    SCALING_FIELD_NUMBER: _ClassVar[int]
    TRANSPOSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    a: str
    b: str
    scaling: float
    transposed: bool
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., a: _Optional[str] = ..., b: _Optional[str] = ..., scaling: _Optional[float] = ..., transposed: _Optional[bool] = ...) -> None: ...

class Registration(_message.Message):
    __slots__ = ("actor", "process", "grpc_address", "ranks", "manifest_id", "policy_version", "incarnation", "phase", "pod_uid", "reads_log")
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    READS_LOG_FIELD_NUMBER: _ClassVar[int]
    actor: str
    process: str
    grpc_address: str
    ranks: int
    manifest_id: str
    policy_version: int
    incarnation: int
    phase: str
    pod_uid: str
    reads_log: bool
    def __init__(self, actor: _Optional[str] = ..., process: _Optional[str] = ..., grpc_address: _Optional[str] = ..., ranks: _Optional[int] = ..., manifest_id: _Optional[str] = ..., policy_version: _Optional[int] = ..., incarnation: _Optional[int] = ..., phase: _Optional[str] = ..., pod_uid: _Optional[str] = ..., reads_log: _Optional[bool] = ...) -> None: ...

class EpochMember(_message.Message):
    __slots__ = ("actor", "process", "first_rank", "ranks")
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    actor: str
    process: str
    first_rank: int
    ranks: int
    def __init__(self, actor: _Optional[str] = ..., process: _Optional[str] = ..., first_rank: _Optional[int] = ..., ranks: _Optional[int] = ...) -> None: ...

class EpochStart(_message.Message):
    __slots__ = ("incarnation", "epoch", "store_address", "backend", "world_size", "members", "manifest_id", "deadline_s")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    epoch: int
    store_address: str
    backend: str
    world_size: int
    members: _containers.RepeatedCompositeFieldContainer[EpochMember]
    manifest_id: str
    deadline_s: float
    def __init__(self, incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., store_address: _Optional[str] = ..., backend: _Optional[str] = ..., world_size: _Optional[int] = ..., members: _Optional[_Iterable[_Union[EpochMember, _Mapping]]] = ..., manifest_id: _Optional[str] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class EpochJoined(_message.Message):
    __slots__ = ("actor", "incarnation", "epoch")
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    actor: str
    incarnation: int
    epoch: int
    def __init__(self, actor: _Optional[str] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("incarnation", "epoch", "version", "manifest_id", "deadline_s")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    epoch: int
    version: int
    manifest_id: str
    deadline_s: float
    def __init__(self, incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., manifest_id: _Optional[str] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class Staged(_message.Message):
    __slots__ = ("actor", "incarnation", "epoch", "version", "checksum", "bytes", "receive_s", "prepare_s")
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_S_FIELD_NUMBER: _ClassVar[int]
    PREPARE_S_FIELD_NUMBER: _ClassVar[int]
    actor: str
    incarnation: int
    epoch: int
    version: int
    checksum: int
    bytes: int
    receive_s: float
    prepare_s: float
    def __init__(self, actor: _Optional[str] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., checksum: _Optional[int] = ..., bytes: _Optional[int] = ..., receive_s: _Optional[float] = ..., prepare_s: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("incarnation", "epoch", "version")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    epoch: int
    version: int
    def __init__(self, incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Sleep(_message.Message):
    __slots__ = ("incarnation", "version")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    version: int
    def __init__(self, incarnation: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Serving(_message.Message):
    __slots__ = ("actor", "incarnation", "epoch", "version", "stall_s")
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    actor: str
    incarnation: int
    epoch: int
    version: int
    stall_s: float
    def __init__(self, actor: _Optional[str] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., stall_s: _Optional[float] = ...) -> None: ...

class LogObject(_message.Message):
    __slots__ = ("version", "key", "bytes", "sha256")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    version: int
    key: str
    bytes: int
    sha256: bytes
    def __init__(self, version: _Optional[int] = ..., key: _Optional[str] = ..., bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class Published(_message.Message):
    __slots__ = ("incarnation", "version", "manifest_id", "place", "objects", "sha256")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_ID_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    version: int
    manifest_id: str
    place: str
    objects: _containers.RepeatedCompositeFieldContainer[LogObject]
    sha256: bytes
    def __init__(self, incarnation: _Optional[int] = ..., version: _Optional[int] = ..., manifest_id: _Optional[str] = ..., place: _Optional[str] = ..., objects: _Optional[_Iterable[_Union[LogObject, _Mapping]]] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("incarnation", "epoch", "version", "reason", "actor", "group_broke")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ACTOR_FIELD_NUMBER: _ClassVar[int]
    GROUP_BROKE_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    epoch: int
    version: int
    reason: str
    actor: str
    group_broke: bool
    def __init__(self, incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., reason: _Optional[str] = ..., actor: _Optional[str] = ..., group_broke: _Optional[bool] = ...) -> None: ...

class RunEnd(_message.Message):
    __slots__ = ("incarnation", "version", "ok", "reason")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    version: int
    ok: bool
    reason: str
    def __init__(self, incarnation: _Optional[int] = ..., version: _Optional[int] = ..., ok: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...
