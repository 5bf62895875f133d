"""Permissions on a run's NATS: the subjects to which each service may publish or subscribe, as lists for nats-server.

`python -m pipelinerl.bus.permissions RUN ...` prints the users to configure in your own NATS server. Each run needs its own
lists, because tokens of subjects, such as `PROMPTS_<run>`, contain the run's name, and NATS has no wildcards inside a token.
docs/security.md lists what NATS does not check.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from pipelinerl.bus.protocol import ACTORS, FROM_ACTOR, FROM_TRAINER, TO_ONE_ACTOR, Subjects
from pipelinerl.errors import FieldError

TRAINER, ACTOR, ADMIN = "trainer", "actor", "admin"
"""NATS users: one for the trainer, one for all actors, and one for people, who get full access. If several runs share a server,
each run has users of its own for trainer and actors, whose names begin with the run's name, as in `lr-1-trainer`."""
_TOKEN = re.compile(r"[A-Za-z0-9_-]+")
_API = "$JS.API"


def inbox_prefix(user: str) -> str:
    """Return the prefix of a user's inboxes, `_INBOX_<user>`. Only this user and ADMIN may read them. For a name that is
    empty or cannot be part of a subject, return NATS's default prefix."""
    return f"_INBOX_{user}" if _TOKEN.fullmatch(user) else "_INBOX"


def permissions(*runs: str) -> dict[str, dict[str, list[str]]]:
    """Return the subjects to which each user of the runs may `publish` and `subscribe`. NATS refuses all other
    subjects. Raises `FieldError` for an invalid run name."""
    found = dict[str, dict[str, list[str]]]()
    for run in runs:
        subjects, prefix = Subjects(run), f"{run}-" if len(runs) > 1 else ""
        for user, publish in ((f"{prefix}{TRAINER}", _trainer(subjects)), (f"{prefix}{ACTOR}", _actor(subjects))):
            found[user] = {"publish": publish, "subscribe": [f"{inbox_prefix(user)}.>"]}
    return found | {ADMIN: {"publish": [">"], "subscribe": [">"]}}


def authorization(runs: str | Iterable[str], passwords: Mapping[str, str]) -> dict[str, Any]:
    """Return the `authorization` block of nats-server's configuration for one or several runs. nats-server reads it as JSON.
    Users without an entry in `passwords` are left out."""
    return {
        "users": [
            {"user": user, "password": passwords[user], "permissions": allowed}
            for user, allowed in permissions(*([runs] if isinstance(runs, str) else runs)).items()
            if user in passwords
        ]
    }


def _trainer(subjects: Subjects) -> list[str]:
    """Return the subjects to which the trainer publishes, including its requests to JetStream."""
    queue = f"{subjects.prompts_stream}.{ACTORS}"
    return [
        subjects.prompts,
        *(subjects.control(kind) for kind in FROM_TRAINER),
        *(subjects.control(kind, "*") for kind in TO_ONE_ACTOR),
        f"{_API}.INFO",
        *(f"{_API}.STREAM.{call}.{stream}" for call in ("CREATE", "INFO") for stream in subjects.every_stream),
        f"{_API}.CONSUMER.INFO.{queue}",
        f"{_API}.CONSUMER.DURABLE.CREATE.{queue}",
        *(f"{_API}.STREAM.MSG.GET.{stream}" for stream in (subjects.prompts_stream, subjects.dead_stream)),
        f"{_API}.STREAM.PURGE.{subjects.sequences_stream}",
        *(f"{_API}.STREAM.DELETE.{stream}" for stream in (subjects.prompts_stream, subjects.sequences_stream)),  # rollback
        *_reading(subjects.sequences_stream, subjects.control_stream, subjects.members_stream),
        f"$O.{subjects.weights_bucket}.>",
        *(f"{_API}.STREAM.{call}.{subjects.weights_stream}" for call in ("CREATE", "INFO", "PURGE", "MSG.GET")),
        *_reading(subjects.weights_stream),
    ]


def _actor(subjects: Subjects) -> list[str]:
    """Return the subjects to which an actor publishes, including its requests to JetStream."""
    filled = (subjects.prompts_stream, subjects.sequences_stream, subjects.dead_stream)
    queue = f"{subjects.prompts_stream}.{ACTORS}"
    return [
        subjects.sequences,
        subjects.prompts,
        subjects.dead,
        *(subjects.control(kind, "*") for kind in FROM_ACTOR),
        f"$KV.{subjects.members_bucket}.*",
        f"{_API}.CONSUMER.MSG.NEXT.{queue}",
        f"$JS.ACK.{queue}.>",
        f"$JS.ACK.*.*.{queue}.>",  # Some servers' acknowledgements also name a domain and an account.
        *(f"{_API}.STREAM.INFO.{stream}" for stream in filled),  # The error about a full stream names its limit.
        *_reading(subjects.control_stream),
        f"{_API}.STREAM.MSG.GET.{subjects.weights_stream}",
        *_reading(subjects.weights_stream),
    ]


def _reading(*streams: str) -> list[str]:
    """Return the subjects to which `OrderedReader` publishes to read `streams` through ephemeral consumers."""
    calls = ("CREATE.{}", "MSG.NEXT.{}.*", "DELETE.{}.*")
    return [f"{_API}.CONSUMER.{call.format(stream)}" for stream in streams for call in calls]


def main() -> int:
    """Print an `authorization` block for nats-server, with a placeholder for each password."""
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.bus.permissions", description=main.__doc__)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="name of a run; with several, users are RUN-trainer and so on")
    runs = parser.parse_args().runs
    try:
        passwords = {user: f"PASSWORD-OF-{user.upper()}" for user in permissions(*runs)}
        print(json.dumps({"authorization": authorization(runs, passwords)}, indent=2))
    except FieldError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
