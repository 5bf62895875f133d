"""Names of streams, subjects and buckets of one run. Subjects are prefixed by the run, so that runs share one NATS.

Pure: strings in, strings out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipelinerl.errors import FieldError

RUN_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
"""What a run may be called: it is part of subjects, stream names, Kubernetes labels and folder names."""


def check_run_name(run: str, field: str = "run") -> str:
    """Returns `run`; raises `FieldError` on `field` when it cannot be part of a subject and a Kubernetes label."""
    if not RUN_NAME.fullmatch(run):
        raise FieldError(field, run, "use 1-40 lowercase letters, digits and inner dashes")
    return run


ACTOR_NAME = re.compile(r"[A-Za-z0-9_-]{1,253}")
"""What an actor may be called: its name is one token of a subject and a key of the membership bucket."""


def check_actor_name(actor: str) -> str:
    """Returns `actor`; raises `FieldError` when it cannot be one token of a subject."""
    if not ACTOR_NAME.fullmatch(actor):
        raise FieldError("actor", actor, "use 1-253 letters, digits, dashes and underscores")
    return actor


def group_id_of(msg_id: str) -> str:
    """The group that a message id on PROMPTS names: `g12` when it was issued, `g12/...` when it was published again."""
    return msg_id.partition("/")[0]


@dataclass(frozen=True)
class Subjects:
    """Subjects, streams and the membership bucket of one run."""

    run: str

    def __post_init__(self) -> None:
        check_run_name(self.run)

    @property
    def prompts_stream(self) -> str:
        return f"PROMPTS_{self.run}"

    @property
    def sequences_stream(self) -> str:
        return f"SEQUENCES_{self.run}"

    @property
    def control_stream(self) -> str:
        return f"CONTROL_{self.run}"

    @property
    def dead_stream(self) -> str:
        return f"DEAD_{self.run}"

    @property
    def members_bucket(self) -> str:
        return f"members-{self.run}"

    @property
    def members_stream(self) -> str:
        """What JetStream calls the bucket's stream."""
        return f"KV_{self.members_bucket}"

    @property
    def prompts(self) -> str:
        return f"{self.run}.prompts"

    @property
    def sequences(self) -> str:
        return f"{self.run}.sequences"

    @property
    def dead(self) -> str:
        """Messages of PROMPTS that were given up."""
        return f"{self.run}.dead"

    @property
    def every_stream(self) -> tuple[str, ...]:
        return (
            self.prompts_stream,
            self.sequences_stream,
            self.control_stream,
            self.dead_stream,
            self.members_stream,
        )

    def control(self, kind: str, actor: str = "") -> str:
        """Subject of one kind of control message; an answer, or an order to one actor, ends with the actor's name."""
        return f"{self.run}.control.{kind}.{actor}" if actor else f"{self.run}.control.{kind}"

    @property
    def control_all(self) -> str:
        return f"{self.run}.control.>"


FROM_TRAINER = ("manifest", "epoch", "announce", "commit", "abort", "end")
FROM_ACTOR = ("joined", "staged", "serving", "failed")
TO_ONE_ACTOR = ("epoch", "announce", "commit", "abort")
"""Orders that the trainer may address to one actor, on its side group."""
EVERY_ACTOR = "*"


def watched(kinds: Sequence[str], actor: str) -> list[tuple[str, str]]:
    """(kind, actor) pairs that a watcher of `kinds` sees: answers of all, orders to all and those to `actor`.

    `actor` empty: no order to a single one; `EVERY_ACTOR`: to any. `EVERY_ACTOR` in a pair matches any name.
    """
    pairs = [(kind, EVERY_ACTOR if kind in FROM_ACTOR else "") for kind in kinds]
    return pairs + [(kind, actor) for kind in kinds if actor and kind in TO_ONE_ACTOR]


def check_control(kind: str, actor: str) -> None:
    """Raises `FieldError` unless `kind` is an order to all (`actor` empty) or to one, or an actor's answer."""
    if kind not in FROM_TRAINER + FROM_ACTOR:
        raise FieldError("kind", kind, f"use one of {', '.join(FROM_TRAINER + FROM_ACTOR)}")
    if kind in FROM_ACTOR or (actor and kind in TO_ONE_ACTOR):
        check_actor_name(actor)
    elif actor:
        raise FieldError("actor", actor, f"control messages of kind {kind!r} are for all actors: leave it empty")


def used_before(run: str, streams: Sequence[str]) -> FieldError:
    """The error for a run whose name was used on this server before. `streams`: those that were published to."""
    every = Subjects(run).every_stream
    return FieldError(
        "run",
        run,
        f"{' and '.join(streams)} on this NATS server hold messages of an earlier run of this name; give another run "
        f"name, or delete that run's streams: {', '.join(every)} (`nats stream rm NAME`)",
    )
