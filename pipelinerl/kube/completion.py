"""The end of a run on a cluster: publish a state that others can wait for, free the GPUs, and keep the report.

Nothing here decides that a run is finished. The state is a ConfigMap of the release, whose `data.phase` is `Running`,
`Finished` or `Failed`, and which shows the progress. A finished run is scaled to zero: first its actors, whose number is stored
in that ConfigMap until the run continues, then the trainer. Scaling through the subresource leaves no field manager, so an
upgrade can set the replicas again without a conflict. If the process is stopped too early, the next one begins again, so an
action may run twice. All calls are repeated until the API accepts them, but for those that show the progress.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pipelinerl.errors import UserError
from pipelinerl.kube.client import BACKOFF, SCALE_ACTORS, SCALE_TRAINER, KubeClient, KubeError, in_cluster
from pipelinerl.local.ending import SAMPLES_READ, report_of, write_report
from pipelinerl.service.lifecycle import sole_error
from pipelinerl.service.retry import retry_forever
from pipelinerl.service.settings import TrainerSettings

log = logging.getLogger(__name__)

RUNNING, FINISHED, FAILED = "Running", "Finished", "Failed"
REPORT = "report.html.gz"
MOST_REPORT_BYTES = 1_000_000
"""Maximum size of the compressed report. A Secret holds 1 MiB, including keys and encoding."""
SEEN_WITHIN_S = 30.0
"""Seconds that the trainer stays after the end, so that alerts and open pages notice it."""
FAILURE_TOLD_WITHIN_S = 30.0
_MOST_REASON = 2000
PROGRESS_EVERY_S = 30.0
_ACTORS = "actors"
_Answer = TypeVar("_Answer")


async def run_goes_on(settings: TrainerSettings, version: int) -> None:
    """Publish that the run is running, and restore the actors that an earlier end scaled to zero."""
    async with _cluster(settings) as client:
        if client is None:
            return
        state = await _tell_phase(client, settings, RUNNING, version)
        if actors := int(state.get(_ACTORS) or 0):
            name = f"{settings.release}-actor"
            if await _insist(lambda: client.count_actors(name)) == 0:  # otherwise Helm has already set the number
                await _insist(lambda: client.scale(SCALE_ACTORS, name, actors))
            await _insist(lambda: client.patch_config(f"{settings.release}-run", {_ACTORS: None}))


async def publish_progress(settings: TrainerSettings, progress: Callable[[], Mapping[str, str]]) -> None:
    """Write the run's progress, for people who list runs, every `PROGRESS_EVERY_S` until cancelled. An error is no reason to
    repeat a call, since the next one comes soon."""
    async with _cluster(settings) as client:
        while client is not None:
            try:
                await client.patch_config(f"{settings.release}-run", progress())
            except KubeError as error:
                log.debug("%s", error)
            await asyncio.sleep(PROGRESS_EVERY_S)


async def complete(
    settings: TrainerSettings, version: int, uploaded: Callable[[], Awaitable[None]], progress: Mapping[str, str]
) -> None:
    """Free the resources of a finished run, as `on_completion` says, and publish that it has finished. The trainer is scaled to
    zero last, after `uploaded` has returned, because that ends this process."""
    async with _cluster(settings) as client:
        if client is None:
            return
        await _insist(lambda: client.patch_config(f"{settings.release}-run", progress))
        if settings.on_completion == "keep":
            await uploaded()  # whoever fetches the results may then remove the release
            await _tell_phase(client, settings, FINISHED, version)
            return
        actor, run = f"{settings.release}-actor", f"{settings.release}-run"
        if actors := await _insist(lambda: client.count_actors(actor)):
            await _insist(lambda: client.patch_config(run, {_ACTORS: str(actors)}))
            await _insist(lambda: client.scale(SCALE_ACTORS, actor, 0))
        await _keep_report(client, settings)
        await _tell_phase(client, settings, FINISHED, version)
        await asyncio.gather(uploaded(), asyncio.sleep(SEEN_WITHIN_S))
        await _insist(lambda: client.scale(SCALE_TRAINER, f"{settings.release}-trainer", 0))


@asynccontextmanager
async def failure_told(settings: TrainerSettings) -> AsyncIterator[None]:
    """If a user's mistake ends the block, publish that the run failed, because a restarted trainer would fail again. Other
    errors may not recur, so they are not published."""
    try:
        yield
    except Exception as error:
        if isinstance(sole := sole_error(error), UserError):
            async with _cluster(settings) as client:
                with suppress(TimeoutError):
                    async with asyncio.timeout(FAILURE_TOLD_WITHIN_S):
                        if client is not None:
                            await _tell_phase(client, settings, FAILED, reason=str(sole)[:_MOST_REASON])
        raise


def packed_report(run_dir: Path) -> bytes:
    """Return a run's report, compressed, with as many samples as fit. Even without samples it may exceed `MOST_REPORT_BYTES`.
    Raises what `report_of` raises."""
    for samples in (SAMPLES_READ, 4, 1, 0):
        packed = gzip.compress(report_of(run_dir, samples).encode())
        if len(packed) <= MOST_REPORT_BYTES:
            break
    return packed


async def _keep_report(client: KubeClient, settings: TrainerSettings) -> None:
    try:
        await asyncio.to_thread(write_report, settings.run_dir)
        report = await asyncio.to_thread(packed_report, settings.run_dir)
    except Exception:  # bad records must not keep GPUs allocated
        log.exception("cannot make the report of the run")
        return
    if settings.on_completion == "release" and len(report) > MOST_REPORT_BYTES:
        log.error("the report has %d compressed bytes, too many for a Secret; it is only on the volume", len(report))
    elif settings.on_completion == "release":
        await _insist(lambda: client.patch_secret(f"{settings.release}-report", {REPORT: report}))


@asynccontextmanager
async def _cluster(settings: TrainerSettings) -> AsyncIterator[KubeClient | None]:
    client = in_cluster(settings) if settings.release else None
    try:
        yield client
    finally:
        if client is not None:
            await client.close()


async def _tell_phase(
    client: KubeClient, settings: TrainerSettings, phase: str, version: int | None = None, reason: str | None = None
) -> dict[str, str]:
    state = {"phase": phase, "run": settings.run, "reason": reason, "revision": settings.revision or None}
    if version is not None:
        state["policyVersion"] = str(version)
    return await _insist(lambda: client.patch_config(f"{settings.release}-run", state))


async def _insist(call: Callable[[], Awaitable[_Answer]]) -> _Answer:
    return await retry_forever(call, "change the release", retried=lambda error: isinstance(error, KubeError), backoff=BACKOFF)
