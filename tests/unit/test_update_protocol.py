"""Both sides of the weight-update protocol over an in-memory bus: real messages, no collective and no vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.errors import ManifestMismatch, ServiceError, TransferError, UserError
from pipelinerl.kube.client import PodEnd
from pipelinerl.messages.control import Backend, decode_control
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.service.lifecycle import GpuTurn
from pipelinerl.transfer.manifest import GroupSpec, Manifest, TransferResult, build_manifest
from pipelinerl.v1.control_pb2 import Registration
from services.actor.app import Heartbeat
from services.actor.metrics import ActorMetrics
from services.actor.weight_sync.client import CommitFailed, StagedWeights, WeightLoading
from services.actor.weight_sync.updates import ServingGate, UpdateListener
from services.trainer.weight_sync import coordinator as c
from services.trainer.weight_sync.coordinator import DeadlinePassed, EvictionCause
from services.trainer.weight_sync.membership import MemberChange, UpdateRecord
from services.trainer.weight_sync.updater import WeightUpdater
from tests.support.memory_bus import MemoryBus, MemoryServer
from tests.unit.builders import RUN

MANIFEST = build_manifest([("w", (4,), "float32")])
CHECKSUM = 42


def _open() -> asyncio.Event:
    """Set until a test clears it."""
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class ScriptedSender:
    """The trainer's end: every broadcast succeeds, as soon as it may end."""

    manifest: Manifest = MANIFEST
    backend: Backend = "gloo"
    opened: list[tuple[int, int]] = field(default_factory=list)
    sent: list[object] = field(default_factory=list)
    may_end: asyncio.Event = field(default_factory=_open)

    def open_group(self, epoch: int, world_size: int, deadline_s: float, patience_s: float | None) -> ScriptedGroup:
        self.opened.append((epoch, world_size))
        return ScriptedGroup(self.sent, self.may_end)


@dataclass
class ScriptedGroup:
    sent: list[object]
    may_end: asyncio.Event
    store_address: str = "127.0.0.1:1"

    async def built(self) -> None:
        return

    async def broadcast(self, snapshot: object, deadline_s: float) -> TransferResult:
        self.sent.append(snapshot)
        await self.may_end.wait()
        return TransferResult(CHECKSUM, 16, 0.001)

    async def abandon(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)


@dataclass
class ScriptedReceiver:
    """An actor's inference side. `on_receive` may wait, fail or report another checksum."""

    on_receive: Callable[[PolicyVersion], int] = lambda version: CHECKSUM
    may_receive: asyncio.Event = field(default_factory=_open)
    may_commit: asyncio.Event = field(default_factory=_open)
    commit_error: TransferError | None = None
    served: list[PolicyVersion] = field(default_factory=list)
    read: dict[PolicyVersion, bytes] = field(default_factory=dict)
    """Bytes of each version that it received from a file."""
    joined: list[tuple[str, int, int]] = field(default_factory=list)
    discards: int = 0
    refuses: Exception | None = None
    sleeps: list[str] = field(default_factory=list)

    async def sleep(self) -> None:
        self.sleeps.append("asleep")

    async def wake(self) -> None:
        self.sleeps.append("awake")

    async def prepare(self, manifest: Manifest) -> WeightLoading:
        if self.refuses is not None:
            raise self.refuses
        assert manifest.manifest_id == MANIFEST.manifest_id
        return WeightLoading("shadow")

    async def join_group(self, group: GroupSpec, timeout_s: float) -> None:
        self.joined.append((group.name, group.rank, group.world))

    async def receive(self, version: PolicyVersion, deadline_s: float, file: Path | None = None) -> StagedWeights:
        if file is not None:
            self.read[version] = file.read_bytes()
        await self.may_receive.wait()
        return StagedWeights(self.on_receive(version), 16, 0.001, 0.001)

    async def commit(self, version: PolicyVersion) -> float:
        await self.may_commit.wait()
        if self.commit_error is not None:
            raise self.commit_error
        self.served.append(version)
        return 0.002

    async def discard(self) -> None:
        self.discards += 1


@dataclass
class Told:
    """What a recorder is told."""

    records: list[UpdateRecord] = field(default_factory=list)
    changes: list[MemberChange] = field(default_factory=list)
    joins: list[str] = field(default_factory=list)

    def served(self, update: UpdateRecord) -> None:
        self.records.append(update)

    def joined(self, actor: str, update: UpdateRecord) -> None:
        self.joins.append(actor)

    def member_changed(self, change: MemberChange) -> None:
        self.changes.append(change)


@dataclass
class RunningActor:
    name: str
    bus: MemoryBus
    receiver: ScriptedReceiver
    gate: ServingGate
    listener: UpdateListener
    task: asyncio.Task[None]
    process: str = "p1"

    async def register(self, process: str = "", **fields: Any) -> None:
        usual = {"process": process or self.process, "grpc_address": f"{self.name}:1", "ranks": 1, "phase": "joining"}
        registration = Registration(actor=self.name, **usual | fields)
        await self.bus.put_member(self.name, registration.SerializeToString())


@dataclass
class Stage:
    updater: WeightUpdater
    sender: ScriptedSender
    actors: dict[str, RunningActor]
    server: MemoryServer
    stack: AsyncExitStack
    running: asyncio.Task[None]
    history: Told

    def told(self, actor: str) -> list[str]:
        return [change.kind for change in self.history.changes if change.member.actor == actor]

    def served(self, actor: str) -> list[int]:
        return [version.number for version in self.actors[actor].receiver.served]

    @property
    def joining(self) -> list[str]:
        return [actor for actor, state in self.updater.states.items() if state == "joining"]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0)

    async def until_serving(self, *names: str) -> None:
        await self.until(lambda: sorted(self.updater.serving) == list(names))

    async def join(
        self, name: str, pod_uid: str = "", *, stuck: bool = False, process: str = "p1", turn: GpuTurn | None = None
    ) -> RunningActor:
        """`stuck`: it receives nothing, until it may. `turn`: of an engine that sleeps."""
        actor = await start_actor(name, self.server, self.stack, process=process, turn=turn)
        self.stack.push_async_callback(ended, actor.task)
        self.actors[name] = actor
        if stuck:
            actor.receiver.may_receive.clear()
        await actor.register(pod_uid=pod_uid)
        return actor

    async def send(self, version: int) -> None:
        async with asyncio.timeout(60):
            await self.updater.offer(version, f"snapshot-{version}")
            await self.updater.all_served()

    async def deadline_passes(self, *answered: str) -> None:
        """Let the deadline pass for all other members once these and the trainer have answered."""
        main, deadline_s = self.updater._main, self.updater.deadline_s
        both, staged = {c.TRAINER, *answered}, main.record.receive_s
        await self.until(lambda: main.coordinator.answered.keys() == both == {c.TRAINER, *staged})
        self.updater.deadline_s = 0.0
        main._set_timer()
        self.updater.deadline_s = deadline_s

    async def brought_back(self, name: str, version: int) -> None:
        """The heart of an actor that was put out beats, and a side group brings it the served version."""
        await self.actors[name].register()
        await self.until(lambda: self.served(name)[-1:] == [version] and not self.joining)

    def fail(self, name: str, error: Exception) -> None:
        def fail(version: PolicyVersion) -> int:
            raise error

        self.actors[name].receiver.on_receive = fail


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, ExceptionGroup):
        await task


async def ends_with(task: asyncio.Task[None], error: type[Exception], match: str) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.timeout(60):
            await task
    assert raised.group_contains(error, match=match)


@asynccontextmanager
async def stage(
    *names: str, join_timeout_s: float = 60.0, server: MemoryServer | None = None, **options: Any
) -> AsyncIterator[Stage]:
    server, sender = server or MemoryServer(), ScriptedSender()
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(MemoryBus(RUN, server=server, limits=StreamLimits(member_ttl_s=600)))
        await bus.create_streams()
        history, options = Told(), {"incarnation": 1, "deadline_s": 600.0, "join_timeout_s": join_timeout_s, **options}
        updater = WeightUpdater(bus, sender, history, **options)
        running = asyncio.create_task(updater.run())
        stack.push_async_callback(ended, running)
        one = Stage(updater, sender, {}, server, stack, running, history)
        for name in names:
            await one.join(name)
        async with asyncio.timeout(60):
            await updater.wait_for_members(len(names))
        yield one


async def start_actor(
    name: str,
    server: MemoryServer,
    stack: AsyncExitStack,
    receiver: ScriptedReceiver | None = None,
    process: str = "p1",
    turn: GpuTurn | None = None,
) -> RunningActor:
    bus = await stack.enter_async_context(MemoryBus(RUN, server=server, limits=StreamLimits(member_ttl_s=600)))
    receiver, gate = receiver or ScriptedReceiver(), ServingGate(max_lag=None)
    metrics = ActorMetrics(CollectorRegistry())
    listener = UpdateListener(bus, receiver, gate, metrics, instance=name, process=process, turn=turn)
    return RunningActor(name, bus, receiver, gate, listener, asyncio.create_task(listener.run()), process)


async def test_every_actor_serves_what_was_sent_on_the_ranks_that_it_takes() -> None:
    async with stage("a", "b") as one:
        await one.actors["a"].register(ranks=4)
        await one.until(lambda: one.updater._main.coordinator.present["a"].ranks == 4)
        await one.send(0)
        await one.send(1)
        for actor in one.actors.values():
            assert actor.receiver.served == [PolicyVersion(1, 0), PolicyVersion(1, 1)]
            assert actor.gate.served == PolicyVersion(1, 1)
        assert one.sender.opened == [(1, 6)]
        assert [a.receiver.joined for a in one.actors.values()] == [[("epoch-1", 1, 6)], [("epoch-1", 5, 6)]]
        assert one.history.records[1].stall_s == {"a": 0.002, "b": 0.002}
        assert one.sender.sent == ["snapshot-0", "snapshot-1"]


async def test_an_actor_that_misses_the_deadline_is_told_of_does_not_stop_the_others_and_comes_back() -> None:
    async with stage("a", "b") as one, asyncio.timeout(60):
        one.actors["b"].receiver.may_receive.clear()
        await one.updater.offer(0, "snapshot-0")
        await one.deadline_passes("a")
        await one.updater.all_served()
        assert (one.served("a"), one.served("b"), one.actors["b"].receiver.discards) == ([0], [], 1)
        assert (one.updater.evictions, one.updater.regroups, one.sender.opened) == (1, 1, [(1, 3), (2, 2)])
        reason, b = "deadline passed while sending", one.updater._main.coordinator.present["b"]
        assert one.updater.updates["aborted"] == 1
        assert one.history.changes[0] == MemberChange("evicted", b, 1, -1, reason, EvictionCause.DEADLINE)
        assert [(change.kind, change.member.actor, change.epoch) for change in one.history.changes[1:]] == [("joined", "a", 2)]
        one.actors["b"].receiver.may_receive.set()
        await one.brought_back("b", 0)
        await one.send(1)
        assert one.served("b") == [0, 1]
        heard: list[int] = []
        one.updater.on_change = lambda: heard.append(one.updater.num_present)
        await one.actors["b"].bus.remove_member("b")
        await one.until(lambda: heard == [1])  # the feeder may issue what takes the place of b's work
        assert one.told("b") == ["evicted", "joined", "evicted"], "nobody has said that it leaves"


async def test_an_actor_waits_for_the_streams_and_an_outage_amid_an_update_is_survived() -> None:
    server = MemoryServer()
    async with AsyncExitStack() as stack:
        early = await start_actor("a", server, stack)
        stack.push_async_callback(ended, early.task)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not early.task.done()
        async with stage(server=server) as one, asyncio.timeout(60):
            early.receiver.may_receive.clear()
            await early.register()
            await one.updater.wait_for_members(1)
            await one.updater.offer(0, "snapshot-0")
            await one.until(lambda: early.listener.staging_state == "receiving")
            server.set_reachable(False)
            early.receiver.may_receive.set()  # what it answers has nowhere to go
            for _ in range(200):
                await asyncio.sleep(0)
            assert (early.task.done(), one.running.done()) == (False, False)
            server.set_reachable(True)
            await one.updater.all_served()
        assert early.receiver.served == [PolicyVersion(1, 0)]


@pytest.mark.parametrize(
    ("refusal", "ends", "says"),
    [
        (ManifestMismatch("w: shape is (4,) here"), UserError, r"w: shape is \(4,\) here.*PIPELINERL_MODEL_DIR"),
        (TransferError("0 of 1 workers connected"), TransferError, "0 of 1 workers"),  # it may be started again
    ],
)
async def test_an_actor_that_cannot_prepare_says_why_and_ends(refusal: Exception, ends: type, says: str) -> None:
    async with stage("a", "b") as one:
        stranger = await start_actor("c", one.server, one.stack, ScriptedReceiver(refuses=refusal))
        await ends_with(stranger.task, ends, says)
        await one.until(lambda: f"c: {refusal}" in one.updater.reasons)
        await one.send(0)
        assert set(one.updater.members) == {"a", "b"}


async def test_a_first_version_that_nobody_serves_ends_the_run_with_the_actors_reasons_and_a_later_one_has_no_limit() -> None:
    async with stage("a", join_timeout_s=1.0) as one:
        one.fail("a", TransferError("disk full"))
        await one.updater.offer(0, "snapshot-0")
        says = r"version 0 within 1 s \(weights\.join_timeout_s\) plus the time for sending\. [^:]+: a: disk full"
        await ends_with(one.running, ServiceError, says)
    async with stage("a") as one:
        await one.send(0)
        one.updater._join_timeout_s = 0.1
        one.actors["a"].receiver.may_receive.clear()
        await one.updater.offer(1, "snapshot-1")
        await asyncio.sleep(0.3)
        assert not one.running.done()


async def test_a_bug_in_a_receive_and_a_swap_that_breaks_half_way_end_the_actor_and_one_that_did_not_begin_does_not() -> None:
    async with stage("a") as one:
        one.fail("a", ZeroDivisionError("ours"))
        await one.updater.offer(0, "snapshot-0")
        await ends_with(one.actors["a"].task, ZeroDivisionError, "ours")
    async with stage("a", "b") as one:
        one.actors["a"].receiver.commit_error = CommitFailed("half of it")
        one.actors["b"].receiver.commit_error = TransferError("nothing is staged")
        await one.updater.offer(0, "snapshot-0")
        await ends_with(one.actors["a"].task, CommitFailed, "half of it")
        await one.until(lambda: "b: nothing is staged" in one.updater.reasons)
        assert not one.actors["b"].task.done()
        assert one.actors["a"].gate.served is None


async def test_updates_and_new_epochs_go_on_while_a_joiner_is_stuck_and_take_it_in_when_it_serves() -> None:
    async with stage("a", "c") as one:
        await one.send(0)
        joiner = await one.join("b", stuck=True)
        await one.until(lambda: len(one.sender.sent) == 2 and joiner.listener.staging_state == "receiving")
        assert sorted(one.updater.states.values()) == ["joining", "serving", "serving"]
        side = joiner.listener.epoch
        await one.actors["c"].bus.remove_member("c")
        await one.until(lambda: one.updater.num_present == 2)
        await one.send(1)  # in an epoch of a alone, of which b hears
        await one.until(lambda: joiner.gate.announced == PolicyVersion(1, 1))
        assert list(one.updater.members) == list(one.updater.serving) == ["a"], "b is on its way to version 0"
        assert (joiner.listener.epoch, joiner.listener.staging_state, joiner.receiver.discards) == (side, "receiving", 0)
        one.fail("b", TransferError("disk full"))
        joiner.receiver.may_receive.set()
        await one.until(lambda: not one.joining)
        joiner.receiver.on_receive = lambda version: CHECKSUM
        await one.brought_back("b", 1)
        assert one.sender.sent == ["snapshot-0", "snapshot-0", "snapshot-1", "snapshot-1"], "each once to b"
        await one.until_serving("a", "b")
        await one.send(2)
        assert one.served("a")[-1] == one.served("b")[-1] == 2
        assert {one.actors[name].listener.staging_state for name in "ab"} == {"idle"}


async def test_nobody_is_evicted_while_a_transfer_makes_progress_at_its_usual_rate() -> None:
    async with stage("a", "b") as one, asyncio.timeout(60):
        await one.send(0)
        one.updater.transfers_s.extend([600.0] * 5)
        one.actors["b"].receiver.may_receive.clear()
        one.sender.may_end.clear()
        one.updater.deadline_s, main = 0.1, one.updater._main
        await one.updater.offer(1, "snapshot-1")
        await one.until(lambda: "a" in main.coordinator.answered and "a" in main.record.receive_s)
        one.updater.post(main, DeadlinePassed())  # as if it had waited while a's answer moved the deadline
        await asyncio.sleep(0.3)
        one.updater.deadline_s = 600.0
        one.sender.may_end.set()
        one.actors["b"].receiver.may_receive.set()
        await one.updater.all_served()
        assert (one.served("a"), one.served("b"), one.updater.evictions) == ([0, 1], [0, 1], 0)


async def test_an_actor_that_starts_is_no_member_and_its_old_process_is_gone() -> None:
    async with stage("a", "b") as one:
        await one.send(0)
        b = one.actors["b"]
        await b.register("p2", phase="starting")
        await one.until(lambda: one.updater.num_present == 1)
        await one.send(1)
        assert (one.updater.starting, list(one.updater.members), one.updater.regroups) == ({"b"}, ["a"], 1)
        await b.register()
        await one.until(lambda: one.served("b") == [0, 1])
        assert one.updater.starting == set()
        await b.register(phase="starting")
        await b.bus.remove_member("b")
        await one.until(lambda: one.updater.num_present == 1 and not one.updater.starting)


async def test_an_actor_never_goes_back_to_an_older_version() -> None:
    async with stage("a", "b") as one:
        await one.send(0)
        b = one.actors["b"]
        b.gate.serve(PolicyVersion(1, 5))  # as if its heartbeat had stopped, and a commit had reached it all the same
        await b.bus.remove_member("b")
        await one.until(lambda: "b" not in one.updater.members)
        await b.register()
        await one.until(lambda: "b" in one.updater.reasons and "newer" in one.updater.reasons)
        assert one.served("b") == [0]
        assert b.gate.announced == PolicyVersion(1, 0)


async def test_an_actor_that_says_it_drains_and_one_whose_pod_is_deleted_have_left_in_order() -> None:
    async with stage("a", "b") as one:
        d = await one.join("d", pod_uid="u1")
        await one.send(0)
        await one.until_serving("a", "b", "d")
        await one.actors["b"].register(phase="draining")
        await one.until(lambda: one.updater.states == {"a": "serving", "b": "leaving", "d": "serving"})
        await one.actors["b"].bus.remove_member("b")
        await one.send(1)
        assert (one.updater.evictions, one.told("b")) == (0, ["joined", "left"])
        assert one.history.changes[-1].reason == "it is shutting down"
        one.updater.pod_ends(PodEnd("d", "u1", "its pod is being deleted", still_running=True))
        await one.until(lambda: one.updater.num_present == 1)
        await d.register("p3", pod_uid="u2")
        await one.until(lambda: one.updater.num_present == 2)
        one.updater.pod_ends(PodEnd("d", "u1", "its pod was deleted", still_running=False))
        await one.send(2)
        assert one.updater.num_present == 2, "what is heard of the old pod does not touch the new one"
        assert one.told("d")[-1] != "evicted"


@pytest.mark.parametrize("how", ["leaves", "restarts"])
async def test_a_joiner_that_goes_while_it_is_being_told_of_its_version_does_not_end_the_run(how: str) -> None:
    async with stage("a") as one:
        await one.send(0)
        bus = one.updater.bus
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
        assert one.served("a")[-1] == 1


async def test_an_engine_sleeps_until_the_trainer_leaves_the_gpu(tmp_path: Path) -> None:
    engine, trainer = GpuTurn(tmp_path / "turn"), GpuTurn(tmp_path / "turn")
    await engine.take()
    async with stage() as one, asyncio.timeout(60):
        actor, open_when_received = await one.join("a", turn=engine), list[bool]()

        def receive(version: PolicyVersion) -> int:
            open_when_received.append(actor.gate.opened.is_set())
            return CHECKSUM + (len(open_when_received) == 1)  # the first attempt at version 2 is aborted

        await one.send(0)
        actor.receiver.may_receive.clear()
        await one.updater.offer(1, "snapshot-1")
        await one.until(lambda: actor.listener.staging_state == "receiving")
        await one.updater.order_sleep()
        actor.receiver.may_receive.set()
        await one.updater.all_served()
        assert actor.receiver.sleeps == [], "no engine sleeps during a transfer"
        actor.receiver.on_receive = receive
        for _ in range(2):  # NATS may store an order twice
            await one.updater.order_sleep()
        await trainer.take()
        assert "sleeps" in actor.gate.reason
        await one.updater.offer(2, "snapshot-2")
        await one.until(lambda: actor.listener.staging_state == "receiving")
        for _ in range(100):
            await asyncio.sleep(0)
        assert actor.receiver.sleeps == ["asleep"], "the trainer has not left the GPU"
        trainer.release()
        await one.until(lambda: one.updater.updates["aborted"] == 1)
        await actor.register()
        await one.updater.all_served()
        assert actor.receiver.sleeps == ["asleep", "awake", "awake"]
        assert (open_when_received, actor.gate.opened.is_set()) == ([False, False], True)
        assert (one.served("a"), engine.is_held) == ([0, 1, 2], True)


async def test_an_engine_that_starts_again_before_the_trainers_turn_sleeps_once_it_serves(tmp_path: Path) -> None:
    engine, trainer = GpuTurn(tmp_path / "turn"), GpuTurn(tmp_path / "turn")
    await engine.take()
    async with stage("a") as one, asyncio.timeout(60):
        await one.send(0)
        await ended(one.actors["a"].task)
        await one.updater.order_sleep()
        taking = asyncio.create_task(trainer.take())
        actor = await one.join("a", process="p2", turn=engine)
        while not taking.done():  # the trainer repeats its order, which the engine ignores before it serves
            await one.updater.order_sleep()
            await asyncio.sleep(0)
        assert (one.served("a"), actor.receiver.sleeps) == ([0], ["asleep"])


# --- an actor's registration: kept fresh, true, and gone once it leaves


def heartbeat(bus: MemoryBus, gate: ServingGate, manifest_id: Callable[[], str] = lambda: "") -> Heartbeat:
    return Heartbeat(bus, gate, manifest_id, Registration(actor="a", process="p1", grpc_address="a:1", ranks=2, pod_uid="u1"))


def test_a_registration_says_what_is_served() -> None:
    gate = ServingGate(max_lag=1)
    assert heartbeat(MemoryBus(RUN), gate).registration().phase == "starting", "it is not prepared for a manifest"
    beat = heartbeat(MemoryBus(RUN), gate, lambda: "m1")
    assert (beat.registration().phase, beat.registration().incarnation) == ("joining", 0)
    gate.serve(PolicyVersion(1, 3))
    now = beat.registration()
    assert (now.phase, now.policy_version, now.incarnation) == ("serving", 3, 1)
    assert (now.manifest_id, now.ranks, now.process, now.pod_uid) == ("m1", 2, "p1", "u1")
    gate.drain()
    assert beat.registration().phase == "draining"


@pytest.mark.parametrize(("drains", "said"), [(True, ["joining", "draining", "gone"]), (False, ["joining", "gone"])])
async def test_an_actor_leaves_once_and_drains_before(drains: bool, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async with MemoryBus(RUN, limits=StreamLimits(member_ttl_s=0.3)) as bus:
        gate, heard, registered = ServingGate(1), list[str](), asyncio.Event()

        async def put(actor: str, payload: bytes) -> None:
            heard.append(decode_control(payload, Registration).phase)
            registered.set()

        async def remove(actor: str) -> None:
            heard.append("gone")

        monkeypatch.setattr(bus, "put_member", put)
        monkeypatch.setattr(bus, "remove_member", remove)
        beat = heartbeat(bus, gate, lambda: "m1")
        beating = asyncio.create_task(beat.run())
        await registered.wait()
        if drains:
            gate.drain()
        await ended(beating)
        await beat.leave()
        await beat.leave()
        assert list(dict.fromkeys(heard)) == said


async def test_leaving_a_bus_that_is_away_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    async with MemoryBus(RUN, limits=StreamLimits(member_ttl_s=0.06)) as bus:
        bus.server.set_reachable(False)
        async with asyncio.timeout(60):
            await heartbeat(bus, ServingGate(1)).leave()
    assert "it will expire" in caplog.text


async def test_newcomers_share_a_transfer_and_one_that_fails_is_put_out_of_it_and_comes_back_alone() -> None:
    async with stage("a") as one:
        await one.send(0)
        one.updater.transfers_s.append(0.5)  # as long as newcomers wait for others
        for name in "bcd":
            await one.join(name)
        one.fail("d", TransferError("disk full"))
        await one.until(lambda: one.served("b") == one.served("c") == [0] and not one.joining)
        assert one.sender.opened == [(1, 2), (2, 4), (3, 3)]
        assert one.sender.sent == ["snapshot-0"] * 3, "to a, to b, c and d, and again to b and c"
        assert (sorted(one.history.joins), one.served("d")) == (["b", "c"], [])
        await one.send(1)
        assert list(one.updater.members) == ["a", "b", "c"]
        one.actors["d"].receiver.on_receive = lambda version: CHECKSUM
        await one.brought_back("d", 1)
        assert one.sender.opened[-1][1] == 2
        await one.send(2)
        assert list(one.updater.members) == ["a", "b", "c", "d"]
        assert one.updater.evictions == 0, "no member of the epoch was lost"


async def test_a_newcomer_that_goes_while_it_shares_a_transfer_does_not_stop_the_others() -> None:
    async with stage("a") as one:
        await one.send(0)
        one.updater.transfers_s.append(0.5)
        b, d = await one.join("b", stuck=True), await one.join("d", stuck=True)
        await one.until(lambda: b.listener.staging_state == d.listener.staging_state == "receiving")
        await d.register("p9", phase="starting")  # it has died and starts again
        await one.until(lambda: one.sender.opened == [(1, 2), (2, 3), (3, 2)])
        assert (one.updater.starting, one.joining, one.updater.num_present) == ({"d"}, ["b"], 2)
        b.receiver.may_receive.set()
        await one.until(lambda: one.served("b") == [0])


async def test_an_order_that_nats_has_stored_twice_is_followed_once() -> None:
    async with stage("a") as one:
        publish = one.updater.bus.publish_control

        async def publish_twice(*message: Any) -> None:
            for _ in range(2):
                await publish(*message)
                for _ in range(20):
                    await asyncio.sleep(0)

        one.updater.bus.publish_control = publish_twice  # type: ignore[method-assign]
        await one.send(0)
        await one.send(1)
        receiver = one.actors["a"].receiver
        assert (receiver.joined, one.served("a"), receiver.discards) == ([("epoch-1", 1, 2)], [0, 1], 0)
