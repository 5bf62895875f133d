"""The weight-update protocol over a real NATS server that is late, or away for a while."""

import asyncio
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry

from benchmarks.nats_server import NatsServer
from pipelinerl.bus.jetstream import connect
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.v1.control_pb2 import Registration
from services.actor.app import Heartbeat
from services.actor.metrics import ActorMetrics
from services.actor.weight_sync.gate import ServingGate
from services.actor.weight_sync.updates import UpdateListener
from services.trainer.weight_sync.updater import WeightUpdater
from tests.unit.test_update_protocol import ScriptedReceiver, ScriptedSender, Told


async def test_an_actor_before_the_streams_and_an_outage_longer_than_every_request(tmp_path: Path) -> None:
    sender, receiver, gate = ScriptedSender(), ScriptedReceiver(), ServingGate(max_lag=None)
    receiver.may_receive.clear()
    with NatsServer(tmp_path) as server:
        async with (
            connect(server.url, "run", request_timeout_s=0.1) as actor_bus,
            connect(server.url, "run", request_timeout_s=0.1) as bus,
        ):
            metrics = ActorMetrics(CollectorRegistry())
            listener = UpdateListener(actor_bus, receiver, gate, metrics, instance="a", process="p1")
            me = Registration(actor="a", process="p1", grpc_address="a:1", ranks=1)
            heartbeat = Heartbeat(actor_bus, gate, lambda: listener.manifest_id, me)
            actor = [asyncio.create_task(listener.run()), asyncio.create_task(heartbeat.run())]
            await asyncio.sleep(0.2)
            assert not any(task.done() for task in actor)

            async with connect(server.url, "run") as patient:
                await patient.create_streams()
            updater = WeightUpdater(bus, sender, Told(), incarnation=1, deadline_s=20, join_timeout_s=60)
            running = asyncio.create_task(updater.run())
            async with asyncio.timeout(60):
                await updater.wait_for_members(1)
                await updater.offer(0, "snapshot-0")
                while not sender.sent:
                    await asyncio.sleep(0.01)
                same_port = int(server.url.rsplit(":", 1)[1])
                server.stop()
                receiver.may_receive.set()  # `staged` has nowhere to go
                await asyncio.sleep(0.5)
                assert not running.done()
                assert not any(task.done() for task in actor)
                server.port = same_port
                server.start()
                await updater.all_served()
            assert receiver.served == [PolicyVersion(1, 0)]
            for task in (*actor, running):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
