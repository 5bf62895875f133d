"""Actors that read the weight log, beside a trainer whose epoch may have members or none."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.errors import ServiceError, TransferError
from pipelinerl.kube.client import PodEnd
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.chunks import pack
from pipelinerl.transfer.delta import LogDamaged
from pipelinerl.transfer.stores import StoreError, open_store
from pipelinerl.transfer.weight_log import WeightLog
from services.actor.metrics import ActorMetrics
from services.actor.weight_sync.client import CommitFailed
from services.actor.weight_sync.updates import ServingGate, UpdateListener
from services.trainer.weight_sync.sender import LogWriter, Snapshot
from tests.support.memory_bus import MemoryBus, MemoryServer
from tests.unit.builders import RUN
from tests.unit.test_update_protocol import MANIFEST, RunningActor, ScriptedReceiver, Stage, ended, ends_with
from tests.unit.test_update_protocol import stage as protocol_stage
from tests.unit.test_weight_log import Faulty

LIMITS = StreamLimits(member_ttl_s=600)


def stream_of(version: int) -> Tensor:
    weights = {spec.name: torch.full(tuple(spec.shape), float(version)) for spec in MANIFEST.parameters}
    return pack(MANIFEST, weights)


def snapshot(version: int, incarnation: int = 1) -> Snapshot:
    return Snapshot(MANIFEST, PolicyVersion(incarnation, version), stream_of(version))


@dataclass(kw_only=True)
class Reader(RunningActor):
    store: Faulty

    @property
    def served(self) -> list[int]:
        return [version.number for version in self.receiver.served]

    async def register(self, process: str = "", **fields: Any) -> None:
        served = self.gate.served or PolicyVersion(0, 0)
        about = {"reads_log": True, "policy_version": served.number, "incarnation": served.incarnation}
        await super().register(process, **about | fields)


@dataclass
class LogStage(Stage):
    store: Faulty
    folder: Path

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                assert not self.running.done(), self.running.exception()
                await asyncio.sleep(0.001)

    async def read(self, name: str, max_lag: int | None = None) -> Reader:
        bus = await self.stack.enter_async_context(MemoryBus(RUN, server=self.server, limits=LIMITS))
        receiver, gate, metrics = ScriptedReceiver(), ServingGate(max_lag), ActorMetrics(CollectorRegistry())
        store = Faulty(await self.stack.enter_async_context(open_store(self.folder.as_uri(), bus)))
        listener = UpdateListener(bus, receiver, gate, metrics, instance=name, process="p1", log=store)
        task = asyncio.create_task(listener.run())
        self.stack.push_async_callback(ended, task)
        reader = Reader(name, bus, receiver, gate, listener, task, store=store)
        await reader.register()
        await self.until(lambda: name in self.updater.readers.members)
        return reader

    async def join(self, name: str, *more: Any, **options: Any) -> RunningActor:
        actor = await super().join(name, *more, **options)
        await self.until(lambda: name in self.updater._main.coordinator.present)
        return actor

    async def send(self, version: int) -> None:
        async with asyncio.timeout(60):
            await self.updater.offer(version, snapshot(version, self.updater.incarnation))
            await self.until(lambda: self.updater.served_version >= version)


@asynccontextmanager
async def stage(folder: Path, incarnation: int = 1, server: MemoryServer | None = None) -> AsyncIterator[LogStage]:
    server = server or MemoryServer()
    async with MemoryBus(RUN, server=server, limits=LIMITS) as bus, open_store(folder.as_uri(), bus) as opened:
        writer = LogWriter(WeightLog(store := Faulty(opened), MANIFEST, RUN, anchor_every=4))
        async with protocol_stage(server=server, incarnation=incarnation, log=writer) as one:
            yield LogStage(**vars(one), store=store, folder=folder)


async def test_a_run_of_readers_only_goes_on_with_the_fastest_and_each_serves_whole_versions(tmp_path: Path) -> None:
    async with stage(tmp_path) as one:
        fast, slow = await one.read("a"), await one.read("b", max_lag=1)
        assert one.updater.num_present == 2
        slow.receiver.may_receive.clear()
        for version in range(6):
            await one.send(version)
        assert fast.served == list(range(6))
        assert (one.updater.served_version, slow.served, slow.gate.opened.is_set()) == (5, [], False)
        assert one.updater.states == {"a": "serving", "b": "joining"}
        assert list(one.updater.serving) == ["a"]
        slow.receiver.may_receive.set()
        await one.until(lambda: slow.served[-1:] == [5])
        assert slow.served[0] < 5, "it finished the version that it was staging"
        assert len(slow.served) == 2, "it skipped those between"
        for reader in (fast, slow):
            for version, data in reader.receiver.read.items():
                assert data == stream_of(version.number).numpy().tobytes()
        assert one.sender.sent == [], "the trainer sent no bytes to anyone"
        await one.until(lambda: one.updater.states["b"] == "serving")
        assert [(change.kind, change.member.actor) for change in one.history.changes] == [("joined", "a"), ("joined", "b")]
        slow.receiver.may_receive.clear()
        await one.send(6)
        assert one.updater.versions == {"a": 6, "b": 5}, "the page shows that b is behind"
        slow.receiver.may_receive.set()
        await one.until(lambda: one.updater.versions["b"] == 6)
        one.updater.readers.unreachable.add("b")
        assert list(one.updater.serving) == ["a"], "an evaluation would wait for b in vain"
        assert list(one.updater.members) == ["a", "b"], "b is asked for its load again"
        assert one.history.records[-1].stall_s["a"] == 0.002


async def test_readers_never_hold_the_members_and_take_over_when_those_are_gone(tmp_path: Path) -> None:
    async with stage(tmp_path) as one:
        _, reader = await one.join("m"), await one.read("r")
        reader.receiver.may_receive.clear()
        await one.send(0)
        await one.send(1)
        assert one.served("m") == [0, 1]
        assert list(one.updater.serving) == ["m"]
        reader.receiver.may_receive.set()
        await one.until(lambda: reader.served[-1:] == [1])
        await one.until(lambda: sorted(one.updater.serving) == ["m", "r"])
        await one.updater.bus.remove_member("m")
        await one.until(lambda: one.updater.num_present == 1)
        await one.send(2)  # nobody is left in the epoch
        assert (reader.served[-1], one.updater.served_version) == (2, 2)
        await one.join("m")
        await one.send(3)
        await one.until(lambda: one.served("m")[-1:] == [3] and reader.served[-1] == 3)


async def test_a_measured_version_is_kept_by_members_and_readers(tmp_path: Path) -> None:
    async with stage(tmp_path) as one:
        member, reader = await one.join("m"), await one.read("a")
        await one.updater.offer(0, snapshot(0))
        async with asyncio.timeout(60):
            async with one.updater.hold_when_served(0):
                await one.until(lambda: reader.served == [0])
                await one.updater.offer(1, snapshot(1))
                await one.until(lambda: any(tmp_path.rglob("1-delta")))
                await one.until(lambda: member.listener.staging_state == "staged")
                assert one.updater.commit_held
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.2):  # a version that is not held is served within milliseconds
                        await one.until(lambda: reader.served != [0])
                assert one.served("m") == reader.served == [0]
            await one.updater.all_served()
            await one.until(lambda: one.served("m") == reader.served == [0, 1])


@pytest.mark.parametrize("error", [StoreError("away from here"), LogDamaged("w/1-delta", "sha256", "away from here")])
async def test_a_store_that_is_away_or_damaged_stops_nobody_and_nothing_wrong_is_served(
    tmp_path: Path, error: TransferError
) -> None:
    async with stage(tmp_path) as one:
        _, reader = await one.join("m"), await one.read("r")
        await one.send(0)
        await one.until(lambda: reader.served == [0])
        one.store.error = StoreError("away")
        for version in (1, 2, 3):
            await one.send(version)
        assert one.served("m") == [0, 1, 2, 3]
        one.store.error, reader.store.error = None, error
        await one.until(lambda: one.updater.log is not None and one.updater.log.published.version == 3)  # type: ignore[union-attr]
        await one.until(lambda: f"r: {error}" in one.updater.reasons)
        assert reader.served == [0]
        reader.store.error = None
        await one.until(lambda: reader.served == [0, 3])
        assert reader.receiver.read[PolicyVersion(1, 3)] == stream_of(3).numpy().tobytes()
        assert not one.updater.reasons


async def test_readers_follow_a_restarted_trainer_onto_its_branch(tmp_path: Path) -> None:
    server = MemoryServer()
    async with stage(tmp_path, server=server) as one:
        reader = await one.read("a")
        for version in range(4):
            await one.send(version)
        assert reader.served == [0, 1, 2, 3]
        again = await one.stack.enter_async_context(stage(tmp_path, incarnation=2, server=server))
        await reader.register()
        await again.until(lambda: again.updater.readers.members.keys() == {"a"})
        assert again.updater.readers.newest == -1, "it serves a version of the other trainer"
        await again.send(2)  # the trainer came back to a checkpoint of version 2
        assert reader.receiver.served[-1] == PolicyVersion(2, 2)
        assert reader.receiver.read[PolicyVersion(2, 2)] == stream_of(2).numpy().tobytes()


async def test_a_reader_that_leaves_or_restarts_is_told_of(tmp_path: Path) -> None:
    async with stage(tmp_path) as one:
        reader = await one.read("a")
        await one.send(0)
        await reader.register(process="p2", phase="joining")
        await one.until(lambda: one.updater.readers.members["a"].process == "p2")
        await reader.register(process="p2", phase="draining")
        await one.until(lambda: not one.updater.readers.members)
        assert [change.kind for change in one.history.changes] == ["joined", "joined", "left"]
        assert one.updater.states == {"a": "leaving"}
        await reader.bus.remove_member("a")
        await one.until(lambda: not one.updater.states)
        await reader.register(pod_uid="u1")
        await one.until(lambda: one.updater.states == {"a": "serving"})
        one.updater.pod_ends(PodEnd("a", "u1", "its pod is being deleted", still_running=True))
        assert not one.updater.states, "at once"
        assert (one.history.changes[-1].kind, one.history.changes[-1].reason) == ("left", "its pod is being deleted")
        await reader.register(pod_uid="u1")  # a heartbeat that comes late
        await reader.bus.put_member("b", b"no registration")
        await one.until(lambda: one.updater.bad_messages == 1)
        assert not one.updater.states


async def test_an_actor_that_restarts_is_not_called_as_before(tmp_path: Path) -> None:
    async with stage(tmp_path) as one:
        reader = await one.read("a")
        await one.send(0)
        assert list(one.updater.serving) == ["a"]
        await reader.register(process="p2", phase="starting")
        await one.until(lambda: not one.updater.serving and not one.updater.num_present)
        member = await one.join("b")
        await member.register(process="p2", reads_log=True)  # with another backend; "starting" was missed
        await one.until(lambda: not one.updater._main.coordinator.present and one.updater.num_present == 1)


async def test_a_run_that_no_actor_can_read_ends_with_the_reason_of_the_store(tmp_path: Path) -> None:
    async with stage(tmp_path) as one:
        await one.read("a")
        one.store.error = StoreError("weight log at s3://models: AWS Error NO_SUCH_BUCKET")
        one.updater.log.offer(snapshot(0))  # type: ignore[union-attr]
        await one.until(lambda: bool(one.updater.log.problem))  # type: ignore[union-attr]
        one.updater._join_timeout_s = 0.1
        await one.updater.offer(0, snapshot(0))
        with pytest.raises(ExceptionGroup) as raised:
            await one.running
        assert raised.group_contains(ServiceError, match=r"weights\.log cannot be written: .*NO_SUCH_BUCKET")


async def test_a_swap_that_breaks_half_way_ends_a_reader(tmp_path: Path) -> None:
    async with stage(tmp_path) as one:
        reader = await one.read("a")
        reader.receiver.commit_error = CommitFailed("half of it")
        await one.updater.offer(0, snapshot(0))
        await ends_with(reader.task, CommitFailed, "half of it")


async def test_a_slow_store_keeps_one_snapshot_beside_the_newest(tmp_path: Path) -> None:
    async with stage(tmp_path) as one:
        await one.join("m")
        one.store.may_go.clear()
        streams: list[weakref.ref[Tensor]] = []
        for version in range(4):
            made = snapshot(version)
            streams.append(weakref.ref(made.stream))
            await one.updater.offer(version, made)
            del made
            await one.until(lambda: one.updater.served_version == version)  # noqa: B023
        one.sender.sent.clear()
        await one.until(lambda: [made() is not None for made in streams] == [True, False, False, True])
        one.store.may_go.set()
        await one.updater.log.all_announced()  # type: ignore[union-attr]
