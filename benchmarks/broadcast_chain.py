"""How long a version takes to reach all ranks over links of one speed: the product's chain and torch's own broadcast.

Each rank is a process in a network namespace of its own, whose link carries `MEGABITS` per second in each direction, so that
the links are the bottleneck and not the cores that all ranks share. Needs root and iproute2. No engine takes part.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.transfer_peers import ReceivingPeer, SendingPeer, peer
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.manifest import Manifest, build_manifest

RANKS = (2, 4, 8)
MEGABITS = 200
PARAMETERS = 16 * 2**20
"""Of 4 bytes each: four chunks."""
ROUNDS = 3
SUBNET = "10.214.77"
GOAL = 0.8
"""Time of a bare copy to one rank divided by that of the chain."""


async def chain_row() -> dict[str, Any]:
    """The row of the most ranks, beside those of `weight_update.bandwidth_row`. `bare`: torch's broadcast to one other rank."""
    manifest = build_manifest([("w", (PARAMETERS,), "float32")])
    return row_of({world: await _measure(world, manifest) for world in RANKS}, manifest)


def row_of(seconds: dict[int, dict[str, float]], manifest: Manifest) -> dict[str, Any]:
    """`seconds` of the chain and of torch's broadcast, the tree, by the number of ranks."""
    megabytes, copy_s, most = manifest.total_bytes / 1e6, seconds[2]["tree"], seconds[max(seconds)]
    return {
        "model": f"{max(seconds) - 1} actors",
        "megabytes": round(megabytes, 1),
        "chunk_megabytes": round(manifest.chunk_bytes / 1e6, 1),
        "rounds": ROUNDS,
        "bare_mb_per_s": round(megabytes / copy_s, 1),
        "alone_mb_per_s": round(megabytes / most["chain"], 1),
        "ratio": round(copy_s / most["chain"], 3),
        "tree_ratio": round(copy_s / most["tree"], 3),
        "goal": GOAL,
        "link_megabits_per_s": MEGABITS,
        "seconds_by_ranks": seconds,
        "load_after": round(os.getloadavg()[0], 2),
    }


def why_not_here() -> str:
    """Why the ranks' links cannot be made on this machine; empty when they can."""
    return "" if os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc") else "needs root and iproute2"


async def _measure(world: int, manifest: Manifest) -> dict[str, float]:
    seconds: dict[str, list[float]] = {"chain": [], "tree": []}
    with ExitStack() as stack:
        names = stack.enter_context(_links(world))
        trainer = stack.enter_context(peer(SendingPeer, manifest, world, f"{SUBNET}.1", namespace=names[0]))
        store = await trainer("address")
        actors = [
            stack.enter_context(peer(ReceivingPeer, manifest, store, rank, world, f"{SUBNET}.{rank + 1}", namespace=name))
            for rank, name in enumerate(names[1:], 1)
        ]
        for command in ("join", "join_bare"):
            await asyncio.gather(trainer(command, command), *(actor(command, command) for actor in actors))
        for number in range(ROUNDS):
            for side in ("chain", "tree") if number % 2 else ("tree", "chain"):
                version = PolicyVersion(0, number + 1)
                send, take = (("send", version), ("receive", version)) if side == "chain" else (("bare",), ("bare",))
                sent, *taken = await asyncio.gather(trainer(*send), *(actor(*take) for actor in actors))
                assert {one.checksum for one in taken} == {sent.checksum}
                seconds[side].append(max(one.ended_s for one in taken) - sent.began_s)
    return {side: round(statistics.median(times), 3) for side, times in seconds.items()}


@contextmanager
def _links(world: int) -> Iterator[list[str]]:
    """Network namespaces on one bridge, rank r's with the address SUBNET.(r + 1). They vanish at the block's end."""
    bridge = f"prlc{os.getpid() % 10**5}{world}"
    names = [f"{bridge}-{rank}" for rank in range(world)]
    limit = ("root", "tbf", "rate", f"{MEGABITS}mbit", "burst", "128kb", "latency", "50ms")
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for rank, name in enumerate(names):
            cable = f"{bridge}v{rank}"
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", cable, "master", bridge, "up")
            _run("ip", "-n", name, "addr", "add", f"{SUBNET}.{rank + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", device, "up")
            _run("tc", "qdisc", "add", "dev", cable, *limit)
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit)
        yield names
    finally:
        for command in (*(("netns", "del", name) for name in names), ("link", "del", bridge)):
            subprocess.run(("ip", *command), check=False, capture_output=True, timeout=60)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=60)
