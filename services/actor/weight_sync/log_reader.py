"""Read versions from the weight log and stage them, for an actor that is in no transfer group."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from pipelinerl.errors import TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.service.retry import Backoff, retry_forever
from pipelinerl.telemetry import attributes
from pipelinerl.telemetry.tracing import Trace, before_ns, child, root, trace_of
from pipelinerl.transfer.manifest import Manifest
from pipelinerl.transfer.stores import LogStore
from pipelinerl.transfer.weight_log import Replica
from pipelinerl.v1.control_pb2 import Commit, Published
from services.actor.metrics import ActorMetrics
from services.actor.weight_sync.client import WeightUpdateClient
from services.actor.weight_sync.gate import ServingGate

STAGE_WITHIN_S = 3600.0
"""Maximum seconds to load a version from the local file, which the worker's own checks end much earlier."""
BACKOFF = Backoff(first_s=0.5, most_s=5.0, jitter=0.2)


class LogReader:
    """Brings the actor to the newest version that was offered. Versions that were published meanwhile are skipped, apart from
    the newest. `swap` serves a staged version; `failed` tells the trainer why a version could not be read.

    An error of the store, or a version that retention has removed, is retried until it succeeds or a newer version is offered.
    """

    def __init__(
        self,
        store: LogStore,
        receiver: WeightUpdateClient,
        gate: ServingGate,
        metrics: ActorMetrics,
        swap: Callable[[Commit, Trace], Awaitable[None]],
        failed: Callable[[Commit, int, TransferError], Awaitable[None]],
    ) -> None:
        self._store, self._receiver, self._gate, self._metrics = store, receiver, gate, metrics
        self._swap, self._failed = swap, failed
        self._folder = tempfile.TemporaryDirectory(prefix="prl-log-", ignore_cleanup_errors=True)
        self._replica: Replica | None = None
        self._manifest_id = ""
        self._newest: Published | None = None

    def prepared(self, manifest: Manifest) -> None:
        """Read versions of this manifest from now on."""
        folder = Path(self._folder.name) / manifest.manifest_id
        folder.mkdir(exist_ok=True)
        self._replica, self._manifest_id = Replica(self._store, manifest, folder), manifest.manifest_id

    def offer(self, published: Published) -> None:
        self._newest = published

    async def catch_up(self) -> None:
        """Serve the newest offered version and those that are offered meanwhile. Raises `CommitFailed`."""
        while self._due() is not None:
            await retry_forever(
                self._serve_newest,
                "serve a version of the weight log",
                retried=lambda error: isinstance(error, TransferError),
                backoff=BACKOFF,
            )

    def close(self) -> None:
        """Remove the local copy of the weights."""
        self._folder.cleanup()

    def _due(self) -> Published | None:
        newest, served = self._newest, self._gate.served
        if newest is None or newest.manifest_id != self._manifest_id:  # the manifest's message is yet to come
            return None
        return newest if served is None or PolicyVersion(newest.incarnation, newest.version) > served else None

    async def _serve_newest(self) -> None:
        published, replica = self._due(), self._replica
        if published is None or replica is None:
            return
        version = PolicyVersion(published.incarnation, published.version)
        commit = Commit(incarnation=version.incarnation, version=version.number)
        with root("weight_update", attributes={attributes.VERSION: version.number}) as span:
            try:
                path = await self._fetched(replica, published)
                staged = await self._receiver.receive(version, STAGE_WITHIN_S, path)
                child(trace_of(span), "weight_update.stage", began_at=before_ns(staged.prepare_s)).end()
                await self._swap(commit, trace_of(span))
            except TransferError as error:
                await self._failed(commit, version.number, error)
                raise

    async def _fetched(self, replica: Replica, published: Published) -> Path:
        """Bring the replica to a version, and count its bytes and seconds."""
        bytes_before, started_s = replica.fetched_bytes, time.monotonic()
        try:
            path = await replica.bring_to(published)
        finally:
            self._metrics.received_bytes.inc(replica.fetched_bytes - bytes_before)
        self._metrics.receive_seconds.observe(time.monotonic() - started_s)
        return path
