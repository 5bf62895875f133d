"""Both sides of the weight-update protocol over an in-memory bus: real messages, no collective and no vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.errors import ManifestMismatch, ServiceError, TransferError, UserError
from pipelinerl.kube.pods import PodEnd
from pipelinerl.messages.control import Backend, Registration
from pipelinerl.messages.control import Phase as RegistrationPhase
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.manifest import Manifest, build_manifest
from services.actor.engine import StagedWeights, WeightLoading
from services.actor.generation import ServingGate
from services.actor.metrics import ActorMetrics
from services.actor.weight_sync.updates import UpdateListener
from services.trainer.weight_sync import coordinator as c
from services.trainer.weight_sync.coordinator import EvictionCause, Phase
from services.trainer.weight_sync.membership import MemberChange
from services.trainer.weight_sync.session import TransferResult, UpdateRecord
from services.trainer.weight_sync.updater import WeightUpdater, coalesce_departures
from tests.support.memory_bus import MemoryBus, MemoryServer
from tests.unit.builders import RUN

MANIFEST = build_manifest([("w", (4,), "float32")])
CHECKSUM = 42


@dataclass
class ScriptedPort:
    """The trainer's end: every broadcast succeeds."""

    manifest: Manifest = MANIFEST
    backend: Backend = "gloo"
    opened: list[tuple[int, int]] = field(default_factory=list)
    sent: list[object] = field(default_factory=list)

    async def open_group(
        self, epoch: int, world_size: int, deadline_s: float, patience_s: float | None
    ) -> ScriptedGroup:
        self.opened.append((epoch, world_size))
        return ScriptedGroup(self.sent)


@dataclass
class ScriptedGroup:
    sent: list[object]
    store_address: str = "127.0.0.1:1"

    async def built(self) -> None:
        return

    async def broadcast(self, snapshot: object, deadline_s: float) -> TransferResult:
        self.sent.append(snapshot)
        return TransferResult(CHECKSUM, 16, 0.001)

    async def abandon(self) -> None:
        """As a real group's: others go on meanwhile."""
        for _ in range(3):
            await asyncio.sleep(0)


def _open() -> asyncio.Event:
    """Set until a test clears it."""
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class ScriptedReceiver:
    """An actor's inference side. `on_receive` may wait, fail or report another checksum."""

    on_receive: Callable[[PolicyVersion], int] = lambda version: CHECKSUM
    may_receive: asyncio.Event = field(default_factory=_open)
    may_commit: asyncio.Event = field(default_factory=_open)
    served: list[PolicyVersion] = field(default_factory=list)
    joined: list[tuple[int, int, int]] = field(default_factory=list)
    discards: int = 0
    refuses: Exception | None = None

    async def prepare(self, manifest: Manifest) -> WeightLoading:
        if self.refuses is not None:
            raise self.refuses
        assert manifest.manifest_id == MANIFEST.manifest_id
        return WeightLoading("shadow")

    async def join_group(
        self, *, store_address: str, epoch: int, first_rank: int, world_size: int, backend: str, deadline_s: float
    ) -> None:
        self.joined.append((epoch, first_rank, world_size))

    async def receive(self, version: PolicyVersion, deadline_s: float) -> StagedWeights:
        await self.may_receive.wait()
        return StagedWeights(self.on_receive(version), 16, 0.001, 0.001)

    async def commit(self, version: PolicyVersion) -> float:
        await self.may_commit.wait()
        self.served.append(version)
        return 0.002

    async def discard(self) -> None:
        self.discards += 1


@dataclass
class RunningActor:
    name: str
    bus: MemoryBus
    receiver: ScriptedReceiver
    gate: ServingGate
    listener: UpdateListener
    task: asyncio.Task[None]

    async def register(
        self, process: str = "p1", ranks: int = 1, pod_uid: str = "", phase: RegistrationPhase = "joining"
    ) -> None:
        registration = Registration(
            actor=self.name, process=process, grpc_address=f"{self.name}:1", ranks=ranks, phase=phase, pod_uid=pod_uid
        )
        await self.bus.put_member(self.name, registration.SerializeToString())


@dataclass
class Stage:
    updater: WeightUpdater
    port: ScriptedPort
    records: list[UpdateRecord]
    actors: dict[str, RunningActor]
    server: MemoryServer
    stack: AsyncExitStack
    running: asyncio.Task[None]
    changes: list[MemberChange]
    aborts: list[tuple[int, int, str, str]]
    regroups: list[int]
    causes: list[EvictionCause]

    def told(self, actor: str) -> list[str]:
        """What was told of an actor's comings and goings."""
        return [change.kind for change in self.changes if change.member.actor == actor]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0)

    async def join(self, name: str, pod_uid: str = "") -> RunningActor:
        actor = await start_actor(name, self.server, self.stack)
        self.stack.push_async_callback(ended, actor.task)
        self.actors[name] = actor
        await actor.register(pod_uid=pod_uid)
        return actor

    async def send(self, version: int) -> None:
        async with asyncio.timeout(10):
            await self.updater.offer(version, f"snapshot-{version}")
            await self.updater.all_served()

    async def brought_back(self, name: str, version: int) -> None:
        """The heart of an actor that was put out beats, and a side group brings it the served version."""
        await self.actors[name].register()
        await self.until(
            lambda: self.actors[name].receiver.served[-1:] == [PolicyVersion(1, version)] and not self.updater.joining
        )


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, ExceptionGroup):
        await task


@asynccontextmanager
async def stage(*names: str, deadline_s: float = 5.0, join_timeout_s: float = 60.0) -> AsyncIterator[Stage]:
    server = MemoryServer()
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(MemoryBus(RUN, server=server, limits=StreamLimits(member_ttl_s=600)))
        await bus.create_streams()
        port, records = ScriptedPort(), list[UpdateRecord]()
        changes, aborts = list[MemberChange](), list[tuple[int, int, str, str]]()
        regroups, causes = list[int](), list[EvictionCause]()
        updater = WeightUpdater(
            bus,
            port,
            incarnation=1,
            deadline_s=deadline_s,
            join_timeout_s=join_timeout_s,
            on_served=records.append,
            on_member=changes.append,
            on_aborted=lambda *aborted: aborts.append(aborted),
            on_regroup=regroups.append,
            on_evicted=causes.append,
        )
        tasks = [asyncio.create_task(updater.run())]
        actors = {}
        for name in names:
            actors[name] = await start_actor(name, server, stack)
            tasks.append(actors[name].task)
            await actors[name].register()
        try:
            async with asyncio.timeout(10):
                await updater.wait_for_members(len(names))
            yield Stage(updater, port, records, actors, server, stack, tasks[0], changes, aborts, regroups, causes)
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError, ExceptionGroup):
                    await task


async def start_actor(
    name: str, server: MemoryServer, stack: AsyncExitStack, refuses: Exception | None = None
) -> RunningActor:
    bus = await stack.enter_async_context(MemoryBus(RUN, server=server, limits=StreamLimits(member_ttl_s=600)))
    receiver, gate = ScriptedReceiver(refuses=refuses), ServingGate(max_lag=None)
    listener = UpdateListener(bus, receiver, gate, ActorMetrics(CollectorRegistry()), instance=name, process="p1")
    return RunningActor(name, bus, receiver, gate, listener, asyncio.create_task(listener.run()))


async def test_every_actor_serves_what_was_sent() -> None:
    async with stage("a", "b") as one:
        await one.send(0)
        await one.send(1)
        for actor in one.actors.values():
            assert actor.receiver.served == [PolicyVersion(1, 0), PolicyVersion(1, 1)]
            assert actor.gate.served == PolicyVersion(1, 1)
        assert one.port.opened == [(1, 3)]
        assert [a.receiver.joined for a in one.actors.values()] == [[(1, 1, 3)], [(1, 2, 3)]]
        assert one.records[1].stall_s == {"a": 0.002, "b": 0.002}
        assert one.port.sent == ["snapshot-0", "snapshot-1"]


async def test_nobody_commits_before_everybody_staged() -> None:
    async with stage("a", "b") as one:
        one.actors["b"].receiver.may_receive.clear()
        sending = asyncio.create_task(one.send(0))
        await one.until(lambda: bool(one.port.sent))
        assert one.actors["a"].receiver.served == []
        states = {"a": "staged", "b": "receiving"}
        await one.until(lambda: {name: actor.listener.staging_state for name, actor in one.actors.items()} == states)
        one.actors["b"].receiver.may_receive.set()
        await sending
        assert {actor.listener.staging_state for actor in one.actors.values()} == {"idle"}
        assert [len(actor.receiver.served) for actor in one.actors.values()] == [1, 1]


async def test_an_actor_that_misses_the_deadline_does_not_stop_the_others() -> None:
    async with stage("a", "b", deadline_s=0.2) as one:
        one.actors["b"].receiver.may_receive.clear()
        await one.send(0)
        assert one.actors["a"].receiver.served == [PolicyVersion(1, 0)]
        assert one.actors["b"].receiver.served == []
        assert one.actors["b"].receiver.discards == 1
        assert (one.updater.evictions, one.causes, one.regroups) == (1, [EvictionCause.DEADLINE], [2])
        assert one.port.opened == [(1, 3), (2, 2)]
        one.actors["b"].receiver.may_receive.set()
        await one.brought_back("b", 0)
        await one.send(1)
        assert one.actors["b"].receiver.served == [PolicyVersion(1, 0), PolicyVersion(1, 1)]


async def test_other_bytes_than_were_sent_are_never_served() -> None:
    async with stage("a", "b") as one:
        one.actors["b"].receiver.on_receive = lambda version: CHECKSUM + 1
        await one.send(0)
        assert one.actors["a"].receiver.served == [PolicyVersion(1, 0)]
        assert one.actors["b"].receiver.served == []


async def test_a_failed_receive_is_said_and_the_rest_go_on() -> None:
    async with stage("a", "b") as one:

        def fail(version: PolicyVersion) -> int:
            raise TransferError("disk full")

        one.actors["b"].receiver.on_receive = fail
        await one.send(0)
        assert one.actors["a"].receiver.served == [PolicyVersion(1, 0)]
        one.actors["b"].receiver.on_receive = lambda version: CHECKSUM
        await one.brought_back("b", 0)
        await one.send(1)
        assert one.actors["b"].receiver.served == [PolicyVersion(1, 0), PolicyVersion(1, 1)]


async def test_with_no_actor_left_a_version_waits_for_the_next_one() -> None:
    async with stage("a") as one:
        await one.send(0)
        await one.actors["a"].bus.remove_member("a")
        await one.updater.offer(1, "snapshot-1")
        await one.until(lambda: one.updater._main.coordinator.phase is Phase.WAITING)
        await one.actors["a"].register()
        async with asyncio.timeout(10):
            await one.updater.all_served()
        assert one.actors["a"].receiver.served == [PolicyVersion(1, 0), PolicyVersion(1, 1)]


async def test_a_measured_version_is_kept_until_it_is_released() -> None:
    async with stage("a") as one:
        actor = one.actors["a"]
        await one.updater.offer(0, "snapshot-0")
        async with asyncio.timeout(10):
            async with one.updater.hold_when_served(0):
                await one.updater.offer(1, "snapshot-1")
                while len(one.port.sent) < 2:
                    await asyncio.sleep(0)
                assert actor.receiver.served == [PolicyVersion(1, 0)]
            await one.updater.all_served()
        assert actor.receiver.served == [PolicyVersion(1, 0), PolicyVersion(1, 1)]


async def test_a_tensor_parallel_actor_takes_consecutive_ranks() -> None:
    async with stage("a", "b") as one:
        await one.actors["a"].register(ranks=4)
        await one.until(lambda: one.updater._main.coordinator.present["a"].ranks == 4)
        await one.send(0)
        assert one.port.opened == [(1, 6)]
        assert one.actors["b"].receiver.joined == [(1, 5, 6)]


async def test_a_model_that_cannot_take_the_weights_ends_the_actor_with_a_users_error() -> None:
    async with stage("a", "b") as one:
        stranger = await start_actor("c", one.server, one.stack, refuses=ManifestMismatch("w: shape is (4,) here"))
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.timeout(10):
                await stranger.task
        assert raised.group_contains(UserError, match=r"w: shape is \(4,\) here.*PIPELINERL_MODEL_DIR")
        await one.until(lambda: "c: w: shape is (4,) here" in one.updater.reasons)
        await one.send(0)
        assert set(one.updater.members) == {"a", "b"}


async def test_a_preparation_that_fails_ends_the_actor_to_be_started_again() -> None:
    async with stage("a") as one:
        unlucky = await start_actor("b", one.server, one.stack, refuses=TransferError("0 of 1 workers connected"))
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.timeout(10):
                await unlucky.task
        assert raised.group_contains(TransferError, match="0 of 1 workers")


async def test_a_first_version_that_nobody_serves_ends_the_run_with_the_actors_reasons() -> None:
    async with stage("a", join_timeout_s=0.2) as one:

        def fail(version: PolicyVersion) -> int:
            raise TransferError("disk full")

        one.actors["a"].receiver.on_receive = fail
        await one.updater.offer(0, "snapshot-0")
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.timeout(10):
                await one.running
        assert raised.group_contains(
            ServiceError, match=r"version 0 .*join_timeout_s = 0.2 s; last heard: a: disk full"
        )


async def test_a_version_after_the_first_has_no_such_limit() -> None:
    async with stage("a", join_timeout_s=0.1) as one:
        await one.send(0)
        one.actors["a"].receiver.may_receive.clear()
        await one.updater.offer(1, "snapshot-1")
        await asyncio.sleep(0.3)
        assert not one.running.done()


async def test_an_actor_that_is_up_before_the_streams_waits_for_them() -> None:
    server = MemoryServer()
    async with AsyncExitStack() as stack:
        early = await start_actor("a", server, stack)
        await asyncio.sleep(0.05)
        assert not early.task.done()
        await early.bus.create_streams()
        await early.bus.publish_control("manifest", MANIFEST.to_bytes())
        async with asyncio.timeout(10):
            while not early.listener.manifest_id:
                await asyncio.sleep(0.01)
        early.task.cancel()
        with suppress(asyncio.CancelledError):
            await early.task


async def test_an_outage_between_two_messages_loses_no_answer_on_either_side() -> None:
    async with stage("a") as one:
        one.actors["a"].receiver.may_receive.clear()
        sending = asyncio.create_task(one.send(0))
        await one.until(lambda: bool(one.port.sent))
        one.server.set_reachable(False)
        one.actors["a"].receiver.may_receive.set()  # `staged` has nowhere to go
        await asyncio.sleep(0.15)
        one.server.set_reachable(True)
        await sending
        assert one.actors["a"].receiver.served == [PolicyVersion(1, 0)]


async def test_a_bug_in_a_receive_is_not_swallowed() -> None:
    async with stage("a") as one:

        def broken(version: PolicyVersion) -> int:
            raise ZeroDivisionError("ours")

        one.actors["a"].receiver.on_receive = broken
        await one.updater.offer(0, "snapshot-0")
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.timeout(10):
                await one.actors["a"].task
        assert raised.group_contains(ZeroDivisionError)


async def test_a_joiner_is_brought_up_to_date_at_once_and_the_others_stay_where_they_are() -> None:
    async with stage("a") as one:
        await one.send(0)
        joiner = await one.join("b")
        await one.until(lambda: joiner.receiver.served == [PolicyVersion(1, 0)] and not one.updater.joining)
        assert joiner.receiver.joined == [(2, 1, 2)]
        assert one.actors["a"].receiver.joined == [(1, 1, 2)]
        await one.send(1)
        assert joiner.receiver.served == one.actors["a"].receiver.served == [PolicyVersion(1, 0), PolicyVersion(1, 1)]
        assert one.port.opened == [(1, 2), (2, 2), (3, 3)]


async def test_updates_go_on_while_a_joiner_is_stuck_and_take_it_in_when_it_serves() -> None:
    async with stage("a") as one:
        await one.send(0)
        joiner = await one.join("b")
        joiner.receiver.may_receive.clear()
        await one.until(lambda: len(one.port.sent) == 2)
        assert one.updater.member_states == {"serving": 1, "joining": 1, "waiting": 0, "leaving": 0}
        await one.send(1)
        assert list(one.updater.members) == ["a"]
        joiner.receiver.may_receive.set()
        await one.until(lambda: joiner.receiver.served == [PolicyVersion(1, 0), PolicyVersion(1, 1)])
        await one.until(lambda: not one.updater.joining)
        await one.send(2)
        assert joiner.receiver.served[-1] == one.actors["a"].receiver.served[-1] == PolicyVersion(1, 2)
        assert one.updater.evictions == 0


async def test_an_actor_never_goes_back_to_an_older_version() -> None:
    async with stage("a", "b") as one:
        await one.send(0)
        b = one.actors["b"]
        b.gate.serve(PolicyVersion(1, 5))  # as if its heartbeat had stopped, and a commit had reached it all the same
        await b.bus.remove_member("b")
        await one.until(lambda: "b" not in one.updater.members)
        await b.register()
        await one.until(lambda: "b" in one.updater.reasons and "newer" in one.updater.reasons)
        assert b.receiver.served == [PolicyVersion(1, 0)]
        assert b.gate.announced == PolicyVersion(1, 0)


def test_departures_that_come_in_a_row_are_taken_together_when_they_are_of_one_kind() -> None:
    joined, served = c.MemberJoined("a", 1), c.MemberServing("a", 1, 1)
    down = [c.MembersDown((name,)) for name in "bcd"]
    one, two = (c.MembersLeaving((c.Member(name, "p"),), "its pod is being deleted") for name in "ef")
    gone = c.MembersLeaving((c.Member("g", "p"),), "its pod was deleted", still_running=False)
    events: list[c.Event] = [joined, *down[:2], served, down[2], one, two, gone]
    assert [event for _, event in coalesce_departures([(None, event) for event in events])] == [
        joined,
        c.MembersDown(("b", "c")),
        served,
        c.MembersDown(("d",)),
        c.MembersLeaving((*one.members, *two.members), "its pod is being deleted"),
        gone,
    ]


def deletion(name: str, uid: str) -> PodEnd:
    return PodEnd(name, uid, "its pod is being deleted", still_running=True)


async def test_an_actor_whose_pod_is_deleted_has_left_and_its_last_heartbeats_do_not_bring_it_back() -> None:
    async with stage("a") as one:
        b = await one.join("b", pod_uid="u1")
        await one.send(0)
        await one.until(lambda: sorted(one.updater.serving) == ["a", "b"])
        one.updater.pod_ends(deletion("b", "u1"))
        await one.until(lambda: list(one.updater.serving) == ["a"])
        await b.register(pod_uid="u1")
        await b.register(pod_uid="u1", phase="serving")
        await one.send(1)
        assert (one.updater.num_present, list(one.updater.members)) == (1, ["a"])
        assert one.updater.member_states == {"serving": 1, "joining": 0, "waiting": 0, "leaving": 0}
        await b.register(pod_uid="u1", phase="draining")
        await one.until(lambda: one.updater.member_states["leaving"] == 1)
        assert b.receiver.served == [PolicyVersion(1, 0)]
        assert (one.updater.evictions, one.told("b")) == (0, ["joined", "left"])
        assert one.aborts == []


async def test_a_new_pod_of_that_name_and_a_container_that_starts_again_are_admitted() -> None:
    async with stage("a") as one:
        b = await one.join("b", pod_uid="u1")
        await one.send(0)
        await one.until(lambda: sorted(one.updater.serving) == ["a", "b"])
        await b.register("p2", pod_uid="u1")
        present = one.updater._main.coordinator.present
        await one.until(lambda: present["b"].process == "p2")
        one.updater.pod_ends(deletion("b", "u1"))
        await one.until(lambda: one.updater.num_present == 1)
        await b.register("p3", pod_uid="u2")
        await one.until(lambda: one.updater.num_present == 2)
        one.updater.pod_ends(PodEnd("b", "u1", "its pod was deleted", still_running=False))
        await one.send(1)
        assert one.updater.num_present == 2, "the old pod's end does not touch the new one"


async def test_a_departure_that_is_heard_after_its_successor_does_not_touch_it() -> None:
    async with stage("a") as one:
        await one.join("b", pod_uid="u2")
        await one.send(0)
        await one.until(lambda: sorted(one.updater.serving) == ["a", "b"])
        one.updater._post(None, c.MembersLeaving((c.Member("b", "p0", pod_uid="u1"),), "its pod was deleted"))
        await one.send(1)
        assert sorted(one.updater.serving) == ["a", "b"]
        assert one.told("b") == ["joined"]
        assert sorted(one.updater.members) == ["a", "b"]


async def test_a_pod_that_ends_before_its_actor_registers_does_not_come_in() -> None:
    async with stage("a") as one:
        one.updater.pod_ends(deletion("b", "u1"))
        await one.join("b", pod_uid="u1")
        await one.send(0)
        assert one.updater.num_present == 1
        assert one.told("b") == []


async def test_a_deletion_while_the_actor_receives_costs_the_others_nothing() -> None:
    async with stage("a") as one:
        b = await one.join("b", pod_uid="u1")
        await one.send(0)
        await one.until(lambda: sorted(one.updater.serving) == ["a", "b"])
        await one.send(1)
        b.receiver.may_receive.clear()
        sending = asyncio.create_task(one.send(2))
        await one.until(lambda: len(one.port.sent) and one.port.sent[-1] == "snapshot-2")
        opened = list(one.port.opened)
        one.updater.pod_ends(deletion("b", "u1"))
        await sending
        assert one.port.opened == opened, "no new epoch"
        assert one.actors["a"].receiver.served[-1] == PolicyVersion(1, 2)
        assert one.actors["a"].receiver.discards == 0
        assert one.aborts == []


async def test_the_side_group_of_an_actor_whose_pod_is_deleted_is_given_up() -> None:
    async with stage("a") as one:
        await one.send(0)
        b = await start_actor("b", one.server, one.stack)
        one.stack.push_async_callback(ended, b.task)
        b.receiver.may_receive.clear()
        await b.register(pod_uid="u1")
        await one.until(lambda: one.updater.joining == {"b"})
        one.updater.pod_ends(deletion("b", "u1"))
        await one.until(lambda: not one.updater.joining)
        await one.send(1)
        assert one.told("b") == []


async def test_an_actor_that_says_it_drains_has_left_in_order() -> None:
    async with stage("a", "b") as one:
        await one.send(0)
        await one.actors["b"].register(phase="draining")
        await one.until(lambda: one.updater.num_present == 1)
        await one.actors["b"].bus.remove_member("b")
        await one.send(1)
        assert (one.updater.evictions, one.told("b")) == (0, ["joined", "left"])
        assert one.changes[-1].reason == "it was told to end"


async def test_comings_goings_and_aborts_are_told_with_their_reasons() -> None:
    async with stage("a", "b", deadline_s=0.2) as one:
        one.actors["b"].receiver.may_receive.clear()
        await one.send(0)
        assert [(change.kind, change.member.actor, change.epoch, change.version) for change in one.changes] == [
            ("evicted", "b", 1, -1),
            ("joined", "a", 2, 0),
        ]
        assert one.changes[0].reason == "deadline passed while sending"
        assert one.aborts == [(0, 1, "", "deadline passed while sending")]
        one.actors["b"].receiver.may_receive.set()
        await one.brought_back("b", 0)
        assert one.told("b") == ["evicted", "joined"]
        await one.actors["b"].bus.remove_member("b")
        await one.until(lambda: one.updater.num_present == 1)
        assert one.told("b") == ["evicted", "joined", "evicted"], "nobody has said that it leaves"


@pytest.mark.parametrize("how", ["leaves", "restarts"])
async def test_a_joiner_that_goes_while_it_is_being_told_of_its_version_does_not_end_the_run(how: str) -> None:
    async with stage("a") as one:
        await one.send(0)
        bus = one.updater._bus
        publish, gone = bus.publish_control, asyncio.Event()

        async def publish_slowly(kind: str, payload: bytes, actor: str = "", *headers: object) -> None:
            await publish(kind, payload, actor)
            if kind == "announce" and actor == "b" and not gone.is_set():
                gone.set()
                b = one.actors["b"]
                await (b.bus.remove_member("b") if how == "leaves" else b.register("p9"))
                for _ in range(20):
                    await asyncio.sleep(0)

        bus.publish_control = publish_slowly  # type: ignore[method-assign]
        await one.join("b")
        await one.until(gone.is_set)
        await one.send(1)
        assert one.actors["a"].receiver.served[-1] == PolicyVersion(1, 1)


async def test_who_is_asked_about_a_version_serves_it() -> None:
    async with stage("a") as one:
        await one.send(0)
        assert list(one.updater.serving) == ["a"]
        joiner = await one.join("b")
        joiner.receiver.may_receive.clear()
        await one.until(lambda: len(one.port.sent) == 2)
        await one.send(1)
        assert list(one.updater.serving) == ["a"], "b is still on its way to version 0"
        joiner.receiver.may_receive.set()
        await one.until(lambda: sorted(one.updater.serving) == ["a", "b"])
        assert joiner.receiver.served[-1] == PolicyVersion(1, 1)
        await one.actors["a"].bus.remove_member("a")
        await one.until(lambda: list(one.updater.serving) == ["b"])
