"""What each service asks of the Kubernetes API, as data: the chart's Roles grant exactly this, and a refusal names it.

It checks nothing: the API server does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Permission:
    """One verb on one resource of the pod's own namespace. `api_group` "" is the core group, v1."""

    resource: str
    verb: str
    api_group: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}"


PATCH_PODS = Permission("pods", "patch")
LIST_PODS = Permission("pods", "list")
WATCH_PODS = Permission("pods", "watch")
CREATE_EVENTS = Permission("events", "create")

ACTOR = frozenset({PATCH_PODS})
TRAINER = frozenset({LIST_PODS, WATCH_PODS, CREATE_EVENTS})
