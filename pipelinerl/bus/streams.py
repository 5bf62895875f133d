"""How a run's streams look in JetStream: pure configuration.

Streams that are there already are never changed: limits count when a run's streams are first made.
"""

from __future__ import annotations

from typing import Any

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


def stream_configs(subjects: Subjects, limits: StreamLimits) -> list[StreamConfig]:
    """PROMPTS, SEQUENCES, CONTROL and DEAD.

    PROMPTS is a work queue: a message leaves when it is acknowledged. The others are logs: SEQUENCES keeps messages until they
    are purged, CONTROL the last one of each subject, DEAD the newest for people. A full PROMPTS or SEQUENCES refuses the next
    message instead of dropping the oldest.
    """

    def config(name: str, subject: str, discard: DiscardPolicy, **more: Any) -> StreamConfig:
        return StreamConfig(
            name=name,
            subjects=[subject],
            discard=discard,
            storage=StorageType.MEMORY if limits.in_memory else StorageType.FILE,
            num_replicas=limits.replicas,
            duplicate_window=limits.duplicate_window_s,
            **more,
        )

    return [
        config(
            subjects.prompts_stream,
            subjects.prompts,
            DiscardPolicy.NEW,
            retention=RetentionPolicy.WORK_QUEUE,
            max_msgs=limits.prompts_max_messages,
        ),
        config(
            subjects.sequences_stream,
            subjects.sequences,
            DiscardPolicy.NEW,
            max_msgs=limits.sequences_max_messages,
            max_bytes=limits.sequences_max_bytes,
        ),
        config(
            subjects.control_stream,
            subjects.control_all,
            DiscardPolicy.OLD,
            max_consumers=_MAX_ACTORS,
            max_msgs_per_subject=1,
        ),
        config(subjects.dead_stream, subjects.dead, DiscardPolicy.OLD, max_msgs=limits.dead_max_messages),
    ]


def actors_consumer(limits: StreamLimits) -> ConsumerConfig:
    """Deliveries are not bounded by the server: it would keep the group for ever and tell nobody."""
    return ConsumerConfig(
        durable_name=ACTORS,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=limits.ack_wait_s,
        max_deliver=_UNLIMITED,
        max_ack_pending=_UNLIMITED,
        max_waiting=_MAX_ACTORS,
    )


def members_bucket(subjects: Subjects, limits: StreamLimits) -> KeyValueConfig:
    """A bucket whose entries expire, with a notice to watchers when they do (nats-server 2.11)."""
    return KeyValueConfig(
        bucket=subjects.members_bucket,
        history=1,
        ttl=limits.member_ttl_s,
        limit_marker_ttl=max(_SHORTEST_NOTICE_S, limits.member_ttl_s),
        storage=StorageType.MEMORY if limits.in_memory else StorageType.FILE,
        replicas=limits.replicas,
    )
