"""A cable pulled, a disk full: faults around the processes, which themselves live on."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from benchmarks.light_members import Break, LightMember, Phase
from pipelinerl.bus.jetstream import Bus
from pipelinerl.errors import BusError
from tests.faults.network import Place, private_network, why_not_here
from tests.faults.stage import FaultStage, fault_stage

needs_network = pytest.mark.skipif(bool(why_not_here()), reason=f"a private network: {why_not_here()}")


@asynccontextmanager
async def three_apart(
    folder: Path, breaks: Break | None = None
) -> AsyncIterator[tuple[FaultStage, list[LightMember], Place]]:
    """Members a, b and c that serve version 0, each in a network namespace, and the place of b, which `breaks`."""
    with private_network() as network:
        async with fault_stage(folder, host=network.host) as stage:
            places = [network.add() for _ in "abc"]
            members = [
                await stage.start(name, breaks if name == "b" else None, address=at.address, namespace=at.namespace)
                for name, at in zip("abc", places, strict=True)
            ]
            await stage.until(lambda: stage.updater.num_present == 3)
            await stage.update(0)
            yield stage, members, places[1]


@needs_network
async def test_a_member_whose_network_is_cut_is_left_out_and_comes_back(tmp_path: Path) -> None:
    async with three_apart(tmp_path) as (stage, members, place):
        place.cut()
        await stage.update(1)
        assert sorted(stage.updater.members) == ["a", "c"]
        place.mend()
        await stage.all_on(1, members)
        await stage.update(2)
        await stage.all_on(2, members)


@needs_network
@pytest.mark.parametrize("phase", ["receiving", "staged", "committing", "serving"])
async def test_a_network_cut_in_the_middle_of_an_update_does_not_hold_up_the_others(
    tmp_path: Path, phase: Phase
) -> None:
    async with three_apart(tmp_path, Break(phase, "freezes", 1)) as (stage, (a, b, c), place):
        await stage.offer(1)
        await b.until(lambda: b.broke)
        place.cut()
        b.send(signal.SIGCONT)
        await stage.served()
        await stage.all_on(1, [a, c])
        place.mend()
        await stage.all_on(1, [b])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)), capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(("umount", "--lazy", str(folder)), check=True)


async def test_updates_wait_while_the_disk_of_the_streams_is_full_and_then_go_on(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with fault_stage(small_disk, in_memory=False) as stage:
        a, b = await stage.start_all("a", "b")
        await stage.update(0)
        ballast = small_disk / "ballast"
        fill(ballast)
        while await takes_a_message(stage.bus):  # what the stream's last page still holds
            pass
        await stage.offer(1)
        await stage.until(lambda: any("say 'announce'" in record.getMessage() for record in caplog.records))
        ballast.unlink()
        stage.server.port = int(stage.server.url.rpartition(":")[2])
        stage.server.stop()
        stage.server.start()
        await stage.served()
        await stage.all_on(1, [a, b])


async def takes_a_message(bus: Bus) -> bool:
    try:
        await bus.publish_control("failed", bytes(512), "nobody")
    except BusError:
        return False
    return True


def fill(ballast: Path) -> None:
    """Until not a byte is left."""
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
