"""Actors without an inference engine, as processes: real protocol, NATS and collective; weights that nobody decodes with.

For fault tests and for benchmarks with many members: they start in a fraction of a second, and can be told to die, freeze, hang
or fail in the middle of a phase. What they serve is reported as the checksum of their weights.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from pipelinerl.bus.jetstream import connect
from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.errors import TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.chunks import checksum
from pipelinerl.transfer.group import StreamFile, WeightGroup
from pipelinerl.transfer.manifest import GroupSpec, Manifest
from pipelinerl.transfer.stores import open_store
from pipelinerl.v1.control_pb2 import Registration
from services.actor.app import Heartbeat
from services.actor.metrics import ActorMetrics
from services.actor.weight_sync.client import StagedWeights, WeightLoading
from services.actor.weight_sync.updates import ServingGate, UpdateListener
from services.actor.weight_sync.worker import Receiver

Phase = Literal["joining", "receiving", "staged", "committing", "serving"]
"""Where a member can break: in the group before it says so, after a first tensor, when all is staged before it says so,
before the swap, after it."""
PHASES: tuple[Phase, ...] = ("joining", "receiving", "staged", "committing", "serving")
How = Literal["dies", "freezes", "hangs", "fails"]
"""SIGKILL to itself, SIGSTOP to itself, waits for ever while its heart beats, raises."""
STALL_TIMEOUT_S = 2.0
WITHIN_S = 300.0
"""Far above what anything here takes: reached only by something that waits for ever."""
_CLONE_NEWNET = 0x40000000
_TICK_S = 0.005


@dataclass(frozen=True)
class Break:
    """What happens on reaching `phase`, of policy version `version` where the phase is of a version."""

    phase: Phase
    how: How
    version: int = 0


@dataclass(frozen=True)
class MemberSpec:
    """One member and whom it talks to."""

    url: str
    run: str
    name: str
    limits: StreamLimits
    breaks: Break | None = None
    address: str = "127.0.0.1"
    """On which other ranks reach it."""
    namespace: str = ""
    """Of the network that its process lives in; empty: this machine's."""
    stall_timeout_s: float = STALL_TIMEOUT_S
    """The longest that one chunk may take."""
    pod_uid: str = ""
    log: str = ""
    """Place of the weight log that it reads, instead of being in epochs; empty: none."""
    folder: str = ""
    """For temporary files, which a killed process leaves behind."""


@dataclass(frozen=True)
class Report:
    """What a member says: it `joined` an epoch (`number`), `serves` a version (`number`, `checksum`), or `breaks` now."""

    kind: Literal["joined", "serves", "breaks"]
    number: int
    checksum: int = 0
    at_s: float = 0.0
    """Monotonic clock, the same for all processes of a machine."""
    pause_s: float = 0.0
    """The longest time since the last version served in which this process's event loop, which would feed an engine, did
    not run."""


class TensorReceiver:
    """As `weight_sync.client.WeightUpdateClient`, over plain tensors, in this process. `weights`: the served version.

    `address`: on which other ranks reach it; `stall_timeout_s`: the longest that one chunk may take.
    """

    def __init__(self, address: str, stall_timeout_s: float = STALL_TIMEOUT_S) -> None:
        self._address, self._stall_timeout_s = address, stall_timeout_s
        self._manifest: Manifest | None = None
        self._group: WeightGroup | StreamFile | None = None
        self._staged: dict[str, Tensor] = {}
        self._aborted = threading.Event()
        self._idle = threading.Lock()
        self.weights: dict[str, Tensor] = {}

    async def prepare(self, manifest: Manifest) -> WeightLoading:
        self._manifest = manifest
        return WeightLoading("shadow")

    async def join_group(self, group: GroupSpec, timeout_s: float) -> None:
        self._leave()
        here = replace(group, bind_host=self._address)
        self._group = await asyncio.to_thread(WeightGroup.connect, here, timeout_s)

    async def receive(self, version: PolicyVersion, deadline_s: float, file: Path | None = None) -> StagedWeights:
        if file is not None:
            assert self._manifest is not None, "prepare comes first"
            self._leave()
            self._group = StreamFile(str(file), self._manifest, version)
        return await asyncio.to_thread(self._receive, version, deadline_s)

    def _receive(self, version: PolicyVersion, deadline_s: float) -> StagedWeights:
        if self._group is None or self._manifest is None:
            raise TransferError("this worker has joined no transfer group")
        with self._idle:
            receiver = Receiver(
                self._group, self._manifest, version, timeout_s=deadline_s,
                stall_timeout_s=self._stall_timeout_s, aborted=self._aborted,
            )  # fmt: skip
            self._staged = {}
            try:
                for name, tensor in receiver.tensors():
                    self._staged[name] = tensor.clone()
                    self.reach("receiving", version)
            except TransferError:
                self._leave()
                raise
            self.reach("staged", version)
            return receiver.staged()

    async def commit(self, version: PolicyVersion) -> float:
        self.weights, self._staged = self._staged, {}
        return 0.0

    async def discard(self) -> None:
        self._aborted.set()
        await asyncio.to_thread(self._forget)

    def _forget(self) -> None:
        with self._idle:
            self._staged = {}
            self._aborted.clear()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def reach(self, phase: Phase, version: PolicyVersion | None) -> None:
        """Called at each phase, not on the event loop's thread. May raise `TransferError`."""


class LightReceiver(TensorReceiver):
    """One that breaks as its `spec` says, and reports what it does."""

    def __init__(self, spec: MemberSpec, reports: Connection) -> None:
        super().__init__(spec.address, spec.stall_timeout_s)
        self._spec, self._reports = spec, reports
        self._broken = False
        self._longest_pause_s = 0.0

    def say(self, report: Report) -> None:
        self._reports.send_bytes(json.dumps(asdict(replace(report, at_s=time.monotonic()))).encode())

    async def watch_pauses(self) -> None:
        """Runs until cancelled."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(_TICK_S)
            self._longest_pause_s = max(self._longest_pause_s, time.monotonic() - before_s - _TICK_S)

    async def join_group(self, group: GroupSpec, timeout_s: float) -> None:
        await super().join_group(group, timeout_s)
        self.say(Report("joined", int(group.name.removeprefix("epoch-"))))
        await asyncio.to_thread(self.reach, "joining", None)

    async def commit(self, version: PolicyVersion) -> float:
        await asyncio.to_thread(self.reach, "committing", version)
        await super().commit(version)
        pause_s, self._longest_pause_s = self._longest_pause_s, 0.0
        self.say(Report("serves", version.number, weights_checksum(self.weights), pause_s=pause_s))
        await asyncio.to_thread(self.reach, "serving", version)
        return 0.0

    def reach(self, phase: Phase, version: PolicyVersion | None) -> None:
        breaks = self._spec.breaks
        if self._broken or breaks is None or breaks.phase != phase:
            return
        if version is not None and breaks.version != version.number:
            return
        self._broken = True
        self.say(Report("breaks", breaks.version))
        match breaks.how:
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freezes":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hangs":
                threading.Event().wait()
            case "fails":
                raise TransferError(f"told to fail while {phase}")


def weights_checksum(weights: dict[str, Tensor]) -> int:
    """Checksum over all tensors in the order of their names."""
    laid_out = [weights[name].contiguous().view(-1).view(torch.uint8) for name in sorted(weights)]
    return checksum(torch.cat(laid_out))


async def _live(spec: MemberSpec, reports: Connection) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    receiver, gate, process = LightReceiver(spec, reports), ServingGate(max_lag=None), uuid.uuid4().hex[:12]

    async with (
        connect(spec.url, spec.run, limits=spec.limits, name=spec.name, request_timeout_s=2.0) as bus,
        open_store(spec.log, bus) if spec.log else nullcontext() as log,
    ):
        metrics = ActorMetrics(CollectorRegistry())
        listener = UpdateListener(bus, receiver, gate, metrics, instance=spec.name, process=process, log=log)
        me = Registration(actor=spec.name, process=process, grpc_address="-:1", ranks=1, pod_uid=spec.pod_uid)
        me.reads_log = log is not None
        heartbeat = Heartbeat(bus, gate, lambda: listener.manifest_id, me)
        tasks = [asyncio.create_task(part) for part in (listener.run(), heartbeat.run(), receiver.watch_pauses())]
        await asyncio.wait({*tasks, stopped := asyncio.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
        gate.drain()
        tasks[1].cancel()
        await heartbeat.leave()
        for task in (*tasks, stopped):
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                traceback.print_exception(ended)


def main(spec: MemberSpec, reports: Connection) -> None:
    """A member's process. Ends with SIGTERM, or when its listener fails."""
    if spec.namespace:
        _enter_network(spec.namespace)
    tempfile.tempdir = spec.folder or None
    torch.set_num_threads(1)
    asyncio.run(_live(spec, reports))
    os._exit(0)  # a thread may hang, as it was told to


def _enter_network(namespace: str) -> None:
    """For this thread and those it starts. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")


@dataclass
class LightMember:
    """The watcher's end of a member."""

    spec: MemberSpec
    process: Any
    reports: list[Report] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def served(self) -> list[Report]:
        """Versions it has served, in order."""
        return [report for report in self.reports if report.kind == "serves"]

    @property
    def version(self) -> int:
        """-1: none yet."""
        return self.served[-1].number if self.served else -1

    def send(self, number: signal.Signals) -> None:
        """Does nothing if it is gone."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    @property
    def is_running(self) -> bool:
        """Neither gone nor stopped by a signal."""
        try:
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "TZX"

    @property
    def broke(self) -> bool:
        return any(report.kind == "breaks" for report in self.reports)

    async def until_serving(self, version: int, timeout_s: float = WITHIN_S) -> None:
        await self.until(lambda: self.version >= version, timeout_s)

    async def until_broken(self) -> None:
        """Returns when it has broken. One that freezes stands still then: a SIGCONT before its SIGSTOP would be lost."""
        await self.until(lambda: self.broke)
        freezes = self.spec.breaks is not None and self.spec.breaks.how == "freezes"
        while freezes and self.is_running:  # noqa: ASYNC110 - no event tells of a stop
            await asyncio.sleep(_TICK_S)

    async def until(self, condition: Any, timeout_s: float = WITHIN_S) -> None:
        """Raises TimeoutError with what it has said so far."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(f"{self.name} has said {self.reports}") from None

    def heard(self, report: Report) -> None:
        self.reports.append(report)
        self._changed.set()


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    main = getattr(sys.modules["__main__"].__spec__, "name", "")
    # Each member imports a benchmark that is the main module, too. Without this, it would import transformers anew.
    stage = ["benchmarks.light_stage", "benchmarks.random_models"] if main.startswith("benchmarks.") else []
    context.set_forkserver_preload(["benchmarks.light_members", *stage])
    return context


@asynccontextmanager
async def light_member(spec: MemberSpec) -> AsyncIterator[LightMember]:
    """Starts a member's process; kills it at the block's end if it still runs."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = _context().Process(target=main, args=(spec, sending), name=spec.name, daemon=True)
    await asyncio.to_thread(process.start)
    sending.close()
    member, loop = LightMember(spec, process), asyncio.get_running_loop()

    def read() -> None:
        try:
            while receiving.poll():
                member.heard(Report(**json.loads(receiving.recv_bytes())))
        except (EOFError, OSError):
            loop.remove_reader(receiving.fileno())

    loop.add_reader(receiving.fileno(), read)
    try:
        yield member
    finally:
        if process.is_alive():
            process.kill()
        await asyncio.to_thread(process.join, 10)
        loop.remove_reader(receiving.fileno())
        receiving.close()
