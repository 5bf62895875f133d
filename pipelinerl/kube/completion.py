"""The end of a run, for a cluster: a state that others can wait for, and replicas that are no longer needed.

The state is a ConfigMap of the release, `data.phase` of which is `Running` or `Finished`. There is none for a run that failed:
its trainer starts again. Nothing here decides that a run is finished, or waits for one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pipelinerl.kube.client import BACKOFF, SCALE_ACTORS, SCALE_TRAINER, KubeError, in_cluster
from pipelinerl.service.settings import TrainerSettings

log = logging.getLogger(__name__)

RUNNING, FINISHED = "Running", "Finished"


async def tell_phase(settings: TrainerSettings, phase: str, version: int) -> None:
    """Returns when the cluster knows; at once where `on_completion` is `keep`. Waits for the API, and for its rights there."""
    client = in_cluster(settings)
    if client is not None and settings.on_completion != "keep":
        state = {"phase": phase, "run": settings.run, "policyVersion": str(version)}
        try:
            await _insist(lambda: client.patch_config(f"{settings.release}-run", state))
        finally:
            await client.close()


async def complete(settings: TrainerSettings, version: int, uploaded: Callable[[], Awaitable[None]]) -> None:
    """Frees what a finished run of `version` holds, as `on_completion` says, and says that it is finished.

    The trainer itself goes last, once `uploaded` returns: whoever scales it to zero ends this process.
    """
    client = in_cluster(settings)
    if client is None or settings.on_completion == "keep":
        return
    try:
        await _insist(lambda: client.scale(SCALE_ACTORS, f"{settings.release}-actor", 0))
        await tell_phase(settings, FINISHED, version)
        if settings.on_completion == "exit":
            await uploaded()
            await _insist(lambda: client.scale(SCALE_TRAINER, f"{settings.release}-trainer", 0))
    finally:
        await client.close()


async def _insist(call: Callable[[], Awaitable[None]]) -> None:
    failures = 0
    while True:
        try:
            return await call()
        except KubeError as error:
            failures += 1
            log.warning("%s; trying again", error)
            await asyncio.sleep(BACKOFF.after(error, failures))
