"""Members that die, freeze, hang and fail in each phase of an update, random histories, a cable pulled, a disk full: real
processes, real signals.

What must hold is checked by the stage at the end of each test; here: the survivors serve the version, the broken one is
left out, and it (or its successor) is brought back beside the others.

`make test` plays `--histories` of the breaks and of the random histories, from `--first-seed`; a test that fails prints the
command that plays it again. `make soak` plays every break and many more histories.
"""

import random
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.light_members import PHASES, Break, How, LightMember, Phase
from benchmarks.light_stage import Settings
from pipelinerl.bus.jetstream import Bus
from pipelinerl.errors import BusError
from tests.faults.network import Place, PrivateNetwork, private_network, why_not_here
from tests.faults.schedule import HOWS, play, random_history
from tests.faults.stage import SETTINGS, FaultStage, fault_stage

BROKEN_AT = 1
BREAKS = [(phase, how) for phase in PHASES for how in HOWS]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, count = metafunc.config.getoption("--first-seed"), metafunc.config.getoption("--histories")
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(first, first + count))
    if "how" in metafunc.fixturenames:
        chosen = random.Random(first).sample(BREAKS, min(count, len(BREAKS)))
        metafunc.parametrize(("phase", "how"), sorted(chosen))


def replay(first_seed: int, histories: int) -> None:
    """Prints the command; pytest shows it with a failure."""
    chosen = f"--first-seed {first_seed} --histories {histories}"
    print(f"replay: .venv/bin/python -m pytest tests/faults/test_faults.py {chosen}")


async def test_after_any_history_one_more_update_reaches_everybody_alive(tmp_path: Path, seed: int) -> None:
    replay(seed, 1)
    async with fault_stage(tmp_path, settings=replace(SETTINGS, log="nats")) as stage:
        await play(stage, random_history(seed))


async def test_a_broken_actor_comes_back(tmp_path: Path, phase: Phase, how: How, request: pytest.FixtureRequest) -> None:
    replay(request.config.getoption("--first-seed"), request.config.getoption("--histories"))
    async with fault_stage(tmp_path) as stage:
        breaks = {"b": Break(phase, how, BROKEN_AT)}
        a, b, c = await stage.start_all("a", "b", "c", breaks=breaks)
        await stage.update(0)
        await stage.update(BROKEN_AT)
        await stage.all_on(BROKEN_AT, [a, c])
        await b.until_broken()  # later than the others are served, if a busy machine had put it out of the epoch
        back = b
        if how == "freezes":
            b.send(signal.SIGCONT)
        elif how != "fails":
            b.process.kill()
            back = await stage.start("b")
        await stage.all_on(BROKEN_AT, [back])
        await stage.update(2)
        await stage.all_on(2, [a, back, c])


async def test_joiners_get_the_served_version_together_and_beside_epochs_of_the_others(tmp_path: Path) -> None:
    async with fault_stage(tmp_path, settings=Settings(member_ttl_s=15.0, deadline_s=60.0, stall_timeout_s=30.0)) as stage:
        (first,) = await stage.start_all("a")
        await stage.update(0)
        joiners = [await stage.start(name) for name in "bcd"]
        await stage.all_on(0, joiners)
        await stage.until(lambda: sorted(stage.history.joined_s) == ["b", "c", "d"])
        assert [report.kind for report in first.reports] == ["joined", "serves"], "the others notice nothing"
        await stage.update(1)
        await stage.all_on(1, [first, *joiners])
        late = await stage.start("e", Break("staged", "freezes", 1))
        await late.until_broken()
        joiners.pop().send(signal.SIGTERM)
        await stage.until(lambda: stage.updater.num_present == 4)
        await stage.update(2)  # in an epoch of a, b and c
        late.send(signal.SIGCONT)
        await stage.all_on(2, [first, *joiners, late])


@pytest.fixture
def network() -> Iterator[PrivateNetwork]:
    if reason := why_not_here():
        pytest.skip(f"a private network: {reason}")
    with private_network() as network:
        yield network


@asynccontextmanager
async def three_apart(
    network: PrivateNetwork, folder: Path, breaks: Break | None = None
) -> AsyncIterator[tuple[FaultStage, list[LightMember], Place]]:
    """Members a, b and c that serve version 0, each in a network namespace, and the place of b, which `breaks`."""
    async with fault_stage(folder, host=network.host) as stage:
        places = [network.add() for _ in "abc"]
        members = [
            await stage.start(name, breaks if name == "b" else None, address=at.address, namespace=at.namespace)
            for name, at in zip("abc", places, strict=True)
        ]
        await stage.until(lambda: stage.updater.num_present == 3)
        await stage.update(0)
        yield stage, members, places[1]


@pytest.mark.parametrize("phase", ["receiving", "staged", "committing", "serving"])
async def test_a_network_cut_during_an_update_stops_nobody_else(tmp_path: Path, network: PrivateNetwork, phase: Phase) -> None:
    async with three_apart(network, tmp_path, Break(phase, "freezes", 1)) as (stage, (a, b, c), place):
        await stage.offer(1)
        await b.until_broken()
        place.cut()
        b.send(signal.SIGCONT)
        await stage.served()
        await stage.all_on(1, [a, c])
        place.mend()
        await stage.all_on(1, [b])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)), capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(("umount", "--lazy", str(folder)), check=True)


async def test_updates_wait_while_the_disk_of_the_streams_is_full(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with fault_stage(small_disk) as stage:
        a, b = await stage.start_all("a", "b")
        await stage.update(0)
        ballast = small_disk / "ballast"
        fill(ballast)
        while await takes_a_message(stage.bus):  # what the stream's last page still holds
            pass
        await stage.offer(1)
        await stage.until(lambda: any("publish 'announce'" in record.getMessage() for record in caplog.records))
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
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
