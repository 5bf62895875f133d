"""What is true of a run at this moment, for its page: phase, versions, members, ledger. Pure: parts in, one object out."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from services.trainer.actor_client import ActorLoad

MOST_MEMBERS = 256
"""That are listed; a run with more is better watched on a dashboard."""


def member_rows(
    registered: Iterable[str],
    serving: Collection[str],
    joining: Collection[str],
    served_version: int,
    loads: Mapping[str, ActorLoad],
) -> list[dict[str, Any]]:
    """Each registered actor in order of its name. Those in `serving` serve `served_version`; of the others the version is known
    that they named when they were asked last."""
    rows = []
    for name in sorted(registered, key=natural):
        state = "serving" if name in serving else "joining" if name in joining else "waiting"
        load = loads.get(name)
        known = served_version if state == "serving" else load.policy_version if load else None
        in_progress = load.sequences_in_progress if load else None
        rows.append({"name": name, "state": state, "version": known, "in_progress": in_progress})
    return rows[:MOST_MEMBERS]


def natural(name: str) -> list[tuple[int, str]]:
    """Key by which actor-10 comes after actor-9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split("([0-9]+)", name)]
