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
GOAL = 1.25
"""Copies: the time of the chain divided by that of a bare transfer between two ranks."""


async def chain_rows() -> list[dict[str, Any]]:
    """One row for each number of ranks. `copies` are multiples of the bare transfer between two ranks."""
    manifest = build_manifest([("w", (PARAMETERS,), "float32")])
    rows = [await _measure(world, manifest) for world in RANKS]
    for row in rows:
        row |= {f"{side}_copies": round(row[f"{side}_s"] / rows[0]["tree_s"], 3) for side in ("chain", "tree")} | {"goal": GOAL}
    return rows


def why_not_here() -> str:
    """Why the ranks' links cannot be made on this machine; empty when they can."""
    return "" if os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc") else "needs root and iproute2"


async def _measure(world: int, manifest: Manifest) -> dict[str, Any]:
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
    return {
        "ranks": world,
        "megabytes": round(manifest.total_bytes / 1e6, 1),
        "megabits_per_s": MEGABITS,
        "rounds": ROUNDS,
        "chain_s": round(statistics.median(seconds["chain"]), 3),
        "tree_s": round(statistics.median(seconds["tree"]), 3),
    }


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
