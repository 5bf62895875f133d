"""An actor's registration: kept fresh, true, and gone once it leaves."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.messages.control import decode_control
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.v1.control_pb2 import Registration
from services.actor.app import Heartbeat
from services.actor.weight_sync.updates import ServingGate
from tests.support.memory_bus import MemoryBus, MemoryServer
from tests.unit.builders import RUN


def heartbeat(bus: MemoryBus, gate: ServingGate, manifest_id: Callable[[], str] = lambda: "") -> Heartbeat:
    return Heartbeat(bus, gate, manifest_id, Registration(actor="a", process="p1", grpc_address="a:1", ranks=2, pod_uid="u1"))


async def next_registration(bus: MemoryBus) -> Registration | None:
    async with asyncio.timeout(60), bus.watch_members() as events:
        async for event in events:
            return None if event.payload is None else decode_control(event.payload, Registration)
    raise AssertionError("the events ended")


async def stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


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


async def test_streams_that_are_not_there_yet_are_waited_for_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async with MemoryBus(RUN, server=MemoryServer(), limits=StreamLimits(member_ttl_s=0.03)) as bus:
        beating = asyncio.create_task(heartbeat(bus, ServingGate(1)).run())
        await asyncio.sleep(0.1)
        assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
        await bus.create_streams()
        while await next_registration(bus) is None:  # it had expired when this process stood still
            pass
        await stopped(beating)


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
        await stopped(beating)
        await beat.leave()
        await beat.leave()
        assert list(dict.fromkeys(heard)) == said


async def test_leaving_a_bus_that_is_away_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    async with MemoryBus(RUN, limits=StreamLimits(member_ttl_s=0.06)) as bus:
        bus.server.set_reachable(False)
        async with asyncio.timeout(60):
            await heartbeat(bus, ServingGate(1)).leave()
    assert "it will expire" in caplog.text
