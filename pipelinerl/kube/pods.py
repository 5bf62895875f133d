"""Reports pods that end, for as long as a service runs: lists them, then follows every change from there.

`KnownPods` is pure: it turns listings and changes into ends. `PodWatch` consumes the API's list and watch and produces each
`PodEnd` once. It waits for the server; an outage is waited out, an expired watch begins with a new list, a refusal is tried
again rarely. One line says that ends go unnoticed, and one that they no longer do. What an end means is for the caller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipelinerl.kube.client import BACKOFF, KubeBackoff, KubeClient, KubeError, Pod

log = logging.getLogger(__name__)

ENDED_PHASES = ("Succeeded", "Failed")


@dataclass(frozen=True)
class PodEnd:
    """`still_running`: it was told to end and may take its grace period. Otherwise its processes are gone; `final` False: it
    may be, instead, that the pod has lost the labels it is watched by."""

    name: str
    uid: str
    reason: str
    still_running: bool
    final: bool = True


class KnownPods:
    """Turns what is listed and watched into ends, each reported once: that a pod is told to end, and that it has ended."""

    def __init__(self) -> None:
        self._pods: dict[str, Pod] = {}  # by uid
        self._reported: dict[str, bool] = {}  # by uid: whether it was still running then

    def listed(self, pods: Iterable[Pod]) -> list[PodEnd]:
        """All there are: a pod that was known and is not among them was deleted while nobody watched."""
        now = {pod.uid: pod for pod in pods}
        gone = [pod for uid, pod in self._pods.items() if uid not in now]
        ends = [*map(self._deleted, gone), *map(self._present, now.values())]
        return [end for end in ends if end is not None]

    def changed(self, pod: Pod) -> PodEnd | None:
        return self._deleted(pod) if pod.deleted else self._present(pod)

    def _present(self, pod: Pod) -> PodEnd | None:
        self._pods[pod.uid] = pod
        if pod.phase in ENDED_PHASES:
            why = f" ({pod.cause})" if pod.cause else ""
            end = PodEnd(pod.name, pod.uid, f"its pod is in phase {pod.phase}{why}", still_running=False)
        elif pod.terminating:
            end = PodEnd(pod.name, pod.uid, "its pod is being deleted", still_running=True)
        else:
            return None
        if self._reported.get(pod.uid) in (False, end.still_running):
            return None
        self._reported[pod.uid] = end.still_running
        return end

    def _deleted(self, pod: Pod) -> PodEnd | None:
        self._pods.pop(pod.uid, None)
        reported = self._reported.pop(pod.uid, None)
        if reported is False:
            return None
        final = pod.terminating or reported is not None
        reason = "its pod was deleted" if final else "its pod was deleted, or relabelled"
        return PodEnd(pod.name, pod.uid, reason, still_running=False, final=final)


class PodWatch:
    """`selector`: labels, as `kubectl get pods -l` takes them. `without`: what follows while it cannot watch, for the log."""

    def __init__(
        self,
        client: KubeClient,
        selector: str,
        on_end: Callable[[PodEnd], None],
        *,
        without: str,
        backoff: KubeBackoff = BACKOFF,
    ) -> None:
        self._client, self._selector, self._on_end = client, selector, on_end
        self._without, self._backoff = without, backoff
        self._known = KnownPods()
        self._resource_version = ""
        self._failures = 0
        self._logged: tuple[object, ...] = ()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            try:
                if not self._resource_version:
                    pods, version = await self._client.list_pods(self._selector)
                    for end in self._known.listed(pods):
                        self._on_end(end)
                    self._resource_version = version
                await self._watch()
            except KubeError as error:
                self._failures += 1
                if error.status == 410:
                    self._resource_version = ""
                else:
                    self._log_away(error)
                await asyncio.sleep(self._backoff.after(error, self._failures))
            else:
                await asyncio.sleep(self._backoff.first_s)

    async def _watch(self) -> None:
        """Until the server ends the watch."""
        async with self._client.watch_pods(self._selector, self._resource_version) as changes:
            if self._logged:
                log.info("the pods %s are watched again", self._selector)
            self._logged, self._failures = (), 0
            async for pod, version in changes:
                self._resource_version = version or self._resource_version
                if pod is not None and (end := self._known.changed(pod)) is not None:
                    self._on_end(end)

    def _log_away(self, error: KubeError) -> None:
        """Warns once, and once more when it is for another reason; not of a connection that the next try has again."""
        why = (error.permission, error.status) if error.denied else (error.denied,)
        if why == self._logged or (self._failures == 1 and not error.denied):
            log.debug("%s", error)
            return
        log.warning("%s; %s", error, self._without)
        self._logged = why
