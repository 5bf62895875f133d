"""What is true of a run at this moment, for its page: phase, versions, members, ledger. Pure: parts in, one object out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from services.trainer.actor_client import ActorLoad

MOST_MEMBERS = 256
"""That are listed; a run with more is better watched on a dashboard."""


def member_rows(states: Mapping[str, str], served_version: int, loads: Mapping[str, ActorLoad]) -> list[dict[str, Any]]:
    """Each registered actor in order of its name, with its state (`updates/member_states.py`). Who is serving serves
    `served_version`; of the others the version is known that they named when they were asked last."""
    rows = []
    for name, state in sorted(states.items(), key=lambda item: natural(item[0])):
        load = loads.get(name)
        known = served_version if state == "serving" else load.policy_version if load else None
        in_progress = load.sequences_in_progress if load else None
        rows.append({"name": name, "state": state, "version": known, "in_progress": in_progress})
    return rows[:MOST_MEMBERS]


def natural(name: str) -> list[tuple[int, str]]:
    """Key by which actor-10 comes after actor-9, whatever is in the name and however long its numbers are."""
    parts = [part.lstrip("0") if index % 2 else part for index, part in enumerate(re.split("([0-9]+)", name))]
    return [(len(part), part) if index % 2 else (-1, part) for index, part in enumerate(parts)]
