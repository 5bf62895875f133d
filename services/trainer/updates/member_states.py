"""What each registered actor is doing, in one word: for the page and for the metrics. Pure."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

MEMBER_STATES = ("serving", "joining", "waiting", "leaving")
"""`waiting`: it serves no version, or an older one, and its turn is still to come. `leaving`: it was told to end, and is still
registered."""


def member_states(
    present: AbstractSet[str], serving: AbstractSet[str], joining: AbstractSet[str], draining: AbstractSet[str]
) -> dict[str, str]:
    """State by name. `present`: members of the group and who waits to be one; `joining`: on side groups; `draining`: told to
    end. An actor on a side group is joining, though it may still serve the version before."""
    states = {name: "joining" if name in joining else "serving" if name in serving else "waiting" for name in present}
    return {**states, **dict.fromkeys(draining - present, "leaving")}
