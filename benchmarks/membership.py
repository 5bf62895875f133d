"""What members cost: forming a group, joining, leaving, dying, and an update, against how many there are.

    python -m benchmarks.membership [--members 1 2 4 …] [--simulated 1000] [--newcomers 16] [--quick]

* `membership`: light members, a process each (real protocol, NATS and Gloo; 1 MB of weights, no engine), with the product's
  default times.
* `control_channel`: simulated members, a consumer and the product's heartbeat each, in a few processes on a real
  nats-server, with no bytes to send: what the control channel and the trainer's state machines alone take.
* a row of `membership` with `newcomers`: simulated members that join at once. `copies` of the weights leave rank 0 in shared
  side groups, and `copies_alone` if each has a side group of its own.

All on one machine, whose cores the members share: with 64 of them, waking 64 processes is in every figure.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.light_stage import LightStage, StageRecorder, end, light_stage, same_weights
from benchmarks.nats_server import NatsServer
from benchmarks.recovery import PRODUCT
from benchmarks.result_files import write_result
from benchmarks.samples import milliseconds
from benchmarks.simulated_members import MANIFEST, RUN, Crowd, NoBytesSender, cpu_seconds, crowd
from pipelinerl.bus.jetstream import connect
from pipelinerl.local.services import available_cores
from services.trainer.weight_sync import membership
from services.trainer.weight_sync.membership import UpdateRecord
from services.trainer.weight_sync.updater import WeightUpdater

RESULTS = Path(__file__).parent / "results"
COUNTS = (1, 2, 4, 8, 16, 32, 64)
SIMULATED = 1000
NEWCOMERS = 16
TRANSFER_S = 0.5
"""What a broadcast to newcomers takes."""
WITHIN_S = 300.0
REPEATS, UPDATES = 3, 10
BEATS = 3
"""Intervals of the heartbeat that are watched."""
MESSAGES_PER_MEMBER = 4
"""Of an update without a new group: announce and commit in, staged and serving out."""


async def measure_members(count: int, repeats: int, updates: int) -> dict[str, Any]:
    """One row: seconds, medians over `repeats` (joins, leaves) and `updates`; one member is killed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        async with light_stage(Path(folder), PRODUCT, same_weights(megabytes=1), LightStage) as stage:
            members = await stage.start_all(*(f"m{number:03d}" for number in range(count)))
            first = await stage.update(0)
            row: dict[str, Any] = {"members": count, "first_group_s": stage.forming_s()}
            row["first_update_s"] = first.round_trip_s
            version = 0
            trips, transfers = [], []
            for version in range(1, updates + 1):
                record = await stage.update(version)
                trips.append(record.round_trip_s)
                transfers.append(record.transfer_s)
            row |= {"update_s": statistics.median(trips), "transfer_s": statistics.median(transfers)}
            row |= await come_and_go(stage, version, repeats)
            if count > 1:
                row |= await kill_one(stage, members[-1].process.pid, version + 1 + 2 * repeats)
            return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


async def come_and_go(stage: LightStage, version: int, repeats: int) -> dict[str, float]:
    """A member joins, is in the next epoch, leaves in order, and is out of the one after: `repeats` times."""
    joins, grown, shrunk = [], [], []
    registered_s: dict[str, float] = {}
    registering = asyncio.create_task(_registrations(stage, registered_s))
    for number in range(repeats):
        name = f"joiner-{number}"
        joiner = await stage.start(name)
        await stage.until(lambda name=name: name in stage.history.joined_s and name in registered_s)  # type: ignore[misc]
        joins.append(stage.history.joined_s[name] - registered_s[name])
        await stage.update(version + 1)
        grown.append(stage.forming_s())
        present = stage.updater.num_present
        joiner.send(signal.SIGTERM)
        await stage.until(lambda present=present: stage.updater.num_present < present)  # type: ignore[misc]
        await stage.update(version := version + 2)
        shrunk.append(stage.forming_s())
    await end(registering)
    figures = {"join_s": joins, "regroup_after_join_s": grown, "regroup_after_leave_s": shrunk}
    return {name: statistics.median(values) for name, values in figures.items()}


async def _registrations(stage: LightStage, registered_s: dict[str, float]) -> None:
    """When each actor was last seen to register for the first time."""
    async with stage.bus.watch_members() as events:
        async for event in events:
            if event.payload is None:
                registered_s.pop(event.actor, None)
            else:
                registered_s.setdefault(event.actor, time.monotonic())


async def kill_one(stage: LightStage, pid: int, version: int) -> dict[str, float]:
    """SIGKILL, and the next version offered at once. `kill_noticed_s`: until the trainer called the others without it."""
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    await stage.update(version)
    return {
        "kill_to_served_s": stage.history.served_s[version] - killed_s,
        "kill_noticed_s": stage.last_s("epoch") - killed_s,
        "regroup_after_kill_s": stage.forming_s(),
    }


async def measure_control(members: int, processes: int, updates: int, profile: bool) -> dict[str, Any]:
    """One row of the control channel with `members` simulated members."""
    recorder = StageRecorder()
    with tempfile.TemporaryDirectory() as folder, NatsServer(Path(folder)) as server:
        async with connect(server.url, RUN, limits=PRODUCT.limits) as bus:
            await bus.create_streams()
            updater = WeightUpdater(
                bus, NoBytesSender(), recorder, incarnation=1, deadline_s=PRODUCT.deadline_s, join_timeout_s=600
            )
            running = asyncio.create_task(updater.run())
            with crowd(server.url, members, processes, PRODUCT.limits) as others:
                await others.listening()
                pids = {"coordinator": os.getpid(), "nats": server.pid}
                row: dict[str, Any] = {"members": members, "registered_s": await register(updater, others, members)}
                profiler = cProfile.Profile()
                if profile:
                    profiler.enable()
                row |= await rounds(updater, recorder.records, pids, members, updates)
                row |= await watch_hearts(pids)
                profiler.disable()
                row["evictions"] = updater.evictions
            running.cancel()
            await asyncio.wait({running})
    if profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    return row


async def measure_newcomers(newcomers: int, processes: int) -> dict[str, Any]:
    """One row: copies that rank 0 sends when `newcomers` join a run with one member at once, and until all of them serve."""
    row: dict[str, Any] = {"members": newcomers + 1, "newcomers": newcomers}
    for kind, most in (("", membership.MOST_IN_SIDE_GROUP), ("_alone", 1)):
        with patch.object(membership, "MOST_IN_SIDE_GROUP", most):
            sent, seconds = await join_at_once(newcomers, processes)
        row |= {f"copies{kind}": round(sent / MANIFEST.total_bytes, 2), f"all_joined{kind}_s": round(seconds, 3)}
    return row


async def join_at_once(newcomers: int, processes: int) -> tuple[int, float]:
    """Bytes that rank 0 sends to them, and seconds from their registration until the last one serves."""
    recorder, sender = StageRecorder(), NoBytesSender(TRANSFER_S)
    with tempfile.TemporaryDirectory() as folder, NatsServer(Path(folder)) as server:
        async with connect(server.url, RUN, limits=PRODUCT.limits) as bus:
            await bus.create_streams()
            updater = WeightUpdater(bus, sender, recorder, incarnation=1, deadline_s=PRODUCT.deadline_s, join_timeout_s=600)
            running = asyncio.create_task(updater.run())
            with (
                crowd(server.url, 1, 1, PRODUCT.limits) as first,
                crowd(server.url, newcomers, processes, PRODUCT.limits, prefix="n") as others,
            ):
                await first.listening()
                await register(updater, first, 1)
                await updater.offer(0, object())  # type: ignore[arg-type] - of no bytes
                await updater.all_served()
                await others.listening()
                sent, began_s = sender.bytes_sent, time.monotonic()
                others.register()
                async with asyncio.timeout(WITHIN_S):
                    while len(recorder.joined_s) < newcomers:  # noqa: ASYNC110 - it is not told otherwise
                        await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.wait({running})
    return sender.bytes_sent - sent, max(recorder.joined_s.values()) - began_s


async def register(updater: WeightUpdater, others: Crowd, members: int) -> float:
    """Seconds until the trainer knows all members, which all register at once."""
    began_s = time.monotonic()
    others.register()
    await updater.wait_for_members(members)
    return round(time.monotonic() - began_s, 3)


async def watch_hearts(pids: dict[str, int]) -> dict[str, float]:
    """CPU of one core that heartbeats alone take, when all members serve a version."""
    seconds = BEATS * PRODUCT.member_ttl_s / 3
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    await asyncio.sleep(seconds)
    return {f"hearts_{name}_cpu": round((cpu_seconds(pid) - before[name]) / seconds, 3) for name, pid in pids.items()}


async def rounds(
    updater: WeightUpdater, records: list[UpdateRecord], pids: dict[str, int], members: int, updates: int
) -> dict[str, Any]:
    """The first update, which forms the group, and `updates` on it."""
    trips, cpu = [], []
    for version in range(updates + 1):
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        await updater.offer(version, object())  # type: ignore[arg-type] - of no bytes
        await updater.all_served()
        trips.append(records[-1].round_trip_s)
        cpu.append({name: cpu_seconds(pid) - before[name] for name, pid in pids.items()})
    round_s = statistics.median(trips[1:])
    return {
        "first_update_s": round(trips[0], 3),
        "update_s": round(round_s, 3),
        "update_max_s": round(max(trips[1:]), 3),
        "coordinator_cpu_ms": milliseconds(statistics.mean(one["coordinator"] for one in cpu[1:])),
        "nats_cpu_ms": milliseconds(statistics.mean(one["nats"] for one in cpu[1:])),
        "messages_per_s": round(MESSAGES_PER_MEMBER * members / round_s),
    }


def write(name: str, rows: Sequence[dict[str, Any]], folder: Path) -> None:
    machine = {"cores": available_cores(), "load_average_after": round(os.getloadavg()[0], 2)}
    result = {"benchmark": name, "machine": machine, "rows": list(rows)}
    write_result(folder / f"{name}.json", result)


def replace_row(name: str, row: dict[str, Any], folder: Path) -> None:
    """Keep the other rows of an earlier result."""
    path = folder / f"{name}.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"benchmark": name, "rows": []}
    result["rows"] = [*(other for other in result["rows"] if "newcomers" not in other), row]
    write_result(path, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="*", help="numbers of light members; none: leave them out")
    parser.add_argument("--simulated", type=int, nargs="*", help="numbers of simulated members; none: leave them out")
    parser.add_argument("--newcomers", type=int, help="members that join at once; 0: leave the row as it is")
    parser.add_argument("--processes", type=int, default=4, help="of the simulated members")
    parser.add_argument("--profile", action="store_true", help="of the coordinator's process with simulated members")
    parser.add_argument("--quick", action="store_true", help="few members, few repeats")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    repeats, updates = (1, 3) if arguments.quick else (REPEATS, UPDATES)
    counts = arguments.members if arguments.members is not None else (2, 4) if arguments.quick else COUNTS
    simulated = arguments.simulated if arguments.simulated is not None else (50,) if arguments.quick else (100, SIMULATED)
    rows = []
    for count in counts:
        rows.append(asyncio.run(measure_members(count, repeats, updates)))
        print(json.dumps(rows[-1]), flush=True)
        write("membership", rows, arguments.output)
    newcomers = NEWCOMERS if arguments.newcomers is None else arguments.newcomers
    if newcomers:
        rows.append(asyncio.run(measure_newcomers(newcomers, arguments.processes)))
        print(json.dumps(rows[-1]), flush=True)
        replace_row("membership", rows[-1], arguments.output)
    rows = []
    for count in simulated:
        rows.append(asyncio.run(measure_control(count, arguments.processes, updates, arguments.profile)))
        print(json.dumps(rows[-1]), flush=True)
        write("control_channel", rows, arguments.output)


if __name__ == "__main__":
    main()
