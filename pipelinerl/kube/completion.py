"""The end of a run, for a cluster: a state that others can wait for, GPUs that are free again, and a report that stays.

The state is a ConfigMap of the release, `data.phase` of which is `Running`, `Finished` or `Failed`. A run that is finished is
scaled away: its actors, whose number stays in that ConfigMap until the run goes on, and then the trainer itself. Scaled to zero
through their subresource, replicas have no manager in the API, so that the manifest of an upgrade sets them again without a
conflict. Whoever is stopped amid this begins again: each step may be taken twice. Nothing here decides that a run is finished.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pipelinerl.errors import UserError
from pipelinerl.kube.client import BACKOFF, SCALE_ACTORS, SCALE_TRAINER, KubeClient, KubeError, in_cluster
from pipelinerl.local.ending import SAMPLES_READ, report_of, write_report
from pipelinerl.service.lifecycle import sole_error
from pipelinerl.service.settings import TrainerSettings

log = logging.getLogger(__name__)

RUNNING, FINISHED, FAILED = "Running", "Finished", "Failed"
REPORT = "report.html.gz"
MOST_REPORT_BYTES = 1_000_000
"""A Secret holds 1 MiB."""
SEEN_WITHIN_S = 30.0
"""The trainer stays for as long after the end: alerts and open pages hear of it."""
FAILURE_TOLD_WITHIN_S = 30.0
_MOST_REASON = 2000
_ACTORS = "actors"
_Answer = TypeVar("_Answer")


async def run_goes_on(settings: TrainerSettings, version: int) -> None:
    """Says that the run is running, and gives it back the actors that it had when it was finished before. Waits for the API."""
    async with _cluster(settings) as client:
        if client is None:
            return
        state = await _tell_phase(client, settings, RUNNING, version)
        if actors := int(state.get(_ACTORS) or 0):
            name = f"{settings.release}-actor"
            if await _insist(lambda: client.count_actors(name)) == 0:  # else Helm was faster, by a number of the values
                await _insist(lambda: client.scale(SCALE_ACTORS, name, actors))
            await _insist(lambda: client.patch_config(f"{settings.release}-run", {_ACTORS: None}))


async def complete(settings: TrainerSettings, version: int, uploaded: Callable[[], Awaitable[None]]) -> None:
    """Frees what a finished run of `version` holds, as `on_completion` says, and says that it is finished. Waits for the API.

    The trainer itself goes last, once `uploaded` returns: whoever scales it to zero ends this process.
    """
    async with _cluster(settings) as client:
        if client is None:
            return
        if settings.on_completion == "keep":
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
    """Says that the run failed where the user's mistake ends the block: the trainer that starts again would end by it again.
    Anything else may heal."""
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
    """The report of a run's folder, compressed, with as many samples as there is room for: without any it may still be larger
    than `MOST_REPORT_BYTES`. Raises what `report_of` raises."""
    for samples in (SAMPLES_READ, 4, 1, 0):
        packed = gzip.compress(report_of(run_dir, samples).encode())
        if len(packed) <= MOST_REPORT_BYTES:
            break
    return packed


async def _keep_report(client: KubeClient, settings: TrainerSettings) -> None:
    """On the volume, and where `release` says so beside it."""
    try:
        await asyncio.to_thread(write_report, settings.run_dir)
        report = await asyncio.to_thread(packed_report, settings.run_dir)
    except Exception:  # whatever is wrong with the records: no GPU is kept for them
        log.exception("the run has no report")
        return
    if settings.on_completion == "release" and len(report) > MOST_REPORT_BYTES:
        log.error("the report is on the volume alone: its %d bytes, compressed, are more than a Secret holds", len(report))
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
    state = {"phase": phase, "run": settings.run, "reason": reason}
    if version is not None:
        state["policyVersion"] = str(version)
    return await _insist(lambda: client.patch_config(f"{settings.release}-run", state))


async def _insist(call: Callable[[], Awaitable[_Answer]]) -> _Answer:
    failures = 0
    while True:
        try:
            return await call()
        except KubeError as error:
            failures += 1
            log.warning("%s; trying again", error)
            await asyncio.sleep(BACKOFF.after(error, failures))
