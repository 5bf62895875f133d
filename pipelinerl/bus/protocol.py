"""Names and limits of a run's streams, and types of their messages. Payloads are bytes, which other modules parse."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pipelinerl.errors import FieldError

Headers = Mapping[str, str]
"""Headers of a message, as the publisher gave them. Names that begin with `Nats-` are reserved for the bus."""
NO_HEADERS: Headers = MappingProxyType({})
_LEAST_BOUND_BYTES = 1024**2


@dataclass(frozen=True)
class StreamLimits:
    """Limits of a run's streams. Publishing to a full stream raises `BusError`, but a full DEAD drops its oldest message."""

    prompts_max_messages: int = 100_000
    sequences_max_bytes: int = 8 * 1024**3
    sequences_max_messages: int = 10_000_000
    dead_max_messages: int = 10_000
    weights_max_bytes: int = 8 * 1024**3
    """Limit of the weight log's bucket, if there is one. The log holds up to three whole versions, and deltas."""
    duplicate_window_s: float = 600.0
    ack_wait_s: float = 30.0
    max_deliveries: int = 5
    """Maximum number of deliveries of a group. An actor that receives it once more publishes its samples as failed."""
    member_ttl_s: float = 10.0
    replicas: int = 1

    def max_bytes(self, share: float) -> int:
        """Return `share` of the size limit of SEQUENCES, in bytes, but at least 1 MiB. All shares in use add up to less than
        1/3, so a volume of 4/3 of the limit of SEQUENCES holds all streams except the weight log."""
        return max(_LEAST_BOUND_BYTES, int(share * self.sequences_max_bytes))


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One message of SEQUENCES. Positions start at 1 and increase."""

    position: int
    payload: bytes
    msg_id: str
    headers: Headers = field(default_factory=lambda: NO_HEADERS)


@dataclass(frozen=True)
class StreamInfo:
    """State of a stream. `first_position` is `last_position + 1` if the stream is empty."""

    messages: int
    bytes: int
    first_position: int
    last_position: int
    first_at_s: float | None = None
    """Unix time in seconds, by the server's clock, at which the oldest message was published; None if the stream is empty."""


@dataclass(frozen=True)
class ControlMessage:
    """A control message. `kind` and `actor` come from its subject; `actor` is empty in orders to all actors."""

    kind: str
    actor: str
    payload: bytes
    position: int
    headers: Headers = field(default_factory=lambda: NO_HEADERS)


@dataclass(frozen=True)
class MemberEvent:
    """A change of a member's registration. `payload`: the new content; None if the registration was removed or has expired."""

    actor: str
    payload: bytes | None


RUN_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


def check_run_name(run: str, field: str = "run") -> str:
    """Return `run`. Raises `FieldError` on `field` if `run` cannot be part of subjects, Kubernetes labels and folder names."""
    if not RUN_NAME.fullmatch(run):
        raise FieldError(field, run, "use 1-40 lowercase letters, digits and inner dashes")
    return run


ACTOR_NAME = re.compile(r"[A-Za-z0-9_-]{1,253}")


def check_actor_name(actor: str) -> str:
    """Return `actor`. Raises `FieldError` if it cannot be both a token of a subject and a key of the membership bucket."""
    if not ACTOR_NAME.fullmatch(actor):
        raise FieldError("actor", actor, "use 1-253 letters, digits, dashes and underscores")
    return actor


def group_id_of(msg_id: str) -> str:
    """Return the group's id from a message id of PROMPTS: `g12` from `g12` or, if the group was republished, `g12/...`."""
    return msg_id.partition("/")[0]


ACTORS = "actors"
"""Name of the durable consumer of PROMPTS that all actors share."""


class Subjects:
    """Subjects, streams and buckets of one run. Each contains the run's name, so that several runs can share one NATS."""

    def __init__(self, run: str) -> None:
        self.run = check_run_name(run)
        self.prompts, self.sequences, self.dead = f"{run}.prompts", f"{run}.sequences", f"{run}.dead"
        self.control_all = f"{run}.control.>"
        self.prompts_stream, self.sequences_stream = f"PROMPTS_{run}", f"SEQUENCES_{run}"
        self.control_stream, self.dead_stream = f"CONTROL_{run}", f"DEAD_{run}"
        self.members_bucket = f"members-{run}"
        self.members_stream = f"KV_{self.members_bucket}"  # JetStream's name for the bucket's stream
        data = (self.prompts_stream, self.sequences_stream, self.control_stream, self.dead_stream)
        self.every_stream = (*data, self.members_stream)
        self.weights_bucket = f"weights-{run}"  # made only for a weight log in NATS
        self.weights_stream = f"OBJ_{self.weights_bucket}"

    def control(self, kind: str, actor: str = "") -> str:
        """Return a control message's subject. `actor`: sender of an answer, or receiver of an order to one actor."""
        return f"{self.run}.control.{kind}.{actor}" if actor else f"{self.run}.control.{kind}"

    def member(self, actor: str) -> str:
        return f"$KV.{self.members_bucket}.{actor}"


FROM_TRAINER = ("manifest", "epoch", "announce", "commit", "published", "sleep", "abort", "end")
FROM_ACTOR = ("joined", "staged", "serving", "failed")
TO_ONE_ACTOR = ("epoch", "announce", "commit", "abort")
"""Orders that the trainer may also send to one actor, for a side group."""
EVERY_ACTOR = "*"


def watched(kinds: Sequence[str], actor: str) -> list[tuple[str, str]]:
    """Return the (kind, actor) pairs that a watcher of `kinds` sees: answers of every actor, orders to all actors and, if
    `actor` is given, orders to this actor alone."""
    pairs = [(kind, EVERY_ACTOR if kind in FROM_ACTOR else "") for kind in kinds]
    return pairs + [(kind, actor) for kind in kinds if actor and kind in TO_ONE_ACTOR]


def check_control(kind: str, actor: str) -> None:
    """Raise `FieldError` if `kind` is unknown, or `actor` is wrong for it. For an answer (`FROM_ACTOR`), `actor` must name the
    sender. For an order in `TO_ONE_ACTOR`, `actor` may name a receiver; for any other order, `actor` must be empty."""
    if kind not in FROM_TRAINER + FROM_ACTOR:
        raise FieldError("kind", kind, f"use one of {', '.join(FROM_TRAINER + FROM_ACTOR)}")
    if kind in FROM_ACTOR or (actor and kind in TO_ONE_ACTOR):
        check_actor_name(actor)
    elif actor:
        raise FieldError("actor", actor, f"control messages of kind {kind!r} are for all actors: leave it empty")
