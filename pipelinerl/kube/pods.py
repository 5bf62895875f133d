"""Report pods that end while a service runs: list them, then follow every change.

`PodWatch` consumes the API's list and watch, and produces each `PodEnd` once: when a pod is told to end, and when it has ended.
It waits for the server: it retries through an outage, lists again after an expired watch, and retries a refusal rarely. One log
line says that ends go unnoticed, and one that they are noticed again. The caller decides what an end means.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from pipelinerl.kube.client import BACKOFF, KubeClient, KubeError, Pod

log = logging.getLogger(__name__)

ENDED_PHASES = ("Succeeded", "Failed")


@dataclass(frozen=True)
class PodEnd:
    """End of a pod. `still_running`: it was told to end and may use its grace period; otherwise its processes are gone. `final`
    False: the pod may instead have lost the labels by which it is watched."""

    name: str
    uid: str
    reason: str
    still_running: bool
    final: bool = True


class PodWatch:
    """`selector`: labels, as `kubectl get pods -l` takes them. `without`: consequence of not watching, for the log."""

    def __init__(self, client: KubeClient, selector: str, on_end: Callable[[PodEnd], None], *, without: str) -> None:
        self._client, self._selector, self._on_end, self._without = client, selector, on_end, without
        self._pods: dict[str, Pod] = {}  # by uid
        self._reported: dict[str, bool] = {}  # by uid: whether it was still running then
        self._resource_version = ""
        self._failures = 0
        self._logged: tuple[object, ...] = ()

    async def run(self) -> None:
        while True:
            try:
                if not self._resource_version:
                    pods, version = await self._client.list_pods(self._selector)
                    listed = {pod.uid for pod in pods}
                    for pod in [pod for uid, pod in self._pods.items() if uid not in listed]:
                        self._deleted(pod)  # it ended between two watches
                    for pod in pods:
                        self._present(pod)
                    self._resource_version = version
                await self._watch()
            except KubeError as error:
                self._failures += 1
                if error.status == 410:
                    self._resource_version = ""
                else:
                    self._log_away(error)
                await asyncio.sleep(BACKOFF.after(error, self._failures))
            else:
                await asyncio.sleep(BACKOFF.first_s)

    async def _watch(self) -> None:
        """Report changes until the server ends the watch."""
        async with self._client.watch_pods(self._selector, self._resource_version) as changes:
            if self._logged:
                log.info("the pods %s are watched again", self._selector)
            self._logged, self._failures = (), 0
            async for pod, version in changes:
                self._resource_version = version or self._resource_version
                if pod is not None:
                    (self._deleted if pod.deleted else self._present)(pod)

    def _present(self, pod: Pod) -> None:
        self._pods[pod.uid] = pod
        ended = pod.phase in ENDED_PHASES
        if not (ended or pod.terminating) or self._reported.get(pod.uid) in (False, not ended):
            return
        why = f" ({pod.cause})" if pod.cause else ""
        reason = f"its pod is in phase {pod.phase}{why}" if ended else "its pod is being deleted"
        self._reported[pod.uid] = not ended
        self._on_end(PodEnd(pod.name, pod.uid, reason, still_running=not ended))

    def _deleted(self, pod: Pod) -> None:
        self._pods.pop(pod.uid, None)
        reported = self._reported.pop(pod.uid, None)
        if reported is not False:
            final = pod.terminating or reported is not None
            reason = "its pod was deleted" if final else "its pod was deleted, or relabelled"
            self._on_end(PodEnd(pod.name, pod.uid, reason, still_running=False, final=final))

    def _log_away(self, error: KubeError) -> None:
        """Warn once, and again for another reason. A connection failure that the next attempt may mend is only logged for
        debugging."""
        why = (error.permission, error.status) if error.denied else (error.denied,)
        if why == self._logged or (self._failures == 1 and not error.denied):
            log.debug("%s", error)
            return
        log.warning("%s; %s", error, self._without)
        self._logged = why
