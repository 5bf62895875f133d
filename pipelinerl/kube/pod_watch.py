"""Tells of pods that end, for as long as a service runs: lists them, then follows every change from there.

Consumes the API's list and watch, produces `PodEnd`s, each once. It waits for the server; an outage is waited out, an expired
watch begins with a new list, a refusal is tried again rarely. One line says that ends go unnoticed, and one that they no longer
do. What an end means is the caller's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from pipelinerl.kube.client import KnownPods, KubeClient, KubeError, PodEnd

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pauses:
    """Seconds before the next try: doubling from `first_s` to `most_s`; `denied_s` after a refusal."""

    first_s: float = 0.5
    most_s: float = 30.0
    denied_s: float = 300.0

    def after(self, error: KubeError, failures: int) -> float:
        """`failures`: in a row, this one included. Pure."""
        return self.denied_s if error.denied else min(self.most_s, self.first_s * 2 ** min(failures - 1, 30))


class PodWatch:
    """See the module. `selector`: labels, as `kubectl get pods -l` takes them. `without`: what follows while it cannot watch,
    for the log."""

    def __init__(
        self,
        client: KubeClient,
        selector: str,
        on_end: Callable[[PodEnd], None],
        *,
        without: str,
        pauses: Pauses | None = None,
    ) -> None:
        self._client, self._selector, self._on_end = client, selector, on_end
        self._without, self._pauses = without, pauses or Pauses()
        self._known = KnownPods()
        self._resource_version = ""
        self._failures = 0
        self._told: tuple[object, ...] = ()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            try:
                if not self._resource_version:
                    await self._list()
                await self._watch()
            except KubeError as error:
                self._failures += 1
                if error.expired:
                    self._resource_version = ""
                else:
                    self._away(error)
                await asyncio.sleep(self._pauses.after(error, self._failures))
            else:
                await asyncio.sleep(self._pauses.first_s)

    async def _list(self) -> None:
        listing = await self._client.list_pods(self._selector)
        self._tell(self._known.listed(listing.pods))
        self._resource_version = listing.resource_version

    async def _watch(self) -> None:
        """Until the server ends the watch."""
        async with self._client.watch_pods(self._selector, self._resource_version) as changes:
            self._back()
            async for change in changes:
                self._resource_version = change.resource_version or self._resource_version
                self._tell(self._known.changed(change))

    def _tell(self, ends: list[PodEnd]) -> None:
        for end in ends:
            self._on_end(end)

    def _away(self, error: KubeError) -> None:
        """Says it once, and once more when it is for another reason; not of a connection that the next try has again."""
        why = (error.permission, error.status) if error.denied else (error.denied,)
        if why == self._told or (self._failures == 1 and not error.denied):
            log.debug("%s", error)
            return
        log.warning("%s; %s", error, self._without)
        self._told = why

    def _back(self) -> None:
        if self._told:
            log.info("the pods %s are watched again", self._selector)
        self._told, self._failures = (), 0
