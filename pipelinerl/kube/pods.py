"""What is read of a pod, and what its changes say about whether it is still there. Pure.

It does not ask the API; `pod_watch.py` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

ENDED_PHASES = ("Succeeded", "Failed")
Kind = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


@dataclass(frozen=True)
class Pod:
    """`terminating`: its deletion was asked for. `cause`: why its phase is what it is, where the API says so."""

    name: str
    uid: str
    phase: str = "Running"
    terminating: bool = False
    cause: str = ""


@dataclass(frozen=True)
class PodList:
    pods: tuple[Pod, ...]
    resource_version: str
    """Where a watch goes on from."""


@dataclass(frozen=True)
class PodChange:
    """One event of a watch. `pod` None: a bookmark, which only says how far the watch has come."""

    kind: Kind
    pod: Pod | None
    resource_version: str


@dataclass(frozen=True)
class PodEnd:
    """`still_running`: it was told to end and may take its grace period. Otherwise its processes are gone; `final` False: it
    may be, instead, that the pod has lost the labels it is watched by."""

    name: str
    uid: str
    reason: str
    still_running: bool
    final: bool = True


def read_pod(raw: Mapping[str, Any]) -> Pod:
    """Of a pod as the API's JSON has it."""
    metadata, status = raw.get("metadata") or {}, raw.get("status") or {}
    return Pod(
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        phase=status.get("phase", ""),
        terminating=bool(metadata.get("deletionTimestamp")),
        cause=status.get("reason", ""),
    )


class KnownPods:
    """Turns what is listed and watched into ends, each told once: that a pod is told to end, and that it has ended."""

    def __init__(self) -> None:
        self._pods: dict[str, Pod] = {}  # by uid
        self._told: dict[str, bool] = {}  # by uid: whether it was still running when that was told

    def listed(self, pods: Iterable[Pod]) -> list[PodEnd]:
        """All there are: a pod that was known and is not among them was deleted while nobody watched."""
        now = {pod.uid: pod for pod in pods}
        gone = [pod for uid, pod in self._pods.items() if uid not in now]
        return [*self._each(self._deleted(pod) for pod in gone), *self._each(map(self._present, now.values()))]

    def changed(self, change: PodChange) -> list[PodEnd]:
        if change.pod is None:
            return []
        deleted = change.kind == "DELETED"
        return self._each([self._deleted(change.pod) if deleted else self._present(change.pod)])

    def _each(self, ends: Iterable[PodEnd | None]) -> list[PodEnd]:
        return [end for end in ends if end is not None]

    def _present(self, pod: Pod) -> PodEnd | None:
        self._pods[pod.uid] = pod
        end = end_of(pod)
        if end is None or self._told.get(pod.uid) in (False, end.still_running):
            return None
        self._told[pod.uid] = end.still_running
        return end

    def _deleted(self, pod: Pod) -> PodEnd | None:
        self._pods.pop(pod.uid, None)
        told = self._told.pop(pod.uid, None)
        if told is False:
            return None
        final = pod.terminating or told is not None
        reason = "its pod was deleted" if final else "its pod was deleted, or relabelled"
        return PodEnd(pod.name, pod.uid, reason, still_running=False, final=final)


def end_of(pod: Pod) -> PodEnd | None:
    """None: it is there, and nobody has asked for its end."""
    if pod.phase in ENDED_PHASES:
        why = f" ({pod.cause})" if pod.cause else ""
        return PodEnd(pod.name, pod.uid, f"its pod is in phase {pod.phase}{why}", still_running=False)
    if pod.terminating:
        return PodEnd(pod.name, pod.uid, "its pod is being deleted", still_running=True)
    return None
