"""How a run's streams look in JetStream: pure configuration, made from `Subjects` and `StreamLimits`.

It creates nothing. Streams that are there already are never changed: limits count when a run's streams are first made.
"""

from __future__ import annotations

from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DiscardPolicy,
    KeyValueConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)

from pipelinerl.bus.protocol import StreamLimits, Subjects

ACTORS = "actors"
"""The durable consumer of PROMPTS that all actors share."""
_UNLIMITED = -1
_SHORTEST_NOTICE_S = 1.0
_MAX_ACTORS = 16_384
"""Actors that may wait for a prompt group at once, and that may follow the control channel, each by a consumer of its own.
The server's defaults are 512 waiting pulls and, from 2.15 on, 1,000 consumers of a stream."""


def _storage(limits: StreamLimits) -> StorageType:
    return StorageType.MEMORY if limits.in_memory else StorageType.FILE


def prompts(subjects: Subjects, limits: StreamLimits) -> StreamConfig:
    """A work queue: a message leaves when it is acknowledged; a full queue refuses the next one."""
    return StreamConfig(
        name=subjects.prompts_stream,
        subjects=[subjects.prompts],
        retention=RetentionPolicy.WORK_QUEUE,
        discard=DiscardPolicy.NEW,
        max_msgs=limits.prompts_max_messages,
        duplicate_window=limits.duplicate_window_s,
        storage=_storage(limits),
        num_replicas=limits.replicas,
    )


def actors(limits: StreamLimits) -> ConsumerConfig:
    """Deliveries are not bounded by the server: it would keep the group for ever and tell nobody."""
    return ConsumerConfig(
        durable_name=ACTORS,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=limits.ack_wait_s,
        max_deliver=_UNLIMITED,
        max_ack_pending=_UNLIMITED,
        max_waiting=_MAX_ACTORS,
    )


def sequences(subjects: Subjects, limits: StreamLimits) -> StreamConfig:
    """A log: messages stay until purged; a full log refuses the next one instead of dropping the oldest."""
    return StreamConfig(
        name=subjects.sequences_stream,
        subjects=[subjects.sequences],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.NEW,
        max_msgs=limits.sequences_max_messages,
        max_bytes=limits.sequences_max_bytes,
        duplicate_window=limits.duplicate_window_s,
        storage=_storage(limits),
        num_replicas=limits.replicas,
    )


def control(subjects: Subjects, limits: StreamLimits) -> StreamConfig:
    """The last message of each subject, and no more."""
    return StreamConfig(
        name=subjects.control_stream,
        subjects=[subjects.control_all],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_consumers=_MAX_ACTORS,
        max_msgs_per_subject=1,
        storage=_storage(limits),
        num_replicas=limits.replicas,
    )


def dead(subjects: Subjects, limits: StreamLimits) -> StreamConfig:
    """What was given up, for people; the oldest goes first."""
    return StreamConfig(
        name=subjects.dead_stream,
        subjects=[subjects.dead],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        max_msgs=limits.dead_max_messages,
        duplicate_window=limits.duplicate_window_s,
        storage=_storage(limits),
        num_replicas=limits.replicas,
    )


def members(subjects: Subjects, limits: StreamLimits) -> KeyValueConfig:
    """A bucket whose entries expire, with a notice to watchers when they do (nats-server 2.11)."""
    return KeyValueConfig(
        bucket=subjects.members_bucket,
        history=1,
        ttl=limits.member_ttl_s,
        limit_marker_ttl=max(_SHORTEST_NOTICE_S, limits.member_ttl_s),
        storage=_storage(limits),
        replicas=limits.replicas,
    )


def members_stream(subjects: Subjects) -> str:
    return subjects.members_stream


def member_subject(subjects: Subjects, actor: str) -> str:
    return f"$KV.{subjects.members_bucket}.{actor}"
