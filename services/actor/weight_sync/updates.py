"""The actor's side of the weight-update protocol (docs/weight-updates.md): receive orders, stage, commit, answer.

`UpdateListener` opens and closes the `ServingGate`. The generation loop takes prompts while the gate is open.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
import uuid
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NoReturn

from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.protocol import NO_HEADERS, ControlMessage, Headers
from pipelinerl.errors import ManifestMismatch, MessageError, TransferError, UserError
from pipelinerl.messages.control import Backend, Order, Phase, decode_control
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.service.lifecycle import GpuTurn
from pipelinerl.service.logs import AGGREGATED
from pipelinerl.service.retry import Backoff, is_transfer_error, retry_forever
from pipelinerl.telemetry import attributes
from pipelinerl.telemetry.tracing import Trace, before_ns, child, headers_of, root, trace_in, trace_of
from pipelinerl.transfer.manifest import GroupFailed, GroupSpec, Manifest, TransferAborted
from pipelinerl.transfer.stores import LogStore
from pipelinerl.transfer.weight_log import Replica
from pipelinerl.v1 import control_pb2 as pb
from services.actor.metrics import ActorMetrics
from services.actor.weight_sync.client import WeightUpdateClient

log = logging.getLogger(__name__)

CONTROL_TYPES = {
    "epoch": pb.EpochStart,
    "announce": pb.Announce,
    "commit": pb.Commit,
    "published": pb.Published,
    "sleep": pb.Sleep,
    "abort": pb.Abort,
    "end": pb.RunEnd,
}
REASON_CHARACTERS = 500
STAGE_WITHIN_S = 3600.0
"""Maximum seconds to load a version from the local file. The worker's own checks end a stalled load much earlier."""
LOG_BACKOFF = Backoff(first_s=0.5, most_s=5.0, jitter=0.2)


class ServingGate:
    """Prompt groups may be taken only while this gate is open; groups taken earlier continue. `reason` has the conditions.

    `max_lag`: the served version must have the newest announced version's incarnation, and be at most `max_lag` + 1 versions
    behind it; None = no limit. The 1 allows for the time between the announcement of a version and its commit."""

    def __init__(self, max_lag: int | None) -> None:
        self._max_lag = max_lag
        self.opened = asyncio.Event()
        self.served: PolicyVersion | None = None
        self.announced: PolicyVersion | None = None
        self.draining = False
        self.swapping = False
        self.asleep = False

    @property
    def cache_salt(self) -> str:
        """Salt of a request that begins now. Requests with equal salts share cached keys and values, so the salt names the
        served version. During a swap, either version may serve the request, so its salt is unique."""
        return uuid.uuid4().hex if self.swapping else f"begun at {self.served}"

    @property
    def phase(self) -> Phase:
        if self.draining:
            return "draining"
        return "joining" if self.served is None else "serving"

    @property
    def reason(self) -> str:
        """Why the gate is closed, for /readyz and logs; empty if it is open."""
        if self.draining:
            return "draining"
        if self.served is None:
            return "no policy version served yet"
        if self.asleep:
            return "the engine sleeps while the trainer uses its GPU"
        if self.announced is not None and self._max_lag is not None:
            if self.served.incarnation != self.announced.incarnation:
                return f"serves {self.served}, which is from another incarnation than {self.announced}"
            if self.announced.number - self.served.number > self._max_lag + 1:
                return f"serves {self.served}, more than max_lag + 1 ({self._max_lag + 1}) versions behind {self.announced}"
        return ""

    def serve(self, version: PolicyVersion) -> None:
        self.served, self.asleep = version, False
        self._update()

    def sleep(self) -> None:
        self.asleep = True
        self._update()

    def announce(self, version: PolicyVersion) -> None:
        """Remember the newest announced version. Older ones, which an actor may get when it joins, are ignored."""
        if self.announced is None or version > self.announced:
            self.announced = version
        self._update()

    def drain(self) -> None:
        self.draining = True
        self._update()

    def _update(self) -> None:
        if self.reason:
            self.opened.clear()
        else:
            self.opened.set()


class UpdateListener:
    """Consumes the trainer's control messages in stream order and answers `joined`, `staged`, `serving` or `failed`.

    A separate task receives weights, so that an abort can be handled during a transfer. Generation goes on until a commit.
    Orders are ignored if they repeat an earlier one, or do not belong to the epoch that this process has joined. On a GPU
    shared with the trainer, this process holds the GPU's `turn` while its engine is awake.

    With a `log`, this actor is in no epoch, and reads the newest published version from the log."""

    def __init__(
        self,
        bus: Bus,
        receiver: WeightUpdateClient,
        gate: ServingGate,
        metrics: ActorMetrics,
        *,
        instance: str,
        process: str,
        turn: GpuTurn | None = None,
        log: LogStore | None = None,
    ) -> None:
        self._bus, self._receiver, self._gate, self._metrics = bus, receiver, gate, metrics
        self._instance, self._process, self._turn = instance, process, turn
        self.manifest_id = ""
        """Id of the manifest for which the model is prepared; empty before the first manifest."""
        self.loader = ""
        """Mode of the weight loader; if "shadow" is ruled out, a colon and the reason follow. Empty before a manifest."""
        self._tasks: asyncio.TaskGroup
        self._receiving: asyncio.Task[None] | None = None
        self._expected: PolicyVersion | None = None
        self._staged: PolicyVersion | None = None
        self.epoch: pb.EpochStart | None = None
        self._alone = False
        """True if the epoch is a side group, which consists of the trainer and joining actors."""
        self.serving = asyncio.Lock()
        """Other code may lock it to prevent commits and sleep."""
        self._log, self._published = log, pb.Published()
        self._folder = Path()
        self._replica: Replica | None = None
        """Reader of the log, which keeps one version in a local file; None before the first manifest."""

    @property
    def staging_state(self) -> str:
        """State of the update: `idle`, `receiving`, `staged` or `committing`. May be read on any thread."""
        receiving = self._receiving
        if self._gate.swapping:
            return "committing"
        if self._staged is not None:
            return "staged"
        return "receiving" if receiving is not None and not receiving.done() else "idle"

    async def run(self) -> None:
        """Wait until the trainer has made the NATS streams, then handle control messages until cancelled. Raises `CommitFailed`
        if a swap fails half-way. If the served model cannot load the weights, tells the trainer and raises `UserError`."""
        async with asyncio.TaskGroup() as self._tasks, AsyncExitStack() as stack:
            if self._log is not None:
                folder = tempfile.TemporaryDirectory(prefix="prl-log-", ignore_cleanup_errors=True)
                self._folder = Path(stack.enter_context(folder))
            stack.push_async_callback(self._end)
            kinds = ("manifest", *CONTROL_TYPES)
            messages = await retry_forever(
                lambda: stack.enter_async_context(self._bus.watch_control(kinds, self._instance)), "follow the control channel"
            )
            async for message in messages:
                await self._handle(message)

    async def _handle(self, message: ControlMessage) -> None:
        try:
            decoded = decode_order(message)
        except MessageError as error:
            log.error("control message %s cannot be read and is ignored: %s", message.kind, error, extra=AGGREGATED)
            self._metrics.bad_messages.labels("control").inc()
            return
        match decoded:
            case Manifest():
                await self._on_manifest(decoded)
            case pb.EpochStart() if self._log is None:
                await self._on_epoch(decoded, alone=bool(message.actor))
            case pb.Announce():
                await self._on_announce(decoded, trace_in(message.headers))
            case pb.Commit():
                await self._on_commit(decoded, trace_in(message.headers))
            case pb.Published() if self._log is not None:
                self._gate.announce(PolicyVersion(decoded.incarnation, decoded.version))
                self._published = decoded
                self._read_log()
            case pb.Sleep():
                await self._on_sleep(PolicyVersion(decoded.incarnation, decoded.version))
            case pb.Abort():
                if self._in_epoch(decoded):
                    log.warning("version %d of epoch %d is aborted: %s", decoded.version, decoded.epoch, decoded.reason)
                    await self._stop_receiving()
            case pb.RunEnd():
                log.info("the trainer ended the run at version %d: %s", decoded.version, decoded.reason or "done")

    async def _on_manifest(self, manifest: Manifest) -> None:
        if self.manifest_id == manifest.manifest_id:
            return
        async with self.serving:  # a swap to a version of the weight log must not be cancelled half-way
            await self._stop_receiving()
        try:
            loading = await self._receiver.prepare(manifest)
        except TransferError as error:
            await self._refuse(error)
        self.manifest_id = manifest.manifest_id
        self._metrics.weight_loader.set({loading.mode: 1.0})
        self.loader = f"{loading.mode}: {loading.reason}" if loading.reason else loading.mode
        log.info("weight loader: %s", self.loader)
        if self._log is not None:
            folder = self._folder / manifest.manifest_id
            folder.mkdir(exist_ok=True)
            self._replica = Replica(self._log, manifest, folder)
            self._read_log()

    async def _refuse(self, error: TransferError) -> NoReturn:
        """Tell the trainer that preparing for its manifest failed. Raise `UserError` for `ManifestMismatch`, else `error`."""
        self._metrics.updates.labels("refused").inc()
        await self._answer("failed", pb.Abort, None, reason=str(error)[:REASON_CHARACTERS])
        if not isinstance(error, ManifestMismatch):
            raise error
        raise UserError(
            f"the model served here does not take the trainer's weights: {error}. If they are of another model, start actor "
            "and trainer with the same recipe and the same initial model (PIPELINERL_RECIPE, PIPELINERL_MODEL_DIR)"
        ) from error

    async def _on_epoch(self, epoch: pb.EpochStart, *, alone: bool) -> None:
        """Leave the last epoch. Join `epoch` if it includes this process. `alone`: `epoch` is a side group."""
        mine = self.epoch
        me = next((m for m in epoch.members if m.actor == self._instance and m.process == self._process), None)
        if mine is not None and mine.incarnation == epoch.incarnation:
            beside = me is None and self._alone  # a side group continues beside epochs without this process
            if beside or epoch.epoch <= mine.epoch:  # NATS may have stored an order twice
                return
        await self._stop_receiving()
        self.epoch = None
        if me is None:
            return
        if self.manifest_id != epoch.manifest_id:
            await self._fail(epoch, TransferError(f"this actor is not prepared for manifest {epoch.manifest_id}"))
            return
        try:
            backend: Backend = "nccl" if epoch.backend == "nccl" else "gloo"
            group = GroupSpec(epoch.store_address, f"epoch-{epoch.epoch}", me.first_rank, epoch.world_size, backend)
            await self._receiver.join_group(group, epoch.deadline_s)
        except TransferError as error:
            await self._fail(epoch, error)
            return
        self.epoch, self._alone = epoch, alone
        log.info("joined epoch %d as rank %d of %d", epoch.epoch, me.first_rank, epoch.world_size)
        await self._answer("joined", pb.EpochJoined, epoch)

    async def _on_announce(self, announce: pb.Announce, trace: Trace) -> None:
        version = PolicyVersion(announce.incarnation, announce.version)
        self._gate.announce(version)
        if not self._in_epoch(announce) or version == self._expected:
            return
        await self._stop_receiving()
        if self._gate.served is not None and self._gate.served > version:
            await self._fail(announce, TransferError(f"this actor already serves {self._gate.served}, which is newer"))
            return
        self._expected = version
        self._receiving = self._tasks.create_task(self._receive(announce, trace))

    async def _receive(self, announce: pb.Announce, trace: Trace) -> None:
        version = PolicyVersion(announce.incarnation, announce.version)
        try:
            about = {attributes.VERSION: announce.version, attributes.EPOCH: announce.epoch}
            with child(trace, "weight_update.receive", attributes=about) as span:
                if self._turn is not None:
                    await self._turn.take()
                    if self._gate.asleep:
                        await self._receiver.wake()
                staged = await self._receiver.receive(version, announce.deadline_s)
                # Preparation overlaps with receiving. Its span has the total duration and ends now.
                span.set_attributes({attributes.BYTES: staged.num_bytes, attributes.RECEIVE_S: staged.receive_s})
                child(trace_of(span), "weight_update.stage", began_at=before_ns(staged.prepare_s)).end()
        except TransferError as error:
            await self._fail(announce, error)
            return
        self._staged = version
        self._metrics.received_bytes.inc(staged.num_bytes)
        self._metrics.receive_seconds.observe(staged.receive_s)
        figures = {name: getattr(staged, name) for name in ("checksum", "receive_s", "prepare_s")}
        fields = {"version": announce.version, "bytes": staged.num_bytes, **figures}
        await self._answer("staged", pb.Staged, announce, headers_of(trace_of(span)), **fields)

    def _read_log(self) -> None:
        if self._receiving is None or self._receiving.done():
            self._receiving = self._tasks.create_task(self._catch_up())

    @property
    def _is_behind(self) -> bool:
        """Return whether the log's newest version is newer than the served one, and this actor is prepared for its manifest."""
        newest, served = PolicyVersion(self._published.incarnation, self._published.version), self._gate.served
        return self._published.manifest_id == self.manifest_id != "" and (served is None or newest > served)

    async def _catch_up(self) -> None:
        """Serve the newest version of the log, with retries, until no newer version has been published."""
        while self._is_behind:
            what = "serve a version of the weight log"
            await retry_forever(self._serve_from_log, what, retried=is_transfer_error, backoff=LOG_BACKOFF)

    async def _serve_from_log(self) -> None:
        published, replica = self._published, self._replica
        if not self._is_behind or replica is None:
            return
        version = PolicyVersion(published.incarnation, published.version)
        commit = pb.Commit(incarnation=version.incarnation, version=version.number)
        with root("weight_update", attributes={attributes.VERSION: version.number}) as span:
            try:
                bytes_before, started_s = replica.fetched_bytes, time.monotonic()
                try:
                    path = await replica.bring_to(published)
                finally:
                    self._metrics.received_bytes.inc(replica.fetched_bytes - bytes_before)
                self._metrics.receive_seconds.observe(time.monotonic() - started_s)
                staged = await self._receiver.receive(version, STAGE_WITHIN_S, path)
                child(trace_of(span), "weight_update.stage", began_at=before_ns(staged.prepare_s)).end()
                await self._swap(commit, trace_of(span))
            except TransferError as error:
                await self._fail(commit, error)
                raise

    async def _on_commit(self, commit: pb.Commit, trace: Trace) -> None:
        version = PolicyVersion(commit.incarnation, commit.version)
        if not self._in_epoch(commit) or self._staged != version:
            return
        self._staged = None
        try:
            await self._swap(commit, trace)
        except TransferError as error:  # `CommitFailed` ends the process, which joins as a new member once restarted
            await self._fail(commit, error)

    async def _swap(self, commit: pb.Commit, trace: Trace) -> None:
        """Serve the staged version from the next decode step on, and tell the trainer. Raises `TransferError` if the swap
        cannot begin, and `CommitFailed` if it fails half-way."""
        version, self._gate.swapping = PolicyVersion(commit.incarnation, commit.version), True
        try:
            about = {attributes.VERSION: commit.version, attributes.EPOCH: commit.epoch}
            with child(trace, "weight_update.commit", attributes=about) as span:
                async with self.serving:
                    stall_s = await self._receiver.commit(version)
                    self._gate.serve(version)
                span.set_attribute(attributes.STALL_S, stall_s)
                child(trace_of(span), "weight_update.load", began_at=before_ns(stall_s)).end()
        finally:
            self._gate.swapping = False
        self._metrics.updates.labels("committed").inc()
        self._metrics.stall_seconds.observe(stall_s)
        headers = headers_of(trace_of(span))
        await self._answer("serving", pb.Serving, commit, headers, version=commit.version, stall_s=stall_s)

    async def _on_sleep(self, version: PolicyVersion) -> None:
        """Put the engine to sleep and release the GPU. Do nothing if the engine does not serve `version`, or during an update;
        the trainer repeats the order."""
        if self._turn is None or version != self._gate.served or self._gate.asleep or self.staging_state != "idle":
            return
        self._gate.sleep()
        async with self.serving:  # wait for a running `Score` call
            await self._receiver.sleep()
        self._turn.release()
        log.info("the engine sleeps with version %s while the trainer uses the GPU", version)

    async def _stop_receiving(self) -> None:
        """Cancel a running receive and withdraw a staged version."""
        task, self._receiving, self._expected = self._receiving, None, None
        unfinished = task is not None and not task.done()
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if unfinished or self._staged is not None:
            self._staged = None
            self._metrics.updates.labels("discarded").inc()
            await self._receiver.discard()

    async def _end(self) -> None:
        try:
            await self._stop_receiving()
        except TransferError as error:
            log.warning("cannot discard the received weights: %s", error)

    def _in_epoch(self, order: pb.Announce | pb.Commit | pb.Abort) -> bool:
        mine = self.epoch
        return mine is not None and (mine.incarnation, mine.epoch) == (order.incarnation, order.epoch)

    async def _fail(self, about: pb.EpochStart | pb.Announce | pb.Commit, error: TransferError) -> None:
        log.error("the weight update failed in this actor: %s", error)
        self._metrics.updates.labels("failed").inc()
        reason, group_broke = str(error)[:REASON_CHARACTERS], isinstance(error, GroupFailed | TransferAborted)
        version = 0 if isinstance(about, pb.EpochStart) else about.version
        await self._answer("failed", pb.Abort, about, version=version, reason=reason, group_broke=group_broke)

    async def _answer(
        self,
        kind: str,
        answer: type[pb.EpochJoined | pb.Staged | pb.Serving | pb.Abort],
        order: pb.EpochStart | pb.Announce | pb.Commit | None,
        headers: Headers = NO_HEADERS,
        **fields: Any,
    ) -> None:
        epoch: dict[str, Any] = {"incarnation": order.incarnation, "epoch": order.epoch} if order is not None else {}
        payload = answer(actor=self._instance, **epoch, **fields).SerializeToString()
        await retry_forever(lambda: self._bus.publish_control(kind, payload, self._instance, headers), f"answer {kind!r}")


def decode_order(message: ControlMessage) -> Manifest | Order:
    """Decode a control message. Raises `MessageError` if it is malformed."""
    if message.kind == "manifest":
        return Manifest.from_bytes(message.payload)
    return decode_control(message.payload, CONTROL_TYPES[message.kind])
