"""The control channel's messages as immutable dataclasses: membership and the weight-update protocol.

docs/architecture.md draws the exchange. The weights' manifest is not here (`pipelinerl.weights.manifest`), and neither
is any state machine that these messages drive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["joining", "serving", "draining"]
Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class Registration:
    """Actor → trainer, its entry in the membership bucket."""

    actor: str
    process: str
    """Changes when the process restarts."""
    grpc_address: str
    """host:port of its ActorService."""
    ranks: int
    """Tensor-parallel size: ranks it takes in the transfer group."""
    manifest_id: str = ""
    """Of the weights that its model is prepared for; "" = not known yet."""
    policy_version: int = 0
    incarnation: int = 0
    """Of the trainer that made the version it serves; 0 = it serves none of this run yet."""
    phase: Phase = "joining"
    pod_uid: str = ""
    """Of the Kubernetes pod it runs in; "" = none."""


@dataclass(frozen=True)
class EpochMember:
    """Its ranks are first_rank .. first_rank + ranks - 1; rank 0 is the trainer."""

    actor: str
    process: str
    first_rank: int
    ranks: int


@dataclass(frozen=True)
class EpochStart:
    """Trainer → actors, `epoch`: the transfer group's membership."""

    incarnation: int
    epoch: int
    store_address: str
    """host:port of the store that the trainer hosts for this epoch."""
    backend: Backend
    world_size: int
    members: tuple[EpochMember, ...]
    manifest_id: str
    deadline_s: float
    """Seconds a member has to join; who has not is left out of the next epoch."""


@dataclass(frozen=True)
class EpochJoined:
    """Actor → trainer, `joined.<actor>`."""

    actor: str
    incarnation: int
    epoch: int


@dataclass(frozen=True)
class Announce:
    """Trainer → actors, `announce`: bytes of this version follow on the collective."""

    incarnation: int
    epoch: int
    version: int
    manifest_id: str
    deadline_s: float
    """Seconds a member has to stage it."""


@dataclass(frozen=True)
class Staged:
    """Actor → trainer, `staged.<actor>`: complete and checked, not yet served."""

    actor: str
    incarnation: int
    epoch: int
    version: int
    checksum: int
    """Over all chunk checksums (64 bits), compared with the trainer's own."""
    bytes: int
    receive_s: float
    """First byte to last, seconds."""
    prepare_s: float
    """Into the engine's layout, seconds."""


@dataclass(frozen=True)
class Commit:
    """Trainer → actors, `commit`: serve it now."""

    incarnation: int
    epoch: int
    version: int


@dataclass(frozen=True)
class Serving:
    """Actor → trainer, `serving.<actor>`."""

    actor: str
    incarnation: int
    epoch: int
    version: int
    stall_s: float
    """Time in which it generated nothing because of this update, seconds."""


@dataclass(frozen=True)
class Abort:
    """Either way, `abort` and `failed.<actor>`: this version's transfer is over; staging is discarded."""

    incarnation: int
    """0 = of none: the actor's model does not take the manifest's weights, and the actor ends."""
    epoch: int
    version: int
    reason: str
    actor: str = ""
    """Who says so; "" = the trainer."""
    group_broke: bool = False
    """An actor's: the transfer group failed, which may be another member's doing."""


@dataclass(frozen=True)
class RunEnd:
    """Trainer → everyone, `end`: the run is over, or has failed."""

    incarnation: int
    version: int
    ok: bool
    reason: str = ""


Control = Registration | EpochStart | EpochJoined | Announce | Staged | Commit | Serving | Abort | RunEnd
