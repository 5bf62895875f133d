"""A cluster of three real nats-servers that keeps every stream three times: servers are killed, and nothing is lost."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import nats
import pytest

from benchmarks.nats_server import NatsServer
from pipelinerl.bus import jetstream
from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.protocol import LogEntry, Subjects
from pipelinerl.errors import BusError, FieldError
from pipelinerl.service.settings import TrainerSettings
from services.trainer.app import check_log_size, stream_limits
from tests.support.guarded_nats import LIMITS, persistently
from tests.support.machine import free_port

RUN, HOST, SIZE = "demo", "127.0.0.1", 3
REPLICATED = replace(LIMITS, replicas=SIZE, ack_wait_s=1.0, member_ttl_s=30.0)
SOON_S = 600.0
NUM_BEFORE, NUM_AFTER = 8, 8


def servers(folder: Path) -> list[NatsServer]:
    """Configured, not started."""
    ports = [free_port() for _ in range(SIZE)]
    routes = [f"nats://{HOST}:{port}" for port in ports]
    return [
        NatsServer(
            folder / f"nats-{number}",
            free_port(),
            {"server_name": f"nats-{number}", "cluster": {"name": "pipelinerl", "listen": f"{HOST}:{port}", "routes": routes}},
        )
        for number, port in enumerate(ports)
    ]


def connected(members: list[NatsServer]) -> object:
    url = ",".join(server.url for server in members)
    return jetstream.connect(url, RUN, limits=REPLICATED, request_timeout_s=2.0)


async def leader_of(url: str, stream: str) -> str:
    async with await nats.connect(url) as client:
        info = await client.jetstream().stream_info(stream)
    return str(info.cluster.leader)


async def read(entries: AsyncIterator[LogEntry], count: int) -> list[bytes]:
    return [(await anext(entries)).payload for _ in range(count)]


async def test_streams_wait_for_a_leader_and_nothing_is_lost_when_servers_are_killed(tmp_path: Path) -> None:
    """A trainer starts while only one of three servers is up. Then the leader of SEQUENCES is killed, and, when that one is
    back, the leader of PROMPTS."""
    members = servers(tmp_path)
    async with AsyncExitStack() as stack, asyncio.timeout(SOON_S):
        stack.enter_context(members[0])
        early = await stack.enter_async_context(connected(members[:1]))
        making = asyncio.create_task(early.create_streams(fresh=True))
        await asyncio.wait([making], timeout=0.5)
        assert not making.done()
        for server in members[1:]:
            stack.enter_context(server)
        await making
        bus = await stack.enter_async_context(connected(members))
        for stream in Subjects(RUN).every_stream:
            assert (await bus.connection.js.stream_info(stream)).config.num_replicas == SIZE
        by_name = {f"nats-{number}": server for number, server in enumerate(members)}
        async with bus.read_sequences(1) as entries:
            for number in range(NUM_BEFORE):
                await bus.publish_sequence(b"%d" % number, f"s{number}")
                await bus.publish_prompt(b"%d" % number, f"g{number}")
            assert await read(entries, NUM_BEFORE) == [b"%d" % number for number in range(NUM_BEFORE)]

            dead = by_name[await leader_of(bus.connection.connected_url.geturl(), "SEQUENCES_demo")]
            os.kill(dead.pid, signal.SIGKILL)
            await _publish_on(bus, NUM_BEFORE)
            after = range(NUM_BEFORE, NUM_BEFORE + NUM_AFTER)
            assert await read(entries, NUM_AFTER) == [b"%d" % number for number in after]
        dead.stop()
        dead.start()
        await persistently(lambda: _all_current(bus))
        dead = by_name[await leader_of(bus.connection.connected_url.geturl(), "PROMPTS_demo")]
        os.kill(dead.pid, signal.SIGKILL)
        taken = []
        while len(taken) < NUM_BEFORE + NUM_AFTER:
            delivery = await persistently(lambda: bus.next_prompt(1.0))
            if delivery is not None and delivery.payload not in taken:
                taken.append(delivery.payload)
                await persistently(delivery.ack)
        assert sorted(map(int, taken)) == list(range(NUM_BEFORE + NUM_AFTER))
        assert (await persistently(bus.sequences_info)).messages == NUM_BEFORE + NUM_AFTER


async def _publish_on(bus: Bus, start: int) -> None:
    for number in range(start, start + NUM_AFTER):
        for publish, letter in ((bus.publish_sequence, "s"), (bus.publish_prompt, "g")):
            await persistently(lambda publish=publish, letter=letter, n=number: publish(b"%d" % n, f"{letter}{n}"))


async def _all_current(bus: Bus) -> None:
    """Raises `BusError` while a copy of PROMPTS lags behind: with the next server gone there would be no majority."""
    info = await bus.connection.js.stream_info("PROMPTS_demo")
    if not all(copy.current and not copy.offline for copy in (info.cluster and info.cluster.replicas) or ()):
        raise BusError("copies lag behind")


def test_the_trainers_settings_reach_the_streams(tmp_path: Path) -> None:
    given = {"run": RUN, "recipe": tmp_path, "instance": "trainer", "run_dir": tmp_path}
    settings = TrainerSettings(**given, stream_replicas=3, sequences_max_gib=1.5)
    limits = stream_limits(settings.model_copy(update={"weights_max_gib": 0.5}))
    assert (limits.replicas, limits.sequences_max_bytes, limits.weights_max_bytes) == (3, 1_610_612_736, 536_870_912)
    check_log_size(0.5, 536_870_912 // 3)
    with pytest.raises(FieldError, match=r"PIPELINERL_WEIGHTS_MAX_GIB = 0\.5: .* raise it to at least 0\.504 "):
        check_log_size(0.5, 180_200_000)
