"""The end of a run on a cluster: free the GPUs, keep the report, and publish a state that users and programs can wait for.

The state is in a ConfigMap of the release: `data.phase` is `Running`, `Finished` or `Failed`, and other keys show the
progress. At the end, unless all pods are kept, the actors are scaled to zero first and the trainer last. The ConfigMap keeps
the number of actors, so that the run can continue. Scaling uses the subresource `scale`, so that a later upgrade by Helm has no
conflict.

A trainer that restarts during these steps repeats all of them. Failed calls are repeated until the API accepts them. But
`publish_progress` repeats none, and `failure_told` gives up after `FAILURE_TOLD_WITHIN_S`.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from pathlib import Path

from pipelinerl.errors import UserError
from pipelinerl.kube.client import COUNT_ACTORS, PATCH_REPORT, SCALE_ACTORS, SCALE_TRAINER, KubeClient, KubeError, in_cluster
from pipelinerl.local.ending import SAMPLES_READ, report_of, write_report
from pipelinerl.service.lifecycle import sole_error
from pipelinerl.service.settings import TrainerSettings

log = logging.getLogger(__name__)

RUNNING, FINISHED, FAILED = "Running", "Finished", "Failed"
REPORT = "report.html.gz"
MOST_REPORT_BYTES = 1_000_000
"""Maximum size of the compressed report. The values of a Secret may have at most 1 MiB in total, before base64."""
SEEN_WITHIN_S = 30.0
"""Seconds for which the trainer keeps running after the run's end, so that alerts and open pages can show the end."""
FAILURE_TOLD_WITHIN_S = 30.0
_MOST_REASON = 2000
PROGRESS_EVERY_S = 30.0
_ACTORS = "actors"


async def run_goes_on(settings: TrainerSettings, version: int) -> None:
    """Publish that the run is running. If an earlier end of the run scaled the actors to zero, restore their number."""
    async with _cluster(settings) as client:
        if client is None:
            return
        state, name = f"{settings.release}-run", f"{settings.release}-actor"
        published = await client.patch_config(state, _phase(settings, RUNNING, version))
        if actors := int(published.get(_ACTORS) or 0):
            if await client.scale(COUNT_ACTORS, name) == 0:  # otherwise Helm has already set the number
                await client.scale(SCALE_ACTORS, name, actors)
            await client.patch_config(state, {_ACTORS: None})


async def publish_progress(settings: TrainerSettings, progress: Callable[[], Mapping[str, str]]) -> None:
    """Publish the run's progress every `PROGRESS_EVERY_S` until cancelled. A call that fails is not repeated."""
    async with _cluster(settings, insists=False) as client:
        while client is not None:
            try:
                await client.patch_config(f"{settings.release}-run", progress())
            except KubeError as error:
                log.debug("%s", error)
            await asyncio.sleep(PROGRESS_EVERY_S)


async def complete(
    settings: TrainerSettings, version: int, uploaded: Callable[[], Awaitable[None]], progress: Mapping[str, str]
) -> None:
    """Free the resources of a finished run as `on_completion` says. Publish the end only after `uploaded` has returned,
    because a client that sees the end may remove the release. Scale the trainer to zero last, since that ends this process."""
    async with _cluster(settings) as client:
        if client is None:
            return
        state, actor, frees = f"{settings.release}-run", f"{settings.release}-actor", settings.on_completion != "keep"
        await client.patch_config(state, progress)
        if frees and (actors := await client.scale(COUNT_ACTORS, actor)):
            await client.patch_config(state, {_ACTORS: str(actors)})
            await client.scale(SCALE_ACTORS, actor, 0)
        if frees:
            await _keep_report(client, settings)
        await uploaded()
        await client.patch_config(state, _phase(settings, FINISHED, version))
        if frees:
            await asyncio.sleep(SEEN_WITHIN_S)
            await client.scale(SCALE_TRAINER, f"{settings.release}-trainer", 0)


@asynccontextmanager
async def failure_told(settings: TrainerSettings) -> AsyncIterator[None]:
    """If a `UserError` ends the block, publish that the run failed. Publish no other error: a restarted trainer may succeed."""
    try:
        yield
    except Exception as error:
        if isinstance(sole := sole_error(error), UserError):
            state = _phase(settings, FAILED, reason=str(sole)[:_MOST_REASON])
            async with _cluster(settings) as client:
                with suppress(TimeoutError):
                    if client is not None:
                        await asyncio.wait_for(client.patch_config(f"{settings.release}-run", state), FAILURE_TOLD_WITHIN_S)
        raise


def packed_report(run_dir: Path) -> bytes | None:
    """Return a run's report, compressed, with as many samples as fit; None if it does not even fit without samples. Raises what
    `report_of` raises."""
    reports = (gzip.compress(report_of(run_dir, samples).encode()) for samples in (SAMPLES_READ, 4, 1, 0))
    return next((report for report in reports if len(report) <= MOST_REPORT_BYTES), None)


async def _keep_report(client: KubeClient, settings: TrainerSettings) -> None:
    try:
        await asyncio.to_thread(write_report, settings.run_dir)
        report = await asyncio.to_thread(packed_report, settings.run_dir) if settings.on_completion == "release" else b""
    except Exception:  # bad records must not keep GPUs allocated
        log.exception("cannot make the report of the run")
        return
    if report is None:
        log.error("the report has over %d bytes, too many for a Secret, so only the volume has it", MOST_REPORT_BYTES)
    elif report:
        body = {"data": {REPORT: base64.b64encode(report).decode()}}
        await client.call(PATCH_REPORT, name=f"{settings.release}-report", body=body)


def _cluster(settings: TrainerSettings, *, insists: bool = True) -> AbstractAsyncContextManager[KubeClient | None]:
    client = in_cluster(settings, insists=insists) if settings.release else None
    return nullcontext() if client is None else client


def _phase(settings: TrainerSettings, phase: str, version: int | None = None, reason: str = "") -> dict[str, str | None]:
    state = {"phase": phase, "run": settings.run, "reason": reason or None, "revision": settings.revision or None}
    return state if version is None else state | {"policyVersion": str(version)}
